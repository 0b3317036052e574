"""The choices that the paper leaves open, and how the runs of a page made them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trishul_ray.methods.base import method_class, method_names

#: What is open, by the field that decides it.
SWITCHES = {
    "optimizer.name": "Equations step along the plain gradient, the protocol says Adam: which?",
    "optimizer.lr_source": "Where do the learning rates come from?",
    "optimizer.schedule": "Does the learning rate decay?",
    "model.train_head": "Is the classification head trained and averaged?",
    "model.precision": "In which precision does the frozen backbone compute?",
    "federation.weighting": "Do clients weigh the same, or by their rows? The equations disagree.",
    "partition.variant": "How does a Dirichlet partition draw its proportions?",
    "partition.min_size": "What is the smallest number of rows of a client?",
    "federation.compute": "Which shares of the budget can clients train?",
    "adapter.matching": "Do methods match the budget on each matrix, or use the published ranks?",
    "adapter.init": "How are the frozen bases drawn?",
    "adapter.sigma": "Which scale have bases that are not normalized?",
    "adapter.overflow": "What if more heads are allocated than can be orthogonal?",
    "method.scalars": "Are the scalars of heads trained?",
    "method.scalar_max": "What bounds the scalars (s_max)?",
    "method.selection": "Which heads does a limited client train?",
    "method.head_fraction": "Which share of its heads does a client train?",
    "method.lam": "How strong is the nuclear norm (λ)?",
    "method.prox_on": "Does the prox shrink the whole core, or its change of the round?",
    "method.prox_every": "After how many local steps does the prox follow?",
    "method.allocation": "What are heads allocated by?",
    "method.block_scores": "Whose weights score a block?",
    "task.kind": "Is text classified by a head, an answer or words? (auto: by the backbone's kind)",
    "evaluation.limit": "How many test rows are scored?",
    "evaluation.top_k": "How many directions has the principal-angle similarity?",
}
#: Where a field decides something: another field of its section, and that one's value.
_APPLIES = {
    "adapter.sigma": ("init", "rv_random_normal"),
    "partition.variant": ("kind", "dirichlet"),
    "partition.min_size": ("kind", "dirichlet"),
}
#: How the absence of a value is displayed, where it is not just "default".
_ABSENT = {"evaluation.limit": "all", "adapter.sigma": "1/√width"}
#: More values than these are counted instead of listed.
MOST_VALUES = 6


@dataclass(frozen=True)
class Switch:
    """A choice, and how often it was made in which way.

    Attributes:
        field: The field of the experiment.
        question: What is open.
        values: Values with the number of runs, the most frequent first.
        others: Number of further values.
    """

    field: str
    question: str
    values: tuple[tuple[str, int], ...]
    others: int


def read_switches(summaries: Sequence[Mapping[str, Any]]) -> tuple[Switch, ...]:
    """Return how runs set each of :data:`SWITCHES`.

    Args:
        summaries: The content of ``result.json`` of each run. Fields that a run's method ignores
            are not in its ``identity``, and do not count.
    """
    found = []
    for field, question in SWITCHES.items():
        counts = Counter(v for s in summaries if (v := _value(s, field)) is not None)
        values = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if values:
            others = max(0, len(values) - MOST_VALUES)
            found.append(Switch(field, question, tuple(values[:MOST_VALUES]), others))
    return tuple(found)


def _value(summary: Mapping[str, Any], field: str) -> str | None:
    """Return how a run set a field, as text; None if it does not apply."""
    section, _, name = field.partition(".")
    # The source of a rate cannot change a number: it is not part of the identity.
    fields = summary["config" if name == "lr_source" else "identity"].get(section, {})
    other, needed = _APPLIES.get(field, (name, fields.get(name)))
    if name not in fields or fields.get(other) != needed:
        return None
    value = fields[name]
    if value is None and field == "adapter.init":
        return _default_init(summary["identity"]["method"]["name"])
    if value is None:
        return _ABSENT.get(field, "default")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default_init(method: str) -> str:
    default = (
        getattr(method_class(method), "default_init", None) if method in method_names() else ""
    )
    return f"{default} (the default of {method})" if default else f"the default of {method}"
