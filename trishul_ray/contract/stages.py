"""Contract checks of a stage, on small single-process runs with the fields of its ``example``."""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from trishul_ray.contract.checks import Check, require, require_hooks
from trishul_ray.contract.methods import (
    SMALL,
    Executors,
    order_is_free,
    resumes,
    server_of,
    small_executor,
)
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.messages import TrainJob
from trishul_ray.stages import STAGES, Stage

#: Method whose next state follows from the mean change, which every stage supports.
METHOD = "trishul"


def checks_of(name: str) -> list[Check]:
    example = STAGES[name].example
    unset = "" if example else 'set example to fields that enable it, such as {"lr": 0.1}'

    @cache
    def executor(*overrides: str) -> InlineExecutor:
        return small_executor(*overrides, *words_of(name))

    def on(check: Callable[..., None]) -> Callable[[Path], None]:
        return partial(check, name=METHOD, executor=executor)

    return [
        Check("is off at its defaults", lambda folder: off_at_defaults(name), skipped=unset),
        Check("repeats a client's call", on(call_repeats), skipped=unset),
        Check("does not depend on the order of clients", on(order_is_free), skipped=unset),
        Check("resumes with the same bytes", on(resumes), skipped=unset),
    ]


def words_of(name: str) -> list[str]:
    """Return the overrides that set a stage's section to its example."""
    return _words(name, STAGES[name].example)


def _words(name: str, fields: Mapping[str, Any]) -> list[str]:
    return [
        (field if "." in field else f"{name}.{field}")
        + f"={value if isinstance(value, str) else json.dumps(value)}"
        for field, value in fields.items()
    ]


def off_at_defaults(name: str) -> None:
    """Check that the defaults keep the id of a plain run, and that the example changes it."""
    require_hooks(STAGES[name], Stage)
    plain, default = load_experiment(None, SMALL).id, STAGES[name].Config()
    own = [field for field in STAGES[name].example if "." not in field]
    off = _words(name, {field: getattr(default, field) for field in own})
    require(
        load_experiment(None, [*SMALL, *off]).id == plain, f"{' '.join(off)} changes a run's id"
    )
    words = words_of(name)
    require(
        load_experiment(None, [*SMALL, *words]).id != plain,
        f"{' '.join(words)} does not change the id",
    )


def call_repeats(folder: Path, name: str, executor: Executors) -> None:
    """Check that a repeated job sends the same bytes, and that no hook writes to its arguments."""
    inline = executor(f"method={name}")
    server = server_of(inline, folder)
    broadcast = server.broadcast().map(np.copy)
    broadcast.map(lambda array: array.setflags(write=False))
    job = TrainJob(1, 2, instructions=server.stages.instruct(1))
    (first, report), (second, again) = (inline.train(broadcast, [job])[0] for _ in range(2))
    same = state_digest(first.arrays) == state_digest(second.arrays)
    require(same and report.stages == again.stages, "the upload of a repeated job differs")
