"""Train one client in a process of limited memory.

    python capped_client.py EXPERIMENT.yaml DEVICE LIMIT

LIMIT is a fraction of a GPU's memory, or the MiB that the process may allocate on the CPU after
loading; 0 sets no limit. Prints the digest of the upload, or the error.
"""

import resource
import sys
from pathlib import Path

import psutil

from trishul_ray.errors import RunError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.messages import TrainJob, to_array
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.local import train_client
from trishul_ray.runtime.device import cap_device_memory


def main(file, device, limit):
    experiment = load_experiment(Path(file), [f"resources.device={device}"])
    context = InlineExecutor(experiment, prepare_run(experiment)).context
    broadcast = context.method.initial_state(context.model.layout, context.initial, {}).map(
        to_array
    )
    before = resource.getrlimit(resource.RLIMIT_AS)
    if device == "cuda":
        cap_device_memory(float(limit))
    elif float(limit):
        most = psutil.Process().memory_info().vms + int(float(limit) * 2**20)
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        upload, _ = train_client(context, broadcast, TrainJob(round=1, client=2))
    except RunError as error:
        print(f"RunError: {error}")
    else:
        print(state_digest(upload.arrays))
    resource.setrlimit(resource.RLIMIT_AS, before)  # The exit of the interpreter needs some memory.


if __name__ == "__main__":
    main(*sys.argv[1:])
