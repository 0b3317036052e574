"""Checks of what a run talks to: Ray, folders, MLflow, the hub and its mirror."""

import importlib
import os
import shutil
import socket
import sqlite3
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from trishul_ray.doctor.base import GIB, PATIENCE, Check, existing, unwritable, within
from trishul_ray.errors import InputError, RunError
from trishul_ray.storage import Store
from trishul_ray.tracking.store import redact, sqlite_file, tracking_uri


def ray_import() -> Check:
    """Whether Ray imports."""
    try:
        ray = importlib.import_module("ray")
    except (ImportError, OSError) as error:
        return Check("ray", "fail", f"does not import: {error}", "make setup")
    return Check("ray", "ok", f"ray {ray.__version__} imports")


def ray_address() -> Check:
    """Whether the cluster of ``RAY_ADDRESS`` answers."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        return Check("ray cluster", "ok", "RAY_ADDRESS is not set: a run starts a local one")
    if address == "auto":
        return Check(
            "ray cluster", "ok", "RAY_ADDRESS=auto: a run joins the cluster of this machine"
        )
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port or (10001 if parts.scheme == "ray" else 6379)
    except ValueError:
        host = None
    if not host:
        hint = "RAY_ADDRESS is host:6379, ray://host:10001 or auto"
        return Check("ray cluster", "fail", f"RAY_ADDRESS={address} is no address", hint)
    fault = within(lambda: socket.create_connection((host, port), PATIENCE).close())
    if fault:
        hint = "start the cluster (ray start --head), or unset RAY_ADDRESS to use a local one"
        return Check("ray cluster", "fail", f"RAY_ADDRESS={address} does not answer: {fault}", hint)
    return Check("ray cluster", "ok", f"RAY_ADDRESS={address} answers")


def ray_token() -> Check:
    """Whether Ray finds or can write the token it authenticates with."""
    name = "ray token"
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode.lower() == "disabled":
        return Check(
            name, "ok", "RAY_AUTH_MODE=disabled: anyone who reaches the cluster may use it"
        )
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Check(name, "ok", "from RAY_AUTH_TOKEN")
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(given) if given else Path.home() / ".ray" / "auth_token"
    if file.is_file():
        if os.access(file, os.R_OK):
            return Check(name, "ok", f"in {file}")
        return Check(name, "fail", f"{file} cannot be read", "fix its permissions")
    if given:
        return Check(
            name, "fail", f"RAY_AUTH_TOKEN_PATH={file} is absent", "ray get-auth-token --generate"
        )
    if os.environ.get("RAY_ADDRESS", "") not in ("", "local"):
        hint = f"if the cluster asks for one, put the cluster's token into {file}"
        return Check(
            name, "ok" if not mode else "warn", "none on this machine", hint if mode else ""
        )
    fault = unwritable(file.parent)
    if fault:
        hint = "set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled on a machine of your own"
        return Check(name, "fail", f"Ray writes a token to {file}, but {fault}", hint)
    return Check(name, "ok", f"a local cluster will write one to {file}")


def ray_start() -> Check:
    """Join or start Ray as a run would, and leave it."""
    from trishul_ray.federation.on_ray.session import ray_session

    try:
        with ray_session() as free:
            have = ", ".join(f"{free[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in free)
    except RunError as error:
        return Check(
            "ray start", "fail", str(error), "see the logs in /tmp/ray/session_latest/logs"
        )
    return Check("ray start", "ok", f"started or joined and left: {have or 'nothing'} free")


def folder(name: str, place: str) -> Check:
    """Whether a folder, or a place on a filesystem, can be written and has room."""
    if "://" in place and not place.startswith("file://"):
        shown = redact(place)

        def look() -> None:
            store = Store.open(place)
            store.filesystem.get_file_info(store.root)

        fault = within(look)
        if fault:
            return Check(name, "fail", f"{shown}: {fault}", "check the address and its credentials")
        return Check(name, "ok", f"{shown} answers")
    folder = Path(place.removeprefix("file://")).expanduser().absolute()
    fault = unwritable(folder)
    if fault:
        return Check(name, "fail", fault, "choose another folder, or fix its permissions")
    free = shutil.disk_usage(existing(folder)).free
    detail = f"{folder}, {free / GIB:.1f} GiB free"
    if free < 0.2 * GIB:
        return Check(name, "fail", detail, "make room: a run's checkpoints need a few hundred MiB")
    if free < 5 * GIB:
        return Check(name, "warn", detail, "little room for datasets, backbones and checkpoints")
    return Check(name, "ok", detail)


def mlflow_store(uri: str | None, runs: str) -> Check:
    """Whether the MLflow store of a run can be opened."""
    name = "mlflow store"
    try:
        uri = tracking_uri(uri, runs)
    except InputError as error:
        return Check(name, "fail", str(error), "set tracking.uri, or tracking.mlflow=false")
    file = sqlite_file(uri)
    if file is None:
        if not uri.startswith(("http://", "https://")):
            return Check(name, "ok", f"{redact(uri)} (not contacted)")
        fault = within(lambda: _get(f"{uri.rstrip('/')}/health"))
        if fault:
            hint = "start the server (mlflow server), or set tracking.mlflow=false"
            return Check(name, "fail", f"{redact(uri)} does not answer: {fault}", hint)
        return Check(name, "ok", f"{redact(uri)} answers")
    if not file.exists():
        fault = unwritable(file.parent)
        hint = "set tracking.uri, or tracking.mlflow=false"
        if fault:
            return Check(name, "fail", fault, hint)
        return Check(name, "ok", f"{file} will be created")
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=1)) as database:
            count = database.execute("select count(*) from runs").fetchone()[0]
    except sqlite3.Error as error:
        hint = "move it aside: the next run makes a new one"
        return Check(name, "fail", f"{file}: {error}", hint)
    if not os.access(file, os.W_OK):
        return Check(name, "fail", f"{file} cannot be written", "fix its permissions")
    return Check(name, "ok", f"{file}, {count} runs")


def mirror(hub: str | None) -> Check:
    """What a local mirror of the hub holds."""
    if not hub:
        return Check("mirror", "ok", "TRISHUL_HUB is not set: the hub itself is used")
    root = Path(hub).expanduser()
    if not root.is_dir():
        return Check(
            "mirror", "fail", f"TRISHUL_HUB={hub} is no folder", "unset it, or mount the mirror"
        )
    names = sorted(
        f"{folder.parent.name}/{folder.name}" for folder in root.glob("*/*") if folder.is_dir()
    )
    if not names:
        hint = "its layout is <owner>/<name>/... as on the hub"
        return Check("mirror", "warn", f"{root} holds nothing", hint)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return Check("mirror", "ok", f"{root}: {shown}")


def hub_reach() -> Check:
    """Whether the hub answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        hint = "unset it to download" if not os.environ.get("TRISHUL_HUB") else ""
        return Check("hub", "ok", "HF_HUB_OFFLINE is set: the cache and the mirror alone", hint)
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    fault = within(lambda: _get(f"{address.rstrip('/')}/api/models?limit=1"))
    if fault:
        hint = (
            "embedded data works; for the rest set TRISHUL_HUB to a mirror, or use what is cached"
        )
        return Check("hub", "warn", f"{redact(address)} does not answer: {fault}", hint)
    return Check("hub", "ok", f"{redact(address)} answers")


def _get(address: str) -> None:
    """Ask for a page; an answer that refuses (401, 404) is an answer."""
    try:
        urllib.request.urlopen(address, timeout=PATIENCE).close()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise
