"""Joining a Ray cluster, or starting a local one and ending what was started."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from trishul_ray.errors import RunError


@contextmanager
def ray_session(cpus: int | None = None) -> Iterator[dict[str, float]]:
    """Join the cluster at ``RAY_ADDRESS``, use the one this process is in, or start a local one.

    A runtime that was there before is left alone at the end; one started here is shut down, with
    every process it had. Local clusters bind to localhost and show no dashboard.

    Args:
        cpus: CPUs of a local cluster; default what the machine has.

    Yields:
        What is free: ``{"CPU": ..., "GPU": ...}``.

    Raises:
        RunError: the cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield ray.available_resources()
        return
    address = os.environ.get("RAY_ADDRESS")
    # Ray's own logs go to its session folder; a person wants one progress bar.
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    # GPU slices are fractions of devices the actor must still see when it holds none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        if address:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        else:
            ray.init(
                num_cpus=cpus,
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the cluster at RAY_ADDRESS={address}" if address else "a local Ray cluster"
        raise RunError(f"cannot join {where}: {str(error).strip().splitlines()[0]}") from error
    try:
        yield ray.available_resources()
    finally:
        ray.shutdown()
