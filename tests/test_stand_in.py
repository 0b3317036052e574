"""What the stand-in for Ray does, Ray does: each behaviour on both."""

import os
import sys
import time

import numpy as np
import pytest
import ray
from ray._private.state import state
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from simulation.world import World

from trishul_ray.federation.on_ray.ray_internals import is_gone, is_restarting
from trishul_ray.federation.on_ray.session import ray_session


class Toy:
    """An actor; on Ray in a process of its own."""

    def __init__(self, pid=None, node=""):
        self.number, self.node, self.total = pid or os.getpid(), node, 0

    def pid(self):
        return self.number

    def add(self, amount):
        self.total += amount
        return self.total

    def kinds(self, *values):
        return [type(value).__name__ for value in values]

    def halves(self, value):
        return value // 2, value - value // 2

    def is_writeable(self, array):
        return array.flags.writeable

    def fail(self):
        raise ValueError("as asked")

    def wait(self, seconds):
        time.sleep(seconds)
        return seconds


class StandIn:
    """The stand-in, with what a test needs beside Ray's verbs."""

    def __init__(self):
        self.world = World(0, {"n0": 99}, {}, grows=False)
        for verb in ("put", "get", "wait", "kill"):
            setattr(self, verb, getattr(self.world, verb))

    def actor(self, **options):
        slow = {name: (1, None) for name in vars(Toy) if not name.startswith("_")}
        made = type("Quick", (Toy,), {"wait": lambda self, seconds: seconds})
        return self.world.create(made, {"num_cpus": 1, **options}, slow)

    def crash(self, handle):
        self.world._die(handle._actor, True)

    crash_at_work = crash

    def let_it_be_seen(self):
        pass

    def is_gone(self, handle):
        return self.world.state_of(handle) == "DEAD"

    def is_restarting(self, handle):
        return self.world.state_of(handle) == "RESTARTING"


class RealRay:
    """Ray, with the same."""

    put, get, wait = staticmethod(ray.put), staticmethod(ray.get), staticmethod(ray.wait)
    kill = staticmethod(ray.kill)
    is_gone, is_restarting = staticmethod(is_gone), staticmethod(is_restarting)

    def actor(self, **options):
        return ray.remote(Toy).options(**{"num_cpus": 0.1, **options}).remote()

    def crash(self, handle):
        os.kill(ray.get(handle.pid.remote()), 9)

    def crash_at_work(self, handle):
        self.let_it_be_seen()
        os.kill(state.actor_table(handle._actor_id.hex())["Pid"], 9)

    def let_it_be_seen(self):
        time.sleep(1)


ON_RAY = pytest.param(
    RealRay, id=f"ray {ray.__version__}", marks=[pytest.mark.slow, pytest.mark.chaos]
)


@pytest.fixture(scope="module", params=[pytest.param(StandIn, id="stand-in"), ON_RAY])
def cluster(request):
    if request.param is StandIn:
        yield StandIn()
        return
    with ray_session(2):
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield RealRay()


def raises(cluster, reference, kind):
    with pytest.raises(kind) as caught:
        cluster.get(reference)
    return caught.value


def test_an_object_is_read_as_a_copy_whose_arrays_cannot_be_written_to(cluster):
    given = np.arange(100_000)
    reference = cluster.put([given])
    (read,) = cluster.get(reference)
    assert (read == given).all() and read is not given and not read.flags.writeable


def test_the_answers_of_several_calls_come_in_their_order(cluster):
    actor = cluster.actor()
    assert cluster.get([actor.add.remote(n) for n in (1, 2, 3)]) == [1, 3, 6]


def test_one_that_is_ready_is_returned_with_the_others(cluster):
    actor = cluster.actor()
    done, later = actor.pid.remote(), actor.wait.remote(1)
    cluster.get(done)
    ready, others = cluster.wait([later, done], num_returns=1)
    assert len(ready) == len(others) == 1 and {*ready, *others} == {later, done}
    cluster.get(later)


