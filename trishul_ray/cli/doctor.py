"""``trishul doctor``: problems of this machine, how to fix them, and leftovers to remove.

The checks install, download and leave nothing, and start a cluster only on request. Checks that may
hang (a network, a remote folder) time out after :data:`TIMEOUT` seconds.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.text import Text

from trishul_ray.config.places import Places
from trishul_ray.data.network import try_within
from trishul_ray.errors import InputError, RunError, join_limited
from trishul_ray.runtime.cpu import usable_cores
from trishul_ray.runtime.gpu import driver_version, why_unusable
from trishul_ray.storage.durable import (
    nearest_existing,
    remove_abandoned,
    remove_unfinished,
    why_not_writable,
)
from trishul_ray.storage.redaction import redact
from trishul_ray.storage.store import Store, remove_unused_copies
from trishul_ray.tracking.store import sqlite_file, tracking_uri
from trishul_ray.version import __version__

#: Seconds that a check may wait for something outside this process.
TIMEOUT = 2.0
#: Seconds without use before a prepared folder is removed.
UNUSED_SECONDS = 3600.0
GIB = 2**30

Status = Literal["ok", "warn", "fail"]
_COLORS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: Subject of the check.
        status: ``ok``; ``warn``: runs work, but more slowly or not everywhere; ``fail``: they fail.
        detail: Finding, in one line.
        hint: How to fix it; empty if there is nothing to fix.
    """

    name: str
    status: Status
    detail: str
    hint: str = ""


def diagnose(
    runs: str = "runs", tracking: str | None = None, start_ray: bool = False
) -> list[Check]:
    """Check everything that a run needs, and return the results in the order to show them.

    With ``start_ray``, also join the cluster of ``RAY_ADDRESS``, or start a local one and stop it.
    """
    places = Places.at()
    # Checks that wait run in threads, while this one spends as long on importing torch.
    with ThreadPoolExecutor(max_workers=4) as pool:
        ray_address = pool.submit(check_ray_address)
        runs_folder = pool.submit(check_folder, "runs folder", runs)
        mlflow_store = pool.submit(check_mlflow_store, tracking, runs)
        hub = pool.submit(check_hub)
        machine = [check_python(), check_packages(), check_devices(), check_cpus(), check_memory()]
        ray = check_ray_import()
    return [
        *machine,
        ray,
        ray_address.result(),
        check_ray_token(),
        *([check_ray_start()] if start_ray else []),
        runs_folder.result(),
        check_cache(places.cache),
        mlflow_store.result(),
        check_mirror(places.hub),
        hub.result(),
    ]


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(check.status == "fail" for check in checks))


