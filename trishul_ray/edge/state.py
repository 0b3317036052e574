"""What the edge keeps on the server between rounds; a part of the checkpoint."""

from dataclasses import dataclass, field

import numpy as np

from trishul_ray.edge.fleet import ClockState
from trishul_ray.files import Json


@dataclass
class PrivacyState:
    """What a private run keeps between rounds.

    Attributes:
        clip_norm: S of the next round.
        noise: z, as it was found when the run began: another version of the library may find
            another one.
        squared_norms: The sum of S^2 over the rounds so far.
        arrays: ``start``, the shared part before round 1, float32 [W], where canaries or the scope
            "core" need it; ``canaries``, the sum of what they sent, float64 [W]; ``released``, the
            sum of all noisy mean changes, float64 [W], for the scope "core".
    """

    clip_norm: float
    noise: float
    squared_norms: float = 0.0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class EdgeState:
    """State of filters, privacy and the clock; each field is empty while its part is off.

    Attributes:
        kept: What filters left with each client, by name.
        privacy: Of a private run; None for others.
        clock: The simulated clock, and what is recorded of clients.
    """

    kept: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    privacy: PrivacyState | None = None
    clock: ClockState | None = None

    def __bool__(self) -> bool:
        return any(vars(self).values())

    @classmethod
    def from_json(cls, fields: Json) -> "EdgeState":
        """Return the state that JSON holds, whose keys are texts."""
        kept = {int(client): arrays for client, arrays in fields.pop("kept").items()}
        if (privacy := fields.pop("privacy", None)) is not None:
            fields["privacy"] = PrivacyState(**privacy)
        if (clock := fields.pop("clock", None)) is not None:
            fields["clock"] = ClockState.from_json(clock)
        return cls(kept=kept, **fields)
