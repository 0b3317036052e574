"""Attackers: clients that scale their change before they send it.

A fixed fraction of the clients, sampled from the seed, multiply their change by a factor. A large
factor replaces the mean (model replacement; Bagdasaryan et al., AISTATS 2020, arXiv 1807.00459),
and a negative factor counteracts the other clients. The attack begins in round ``attack.start``.

The server and the records contain only the number of attackers of a round.
"""

import math
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.runtime.proportions import exact_fraction
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import Change, ClientRoundInfo, Stage, register_stage


class AttackConfig(Section):
    """Fraction of attackers, and the factor of their changes."""

    share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of the clients that attack, rounded up; sampled from the seed",
    )
    scale: float = Field(
        -1.0, description="factor by which attackers multiply their change; -1 reverses it"
    )
    start: int = Field(1, ge=1, description="first round of the attack")

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "AttackConfig":
        if not self.share:
            self.reject_unused(["scale", "start"], "with share=0")
        return self


@register_stage("attack")
class Attack(Stage):
    """Scale the changes of attackers before any other stage reads them."""

    Config, wire = AttackConfig, -1
    summed = frozenset({"attackers"})
    example: ClassVar = {"share": 0.5, "scale": -2.0}
    config: AttackConfig

    @cached_property
    def attackers(self) -> frozenset[int]:
        """The clients that attack; the same in every round."""
        clients, share = self.settings.federation.clients, self.config.share
        sampled = numpy_rng(self.settings.draw_seed, "attackers").permutation(clients)
        return frozenset(sampled[: math.ceil(exact_fraction(clients, share))].tolist())

    def send(self, change: Change, sender: ClientRoundInfo) -> Change:
        """Multiply the change of an attacker by the factor."""
        attacks = sender.client in self.attackers and sender.round >= self.config.start
        metrics = change.metrics | {"attackers": float(attacks)}
        if not attacks:
            return replace(change, metrics=metrics)
        factor = np.float32(self.config.scale)
        extra = {name: values * factor for name, values in change.extra.items()}
        return replace(change, shared=change.shared * factor, extra=extra, metrics=metrics)
