"""Robust aggregation rules, for rounds in which some clients send harmful changes.

A rule replaces the mean of the changes x_1 .. x_m, of which f may be harmful::

    median   of each entry                  Yin et al., ICML 2018, arXiv 1803.01498
    trimmed  mean of each entry without its f smallest and f largest values      (the same)
    krum     mean of the m - f changes with the smallest sums of squared distances to their
             m - f - 2 nearest changes      Blanchard et al., NeurIPS 2017 (multi-Krum)
    norm     mean of the changes, each clipped to a maximum norm
                                            Sun et al., 2019, arXiv 1911.07963

All changes have equal weights, because a client could claim any number of rows. A rule reads each
change as one vector, without its layers. By default, the maximum norm is the median norm of the
round's changes.

On the factors of LoRA, the rules are known to be weak (arXiv 2602.15671); they are baselines.

Legend: W entries of the shared part, m clients.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.errors import InputError
from trishul_ray.methods.base import Method
from trishul_ray.runtime.proportions import exact_fraction
from trishul_ray.stages import MeanChange, Stage, norm_of, register_stage


class RobustConfig(Section):
    """The robust rule that replaces the mean of a round's changes."""

    rule: Literal["mean", "median", "trimmed", "krum", "norm"] = Field(
        "mean", description="mean: no rule; other rules replace the mean, with equal weights"
    )
    share: float = Field(
        0.2,
        ge=0,
        lt=0.5,
        description="trimmed, krum: fraction of a cohort that may be harmful, rounded up",
    )
    bound: Annotated[float, Field(gt=0)] | Literal["median"] = Field(
        "median", description="norm: maximum norm of a change, or the median norm of the round"
    )

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "RobustConfig":
        unread = {"trimmed": ["bound"], "krum": ["bound"], "norm": ["share"]}
        self.reject_unused(unread.get(self.rule, ["share", "bound"]), f"with rule={self.rule!r}")
        return self


@register_stage("robust")
class Robust(Stage):
    """Replace the mean change by a robust rule."""

    Config, wire, alters_mean, needs_client_changes = RobustConfig, 0, True, True
    example: ClassVar = {"rule": "median"}
    config: RobustConfig

    @property
    def harmful(self) -> int:
        """Number of harmful clients of a full cohort, f; 0 if the rule does not use it."""
        if self.config.rule not in ("trimmed", "krum"):
            return 0
        return harmful_of(self.config.share, self.settings.federation.clients_per_round)

    @property
    def least(self) -> int:
        """Minimum number of changes for which the rule is defined."""
        return {"trimmed": 2 * self.harmful + 1, "krum": 2 * self.harmful + 3}.get(
            self.config.rule, 1
        )

    @property
    def quorum(self) -> dict[str, int]:
        """The minimum number of changes of the rule."""
        return {"robust.rule": self.least}

    def check(self, method: Method) -> None:
        """Reject experiments that the rule does not support."""
        settings, name = self.settings, f"robust.rule={self.config.rule!r}"
        fed = settings.federation
        if fed.clients_per_round < self.least:
            raise ValueError(
                f"{name} with robust.share={self.config.share:g} needs {self.least} clients per "
                f"round: federation.clients_per_round={fed.clients_per_round} is too small"
            )
        if settings.is_set("privacy"):
            raise ValueError(
                f"{name} needs each client's change, which the section privacy hides; set only "
                "one of them"
            )
        if fed.compute != "full" or fed.weighting != "uniform":
            raise ValueError(
                f"{name} gives all changes the same weight: federation.compute={fed.compute!r} and "
                f"federation.weighting={fed.weighting!r} must be full and uniform"
            )

    def begin(self) -> list[str]:
        """Reject methods that send more than the shared part."""
        if more := sorted(self.plan.lengths.keys() - {"shared"}):
            raise InputError(
                f"robust.rule={self.config.rule!r} supports only methods that send nothing but the "
                f"trained parameters, and {self.settings.method_as_set} also sends "
                f"{', '.join(more)}; use another method"
            )
        return []

    def aggregate(
        self, number: int, mean: MeanChange, changes: Mapping[int, np.ndarray]
    ) -> MeanChange:
        """Apply the rule to the changes."""
        rows = np.stack([changes[client] for client in sorted(changes)]).astype(np.float64)
        rule = self.config.rule
        metrics: dict[str, float] = {}
        if rule == "median":
            found = np.median(rows, axis=0)
        elif rule == "trimmed":
            found = trimmed_mean(rows, self.harmful)
        elif rule == "krum":
            kept = krum(rows, self.harmful)
            found = rows[kept].mean(axis=0)
        else:
            found, cut = bounded_mean(rows, self.config.bound)
            metrics["robust_bounded"] = float(cut)
        metrics["robust_moved"] = norm_of([found - mean.state.shared])
        found = found.astype(mean.state.shared.dtype)
        return replace(mean.with_shared(found), metrics={**mean.metrics, **metrics})


def harmful_of(share: float, clients: int) -> int:
    """Return f, a fraction of the clients, rounded up."""
    return math.ceil(exact_fraction(clients, share))


def trimmed_mean(rows: np.ndarray, harmful: int) -> np.ndarray:
    """Compute the mean [W] of each entry of [m, W] without its f smallest and f largest values."""
    mean: np.ndarray = np.sort(rows, axis=0)[harmful : len(rows) - harmful].mean(axis=0)
    return mean


def krum(rows: np.ndarray, harmful: int) -> np.ndarray:
    """Return the indices of the m - f rows [m, W] with the smallest scores, ascending.

    The lower index breaks ties.
    """
    count = len(rows)
    squares = np.zeros((count, count))
    for first in range(count):
        # Distances from inner products would lose precision if one row is large.
        squares[first] = np.square(rows - rows[first]).sum(axis=1)
    nearest = np.sort(squares, axis=1)[:, 1 : max(2, count - harmful - 1)]  # 0 is the row itself
    order = np.argsort(nearest.sum(axis=1), kind="stable")
    return np.sort(order[: count - harmful])


def bounded_mean(rows: np.ndarray, bound: float | Literal["median"]) -> tuple[np.ndarray, int]:
    """Compute the mean [W] of rows [m, W] clipped to a norm, and the number of clipped rows."""
    norms = np.array([norm_of([row]) for row in rows])
    most = float(np.median(norms)) if bound == "median" else bound
    scale = np.divide(most, norms, out=np.ones_like(norms), where=norms > most)
    mean: np.ndarray = (rows * scale[:, None]).mean(axis=0)
    return mean, int((norms > most).sum())
