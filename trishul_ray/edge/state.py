"""What the edge keeps on the server between rounds; a part of the checkpoint."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class EdgeState:
    """State of filters, stages, cohorts and the clock; each field is empty while its part is off.

    Attributes:
        kept: What filters left with each client, by name.
        moments: First and second moments [W] float64 of the server optimizer.
    """

    kept: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    moments: dict[str, np.ndarray] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "EdgeState":
        """Return the state that JSON holds, whose keys are texts."""
        kept = {int(client): arrays for client, arrays in fields.pop("kept").items()}
        return cls(kept=kept, **fields)
