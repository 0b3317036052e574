"""Choices that the paper leaves open, and how runs made them: a section of the page."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from trishul_ray.config.fields import COMPUTE_LEVELS, COMPUTE_PROFILES
from trishul_ray.methods.base import method_class, method_names
from trishul_ray.paper.numbers import PAPER
from trishul_ray.report.outcomes import SweepOutcome
from trishul_ray.report.sections import SECTIONS, PageSection, render
from trishul_ray.report.summary import RunSummary

#: Open questions by the field that decides them.
SWITCHES = {
    "optimizer.name": "Equations step along the plain gradient, the protocol says Adam: which?",
    "optimizer.lr_source": "Where do the learning rates come from? The paper says both: tuned by "
    "method and budget, and fixed across methods; `trishul rates` tunes them.",
    "optimizer.schedule": "Does the learning rate decay?",
    "model.name": "Which checkpoint is the backbone?",
    "model.dropout": "Does the backbone's dropout act in training?",
    "model.train_head": "Is the classification head trained and averaged?",
    "model.precision": "In which precision does the frozen backbone compute?",
    "federation.weighting": "Do clients weigh the same, or by their rows? The equations disagree.",
    "partition.variant": "How does a Dirichlet partition draw its proportions?",
    "partition.min_size": "What is the smallest number of rows of a client?",
    "federation.compute": "Which shares of the budget can clients train?",
    "adapter.matching": "Do methods match the budget on each matrix, or use the published ranks?",
    "adapter.init": "How are the frozen bases drawn?",
    "adapter.sigma": "Which scale have bases that are not normalized?",
    "adapter.alpha": "What is LoRA's α? (the update is α/r B A)",
    "adapter.overflow": "What if more heads are allocated than can be orthogonal? (auto: "
    "water-filling may exceed that number; gradient and curvature allocations are capped at it, "
    "since their scores may give one block all heads)",
    "method.scalars": "Are the scalars of heads trained?",
    "method.scalar_max": "What bounds the scalars (s_max)?",
    "method.selection": "Which heads does a limited client train?",
    "method.head_fraction": "Which share of its heads does a client train?",
    "method.lam": "How strong is the nuclear norm (λ)?",
    "method.prox_on": "Does the prox shrink the whole core, or its change of the round?",
    "method.prox_every": "After how many local steps does the prox follow?",
    "method.allocation": "What are heads allocated by?",
    "method.block_scores": "Whose weights score a block?",
    "method.option": "What is SCAFFOLD's control variate? (auto: the mean raw gradient)",
    "method.server_lr": "Which step does SCAFFOLD's server take?",
    "method.unsent": "What becomes of HetLoRA's components that no client of a round sends?",
    "method.init_clients": "How many clients send Fed-SB's first gradient?",
    "method.init_batches": "On how many mini-batches is Fed-SB's first gradient?",
    "method.init_lr": "Which signed step do Fed-SB's bases come from?",
    "task.kind": "Is text classified by a head, an answer or words? (auto: by the backbone's kind)",
    "task.template": "Which prompt is a text read in?",
    "task.verbalizers": "Which words stand for the classes?",
    "task.target_length": "How many tokens may a generated answer have?",
    "evaluation.limit": "How many test rows are scored?",
    "evaluation.top_k": "How many directions has the principal-angle similarity?",
}
#: Open questions that no field decides: question, answer, and the dataset that they concern.
FIXED = (
    ("Which round is reported?", "the last", None),
    ("What is the mean F1 of MRQA over?", "questions, not its six sub-datasets", "mrqa"),
)
#: Conditions under which a field decides something: another field of its section, and its values.
_APPLIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "adapter.sigma": ("init", lambda init: init == "rv_random_normal"),
    "partition.variant": ("kind", lambda kind: kind == "dirichlet"),
    "partition.min_size": ("kind", lambda kind: kind == "dirichlet"),
}
#: Displayed text of absent values, if it is not just "default".
_ABSENT = {"evaluation.limit": "all", "adapter.sigma": "1/√width", "adapter.alpha": "r"}
#: More values than these are counted instead of listed.
MOST_VALUES = 6


@dataclass(frozen=True)
class Switch:
    """A choice, and how many runs made it in which way, the most frequent first.

    ``field`` is empty if no field decides; ``others`` is the number of further values.
    """

    field: str
    question: str
    values: tuple[tuple[str, int], ...]
    others: int


@SECTIONS.register("switches")
class SwitchesSection(PageSection):
    """Choices of the page's runs. Sweeps of a user's own alone have no section."""

    title = "Choices that the paper leaves open"

    def __init__(self, sweeps: Sequence[SweepOutcome]) -> None:
        super().__init__(sweeps)
        runs = {run.id: run for sweep in sweeps for run in sweep.cells if run.summary is not None}
        self.switches = read_switches([run.result for run in runs.values()])
        # Contradictions of the paper on the times of a round, which no table shows.
        overhead = any(sweep.name == "overhead" for sweep in sweeps)
        self.slips = PAPER.slips("fig:overhead") if overhead else ()

    def html(self) -> Markup:
        """Return a table of the choices, with the number of runs for each."""
        profiles = tuple(dict.fromkeys(sweep.profile for sweep in self.sweeps))
        if not {*profiles} - {"custom"}:
            return Markup("")
        return render("trishul_ray.paper", "switches.html", section=self, profiles=profiles)

    def markdown(self) -> str:
        """Return the same table."""
        return render("trishul_ray.paper", "switches.md", section=self)


def read_switches(summaries: Sequence[RunSummary]) -> tuple[Switch, ...]:
    """Return how runs set each of :data:`SWITCHES`.

    Fields that a run's method or task does not read do not count.
    """
    found = []
    for field, question in SWITCHES.items():
        counts = Counter(v for s in summaries if (v := _value(s, field)) is not None)
        values = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if values:
            others = max(0, len(values) - MOST_VALUES)
            found.append(Switch(field, question, tuple(values[:MOST_VALUES]), others))
    for question, answer, dataset in FIXED:
        runs = sum(dataset in (None, s.identity["data"]["name"]) for s in summaries)
        if runs:
            found.append(Switch("", question, ((answer, runs),), 0))
    return tuple(found)


def _value(summary: RunSummary, field: str) -> str | None:
    """Return how a run set a field, as text; None if it does not apply."""
    section, _, name = field.partition(".")
    # The source of a rate cannot change a number: it is not part of the identity.
    fields = (summary.config if name == "lr_source" else summary.identity).get(section, {})
    other, applies = _APPLIES.get(field, (name, lambda _: True))
    unread = name not in fields or field in summary.unread_fields
    if unread or not applies(fields.get(other)):
        return None
    value = fields[name]
    if field == "federation.compute":
        return _shares(value, fields.get("compute_shares"))
    if value is None and field == "adapter.init":
        return _default_init(summary.identity["method"]["name"])
    if value is None:
        return _ABSENT.get(field, "default")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", "\\n")


def _shares(profile: str, custom: Sequence[float] | None) -> str:
    """Return a profile of capacities with the proportions that it stands for."""
    if profile == "full":
        return profile
    proportions = COMPUTE_PROFILES[profile] if custom is None else custom
    levels = zip(COMPUTE_LEVELS, proportions, strict=False)
    return f"{profile} ({', '.join(f'{share:.0%} train {level:g}' for level, share in levels)})"


def _default_init(method: str) -> str:
    default = (
        getattr(method_class(method), "default_init", None) if method in method_names() else ""
    )
    return f"{default} (the default of {method})" if default else f"the default of {method}"
