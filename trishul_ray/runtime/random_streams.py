"""Random streams without a global seed.

Each stream is identified by ``(seed, purpose, *path)``, where ``path`` is usually
``(round, client)``. Equal identities yield the same stream in any process, and streams that differ
in any component are independent.
"""

from __future__ import annotations

import hashlib

import numpy as np

from trishul_ray.runtime.lazy import torch


def _entropy(seed: int, purpose: str, path: tuple[int | str, ...]) -> int:
    # repr distinguishes 1 from "1", and (1, 23) from (12, 3).
    text = repr((int(seed), purpose, path)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


def numpy_rng(seed: int, purpose: str, *path: int | str) -> np.random.Generator:
    """Create a NumPy generator (Philox) for a stream.

    Args:
        seed: Seed of the experiment, at least 0.
        purpose: Purpose of the numbers, such as ``"cohort"`` or ``"batches"``.
        *path: Additional components of the identity, such as ``(round, client)``.
    """
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence(_entropy(seed, purpose, path)))
    )


def torch_rng(
    seed: int, purpose: str, *path: int | str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Create a torch generator on ``device``; see :func:`numpy_rng` for the other arguments."""
    generator = torch.Generator(device=device)
    generator.manual_seed(_entropy(seed, purpose, path) & 0x7FFF_FFFF_FFFF_FFFF)
    return generator
