"""Where a driver works, told to actors on other nodes. Imports nothing of weight; see client.py."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Surroundings:
    """What paths and settings mean in the driver, for actors that a daemon started elsewhere."""

    folder: str
    variables: dict[str, str]

    @classmethod
    def here(cls) -> "Surroundings":
        """This process's working folder and its settings of this package and of the hub."""
        kept = {k: v for k, v in os.environ.items() if k.startswith(("TRISHUL_", "HF_"))}
        return cls(os.getcwd(), kept)

    def enter(self) -> None:
        """Take them over, as far as this machine has the folder."""
        os.environ.update(self.variables)
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
