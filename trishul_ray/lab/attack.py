"""Attackers: clients that send another change than the one that they trained.

A fixed share of the clients, which the seed draws, sends its change times a factor: a large one
takes over the mean (model replacement; Bagdasaryan et al., AISTATS 2020, arXiv 1807.00459), a
negative one works against the others. ``attack.start`` lets a run begin well. The server and the
records know nothing of who attacks but the number of attackers in a round.
"""

import math
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config import Section
from trishul_ray.methods.base import exact_share
from trishul_ray.rng import numpy_rng
from trishul_ray.stages import Change, Sender, Stage, register_stage


class AttackConfig(Section):
    """Attackers, and the factor of their changes."""

    share: float = Field(
        0.0, ge=0, lt=1, description="share of the clients, rounded up, that attack; by the seed"
    )
    scale: float = Field(-1.0, description="what they multiply their change by; -1 reverses it")
    start: int = Field(1, ge=1, description="first round in which they do")

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "AttackConfig":
        if not self.share:
            self.reject_unused(["scale", "start"], "with share=0")
        return self


@register_stage("attack")
class Attack(Stage):
    """Attackers multiply their change before anything else is done with it."""

    Config, wire = AttackConfig, -1
    summed = frozenset({"attackers"})
    example: ClassVar = {"share": 0.5, "scale": -2.0}
    config: AttackConfig

    @cached_property
    def attackers(self) -> frozenset[int]:
        """The clients that attack, the same in every round."""
        clients, share = self.settings.federation.clients, self.config.share
        drawn = numpy_rng(self.settings.seed, "attackers").permutation(clients)
        return frozenset(drawn[: math.ceil(exact_share(clients, share))].tolist())

    def send(self, change: Change, sender: Sender) -> Change:
        """Return the change times the factor, of an attacker."""
        attacks = sender.client in self.attackers and sender.round >= self.config.start
        metrics = change.metrics | {"attackers": float(attacks)}
        if not attacks:
            return replace(change, metrics=metrics)
        factor = np.float32(self.config.scale)
        extra = {name: values * factor for name, values in change.extra.items()}
        return replace(change, shared=change.shared * factor, extra=extra, metrics=metrics)
