"""Checks of the services that a run uses: Ray, storage, MLflow, the hub and its mirror."""

import importlib
import os
import shutil
import socket
import sqlite3
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from trishul_ray.doctor.check import Check, Status
from trishul_ray.errors import InputError, RunError
from trishul_ray.network import try_within
from trishul_ray.redaction import redact
from trishul_ray.storage import Store
from trishul_ray.tracking.store import sqlite_file, tracking_uri

#: Seconds that a check may wait for something outside this process.
TIMEOUT = 2.0
GIB = 2**30


def check_ray_import() -> Check:
    """Check that Ray can be imported."""
    try:
        ray = importlib.import_module("ray")
    except (ImportError, OSError) as error:
        return Check("ray", "fail", f"cannot be imported: {error}", "make setup")
    return Check("ray", "ok", f"ray {ray.__version__} can be imported")


def check_ray_address() -> Check:
    """Check that the cluster at ``RAY_ADDRESS`` answers."""
    name = "ray cluster"
    address = os.environ.get("RAY_ADDRESS", "")
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
    name = "ray token"
    mode = os.environ.get("RAY_AUTH_MODE", "")
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
    fault = why_not_writable(file.parent)
    if fault:
        hint = "set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled on a machine that only you use"
        return Check(name, "fail", f"Ray writes a token to {file}, but {fault}", hint)
    return Check(name, "ok", f"a local cluster will write one to {file}")


def check_ray_start() -> Check:
    """Join or start Ray as a run would, then leave or stop it."""
    from trishul_ray.federation.on_ray.session import ray_session

    try:
        with ray_session() as free:
            resources = ", ".join(
                f"{free[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in free
            )
    except RunError as error:
        hint = "see the logs in /tmp/ray/session_latest/logs"
        return Check("ray start", "fail", str(error), hint)
    return Check("ray start", "ok", f"joined or started, then left: {resources or 'nothing'} free")


def check_folder(name: str, place: str) -> Check:
    """Check that a local folder can be written and has room, or that a remote one answers."""
    if "://" in place and not place.startswith("file://"):

        def look_up() -> None:
            store = Store.open(place)
            store.filesystem.get_file_info(store.root)

        return _check_answer(name, redact(place), look_up, "check the address and its credentials")
    folder = Path(place.removeprefix("file://")).expanduser().absolute()
    fault = why_not_writable(folder)
    if fault:
        return Check(name, "fail", fault, "choose another folder, or fix its permissions")
    free = shutil.disk_usage(nearest_existing(folder)).free
    detail = f"{folder}, {free / GIB:.1f} GiB free"
    if free < 0.2 * GIB:
        return Check(name, "fail", detail, "free space: a run's checkpoints take a few hundred MiB")
    if free < 5 * GIB:
        return Check(name, "warn", detail, "low for datasets, backbones and checkpoints")
    return Check(name, "ok", detail)


def check_cache(cache: Path) -> Check:
    """Check the cache folder as :func:`check_folder` does, and tell how large its parts are."""
    check = check_folder("cache folder", str(cache))
    sizes = []
    for part in sorted(cache.glob("*")):
        with suppress(OSError):  # a run may remove a file
            if part.is_dir():
                sizes.append(f"{part.name} {_size(part) / 2**20:,.0f} MiB")
    return replace(check, detail=f"{check.detail}; {', '.join(sizes)}") if sizes else check


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_mlflow_store(uri: str | None, runs: str) -> Check:
    """Check that the MLflow store of a run can be opened."""
    name = "mlflow store"
    try:
        uri = tracking_uri(uri, runs)
    except InputError as error:
        return Check(name, "fail", str(error), "set tracking.uri, or tracking.mlflow=false")
    file = sqlite_file(uri)
    if file is None:
        if not uri.startswith(("http://", "https://")):
            return Check(name, "ok", f"{redact(uri)} (not contacted)")
        hint = "start the server (mlflow server), or set tracking.mlflow=false"
        health = f"{uri.rstrip('/')}/health"
        return _check_answer(name, redact(uri), lambda: _get(health), hint)
    if not file.exists():
        fault = why_not_writable(file.parent)
        if fault:
            return Check(name, "fail", fault, "set tracking.uri, or tracking.mlflow=false")
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
    folders = (folder for folder in hub.glob("*/*") if folder.is_dir())
    names = sorted(f"{folder.parent.name}/{folder.name}" for folder in folders)
    if not names:
        hint = "put repositories into <owner>/<name>/... as on the hub"
        return Check("mirror", "warn", f"{hub} is empty", hint)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return Check("mirror", "ok", f"{hub}: {shown}")


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
    fault = try_within(TIMEOUT, request)
    if fault:
        return Check(name, otherwise, f"{place} does not answer: {fault}", hint)
    return Check(name, "ok", f"{place} answers")


def _get(address: str) -> None:
    """Request a page; a refusal (401, 404) counts as an answer."""
    try:
        urllib.request.urlopen(address, timeout=TIMEOUT).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def why_not_writable(folder: Path) -> str:
    """Return why a folder, which need not exist yet, cannot be written; ``""`` if it can."""
    nearest = nearest_existing(folder)
    try:
        # Write a file: permission bits do not show read-only mounts and quotas.
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"0")
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}"
    return ""
