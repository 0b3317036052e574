"""``trishul doctor``: check the requirements of a run on this machine, and remove leftovers.

The checks do not install or download anything, and leave no files.
"""

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import urllib.request
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import first_line
from trishul_ray.runtime.device import usable_cores
from trishul_ray.storage.durable import (
    nearest_existing,
    remove_abandoned,
    remove_unfinished,
    why_not_writable,
)
from trishul_ray.storage.integrity import remove_unused
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store
from trishul_ray.tracking.store import is_server, sqlite_file, tracking_uri
from trishul_ray.version import __version__

#: Seconds that a check waits for a server.
TIMEOUT = 2.0
GIB = 2**30


class Check(NamedTuple):
    """Result of a check. ``status`` is ``ok``, ``warn`` (only some runs fail here) or ``fail``."""

    name: str
    status: str
    detail: str


def diagnose(runs: str = "runs", start_ray: bool = False) -> list[Check]:
    """Check the requirements of a run; with ``start_ray``, also connect to Ray or start it."""
    paths = StoragePaths.at()
    checks: dict[str, Callable[[], str]] = {
        "versions": check_packages,
        "devices": check_devices,
        "ray": partial(check_ray, start_ray),
        "runs": partial(check_folder, runs),
        "cache": partial(check_folder, str(paths.cache)),
        "mlflow": partial(check_mlflow, runs),
        "hub": partial(check_hub, paths.hub),
    }
    return [Check(name, *result_of(check)) for name, check in checks.items()]


def result_of(check: Callable[[], str]) -> tuple[str, str]:
    """Run a check, which returns its detail or raises a warning or error.

    Returns:
        The status and the detail.
    """
    try:
        return "ok", check()
    except UserWarning as warning:
        return "warn", str(warning)
    except (ImportError, OSError, RuntimeError, ValueError, sqlite3.Error) as error:
        return "fail", redact(first_line(error))


def remove_leftovers(cache: Path, runs: str = "runs") -> list[Path]:
    """Remove unused files, and return their paths.

    Unused files are folders of finished Ray sessions, temporary files of killed processes, and
    cached data and weights that no run has used for a month.
    """
    removed = [*remove_unused(cache), *remove_unfinished(cache)]
    if "://" not in runs:
        removed += remove_unfinished(Path(runs))
    return removed + remove_abandoned()


def check_packages() -> str:
    """Compare the installed packages with the declared version ranges."""
    wrong = []
    for requirement in map(Requirement, importlib.metadata.requires("trishul-ray") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    if wrong:
        raise ImportError(f"{'; '.join(wrong)}; pip install -e .")
    return f"trishul-ray {__version__}, Python {platform.python_version()}, {platform.machine()}"


def check_devices() -> str:
    """List the devices that torch can use."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if gpus:
        torch.zeros(1, device="cuda")
    devices = f"torch {torch.__version__}: {', '.join([*gpus, f'{usable_cores()} CPU cores'])}"
    if not gpus and shutil.which("nvidia-smi"):
        raise UserWarning(f"{devices}; torch cannot use the GPU")
    return devices


def check_ray(start: bool) -> str:
    """Check that Ray can be imported and, with ``start``, that a run can connect to or start it."""
    import ray

    detail = f"ray {ray.__version__}; runs use {os.environ.get('RAY_ADDRESS') or 'a local cluster'}"
    if not start:
        return detail
    from trishul_ray.federation.on_ray.session import ray_session

    with ray_session() as free:
        return f"{detail}, which started with {free.get('CPU', 0):g} CPU free"


def check_folder(place: str) -> str:
    """Check that a local folder is writable and has space, or that a remote one can be listed."""
    if "://" in place and not place.startswith("file://"):
        Store.open(place).names()
        return redact(place)
    folder = Path(place.removeprefix("file://")).expanduser().absolute()
    if fault := why_not_writable(folder):
        raise OSError(fault)
    free = shutil.disk_usage(nearest_existing(folder)).free / GIB
    if free < 5:
        raise UserWarning(f"{folder}, only {free:.1f} GiB free")
    return f"{folder}, {free:.1f} GiB free"


def check_mlflow(runs: str) -> str:
    """Check that runs can use the MLflow store."""
    uri = tracking_uri(None, runs)
    if is_server(uri):
        return _responds(f"{uri.rstrip('/')}/health")
    file = sqlite_file(uri)
    if file is None or not file.exists():
        return f"{redact(uri)}, which the first run creates"
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=1)) as base:
        return f"{file}, {base.execute('select count(*) from runs').fetchone()[0]} runs"


def check_hub(mirror: Path | None) -> str:
    """Check the local mirror of the Hugging Face hub, or the connection to the hub."""
    if mirror is not None:
        if not (count := len([*mirror.glob("*/*/")])):
            raise OSError(f"TRISHUL_HUB={mirror} has no repositories")
        return f"TRISHUL_HUB={mirror}, {count} repositories"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return "HF_HUB_OFFLINE is set: runs use the cache"
    try:
        return _responds(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    except OSError as error:  # runs with built-in or local data do not need the hub
        raise UserWarning(redact(first_line(error))) from error


def _responds(address: str) -> str:
    try:
        urllib.request.urlopen(address, timeout=TIMEOUT).close()
    except OSError as error:
        raise OSError(f"{address}: {error}") from error
    return f"{redact(address)} responds"
