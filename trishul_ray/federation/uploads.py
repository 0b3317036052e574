"""Single uploads as the server reads them: as values or changes.

The mean of a round needs none of it; diagnostics, some methods and some stages do.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trishul_ray.federation.executor import Executor
from trishul_ray.federation.messages import Upload
from trishul_ray.stages import ArrayState, Stages


@dataclass(frozen=True)
class UploadReader:
    """Reads the uploads of a run.

    Attributes:
        executor: Brings uploads into this process, given their handles.
        stages: The stages of the run.
    """

    executor: Executor
    stages: Stages

    def fetch(self, handles: Sequence[Any]) -> list[Upload]:
        """Bring uploads into this process, given their handles."""
        return self.executor.fetch([*handles])

    def values(self, uploads: Sequence[Upload], broadcast: ArrayState) -> list[Upload]:
        """Return uploads as values, even where clients send the change since ``broadcast``."""
        if not self.stages.act_on_changes:
            return [*uploads]
        return [
            replace(u, arrays=replace(u.arrays, shared=broadcast.shared + u.arrays.shared))
            for u in uploads
        ]

    def changes(self, handles: Sequence[Any], accepted: AbstractSet[int]) -> dict[int, np.ndarray]:
        """Return the changes [W] of the accepted clients, by ascending client."""
        return {
            upload.client: upload.arrays.shared
            for upload in sorted(self.fetch(handles), key=lambda each: each.client)
            if upload.client in accepted
        }
