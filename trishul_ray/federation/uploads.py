"""Single uploads as the server reads them: as values or changes, however stages encoded them.

The mean of a round needs none of it; diagnostics, some methods and some stages do.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trishul_ray.federation.executor import Executor
from trishul_ray.federation.messages import Upload
from trishul_ray.federation.reduce import configured_weight
from trishul_ray.stages import ArrayState, Stages


@dataclass(frozen=True)
class UploadReader:
    """Reads the uploads of a run.

    Attributes:
        executor: Brings uploads into this process, given their handles.
        stages: The stages of the run.
        weighting: ``federation.weighting``.
    """

    executor: Executor
    stages: Stages
    weighting: str

    def fetch(self, handles: Sequence[Any]) -> list[Upload]:
        """Bring uploads into this process, given their handles."""
        return self.executor.fetch([*handles])

    def values(self, uploads: Sequence[Upload], broadcast: ArrayState) -> list[Upload]:
        """Return uploads as values, even where clients send the change since ``broadcast``."""
        if not self.stages.act_on_changes:
            return [*uploads]
        return [self._value(upload, broadcast) for upload in uploads]

    def changes(self, handles: Sequence[Any], accepted: AbstractSet[int]) -> dict[int, np.ndarray]:
        """Return the changes [W] of the accepted clients, decoded, by ascending client."""
        return {
            upload.client: self._change(upload)
            for upload in sorted(self.fetch(handles), key=lambda each: each.client)
            if upload.client in accepted
        }

    def _change(self, upload: Upload) -> np.ndarray:
        weight = configured_weight(self.weighting, upload)
        return self.stages.restore(upload.arrays.shared, weight)

    def _value(self, upload: Upload, broadcast: ArrayState) -> Upload:
        value = broadcast.shared + self._change(upload)
        return replace(upload, arrays=replace(upload.arrays, shared=value.astype(np.float32)))
