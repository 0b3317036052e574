"""What would go wrong on this machine, and the cure: the checks behind ``trishul doctor``.

Nothing is installed, downloaded or left behind, and no cluster is started unless asked for. What
may hang (a network, a remote folder) is given :data:`PATIENCE` seconds.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from trishul_ray.doctor import machine, services
from trishul_ray.doctor.base import PATIENCE, Check, Status

__all__ = ["PATIENCE", "Check", "diagnose", "exit_code", "render"]

_SYMBOLS: dict[Status, str] = {
    "ok": "[green]ok[/]  ",
    "warn": "[yellow]warn[/]",
    "fail": "[red]fail[/]",
}


def diagnose(
    runs: str = "runs",
    cache: str | None = None,
    hub: str | None = None,
    tracking: str | None = None,
    start_ray: bool = False,
) -> list[Check]:
    """Look at everything a run needs.

    Args:
        runs: ``storage.runs``: a folder or a filesystem URI.
        cache: ``storage.cache``; default ``$TRISHUL_CACHE``, else ``~/.cache/trishul``.
        hub: ``storage.hub``; default ``$TRISHUL_HUB``.
        tracking: ``tracking.uri``; default a SQLite file in ``runs``.
        start_ray: also join the cluster of ``RAY_ADDRESS``, or start a local one and stop it.

    Returns:
        The findings, in the order of the checks.
    """
    cache = cache or os.environ.get("TRISHUL_CACHE") or "~/.cache/trishul"
    hub = hub or os.environ.get("TRISHUL_HUB")
    # Those that wait for something go to threads first; importing torch takes as long as they do.
    with ThreadPoolExecutor(max_workers=4) as pool:
        waiting = [
            pool.submit(services.ray_address),
            pool.submit(services.folder, "runs folder", runs),
            pool.submit(services.mlflow_store, tracking, runs),
            pool.submit(services.hub_reach),
        ]
        here = [
            machine.python(),
            machine.packages(),
            machine.devices(),
            machine.cpus(),
            machine.memory(),
            services.ray_import(),
        ]
        address, runs_check, store, online = (future.result() for future in waiting)
    checks = [*here, address, services.ray_token()]
    if start_ray:
        checks.append(services.ray_start())
    return [
        *checks,
        runs_check,
        services.folder("cache folder", cache),
        store,
        services.mirror(hub),
        online,
    ]


def render(checks: Sequence[Check], console: Console) -> None:
    """Print the findings, each with its cure under it, and a closing line."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        console.print(f"{_SYMBOLS[check.status]}  {check.name:<{width}}  ", end="")
        console.print(check.detail, markup=False, highlight=False, soft_wrap=True)
        if check.hint:
            pad = " " * (width + 8)
            console.print(f"{pad}{check.hint}", markup=False, highlight=False, soft_wrap=True)
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    if failed:
        console.print(f"{failed} of {len(checks)} checks failed: a run would not succeed here.")
    elif warned:
        console.print(f"A run can go; {warned} of {len(checks)} checks have a remark.")
    else:
        console.print("All is well.")


def exit_code(checks: Sequence[Check]) -> int:
    """1 if a check failed, else 0."""
    return int(any(check.status == "fail" for check in checks))
