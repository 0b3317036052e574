"""Seven GLUE tasks, each with one or two texts and a label: all but STS-B, a regression, and WNLI.

The test rows are the development sets, since the labels of the official test sets are not public.
MNLI has two development sets, ``matched`` and ``mismatched``, which are groups of its test rows.

Source: A. Wang et al., "GLUE", ICLR 2019, https://gluebenchmark.com/tasks.
"""

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import PublicDataset, TextRows, register_dataset

#: The commit of the hub's repository.
_REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"

_ENTAILMENT = ("entailment", "not_entailment")


def _glue(
    task: str,
    description: str,
    fields: tuple[str, ...],
    classes: tuple[str, ...],
    sizes: dict[str, int],
    groups: tuple[str, ...] = (),
) -> PublicDataset:
    """Register a task, with its development sets as test rows."""
    return register_dataset(
        PublicDataset(
            name=f"glue/{task}",
            description=description,
            repo=HubRepo(
                "nyu-mll/glue",
                config=task,
                revision=_REVISION,
                file_patterns=(f"{task}/{{split}}-*.parquet",),
            ),
            rows=TextRows(fields=fields, classes=classes),
            sizes=sizes,
            test=tuple(split for split in sizes if split != "train"),
            groups=groups,
        )
    )


MNLI = _glue(
    "mnli",
    "entailment, 3 classes, 392,702 train / 9,815 + 9,832 test",
    ("premise", "hypothesis"),
    ("entailment", "neutral", "contradiction"),
    {"train": 392_702, "validation_matched": 9_815, "validation_mismatched": 9_832},
    groups=("matched", "mismatched"),
)

QNLI = _glue(
    "qnli",
    "does a sentence answer a question, 104,743 / 5,463",
    ("question", "sentence"),
    _ENTAILMENT,
    {"train": 104_743, "validation": 5_463},
)

QQP = _glue(
    "qqp",
    "do two questions mean the same, 363,846 / 40,430",
    ("question1", "question2"),
    ("not_duplicate", "duplicate"),
    {"train": 363_846, "validation": 40_430},
)

SST2 = _glue(
    "sst2",
    "sentiment of phrases in film reviews, 67,349 / 872",
    ("sentence",),
    ("negative", "positive"),
    {"train": 67_349, "validation": 872},
)

RTE = _glue(
    "rte",
    "does a text entail a sentence, 2,490 / 277",
    ("sentence1", "sentence2"),
    _ENTAILMENT,
    {"train": 2_490, "validation": 277},
)

MRPC = _glue(
    "mrpc",
    "do two sentences mean the same, 3,668 / 408",
    ("sentence1", "sentence2"),
    ("not_equivalent", "equivalent"),
    {"train": 3_668, "validation": 408},
)

COLA = _glue(
    "cola",
    "is a sentence grammatical, 8,551 / 1,043",
    ("sentence",),
    ("unacceptable", "acceptable"),
    {"train": 8_551, "validation": 1_043},
)
