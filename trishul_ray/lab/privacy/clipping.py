"""Clip a client's change, as the last filter before the sum, and let the norm follow a quantile."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from trishul_ray.stages import Change, norm_of

#: What a client reports: whether it was clipped, and the norm before.
CLIPPED, NORM = "privacy_clipped", "privacy_norm"


def clip(
    shared: np.ndarray, extra: Mapping[str, np.ndarray], bound: float
) -> tuple[np.ndarray, dict[str, np.ndarray], float]:
    """Scale a change by ``min(1, S / norm)``; a change of norm 0 or not finite stays as it is.

    Args:
        shared: [W] float32.
        extra: What the method adds, float32, by name.
        bound: S; 0 leaves nothing.

    Returns:
        Both arrays, whose norm after rounding is at most S, and the norm before.
    """
    before = norm_of([shared, *extra.values()])
    if not (bound < before < math.inf):
        return shared, dict(extra), before
    factor = bound / before
    while True:
        first = (shared * np.float64(factor)).astype(np.float32)
        rest = {k: (v * np.float64(factor)).astype(np.float32) for k, v in extra.items()}
        after = norm_of([first, *rest.values()])
        if after <= bound:
            return first, rest, before
        factor *= (bound / after) * (1 - 2.0**-24)  # rounding has added to the norm


def clip_change(change: Change, norm: float) -> Change:
    """Return a change clipped as a whole; report its norm and whether it was clipped.

    McMahan et al.: "Learning Differentially Private Recurrent Language Models", ICLR 2018, arXiv
    1710.06963, flat clipping. Nothing may change the upload after it: the noise hides no more than
    this norm.

    Args:
        change: All that a client sends.
        norm: The round's clip norm.
    """
    shared, extra, before = clip(change.shared, change.extra, norm)
    found = {CLIPPED: float(before > norm), NORM: before}
    return replace(change, shared=shared, extra=extra, metrics=change.metrics | found)


def automatic_norm(rate: float, steps: int, numbers: int) -> float:
    """Return ``lr sqrt(steps P)``: a walk of Adam's steps of size lr in P numbers; our own."""
    return rate * math.sqrt(steps * numbers)


def next_norm(norm: float, unclipped: float, quantile: float, rate: float) -> float:
    """Return ``C exp(-eta (b - gamma))`` (Andrew et al., 2021, arXiv 1905.03871, Algorithm 1).

    Args:
        norm: C, the clip norm of the round.
        unclipped: b, the noisy share of clients whose norm is at most C.
        quantile: gamma, the share that is aimed at.
        rate: eta, the learning rate.
    """
    return norm * math.exp(-rate * (unclipped - quantile))
