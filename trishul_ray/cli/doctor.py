"""``trishul doctor``: what a run needs from this machine, and leftovers to remove.

The checks install, download and leave nothing. Checks that may hang, such as a network or a remote
folder, time out.
"""

import importlib.metadata
import os
import platform
import shutil
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from rich.text import Text

from trishul_ray.cli.output import out, print_line
from trishul_ray.config.places import Places
from trishul_ray.errors import InputError, RunError, first_line
from trishul_ray.runtime.device import usable_cores
from trishul_ray.storage.durable import (
    nearest_existing,
    remove_abandoned,
    remove_unfinished,
    why_not_writable,
)
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store
from trishul_ray.tracking.store import is_server, sqlite_file, tracking_uri
from trishul_ray.version import __version__

#: Seconds that a check waits for something outside this process.
TIMEOUT = 2.0
#: Seconds without use before a prepared folder is removed.
UNUSED_SECONDS = 3600.0
GIB = 2**30

Status = Literal["ok", "warn", "fail"]
_COLORS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """The result of one check: ``warn`` if runs work but not everywhere, ``fail`` if they fail."""

    name: str
    status: Status
    detail: str


def diagnose(runs: str = "runs", start_ray: bool = False) -> list[Check]:
    """Check what a run needs; with ``start_ray``, also join or start Ray as a run would."""
    places = Places.at()
    checks = [check_packages(), check_devices(), check_memory(), check_ray(start_ray)]
    checks += [check_folder("runs", runs), check_folder("cache", str(places.cache))]
    return [*checks, check_mlflow(runs), check_hub(places.hub)]


def render(checks: list[Check]) -> int:
    """Print the checks and return the exit code: 1 if a check failed."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text(f"{check.status:<4}  {check.name:<{width}}  {check.detail}")
        line.stylize(_COLORS[check.status], 0, 4)
        out.print(line, soft_wrap=True)
    failed = [check.name for check in checks if check.status == "fail"]
    print_line(f"a run would fail here: {', '.join(failed)}" if failed else "runs work here")
    return int(bool(failed))


def clean(cache: Path, runs: str = "runs") -> list[Path]:
    """Remove what no process uses any more, and return it.

    These are failed and outdated preparations of user data, folders of finished Ray sessions and
    temporary files of killed processes. Rows passed from Python and prepared weights, which later
    runs may need, are kept for a month.
    """
    # They import torch, which the checks may find broken.
    from trishul_ray.data.cache import remove_unused_data
    from trishul_ray.models.shared_weights import remove_unused_weights

    removed = [*remove_unused_data(cache), *remove_unused_weights(cache)]
    removed += remove_unfinished(cache)
    if "://" not in runs:
        removed += remove_unfinished(Path(runs))
    return removed + remove_abandoned()


def check_packages() -> Check:
    """Compare installed packages with the declared ranges."""
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
    python = f"trishul-ray {__version__}, Python {platform.python_version()}, {platform.machine()}"
    detail = "; ".join([python, *wrong]) + "; pip install -e ." * bool(wrong)
    return Check("versions", "fail" if wrong else "ok", detail)


def check_devices() -> Check:
    """List the devices that torch can use."""
    try:
        import torch

        count = torch.cuda.device_count()
        gpus = [torch.cuda.get_device_name(index) for index in range(count)]
        if gpus:
            torch.zeros(1, device="cuda")
    except (ImportError, OSError, RuntimeError) as error:
        return Check("devices", "fail", f"torch: {first_line(error)}")
    devices = ", ".join([*gpus, f"{usable_cores()} CPU cores"])
    if not gpus and shutil.which("nvidia-smi"):
        return Check("devices", "warn", f"{devices}; torch {torch.__version__} cannot use the GPU")
    return Check("devices", "ok", f"torch {torch.__version__}: {devices}")


def check_memory() -> Check:
    """Measure the free memory, and the room for Ray's object store."""
    memory, shared = psutil.virtual_memory(), Path("/dev/shm")
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < 2 * GIB:
        return Check("memory", "warn", f"{detail}; Ray takes 1 GiB, and an actor 0.3 GiB")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 2 * GIB
    if room < min(0.3 * memory.available, 2 * GIB):
        why = f"{room / GIB:.1f} GiB in /dev/shm; docker run --shm-size=2g gives Ray more"
        return Check("memory", "warn", f"{detail}, {why}")
    return Check("memory", "ok", detail)


def check_ray(start: bool) -> Check:
    """Check that Ray can be imported, and, with ``start``, that a run can join or start it."""
    address = os.environ.get("RAY_ADDRESS") or "a local cluster"
    try:
        import ray

        detail = f"ray {ray.__version__}; runs use {address}"
        if start:
            from trishul_ray.federation.on_ray.session import ray_session

            with ray_session() as free:
                found = [f"{free[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in free]
            detail += f", which started with {', '.join(found) or 'nothing'} free"
    except (ImportError, OSError, RunError) as error:
        return Check("ray", "fail", str(error))
    return Check("ray", "ok", detail)


def check_folder(name: str, place: str) -> Check:
    """Check that a local folder can be written and has space, or that a remote folder answers."""
    if "://" in place and not place.startswith("file://"):
        return _check_answer(name, place, lambda: Store.open(place).names())
    folder = Path(place.removeprefix("file://")).expanduser().absolute()
    if fault := why_not_writable(folder):
        return Check(name, "fail", fault)
    free = shutil.disk_usage(nearest_existing(folder)).free / GIB
    return Check(name, "ok" if free > 5 else "warn", f"{folder}, {free:.1f} GiB free")


def check_mlflow(runs: str) -> Check:
    """Check that the MLflow store of a run can be used."""
    try:
        uri = tracking_uri(None, runs)
    except InputError as error:
        return Check("mlflow", "fail", str(error))
    if is_server(uri):
        return _check_answer("mlflow", uri, lambda: _get(f"{uri.rstrip('/')}/health"))
    file = sqlite_file(uri)
    if file is None or not file.exists():
        return Check("mlflow", "ok", f"{redact(uri)}, which the first run creates")
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=1)) as base:
            count = base.execute("select count(*) from runs").fetchone()[0]
    except sqlite3.Error as error:
        return Check("mlflow", "fail", f"{file}: {error}; move it away")
    return Check("mlflow", "ok", f"{file}, {count} runs")


def check_hub(mirror: Path | None) -> Check:
    """Check the local mirror of the Hugging Face hub, or that the hub answers."""
    if mirror is not None:
        count = len([*mirror.glob("*/*/")])
        status: Status = "ok" if count else "fail"
        return Check("hub", status, f"TRISHUL_HUB={mirror}, {count} repositories")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return Check("hub", "ok", "HF_HUB_OFFLINE is set: runs use the cache")
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    return _check_answer("hub", address, lambda: _get(f"{address}/api/models?limit=1"), "warn")


def _check_answer(
    name: str, place: str, request: Callable[[], object], otherwise: Status = "fail"
) -> Check:
    try:
        request()
    except (OSError, ValueError) as error:
        why = redact(str(getattr(error, "reason", None) or error))
        return Check(name, otherwise, f"{redact(place)} does not answer: {why}")
    return Check(name, "ok", f"{redact(place)} answers")


def _get(address: str) -> None:
    try:
        urllib.request.urlopen(address, timeout=TIMEOUT).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:  # a refusal is an answer
            raise
