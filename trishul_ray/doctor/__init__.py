"""The checks behind ``trishul doctor``: what would go wrong on this machine, and how to fix it.

The checks install, download and leave nothing, and start a cluster only on request. Checks that
may hang (a network, a remote folder) time out after :data:`~services.TIMEOUT` seconds.
"""

from concurrent.futures import ThreadPoolExecutor

from trishul_ray.doctor import machine, services
from trishul_ray.doctor.check import Check, exit_code, render
from trishul_ray.storage import Places

__all__ = ["Check", "diagnose", "exit_code", "render"]


def diagnose(
    runs: str = "runs", tracking: str | None = None, start_ray: bool = False
) -> list[Check]:
    """Check everything that a run needs.

    Args:
        runs: ``storage.runs``: a folder or a filesystem URI.
        tracking: ``tracking.uri``; default a SQLite file in ``runs``.
        start_ray: Also join the cluster of ``RAY_ADDRESS``, or start a local one and stop it.

    Returns:
        The results, in the order in which to show them.
    """
    places = Places.at()
    # Checks that wait run in threads, while this one spends as long on importing torch.
    with ThreadPoolExecutor(max_workers=4) as pool:
        waiting = [
            pool.submit(services.check_ray_address),
            pool.submit(services.check_folder, "runs folder", runs),
            pool.submit(services.check_mlflow_store, tracking, runs),
            pool.submit(services.check_hub),
        ]
        local = [
            machine.check_python(),
            machine.check_packages(),
            machine.check_devices(),
            machine.check_cpus(),
            machine.check_memory(),
            services.check_ray_import(),
        ]
        ray_address, runs_folder, mlflow_store, hub = (future.result() for future in waiting)
    checks = [*local, ray_address, services.check_ray_token()]
    if start_ray:
        checks.append(services.check_ray_start())
    cache_folder = services.check_cache(places.cache)
    return [
        *checks,
        runs_folder,
        cache_folder,
        mlflow_store,
        services.check_mirror(places.hub),
        hub,
    ]
