"""Checks of the machine: interpreter, packages, devices, cores, memory."""

import importlib.metadata
import os
import platform
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from trishul_ray.doctor.base import GIB, Check
from trishul_ray.federation.on_ray.slices import usable_cores
from trishul_ray.version import __version__


def python() -> Check:
    """Interpreter, system and version of the package."""
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", "ok", f"{system}, trishul-ray {__version__}")


def packages() -> Check:
    """Versions against what the package declares, and against those it was tested with."""
    absent, wrong, other = [], [], []
    tested = _tested_versions()
    required = list(_required())
    for need in required:
        try:
            have = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(need.name)
            continue
        if not need.specifier.contains(have, prereleases=True):
            wrong.append(f"{need.name} {have} (needs {need.specifier})")
        elif need.name.lower() in tested and Version(have).public != tested[need.name.lower()]:
            other.append(f"{need.name} {have} (tested {tested[need.name.lower()]})")
    cure = "make setup, or: pip install -c constraints.txt -e ."
    if absent or wrong:
        faults = ([f"missing: {', '.join(absent)}"] if absent else []) + wrong
        return Check("packages", "fail", "; ".join(faults), cure)
    if other:
        return Check("packages", "warn", f"not the tested versions: {', '.join(other)}", cure)
    return Check(
        "packages", "ok", f"{len(required)} required, all {'tested ' * bool(tested)}versions"
    )


def devices() -> Check:
    """What torch can compute on."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("devices", "fail", f"torch does not import: {error}", "install torch anew")
    if torch.cuda.is_available():
        found = []
        for index in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            found.append(f"{of.name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
        bf16 = "with" if torch.cuda.is_bf16_supported() else "without"
        detail = f"torch {torch.__version__}; {'; '.join(found)}; {bf16} bf16"
        return Check("devices", "ok", detail)
    detail = f"torch {torch.__version__}; CPU only ({torch.backends.cpu.get_cpu_capability()})"
    if shutil.which("nvidia-smi"):
        hint = "there is an NVIDIA driver but this torch sees no GPU: install a CUDA build of torch"
        return Check("devices", "warn", detail, hint)
    return Check("devices", "ok", detail)


def cpus() -> Check:
    """Cores, and thread settings that do not fit them."""
    cores = usable_cores()
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAY_NUM_CPUS")
    given = {name: os.environ[name] for name in names if name in os.environ}
    detail = f"{cores} cores" + "".join(f", {name}={value}" for name, value in given.items())
    wrong = [n for n, v in given.items() if not v.isdigit() or not 1 <= int(v) <= cores]
    if wrong:
        hint = f"{', '.join(wrong)}: unset, or a number from 1 to {cores}"
        return Check("cpus", "warn", detail, hint)
    return Check("cpus", "ok", detail)


def memory() -> Check:
    """Memory, and the room for Ray's object store."""
    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < 2 * GIB:
        hint = "an actor takes 0.3 GiB, Ray itself 1 GiB: make room, or set resources.actors=1"
        return Check("memory", "warn", detail, hint)
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Check("memory", "ok", detail)
    room = shutil.disk_usage(shared).free
    detail += f", {room / GIB:.1f} GiB in /dev/shm"
    # Ray's object store takes 30 % of the memory it finds, if /dev/shm holds as much.
    if room < min(0.3 * memory.available, 2 * GIB):
        hint = (
            "Ray's object store shrinks to fit or moves to disk: docker run --shm-size=2g, or more"
        )
        return Check("memory", "warn", detail, hint)
    return Check("memory", "ok", detail)


def _required() -> Iterator[Requirement]:
    """What the package declares: of the installed one, else of the checkout it runs from."""
    try:
        lines = importlib.metadata.requires("trishul-ray") or []
    except importlib.metadata.PackageNotFoundError:
        file = _checkout() / "pyproject.toml"
        lines = tomllib.loads(file.read_text())["project"]["dependencies"] if file.exists() else []
    for line in lines:
        need = Requirement(line)
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            yield need


def _tested_versions() -> dict[str, str]:
    file = _checkout() / "constraints.txt"
    if not file.exists():  # installed as a wheel: only the declared ranges are known
        return {}
    pins = (line.split("==") for line in file.read_text().splitlines() if "==" in line)
    return {name.strip().lower(): version.strip() for name, version in pins}


def _checkout() -> Path:
    return Path(__file__).resolve().parents[2]
