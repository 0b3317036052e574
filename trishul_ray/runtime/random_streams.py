"""Random streams without a global seed.

Each stream is identified by ``(seed, purpose, *path)``, where the path is usually
``(round, client)``. Equal components give the same stream in any process; streams that differ in
any component are independent.
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
    """Return a NumPy generator (Philox).

    Args:
        seed: the experiment's seed, >= 0.
        purpose: what the numbers are for, e.g. ``"cohort"`` or ``"batches"``.
        path: further components of the stream's identity, e.g. ``(round, client)``.
    """
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence(_entropy(seed, purpose, path)))
    )


def torch_rng(
    seed: int, purpose: str, *path: int | str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a torch generator on ``device``; see :func:`numpy_rng` for the arguments."""
    generator = torch.Generator(device=device)
    generator.manual_seed(_entropy(seed, purpose, path) & 0x7FFF_FFFF_FFFF_FFFF)
    return generator
