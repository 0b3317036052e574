"""The files in which the public datasets were first published, read without unpacking to disk."""

from trishul_ray.data.datasets.cifar import CIFAR10, CIFAR10_ARCHIVE, CIFAR100, CIFAR100_ARCHIVE
from trishul_ray.data.datasets.glue import MNLI, QNLI, QQP, RTE, SST2, GlueArchive
from trishul_ray.data.datasets.mrqa import MRQA, MrqaArchive
from trishul_ray.data.datasets.newsgroups import NEWSGROUPS, NewsgroupsArchive
from trishul_ray.data.datasets.svhn import SVHN, SvhnArchive

__all__ = [
    "CIFAR10_ARCHIVE",
    "CIFAR100_ARCHIVE",
    "GlueArchive",
    "MrqaArchive",
    "NewsgroupsArchive",
    "SvhnArchive",
]


#: All of them.
PUBLIC = (CIFAR10, CIFAR100, SVHN, NEWSGROUPS, MRQA, MNLI, QNLI, QQP, SST2, RTE)
