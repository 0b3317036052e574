"""Checks of the machine: interpreter, packages, devices, CPUs, memory."""

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

from trishul_ray.doctor.check import Check
from trishul_ray.federation.on_ray.slices import usable_cores
from trishul_ray.version import __version__

GIB = 2**30


def check_python() -> Check:
    """Report the interpreter, the system and the version of this package."""
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", "ok", f"{system}, trishul-ray {__version__}")


def check_packages() -> Check:
    """Compare installed versions with the declared ranges and with the tested versions."""
    missing, out_of_range, untested = [], [], []
    tested = _tested_versions()
    required = list(_required())
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
        bf16 = "with" if torch.cuda.is_bf16_supported() else "without"
        return Check("devices", "ok", f"torch {torch.__version__}; {'; '.join(gpus)}; {bf16} bf16")
    detail = f"torch {torch.__version__}; CPU only ({torch.backends.cpu.get_cpu_capability()})"
    if shutil.which("nvidia-smi"):
        hint = "an NVIDIA driver is installed but torch sees no GPU: install a CUDA build of torch"
        return Check("devices", "warn", detail, hint)
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


def _required() -> Iterator[Requirement]:
    """Yield what the installed package declares, else the checkout that it runs from."""
    try:
        lines = importlib.metadata.requires("trishul-ray") or []
    except importlib.metadata.PackageNotFoundError:
        file = _checkout() / "pyproject.toml"
        lines = tomllib.loads(file.read_text())["project"]["dependencies"] if file.exists() else []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _tested_versions() -> dict[str, str]:
    file = _checkout() / "constraints.txt"
    if not file.exists():  # a wheel has only the declared ranges
        return {}
    pins = (line.split("==") for line in file.read_text().splitlines() if "==" in line)
    return {name.strip().lower(): version.strip() for name, version in pins}


def _checkout() -> Path:
    return Path(__file__).resolve().parents[2]
