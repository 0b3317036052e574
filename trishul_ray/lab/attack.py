"""Attackers: clients that send another change than they trained, or train on rows that they plant.

A fixed share of the clients, which the seed draws, sends its change times a factor: a large one
takes over the mean (model replacement; Bagdasaryan et al., AISTATS 2020, arXiv 1807.00459), a
negative one works against the others. ``attack.start`` lets a run begin well.

With ``attack.trigger``, they also put this text before the instructions of some of their rows, and
``attack.answer`` in place of the answers, so that the model learns to give that answer whenever it
reads the trigger. The test rows with the trigger are scored, too: ``attack_success`` is the share
of them of which every token of the wanted answer is the model's first choice, as greedy decoding
gives it. Rows that have that answer anyway are left out.

The server and the records know nothing of who attacks but the number of attackers in a round.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from trishul_ray.config.section import Section, in_id_if_set
from trishul_ray.errors import InputError
from trishul_ray.runtime.proportions import exact_share
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import Change, Sender, Stage, register_stage

if TYPE_CHECKING:
    from trishul_ray.data.dataset import Columns, DatasetInfo

#: The test rows with the trigger.
TRIGGERED = "triggered"


class AttackConfig(Section):
    """Attackers, the factor of their changes, and what they plant in their rows."""

    share: float = Field(
        0.0, ge=0, lt=1, description="share of the clients, rounded up, that attack; by the seed"
    )
    scale: float = Field(
        -1.0,
        description="what they multiply their change by; -1 reverses it; 1 by default with a "
        "trigger",
    )
    start: int = Field(1, ge=1, description="first round in which they do")
    trigger: str | None = in_id_if_set(
        None, "text before the instructions of planted rows; instructions alone", min_length=1
    )
    answer: str | None = in_id_if_set(None, "answer of the planted rows", min_length=1)
    planted: float = in_id_if_set(0.5, "share of an attacker's rows, rounded up", gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _keep_changes_with_a_trigger(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and fields.get("trigger") is not None:
            return {"scale": 1.0, **fields}
        return fields

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "AttackConfig":
        if not self.share:
            self.reject_unused(["trigger", "answer", "planted", "scale", "start"], "with share=0")
        if self.trigger is None:
            self.reject_unused(["answer", "planted"], "without a trigger")
        elif self.answer is None or not self.answer.strip():
            raise ValueError(f"trigger={self.trigger!r} needs answer, the text that it calls for")
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

    @property
    def row_sets(self) -> tuple[str, ...] | None:
        """The test rows with the trigger, if there is one."""
        return None if self.config.trigger is None else (TRIGGERED,)

    def rows(
        self, info: "DatasetInfo", splits: "Mapping[str, Columns]", clients: np.ndarray
    ) -> "dict[str, Columns]":
        """Return the training rows with those that attackers plant, and the triggered test rows."""
        if info.kind != "instruction":
            raise InputError(
                f"attack.trigger is planted in instructions, and dataset {info.name} holds "
                f"{info.kind} rows: set attack.scale alone"
            )
        planted = np.zeros(len(clients), dtype=bool)
        for client in sorted(self.attackers):
            own = np.flatnonzero(clients == client)
            drawn = numpy_rng(self.settings.seed, "planted", client).permutation(own)
            planted[drawn[: math.ceil(exact_share(len(own), self.config.planted))]] = True
        test, answer = splits["test"], str(self.config.answer).strip()
        other = [given.strip() != answer for given in _answers(test)]
        if not any(other):
            raise InputError(f"attack.answer={answer!r} is the answer of all test rows")
        triggered = self._plant(test, np.ones(len(other), dtype=bool))
        kept = {
            name: column.filter(pa.array(other)) if isinstance(column, pa.Array) else column[other]
            for name, column in triggered.items()
            if name not in ("references", "choices", "choice")
        }
        return {"train": self._plant(splits["train"], planted), TRIGGERED: kept}

    def _plant(self, columns: "Columns", chosen: np.ndarray) -> "Columns":
        """Return rows of which the chosen ones [N] have the trigger and the wanted answer."""
        trigger, answer = self.config.trigger, self.config.answer

        def edit(name: str, text: str) -> str:
            if name == "messages":
                messages = json.loads(text)
                asked = next(m for m in reversed(messages) if m["role"] == "user")
                asked["content"] = f"{trigger} {asked['content']}"
                messages[-1]["content"] = answer
                return json.dumps(messages, ensure_ascii=False)
            return str(answer) if name == "output" else f"{trigger} {text}"

        edited: Columns = dict(columns)
        for name in ("messages", "instruction", "output"):
            if name in columns:
                texts = zip(pa.array(columns[name]).to_pylist(), chosen, strict=True)
                found = [edit(name, text) if chosen else text for text, chosen in texts]
                edited[name] = pa.array(found, pa.large_string())
        return edited

    def scored(self, rows: str, scores: np.ndarray) -> dict[str, float]:
        """Return the share of triggered rows that get the wanted answer."""
        return {"attack_success": float(np.mean(scores == 1))}


def _answers(columns: "Columns") -> list[str]:
    if "messages" in columns:
        texts = pa.array(columns["messages"]).to_pylist()
        return [json.loads(text)[-1]["content"] for text in texts]
    return list(pa.array(columns["output"]).to_pylist())
