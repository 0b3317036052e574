"""A stand-in for Ray: actors, objects and nodes in one process, under a seeded scheduler.

What decides about a run (``ActorPool``, ``Coordinator``, ``RayDriver``, ``Server``) is the real
code; Ray's verbs are those of a :class:`World`, whose next event a random generator draws. A call
of the coordinator runs inside the call of the driver that waits for it, so that there is one
thread, and one integer replays everything. ``test_contract.py`` holds these verbs against Ray.

What an actor is: queued calls, a process that may die, and restarts that need room on a node. A
call without retries fails once its death is seen, which for an actor of a lost node may take until
its restart; a call with retries waits for the restart. An object lives on the node that made it,
and is lost with it, unless it is small. Objects are read as Ray's are: a copy, whose arrays cannot
be written to.
"""

import pickle
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

#: More events than any run needs: it makes no progress.
MOST_EVENTS = 5_000


class Hang(BaseException):
    """A run that waits for what does not come."""


class DriverKilled(BaseException):
    """The end of the driver's process, and with it of all that it owns."""


class ActorKilled(BaseException):
    """The end of the process of an actor whose call is under way."""


@dataclass(eq=False)
class Ref:
    """An object, or the answer of a call."""

    world: "World"
    node: str = ""  # that it is lost with; empty: none
    done: bool = False
    data: Any = None  # pickled, with its buffers
    error: Exception | None = None
    call: "Call | None" = None

    def set(self, value: Any, node: str = "") -> None:
        buffers: list[Any] = []
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self.data, self.done, self.node = (body, [bytes(b) for b in buffers]), True, node

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.error, self.done = error, True

    @property
    def is_lost(self) -> bool:
        return self.node != "" and self.node not in self.world.nodes

    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        if self.is_lost:
            raise ObjectLostError("00" * 28, None, "")
        body, buffers = self.data
        return pickle.loads(body, buffers=buffers)

    def future(self) -> Any:
        return SimpleNamespace(result=lambda: self.world.get(self))

    def __reduce__(self) -> Any:
        return _found, (id(self.world), self.world.number_of(self))


_WORLDS: dict[int, "World"] = {}


def _found(world: int, number: int) -> Ref:
    return _WORLDS[world].refs[number]


@dataclass(eq=False)
class Call:
    """A call of an actor that has not ended."""

    method: str
    args: tuple[Any, ...]
    refs: list[Ref]
    retries: int  # -1: without end
    unheard: bool = False  # its process is gone, and nobody knows yet


@dataclass(eq=False)
class Actor:
    """An actor, as Ray knows it."""

    make: Any  # of an incarnation, given its pid and its node
    options: dict[str, Any]
    methods: dict[str, tuple[int, int]]  # number of returned values, and of retries
    owner: tuple["Actor | None", int]  # whose incarnation has asked for it
    left: int  # restarts
    state: str = "PENDING"
    incarnation: int = 0
    node: str = ""
    pid: int = 0
    self_: Any = None
    queue: deque[Call] = field(default_factory=deque)
    doomed: bool = False  # asked to end; it may still answer
    busy: Call | None = None