def test_a_call_that_waits_for_an_actor_without_room_times_out(cluster):
    actor = cluster.actor(num_cpus=100)
    call = actor.pid.remote()
    assert cluster.wait([call], num_returns=1, timeout=0.2) == ([], [call])
    with pytest.raises(GetTimeoutError):
        cluster.get(call, timeout=0.2)
    cluster.kill(actor)


def test_an_error_of_a_call_has_its_cause(cluster):
    error = raises(cluster, cluster.actor().fail.remote(), RayTaskError)
    assert isinstance(error.cause, ValueError) and isinstance(error, ValueError)
    assert str(error.cause) == "as asked"


def test_an_error_leaves_the_actor_as_it_is(cluster):
    actor = cluster.actor()
    failed, after = actor.fail.remote(), actor.add.remote(1)
    raises(cluster, failed, RayTaskError)
    assert cluster.get(after) == 1


def test_several_values_are_several_objects(cluster):
    first, second = cluster.actor().halves.options(num_returns=2).remote(7)
    assert cluster.get(second) == 4 and cluster.get(first) == 3


def test_a_reference_is_read_for_a_call_but_not_one_in_a_list(cluster):
    one = cluster.put(1)
    first, second = cluster.get(cluster.actor().kinds.remote(one, [one]))
    assert first == "int" and second == "list"


def test_an_array_that_is_passed_by_reference_cannot_be_written_to(cluster):
    array = cluster.put(np.zeros(100_000))
    assert not cluster.get(cluster.actor().is_writeable.remote(array))


def test_a_call_with_an_argument_that_failed_fails_as_that(cluster):
    actor = cluster.actor()
    error = raises(cluster, actor.kinds.remote(actor.fail.remote()), RayTaskError)
    assert isinstance(error.cause, ValueError)


def test_a_killed_actor_fails_its_calls_and_later_ones(cluster):
    actor = cluster.actor(max_restarts=3)
    cluster.get(actor.pid.remote())
    waiting = actor.wait.remote(60)
    cluster.kill(actor)
    raises(cluster, waiting, RayActorError)
    raises(cluster, actor.pid.remote(), RayActorError)
    assert cluster.is_gone(actor)


def test_a_crashed_actor_is_restarted_as_another_process_without_its_memory(cluster):
    actor = cluster.actor(max_restarts=1, max_task_retries=3)
    before = cluster.get(actor.pid.remote())
    cluster.get(actor.add.remote(5))
    cluster.crash(actor)
    assert cluster.get(actor.pid.remote()) != before
    assert cluster.get(actor.add.remote(1)) == 1
    assert not cluster.is_gone(actor) and not cluster.is_restarting(actor)


def test_a_call_without_retries_fails_with_the_process_and_one_with_retries_is_repeated(cluster):
    for retries in (0, 2):
        actor = cluster.actor(max_restarts=2, max_task_retries=retries)
        cluster.get(actor.pid.remote())
        call = actor.wait.remote(3)
        cluster.crash_at_work(actor)
        if retries:
            assert cluster.get(call) == 3
        else:
            raises(cluster, call, RayActorError)


def test_an_actor_whose_restarts_are_used_up_is_gone(cluster):
    actor = cluster.actor(max_restarts=1, max_task_retries=5)
    cluster.get(actor.pid.remote())
    for _ in range(2):
        cluster.crash(actor)
        cluster.let_it_be_seen()
        if not cluster.is_gone(actor):
            cluster.get(actor.pid.remote())
    raises(cluster, actor.pid.remote(), RayActorError)
    assert cluster.is_gone(actor)


def test_an_actor_that_is_killed_softly_starts_again(cluster):
    actor = cluster.actor(max_restarts=1, max_task_retries=5)
    before = cluster.get(actor.pid.remote())
    cluster.kill(actor, no_restart=False)
    answers = [cluster.get(actor.pid.remote()) for _ in range(20) if time.sleep(0.05) is None]
    assert answers[-1] != before  # the first ones may be of the old process
    assert not cluster.is_gone(actor)
