"""Settings of a driver and of a run that are sent to the actors.

This module has no heavy imports: a coordinator requests its clients before it imports torch.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trishul_ray.storage.durable import Json

if TYPE_CHECKING:
    from trishul_ray.experiment import Experiment


@dataclass(frozen=True)
class WorkerEnvironment:
    """The working directory and settings of a driver."""

    directory: str
    variables: dict[str, str]

    @classmethod
    def of_this_process(cls) -> "WorkerEnvironment":
        """Capture the working directory and the ``TRISHUL_*`` and ``HF_*`` variables."""
        variables = {k: v for k, v in os.environ.items() if k.startswith(("TRISHUL_", "HF_"))}
        return cls(os.getcwd(), variables)

    def apply(self) -> None:
        """Set the variables, and change to the directory if this machine has it."""
        os.environ.update(self.variables)
        if os.path.isdir(self.directory):
            os.chdir(self.directory)


@dataclass(frozen=True)
class RunRequest:
    """A run that actors open.

    Attributes:
        experiment: The fields of the experiment.
        attempt: Name of the run in the tracking server.
        prepared: The object store reference of a :class:`~trishul_ray.federation.prepare.Prepared`,
            in a list, so that an actor receives the reference instead of the content.
    """

    experiment: Json
    attempt: str
    prepared: list[Any]

    def load(self) -> "Experiment":
        """Load the experiment and its plug-ins.

        Raises:
            InputError: A plug-in cannot be loaded here.
        """
        from trishul_ray.experiment.experiment import received

        return received(self.experiment)
