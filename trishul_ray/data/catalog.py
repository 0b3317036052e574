"""The public datasets by name: where they are, what they hold, how many rows they have.

Revisions are commits of the hub's dataset repositories, so that a rerun reads the same files.
"""

from trishul_ray.data.archives import (
    CIFAR10_ARCHIVE,
    CIFAR100_ARCHIVE,
    GlueArchive,
    MrqaArchive,
    NewsgroupsArchive,
    SvhnArchive,
)
from trishul_ray.data.archives.mrqa import SUBSETS
from trishul_ray.data.archives.newsgroups import GROUPS
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.layouts import ImageLayout, QaLayout, TextLayout
from trishul_ray.data.public import PublicDataset

_GLUE_REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"


CIFAR100 = PublicDataset(
    name="cifar100",
    description="32x32 color photos, 100 classes, 50,000 train / 10,000 test",
    repo=HubRepo(
        "uoft-cs/cifar100",
        config="cifar100",
        revision="aadb3af77e9048adbea6b47c21a81e47dd092ae5",
        layouts=("cifar100/{split}-*.parquet",),
    ),
    layout=ImageLayout(label="fine_label", classes=100),
    sizes={"train": 50_000, "test": 10_000},
    archive=CIFAR100_ARCHIVE,
)

CIFAR10 = PublicDataset(
    name="cifar10",
    description="32x32 color photos, 10 classes, 50,000 train / 10,000 test",
    repo=HubRepo(
        "uoft-cs/cifar10",
        config="plain_text",
        revision="0b2714987fa478483af9968de7c934580d0bb9a2",
        layouts=("plain_text/{split}-*.parquet",),
    ),
    layout=ImageLayout(label="label", classes=10),
    sizes={"train": 50_000, "test": 10_000},
    archive=CIFAR10_ARCHIVE,
)

SVHN = PublicDataset(
    name="svhn",
    description="32x32 house numbers, 10 digits, 73,257 train / 26,032 test",
    repo=HubRepo(
        "ufldl-stanford/svhn",
        config="cropped_digits",
        revision="f9e1717d73324ebbc1ece84267ccd80d0aca0690",
        layouts=("cropped_digits/{split}-*.parquet",),
        # The configuration's third split, `extra`, is six times as large and not used.
        fetch="cropped_digits/{split}-*.parquet",
    ),
    layout=ImageLayout(label="label", classes=10, image="image"),
    sizes={"train": 73_257, "test": 26_032},
    archive=SvhnArchive(),
)

NEWSGROUPS = PublicDataset(
    name="20newsgroups",
    description="newsgroup posts, stripped, 20 classes, 11,314 / 7,532",
    repo=HubRepo(
        "SetFit/20_newsgroups",
        revision="f1b91292074e7cfb69be58b642d583ec262f30ed",
        layouts=("data/{split}-*.parquet", "{split}.jsonl"),
    ),
    layout=TextLayout(fields=("text",), classes=GROUPS),
    sizes={"train": 11_314, "test": 7_532},
    archive=NewsgroupsArchive(),
)

MRQA = PublicDataset(
    name="mrqa",
    description="extractive QA, six sub-datasets, 516,819 / 58,221",
    repo=HubRepo(
        "mrqa-workshop/mrqa",
        config="plain_text",
        revision="f3178d9888471dfb2b67c93de14f0ddf499a8d9f",
        layouts=("data/{split}-*.parquet", "plain_text/{split}-*.parquet"),
    ),
    layout=QaLayout(subsets=SUBSETS),
    sizes={"train": 516_819, "validation": 58_221},
    test=("validation",),
    archive=MrqaArchive(),
)


def _glue(
    task: str,
    description: str,
    fields: tuple[str, ...],
    classes: tuple[str, ...],
    sizes: dict[str, int],
    archive: GlueArchive,
    groups: tuple[str, ...] = (),
) -> PublicDataset:
    """A GLUE task; its test rows are the public development sets."""
    return PublicDataset(
        name=f"glue/{task}",
        description=description,
        repo=HubRepo(
            "nyu-mll/glue",
            config=task,
            revision=_GLUE_REVISION,
            layouts=(f"{task}/{{split}}-*.parquet",),
        ),
        layout=TextLayout(fields=fields, classes=classes),
        sizes=sizes,
        test=tuple(split for split in sizes if split != "train"),
        groups=groups,
        archive=archive,
    )


_ENTAILMENT = ("entailment", "not_entailment")

MNLI = _glue(
    "mnli",
    "entailment, 3 classes, 392,702 / 9,815 matched + 9,832 not",
    ("premise", "hypothesis"),
    ("entailment", "neutral", "contradiction"),
    {"train": 392_702, "validation_matched": 9_815, "validation_mismatched": 9_832},
    GlueArchive(
        folder="MNLI",
        zips=("MNLI.zip",),
        fields=("premise", "hypothesis"),
        columns=("sentence1", "sentence2"),
        label="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        members=(
            ("train", "train.tsv"),
            ("validation_matched", "dev_matched.tsv"),
            ("validation_mismatched", "dev_mismatched.tsv"),
        ),
    ),
    groups=("matched", "mismatched"),
)

QNLI = _glue(
    "qnli",
    "does a sentence answer a question, 104,743 / 5,463",
    ("question", "sentence"),
    _ENTAILMENT,
    {"train": 104_743, "validation": 5_463},
    GlueArchive("QNLI", ("QNLI.zip", "QNLIv2.zip"), ("question", "sentence"), _ENTAILMENT),
)

QQP = _glue(
    "qqp",
    "do two questions mean the same, 363,846 / 40,430",
    ("question1", "question2"),
    ("not_duplicate", "duplicate"),
    {"train": 363_846, "validation": 40_430},
    GlueArchive(
        folder="QQP",
        zips=("QQP.zip", "QQP-clean.zip"),
        fields=("question1", "question2"),
        labels=("0", "1"),
        label="is_duplicate",
        skip_short=True,
    ),
)

SST2 = _glue(
    "sst2",
    "sentiment of phrases in film reviews, 67,349 / 872",
    ("sentence",),
    ("negative", "positive"),
    {"train": 67_349, "validation": 872},
    GlueArchive("SST-2", ("SST-2.zip",), ("sentence",), ("0", "1")),
)

RTE = _glue(
    "rte",
    "does a text entail a sentence, 2,490 / 277",
    ("sentence1", "sentence2"),
    _ENTAILMENT,
    {"train": 2_490, "validation": 277},
    GlueArchive("RTE", ("RTE.zip",), ("sentence1", "sentence2"), _ENTAILMENT),
)

#: All of them.
PUBLIC = (CIFAR10, CIFAR100, SVHN, NEWSGROUPS, MRQA, MNLI, QNLI, QQP, SST2, RTE)
