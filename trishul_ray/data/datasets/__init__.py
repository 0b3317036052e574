"""The public datasets, one file each: source, original archive, columns, row counts and classes.

The handwritten digits, which come with scikit-learn, are in ``digits.py``. They need no files and
are not in :data:`PUBLIC`.
"""

from trishul_ray.data.datasets.cifar import CIFAR10, CIFAR100
from trishul_ray.data.datasets.glue import MNLI, QNLI, QQP, RTE, SST2
from trishul_ray.data.datasets.mrqa import MRQA
from trishul_ray.data.datasets.newsgroups import NEWSGROUPS
from trishul_ray.data.datasets.svhn import SVHN

__all__ = ["PUBLIC"]

#: All datasets that are read from a mirror, an original archive or the hub.
PUBLIC = (CIFAR10, CIFAR100, SVHN, NEWSGROUPS, MRQA, MNLI, QNLI, QQP, SST2, RTE)