def render(checks: Sequence[Check], console: Console) -> None:
    """Print each result with its hint below it, and a summary."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text(f"{check.status:<4}  {check.name:<{width}}  {check.detail}")
        line.stylize(_COLORS[check.status], 0, len(check.status))
        console.print(line, soft_wrap=True)
        if check.hint:
            pad = " " * (width + 8)
            console.print(f"{pad}{check.hint}", markup=False, highlight=False, soft_wrap=True)
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    if failed:
        console.print(f"{failed} of {len(checks)} checks failed: a run would fail here.")
    elif warned:
        console.print(f"Runs work here; {warned} of {len(checks)} checks gave a warning.")
    else:
        console.print("All checks passed.")


def clean(cache: Path, runs: str = "runs") -> list[Path]:
    """Remove failed and outdated preparations of own data, and folders of runs that are over.

    Nothing is removed that a process uses or that was used within the last hour. Rows passed from
    Python and prepared weights, which later runs may need, are kept for a month after their use.
    Temporary files of killed processes in the cache and the folder ``runs`` are removed, too.
    Return all that was removed.
    """
    # They import torch, which the checks may find broken.
    from trishul_ray.data.passed_rows import remove_unused_rows
    from trishul_ray.data.prepare import remove_leftovers
    from trishul_ray.models.shared_weights import remove_unused_weights

    removed = remove_leftovers(cache, keep=1, unused_seconds=UNUSED_SECONDS)
    removed += [*remove_unused_rows(cache), *remove_unused_weights(cache)]
    removed += remove_unused_copies(cache)
    removed += remove_unfinished(cache, below=True)
    if "://" not in runs:
        removed += remove_unfinished(Path(runs), below=True)
    return removed + remove_abandoned()


def check_python() -> Check:
    """Report the interpreter, the system and the version of this package."""
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", "ok", f"{system}, trishul-ray {__version__}")


def check_packages() -> Check:
    """Compare installed versions with the declared ranges and with the tested versions."""
    missing, out_of_range, untested = [], [], []
    tested, required = _tested_versions(), list(_required())
    for requirement in required:
        name, specifier = requirement.name, requirement.specifier
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        expected = tested.get(name.lower())
        if not specifier.contains(installed, prereleases=True):
            out_of_range.append(f"{name} {installed} (needs {specifier})")
        elif expected is not None and Version(installed).public != expected:
            untested.append(f"{name} {installed} (tested {expected})")
    hint = "make setup, or: pip install -c constraints.txt -e ."
    if missing or out_of_range:
        faults = ([f"missing: {', '.join(missing)}"] if missing else []) + out_of_range
        return Check("packages", "fail", "; ".join(faults), hint)
    if untested:
        return Check("packages", "warn", f"untested versions: {', '.join(untested)}", hint)
    state = "all in the tested versions" if tested else "all installed"
    return Check("packages", "ok", f"{len(required)} required packages, {state}")


def _required() -> Iterator[Requirement]:
    """Yield what the package declares; the package itself where only its files are here."""
    try:
        declared = importlib.metadata.requires("trishul-ray") or []
    except importlib.metadata.PackageNotFoundError:
        declared = ["trishul-ray"]
    for requirement in map(Requirement, declared):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _tested_versions() -> dict[str, str]:
    file = _CHECKOUT / "constraints.txt"
    if not file.exists():  # a wheel has only the declared ranges
        return {}
    pins = (line.split("==") for line in file.read_text().splitlines() if "==" in line)
    return {name.strip().lower(): version.strip() for name, version in pins}


def check_devices() -> Check:
    """List the devices that torch can use."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("devices", "fail", f"torch cannot be imported: {error}", "reinstall torch")
    if torch.cuda.is_available():
        gpus = []
        for index in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_properties(index).name
            free, total = torch.cuda.mem_get_info(index)
            gpus.append(f"{name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
        bf16 = "with" if torch.cuda.is_bf16_supported(including_emulation=False) else "without"
        detail = f"torch {torch.__version__}; {'; '.join(gpus)}; {bf16} bf16"
        reason = why_unusable()
        return Check("devices", "fail" if reason else "ok", detail, reason or "")
    detail = f"torch {torch.__version__}; CPU only ({torch.backends.cpu.get_cpu_capability()})"
    if driver_version() is not None or shutil.which("nvidia-smi"):
        return Check("devices", "warn", detail, why_unusable() or "")
    return Check("devices", "ok", detail)


def check_cpus() -> Check:
    """Count the cores, and warn of thread settings that do not fit them."""
    cores = usable_cores()
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAY_NUM_CPUS")
    settings = {name: os.environ[name] for name in names if name in os.environ}
    detail = f"{cores} cores" + "".join(f", {name}={value}" for name, value in settings.items())
    wrong = [n for n, v in settings.items() if not v.isdigit() or not 1 <= int(v) <= cores]
    hint = f"unset {', '.join(wrong)}, or set a number from 1 to {cores}" if wrong else ""
    return Check("cpus", "warn" if wrong else "ok", detail, hint)


def check_memory() -> Check:
    """Measure the free memory and the room for Ray's object store."""
    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < 2 * GIB:
        hint = "an actor takes 0.3 GiB, Ray itself 1 GiB: free memory, or set resources.actors=1"
        return Check("memory", "warn", detail, hint)
    shared = Path("/dev/shm")
    if shared.is_dir():
        room = shutil.disk_usage(shared).free
        detail += f", {room / GIB:.1f} GiB in /dev/shm"
        # Ray's object store takes 30 % of the free memory, if /dev/shm has room for it.
        if room < min(0.3 * memory.available, 2 * GIB):
            hint = "Ray's object store will be small or on disk: docker run --shm-size=2g, or more"
            return Check("memory", "warn", detail, hint)
    return Check("memory", "ok", detail)


def check_ray_import() -> Check:
    """Check that Ray can be imported."""
    try:
        ray = importlib.import_module("ray")
    except (ImportError, OSError) as error:
        return Check("ray", "fail", f"cannot be imported: {error}", "make setup")
    return Check("ray", "ok", f"ray {ray.__version__} can be imported")


def check_ray_address() -> Check:
    """Check that the cluster at ``RAY_ADDRESS`` answers."""
    name, address = "ray cluster", os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return Check(name, "ok", "RAY_ADDRESS is not set: a run starts a local cluster")
    if address == "auto":
        return Check(name, "ok", "RAY_ADDRESS=auto: a run joins the cluster of this machine")
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port or (10001 if parts.scheme == "ray" else 6379)
    except ValueError:
        host = None
    if not host:
        hint = "set RAY_ADDRESS to host:6379, ray://host:10001 or auto"
        return Check(name, "fail", f"RAY_ADDRESS={address} is not an address", hint)
    hint = "start the cluster (ray start --head), or unset RAY_ADDRESS to use a local one"

    def connect() -> None:
        socket.create_connection((host, port), TIMEOUT).close()

    return _check_answer(name, f"RAY_ADDRESS={address}", connect, hint)


def check_ray_token() -> Check:
    """Check that Ray finds, or can write, its authentication token."""
    name, mode = "ray token", os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() == "disabled":
        return Check(name, "ok", "RAY_AUTH_MODE=disabled: the cluster is open to all who reach it")
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Check(name, "ok", "from RAY_AUTH_TOKEN")
    configured = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(configured) if configured else Path.home() / ".ray" / "auth_token"
    if file.is_file():
        if os.access(file, os.R_OK):
            return Check(name, "ok", f"in {file}")
        return Check(name, "fail", f"{file} cannot be read", "fix its permissions")
    if configured:
        hint = "create it: ray get-auth-token --generate"
        return Check(name, "fail", f"RAY_AUTH_TOKEN_PATH={file} does not exist", hint)
    if os.environ.get("RAY_ADDRESS", "") not in ("", "local"):
        if not mode:
            return Check(name, "ok", "none on this machine")
        hint = f"if the cluster requires a token, put it into {file}"
        return Check(name, "warn", "none on this machine", hint)
    if not mode:
        return Check(name, "ok", "a local cluster makes one for itself, and writes it nowhere")
    if fault := why_not_writable(file.parent):
        hint = "set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled on a machine that only you use"
        return Check(name, "fail", f"Ray writes a token to {file}, but {fault}", hint)
    return Check(name, "ok", f"RAY_AUTH_MODE={mode}: a local cluster will write one to {file}")


def check_ray_start() -> Check:
    """Join or start Ray as a run would, then leave or stop it."""
    from trishul_ray.federation.on_ray.session import ray_session

    try:
        with ray_session() as free:
            found = ", ".join(f"{free[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in free)
    except RunError as error:
        return Check("ray start", "fail", str(error))
    return Check("ray start", "ok", f"joined or started, then left: {found or 'nothing'} free")


def check_folder(name: str, place: str, remedy: str = "choose another folder") -> Check:
    """Check that a local folder can be written and has room, or that a remote one answers."""
    if "://" in place and not place.startswith("file://"):

        def look_up() -> None:
            store = Store.open(place)
            store.filesystem.get_file_info(store.root)

        return _check_answer(name, redact(place), look_up, "check the address and its credentials")
    folder = Path(place.removeprefix("file://")).expanduser().absolute()
    if fault := why_not_writable(folder):
        return Check(name, "fail", fault, f"{remedy}, or fix its permissions")
    free = shutil.disk_usage(nearest_existing(folder)).free
    detail = f"{folder}, {free / GIB:.1f} GiB free"
    if free < 0.2 * GIB:
        return Check(name, "fail", detail, "free space: a run's checkpoints take a few hundred MiB")
    if free < 5 * GIB:
        return Check(name, "warn", detail, "low for datasets, backbones and checkpoints")
    return Check(name, "ok", detail)


def check_cache(cache: Path) -> Check:
    """Check the cache folder as :func:`check_folder` does, and tell how large its parts are."""
    check = check_folder("cache folder", str(cache), "set TRISHUL_CACHE")
    sizes = []
    for part in sorted(cache.glob("*/")):
        with suppress(OSError):  # a run may remove a file
            size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
            sizes.append(f"{part.name} {size / 2**20:,.0f} MiB")
    return replace(check, detail=f"{check.detail}; {', '.join(sizes)}") if sizes else check


def check_mlflow_store(uri: str | None, runs: str) -> Check:
    """Check that the MLflow store of a run can be opened."""
    name, remedy = "mlflow store", "set tracking.uri, or tracking.mlflow=false"
    try:
        uri = tracking_uri(uri, runs)
    except InputError as error:
        return Check(name, "fail", str(error), remedy)
    file = sqlite_file(uri)
    if file is None:
        if not uri.startswith(("http://", "https://")):
            return Check(name, "ok", f"{redact(uri)} (not contacted)")
        hint = "start the server (mlflow server), or set tracking.mlflow=false"
        health = f"{uri.rstrip('/')}/health"
        return _check_answer(name, redact(uri), lambda: _get(health), hint)
    if not file.exists():
        if fault := why_not_writable(file.parent):
            return Check(name, "fail", fault, remedy)
        return Check(name, "ok", f"{file} will be created")
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=1)) as database:
            count = database.execute("select count(*) from runs").fetchone()[0]
    except sqlite3.Error as error:
        hint = "move it away: the next run creates a new one"
        return Check(name, "fail", f"{file}: {error}", hint)
    if not os.access(file, os.W_OK):
        return Check(name, "fail", f"{file} cannot be written", "fix its permissions")
    return Check(name, "ok", f"{file}, {count} runs")


