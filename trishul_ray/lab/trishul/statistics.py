"""Statistics of core heads that clients send beside the cores, for the server's decisions.

Legend: n core heads over all layers, in the order of the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from trishul_ray.adapters.layout import Layout
from trishul_ray.methods.messages import LocalRun, Round, State, Tensors
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: The statistic that all others go with: 1 where a client has trained a core head, else 0.
TRAINED = "trained"


def core_heads(layout: Layout) -> int:
    """Return n."""
    return sum(entry.shape[0] for entry in layout.entries if entry.kind == "core")


def with_statistic(sent: State, run: LocalRun, name: str, values: Tensor) -> State:
    """Return an upload with a statistic [n], 0 where the client has not trained a core head."""
    count = core_heads(run.layout)
    trained = torch.ones(count, dtype=torch.bool) if run.active is None else run.active[:count]
    masked = (values * trained.to(values)).float()
    return replace(sent, extra=sent.extra | {TRAINED: trained.to(run.vector), name: masked})


def lengths(layout: Layout, name: str) -> dict[str, int]:
    """Return the lengths of what :func:`with_statistic` adds, by name."""
    return dict.fromkeys((TRAINED, name), core_heads(layout))


def means(mean: State, round_: Round, names: Iterable[str]) -> Tensors:
    """Return means over clients: the share that trained each core head, and statistics of it.

    They are 0 for a core head whose change was withheld: what one client says must not count
    where its core does not.
    """
    used = round_.trained[: len(mean.extra[TRAINED])].to(mean.extra[TRAINED])
    return {name: mean.extra[name] * used for name in (TRAINED, *names)}


def without_statistics(mean: State, *names: str) -> State:
    """Return a mean of uploads without the given statistics: they are no part of the state."""
    gone = (TRAINED, *names)
    return replace(mean, extra={k: v for k, v in mean.extra.items() if k not in gone})