class Handle:
    """A handle of an actor: ``handle.method.options(...).remote(...)``."""

    def __init__(self, world: "World", actor: Actor) -> None:
        self._world, self._actor = world, actor

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        returns, retries = self._actor.methods.get(method, (1, 0))

        def bound(returns: int) -> Any:
            return SimpleNamespace(
                remote=lambda *args: self._world.submit(
                    self._actor, Call(method, args, [], retries), returns
                ),
                options=lambda num_returns: bound(num_returns),
            )

        return bound(returns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._actor is self._actor

    def __hash__(self) -> int:
        return id(self._actor)


def methods_of(remote_class: Any) -> dict[str, tuple[int, int]]:
    """Return what ``ray.method`` says of the methods of a class, by name."""
    cls = remote_class.__ray_metadata__.modified_class
    found = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
    return {
        name: (
            getattr(method, "__ray_num_returns__", None) or 1,
            getattr(method, "__ray_max_task_retries__", None),
        )
        for name, method in found.items()
    }


class World:
    """A cluster, and the time in it.

    Args:
        seed: Of the scheduler.
        room: CPUs of each node, by its name; the first is the driver's.
        trouble: How many of each kind of trouble may happen: ``client``, ``node``, ``drain``,
            ``coordinator``, ``driver``, ``disk``.
        grows: Whether nodes join at any time; otherwise only when no client actor can run.
    """

    def __init__(
        self, seed: int, room: dict[str, int], trouble: dict[str, int], *, grows: bool
    ) -> None:
        self.rng, self.trouble, self.grows = random.Random(seed), Counter(trouble), grows
        self.room, self.nodes, self.draining = dict(room), set(room), set[str]()
        self.home = next(iter(room))
        self.refs: list[Ref] = []
        self._numbers: dict[Ref, int] = {}
        self.actors: list[Actor] = []
        self.now, self.events, self.pids = 0.0, 0, 100
        self.said: Counter[str] = Counter()
        self._running: list[Actor] = []  # whose calls are under way: a stack
        _WORLDS[id(self)] = self

    def close(self) -> None:
        """Forget the world."""
        _WORLDS.pop(id(self), None)

    def number_of(self, ref: Ref) -> int:
        return self._numbers[ref]

    def _ref(self, call: Call | None = None) -> Ref:
        ref = Ref(self, call=call)
        self._numbers[ref] = len(self.refs)
        self.refs.append(ref)
        return ref

    @property
    def _process(self) -> tuple[Actor | None, int]:
        """The process that acts now."""
        actor = self._running[-1] if self._running else None
        return actor, actor.incarnation if actor else 0

    # Ray's verbs.

    def put(self, value: Any) -> Ref:
        ref = self._ref()
        ref.set(value)
        return ref

    def create(self, make: Any, options: dict[str, Any], methods: Any) -> Handle:
        """Ask for an actor, as ``Class.options(...).remote(...)`` does."""
        retries = options.get("max_task_retries", 0)
        known = {n: (r, retries if t is None else t) for n, (r, t) in methods.items()}
        restarts = options.get("max_restarts", 0)
        actor = Actor(make, options, known, self._process, restarts)
        self.actors.append(actor)
        return Handle(self, actor)

    def submit(self, actor: Actor, call: Call, returns: int) -> Any:
        call.refs = [self._ref(call) for _ in range(returns)]
        if actor.state == "DEAD":
            self._fail(call, "the actor is dead")
        else:
            actor.queue.append(call)
        return call.refs[0] if returns == 1 else call.refs

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> Any:
        assert num_returns == 1
        until = None if timeout is None else self.now + timeout
        while not (ready := [ref for ref in refs if ref.done]):
            if not self._happen(until):
                return [], list(refs)
        first = self.rng.choice(ready)
        return [first], [ref for ref in refs if ref is not first]

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref, timeout) for ref in refs]
        until = None if timeout is None else self.now + timeout
        while not refs.done or (timeout is not None and refs.is_lost):
            if not self._happen(until):
                raise GetTimeoutError("Get timed out")
        return refs.value()

    def kill(self, handle: Handle, *, no_restart: bool = True) -> None:
        actor = handle._actor
        if no_restart:
            actor.left = 0
            if actor.state != "DEAD":
                self._end(actor, "it was killed", seen=True)
        elif actor.state == "ALIVE":
            actor.doomed = True

    def cancel(self, ref: Ref) -> None:
        """Take back a call of an actor that waits for its restart, as Ray does.

        Of one that runs, Ray 2.60 leaves a gap: the calls behind it fail after half a minute.
        """
        for actor in self.actors:
            if ref.call in actor.queue and actor.busy is not ref.call:
                actor.queue.remove(ref.call)

    def alive_nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": node in self.nodes} for node in self.room]

    def state_of(self, handle: Handle) -> str:
        return handle._actor.state

    @property
    def verbs(self) -> Any:
        """What stands in place of the module ``ray``."""
        return SimpleNamespace(
            put=self.put, get=self.get, wait=self.wait, kill=self.kill, cancel=self.cancel,
            nodes=self.alive_nodes,
            util=SimpleNamespace(get_current_placement_group=lambda: None),
        )  # fmt: skip

    # What happens.

    def _happen(self, until: float | None) -> bool:
        """Let one thing happen; return False if the time is over before."""
        self.events += 1
        if self.events > MOST_EVENTS:
            raise Hang(f"no end after {MOST_EVENTS} events")
        options = self._options()
        if not options:
            if until is None:
                raise Hang("nothing can happen any more")
            self.now = until
            return False
        self.now += self.rng.random()
        if until is not None and self.now > until and self.rng.random() < 0.5:
            return False
        act, *args = self.rng.choice(options)
        act(*args)
        return True

    def _options(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for actor in self.actors:
            if actor.state in ("PENDING", "RESTARTING"):
                found += [(self._start, actor, node) for node in self._places(actor)]
            elif actor.state == "ALIVE" and actor.busy is None and actor.queue:
                found += [(self._work, actor)] * 4
            if actor.doomed:
                found.append((self._die, actor, True))
            if self.trouble["client"] and actor.state == "ALIVE" and actor.options["num_cpus"]:
                found += [(self._trouble, "client", self._die, actor, seen) for seen in (1, 0)]
            if self.trouble["coordinator"] and actor.state == "ALIVE" and actor.busy is not None:
                found.append((self._trouble, "coordinator", self._die, actor, True))
        others = sorted(self.nodes - {self.home})
        if others and self.trouble["node"] and self.rng.random() < 0.2:
            found += [(self._trouble, "node", self._lose, node) for node in others]
        if self.trouble["drain"] and self.rng.random() < 0.2:
            found += [
                (self._trouble, "drain", self.draining.add, node)
                for node in others
                if node not in self.draining
            ]
        if self.draining and self.rng.random() < 0.05:
            found += [(self._lose, node) for node in sorted(self.draining)]
        if not self._has_client() or (self.grows and self.rng.random() < 0.02):
            found.append((self._join,))
        if self.trouble["driver"] and self.rng.random() < 0.02:
            found.append((self._trouble, "driver", self._kill_driver))
        return found

    def _trouble(self, kind: str, act: Any, *args: Any) -> None:
        self.trouble[kind] -= 1
        self.said[kind] += 1
        act(*args)

    def point(self) -> None:
        """A place between two durable operations of the process that acts now."""
        if self._running and self.trouble["coordinator"] and self.rng.random() < 0.1:
            self._trouble("coordinator", self._die, self._running[-1], True)
        if self.trouble["driver"] and self.rng.random() < 0.05:
            self._trouble("driver", self._kill_driver)
        if self.trouble["disk"] and self.rng.random() < 0.1:
            self.trouble["disk"] -= 1
            self.said["disk"] += 1
            raise OSError(28, "No space left on device")

    def _places(self, actor: Actor) -> list[str]:
        """Return the nodes that an actor can start on."""
        if not (needed := actor.options["num_cpus"]):  # the coordinator, beside the driver
            return [self.home]
        used = Counter[str]()
        for other in self.actors:
            if other.state == "ALIVE":
                used[other.node] += other.options["num_cpus"]
        return [n for n in sorted(self.nodes - self.draining) if used[n] + needed <= self.room[n]]

    def _has_client(self) -> bool:
        """Return whether a client actor runs, or can start."""
        clients = [actor for actor in self.actors if actor.options["num_cpus"]]
        return any(actor.state == "ALIVE" or self._waits_with_room(actor) for actor in clients)

    def _waits_with_room(self, actor: Actor) -> bool:
        return actor.state in ("PENDING", "RESTARTING") and bool(self._places(actor))

    def _join(self) -> None:
        node = f"n{len(self.room)}"
        self.room[node] = 2
        self.nodes.add(node)

    def _start(self, actor: Actor, node: str) -> None:
        self.pids += 1
        actor.state, actor.node, actor.pid = "ALIVE", node, self.pids
        actor.incarnation += 1
        for call in [call for call in actor.queue if call.unheard]:
            actor.queue.remove(call)
            self._fail(call, "its actor was restarted")
        self._running.append(actor)
        try:
            actor.self_ = actor.make(actor.pid, node)
        except ActorKilled:
            pass
        finally:
            self._running.pop()

    def _work(self, actor: Actor) -> None:
        call = actor.busy = actor.queue[0]
        incarnation = actor.incarnation
        self._running.append(actor)
        try:
            args = [arg.value() if isinstance(arg, Ref) else arg for arg in call.args]
            result = getattr(actor.self_, call.method)(*args)
        except ActorKilled:
            return
        except Exception as error:
            if isinstance(error, RayTaskError):
                error = error.cause
            failed = RayTaskError(call.method, "Traceback", error).as_instanceof_cause()
            for ref in call.refs:
                ref.fail(failed)
        else:
            values = result if len(call.refs) > 1 else (result,)
            for number, (ref, value) in enumerate(zip(call.refs, values, strict=True)):
                ref.set(value, actor.node if number else "")
        finally:
            self._running.pop()
            if actor.incarnation == incarnation and actor.state == "ALIVE":
                actor.busy = None
                actor.queue.popleft()

    def _fail(self, call: Call, why: str) -> None:
        for ref in call.refs:
            ref.fail(RayActorError(error_msg=f"The actor died because {why}. "))

    def _die(self, actor: Actor, seen: bool) -> None:
        self._end(actor, "it crashed", seen=bool(seen))

    def _end(self, actor: Actor, why: str, *, seen: bool) -> None:
        """End the process of an actor: its calls fail, or wait for its restart."""
        under_way = actor.busy is not None
        actor.state = "RESTARTING" if actor.left > 0 else "DEAD"
        actor.left -= 1
        actor.doomed, actor.busy, waits = False, None, deque[Call]()
        for call in actor.queue:
            if actor.state == "DEAD" or (not call.retries and seen):
                self._fail(call, why)
                continue
            call.unheard = not call.retries
            if call.retries > 0:
                call.retries -= 1
            waits.append(call)
        actor.queue = waits
        for other in self.actors:  # an actor ends with the process that owns it
            if other.owner == (actor, actor.incarnation) and other.state != "DEAD":
                other.left = 0
                self._end(other, "its owner died", seen=True)
        if under_way and actor in self._running:
            raise ActorKilled

    def _lose(self, node: str) -> None:
        self.nodes.discard(node)
        self.draining.discard(node)
        for actor in self.actors:
            if actor.node == node and actor.state == "ALIVE":
                self._end(actor, "its node was lost", seen=self.rng.random() < 0.5)

    def _kill_driver(self) -> None:
        raise DriverKilled
