"""Choices that the paper leaves open, and how runs decide them."""

from collections import Counter
from collections.abc import Sequence

from trishul_ray.report.references import Choice
from trishul_ray.report.summary import RunSummary, flatten

#: Open questions by the field that decides them.
OPEN_CHOICES = {
    "optimizer.name": "Equations step along the plain gradient, the protocol says Adam: which?",
    "optimizer.lr_source": "Where do the learning rates come from? The paper says both: tuned by "
    "method and budget, and fixed across methods; `trishul sweep rates` tunes them.",
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
#: Fields that decide something only if another field has a value.
_ONLY_IF = {
    "adapter.sigma": ("adapter.init", "rv_random_normal"),
    "partition.variant": ("partition.kind", "dirichlet"),
    "partition.min_size": ("partition.kind", "dirichlet"),
}


def open_choices(runs: Sequence[RunSummary]) -> list[Choice]:
    """Return how finished runs decide each of :data:`OPEN_CHOICES`.

    Fields that a run's method or task does not read do not count.
    """
    counts: dict[str, Counter[str]] = {field: Counter() for field in OPEN_CHOICES}
    for run in runs:
        fields = flatten(run.config)
        for field in OPEN_CHOICES.keys() & fields.keys() - set(run.unread_fields):
            other, needed = _ONLY_IF.get(field, (field, fields[field]))
            if fields.get(other) == needed:
                value = fields[field]
                counts[field]["default" if value is None else str(value)] += 1
    return [
        Choice(question, field, tuple(counts[field].most_common()))
        for field, question in OPEN_CHOICES.items()
        if counts[field]
    ]
