"""Random streams without a global seed.

Every random consumer asks for its own generator by ``(seed, purpose, *path)``, where the path is
usually ``(round, client)``. Two streams that differ in any component are independent; the same
components give the same stream in any process, in any order, however often.
"""

import hashlib

import numpy as np
import torch


def _entropy(seed: int, purpose: str, path: tuple[int | str, ...]) -> int:
    # repr keeps 1 and "1" apart; a hash, not a sum, so that (1, 23) and (12, 3) differ.
    text = repr((int(seed), purpose, path)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


def numpy_rng(seed: int, purpose: str, *path: int | str) -> np.random.Generator:
    """A NumPy generator (Philox) for ``purpose`` at ``path``.

    Args:
        seed: the experiment's seed, >= 0.
        purpose: what the numbers are for, e.g. ``"cohort"`` or ``"batches"``.
        path: what tells this consumer from its siblings, e.g. ``(round, client)``.
    """
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence(_entropy(seed, purpose, path)))
    )


def torch_rng(
    seed: int, purpose: str, *path: int | str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A torch generator for ``purpose`` at ``path``, on ``device``; see :func:`numpy_rng`."""
    generator = torch.Generator(device=device)
    generator.manual_seed(_entropy(seed, purpose, path) & 0x7FFF_FFFF_FFFF_FFFF)
    return generator
