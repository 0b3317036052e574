"""Driving one federation from outside: inline, or through a coordinator actor.

Both drivers speak alike: ``begin``, then ``step`` until finished, then ``final``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.coordinator import (
    Coordinator,
    Final,
    Progressed,
    final_of,
    open_checkpoints,
    progress_of,
    standing_of,
)
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.pool import actor_failure, cause_of
from trishul_ray.federation.resources import plan_slices
from trishul_ray.federation.server import Server
from trishul_ray.federation.world import Prepared


class Driver(Protocol):
    """A federation under way."""

    def begin(self) -> Progressed:
        """What a checkpoint already holds."""
        ...

    def step(self) -> Progressed:
        """One more round."""
        ...

    def final(self) -> Final:
        """The result of a finished federation."""
        ...


class InlineDriver:
    """Everything in this process."""

    def __init__(self, experiment: Experiment, prepared: Prepared, attempt: str) -> None:
        """Build the workbench and find the newest checkpoint."""
        executor = InlineExecutor(experiment, prepared)
        self.server = Server(experiment, executor, open_checkpoints(experiment), attempt)

    def begin(self) -> Progressed:
        """See :class:`Driver`."""
        return standing_of(self.server)

    def step(self) -> Progressed:
        """See :class:`Driver`."""
        try:
            return progress_of(self.server)
        except FloatingPointError as error:
            raise RunError(str(error)) from error

    def final(self) -> Final:
        """See :class:`Driver`."""
        return final_of(self.server)


class RayDriver:
    """A coordinator actor and its clients. A coordinator that dies is restarted by Ray."""

    def __init__(
        self, experiment: Experiment, prepared: Prepared, attempt: str, free: dict[str, float]
    ) -> None:
        """Ask for the slices and start the coordinator.

        Raises:
            InputError: the slices asked for are not to be had.
        """
        self.slices = plan_slices(experiment, free)
        self.limit = experiment.resources.max_restarts
        self.actor: Any = Coordinator.options(  # type: ignore[attr-defined]  # by ray.remote
            num_cpus=0, max_restarts=self.limit
        ).remote(experiment.to_dict(), prepared, self.slices, attempt)

    def _call(self, method: str) -> Any:
        failures: list[str] = []
        while True:
            try:
                return ray.get(getattr(self.actor, method).remote())
            except RayActorError as error:
                refused = actor_failure(error)
                if isinstance(refused, InputError) or len(failures) >= self.limit:
                    raise refused from error
                failures.append(cause_of(error))
            except RayTaskError as error:
                if isinstance(error.cause, InputError | RunError):
                    raise error.cause from error
                raise RunError(f"the coordinator failed: {cause_of(error)}") from error

    def begin(self) -> Progressed:
        """See :class:`Driver`."""
        found: Progressed = self._call("begin")
        return found

    def step(self) -> Progressed:
        """See :class:`Driver`; repeats the round if the coordinator died in it."""
        found: Progressed = self._call("step")
        return found

    def final(self) -> Final:
        """See :class:`Driver`."""
        found: Final = self._call("final")
        return found

    def close(self) -> None:
        """End the coordinator; its client actors die with their owner."""
        ray.kill(self.actor)


@contextmanager
def open_driver(
    experiment: Experiment, prepared: Prepared, attempt: str, free: dict[str, float]
) -> Iterator[Driver]:
    """The driver that ``resources.backend`` asks for, ended at the end."""
    if experiment.resources.backend == "inline":
        yield InlineDriver(experiment, prepared, attempt)
        return
    driver = RayDriver(experiment, prepared, attempt, free)
    try:
        yield driver
    finally:
        driver.close()
