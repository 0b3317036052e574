"""The rows of an experiment and their partition.

Neither torch nor a backbone is needed.
"""

import numpy as np

from trishul_ray.data.choose_rows import choose_rows
from trishul_ray.data.dataset import PreparedDataset, ProgressCallback
from trishul_ray.data.hub import ON_HUB
from trishul_ray.data.partition import Partition, partition, partition_column
from trishul_ray.data.prepare import find_source, prepare
from trishul_ray.errors import InputError
from trishul_ray.experiment.experiment import Experiment
from trishul_ray.runtime.random_streams import numpy_rng


def partition_rows(dataset: PreparedDataset, experiment: Experiment) -> Partition:
    """Assign the training rows to clients.

    Raises:
        InputError: The rows cannot be partitioned as configured.
    """
    rows = np.arange(len(dataset.train))
    if experiment.data.train_limit is not None:
        rng = numpy_rng(experiment.draw_seed, "train-limit")
        rows = np.sort(rng.permutation(rows)[: experiment.data.train_limit])
    shards = partition(
        partition_column(dataset.train, experiment.partition)[rows],
        experiment.partition,
        experiment.federation.clients,
        experiment.draw_seed,
    )
    return Partition(rows[shards.permutation], shards.offsets)


def check_rows(experiment: Experiment, progress: ProgressCallback | None = None) -> None:
    """Check the rows on this machine, and that they can be partitioned as configured.

    Rows that are only on the hub are not downloaded.

    Raises:
        InputError: User data are malformed or fit no task, or the rows cannot be partitioned.
    """
    data, paths = experiment.data, experiment.storage.paths
    try:
        rows = prepare(data, cache=paths.cache, hub=paths.hub, progress=progress, download=False)
    except InputError:
        if find_source(data).key(paths.hub).startswith(ON_HUB):
            return
        raise
    partition_rows(choose_rows(rows, data, cache=paths.cache), experiment)
