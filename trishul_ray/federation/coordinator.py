"""The coordinator actor: owns the client actors of one run and drives its rounds.

It holds no state that is not in the newest checkpoint: killed and restarted, its first call starts
new client actors and continues after the last whole round. Client actors take longest to come up,
so they are asked for before this process imports what it needs itself.
"""

import os
from typing import TYPE_CHECKING, Any

import ray

from trishul_ray.federation.client import start_clients
from trishul_ray.federation.determinism import set_environment
from trishul_ray.federation.resources import Slices
from trishul_ray.federation.surroundings import Surroundings

if TYPE_CHECKING:
    from trishul_ray.federation.pool import ActorPool
    from trishul_ray.federation.server import Server
    from trishul_ray.federation.standing import Final, Progressed

set_environment()


@ray.remote
class Coordinator:
    """Samples, broadcasts through the object store, reduces, checkpoints."""

    def __init__(
        self, experiment: dict[str, Any], slices: Slices, attempt: str, surroundings: Surroundings
    ) -> None:
        """Keep what is needed; what can fail, or is large, comes with the calls.

        Args:
            experiment: the run, as plain fields.
            slices: how many client actors, with what each.
            attempt: names the run in the tracking server.
            surroundings: what relative paths mean.
        """
        surroundings.enter()
        self.experiment = experiment
        self.slices = slices
        self.attempt = attempt
        self.surroundings = surroundings
        self.pool: ActorPool | None = None
        self._server: Server | None = None

    def _run(self, prepared: list[Any]) -> "Server":
        """The run: started, or found in the newest checkpoint, by whichever call comes first.

        Args:
            prepared: a list around the reference to what the client actors get: this process
                passes it on unread.
        """
        if self._server is None:
            started = (
                start_clients(self.experiment, prepared[0], self.slices, self.surroundings)
                if self.pool is None
                else []
            )
            from trishul_ray.experiment import Experiment
            from trishul_ray.federation.pool import ActorPool
            from trishul_ray.federation.server import Server
            from trishul_ray.federation.standing import open_checkpoints

            settings = Experiment.model_validate(self.experiment)
            self.pool = self.pool or ActorPool(started)
            checkpoints = open_checkpoints(settings)
            self._server = Server(settings, self.pool, checkpoints, self.attempt)
        return self._server

    @ray.method(max_task_retries=-1)
    def begin(self, prepared: list[Any]) -> "Progressed":
        """What is there already: records of a resumed run, the first events.

        Repeated by Ray, after a restart, as long as there are restarts.

        Raises:
            InputError: the client actors cannot be built from this input.
            RunError: no client actor came up.
        """
        server = self._run(prepared)
        from trishul_ray.federation.standing import standing_of

        return standing_of(server)

    def step(self, prepared: list[Any]) -> "Progressed":
        """One round, or nothing if the run is finished."""
        server = self._run(prepared)
        from trishul_ray.federation.standing import progress_of, standing_of

        return standing_of(server) if server.finished else progress_of(server)

    @ray.method(max_task_retries=-1)
    def final(self, prepared: list[Any]) -> "Final":
        """The result."""
        server = self._run(prepared)
        from trishul_ray.federation.standing import final_of

        return final_of(server)

    def processes(self) -> list[int]:
        """Operating-system processes: this one, then the client actors'."""
        return [os.getpid(), *(self.pool.processes() if self.pool else [])]