def check_mirror(hub: Path | None) -> Check:
    """List what the local mirror of the hub holds."""
    if hub is None:
        return Check("mirror", "ok", "TRISHUL_HUB is not set: runs use the hub itself")
    if not hub.is_dir():
        hint = "unset it, or mount the mirror"
        return Check("mirror", "fail", f"TRISHUL_HUB={hub} is not a folder", hint)
    names = sorted(f"{folder.parent.name}/{folder.name}" for folder in hub.glob("*/*/"))
    if not names:
        hint = "put repositories into <owner>/<name>/... as on the hub"
        return Check("mirror", "warn", f"{hub} is empty", hint)
    return Check("mirror", "ok", f"{hub}: {join_limited(names, 8)}")


def check_hub() -> Check:
    """Check that the Hugging Face hub answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        hint = "unset it to download" if not os.environ.get("TRISHUL_HUB") else ""
        return Check("hub", "ok", "HF_HUB_OFFLINE is set: runs use the cache and the mirror", hint)
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    page = f"{address.rstrip('/')}/api/models?limit=1"
    hint = "embedded and cached data work; for the rest set TRISHUL_HUB to a mirror"
    return _check_answer("hub", redact(address), lambda: _get(page), hint, "warn")


def _check_answer(
    name: str, place: str, request: Callable[[], object], hint: str, otherwise: Status = "fail"
) -> Check:
    if fault := try_within(TIMEOUT, request):
        return Check(name, otherwise, f"{place} does not answer: {fault}", hint)
    return Check(name, "ok", f"{place} answers")


def _get(address: str) -> None:
    """Request a page; a refusal (401, 404) counts as an answer."""
    try:
        urllib.request.urlopen(address, timeout=TIMEOUT).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise
