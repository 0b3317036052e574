"""Datasets as memory-mapped Arrow tables, and how their rows are dealt to clients."""

from trishul_ray.data.partition import Partition, partition
from trishul_ray.data.prepare import dataset_names, describe_datasets, prepare
from trishul_ray.data.prepared import PreparedDataset, Split

__all__ = [
    "Partition",
    "PreparedDataset",
    "Split",
    "dataset_names",
    "describe_datasets",
    "partition",
    "prepare",
]
