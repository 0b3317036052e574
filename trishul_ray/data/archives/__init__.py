"""The files in which the public datasets were first published, read without unpacking to disk."""

from trishul_ray.data.archives.cifar import CIFAR10_ARCHIVE, CIFAR100_ARCHIVE
from trishul_ray.data.archives.glue import GlueArchive
from trishul_ray.data.archives.mrqa import MrqaArchive
from trishul_ray.data.archives.newsgroups import NewsgroupsArchive
from trishul_ray.data.archives.svhn import SvhnArchive

__all__ = [
    "CIFAR10_ARCHIVE",
    "CIFAR100_ARCHIVE",
    "GlueArchive",
    "MrqaArchive",
    "NewsgroupsArchive",
    "SvhnArchive",
]
