"""Right first: the same bytes twice and after a resume, the CPU's state, the tests marked gpu."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from _gpu import Place, experiment_at
from _results import Goal, Section

from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.server import RunResult
from trishul_ray.methods.base import method_names

ROOT = Path(__file__).resolve().parent.parent
#: The files that hold tests marked gpu.
TESTS = ("tests/gpu", "tests/spectral/test_svt.py")
#: Seconds after which the tests are stopped.
PATIENCE = 170
SMALL = (
    "dataset=synthetic/shapes",
    "model=vit-digits",
    "model.init=random",
    "federation.clients=4",
    "federation.clients_per_round=3",
    "federation.local_steps=4",
    "federation.batch_size=8",
    "evaluation.limit=64",
    # Adam would turn the rounding noise of a gradient that is zero into a whole step.
    "optimizer.name=sgd",
    "optimizer.lr=0.1",
)


def measure(place: Place) -> None:
    """Methods against the CPU, bytes, and the tests."""
    place.add(against_the_cpu(place))
    place.add(same_bytes(place))
    place.add(marked_tests(place))


def run(place: Place, name: str, *overrides: str, stop: int | None = None) -> RunResult | None:
    """A run in a folder of its own, which continues if the folder holds a checkpoint."""
    folder = f"storage.runs={place.scratch / name}"
    experiment = experiment_at(place, *SMALL, folder, *overrides)
    driver = InlineDriver(experiment, prepare_run(experiment), "benchmark")
    report = driver.begin()
    while not report.finished:
        report = driver.step()
        if stop is not None and report.round >= stop:
            return None
    return driver.final()


def against_the_cpu(place: Place) -> Section:
    """Every method's state after one round, here and on the CPU, fp32."""
    methods = ["trishul", "fullft"] if place.rehearsal else method_names()
    rows, worst = [], 0.0
    for method in methods:
        common = [f"method={method}", "federation.rounds=1"]
        here = run(place, f"{method}-here", *common)
        there = run(place, f"{method}-cpu", *common, "resources.device=cpu")
        assert here is not None and there is not None
        difference = float(np.abs(here.state.shared - there.state.shared).max())
        largest = float(np.abs(there.state.shared).max())
        rows.append([method, f"{difference:.1e}", f"{largest:.2g}"])
        worst = max(worst, difference)
    return Section(
        "One round against the CPU, fp32",
        ["method", "largest difference", "largest entry"],
        rows,
        goals=[Goal("difference of states after a round", worst, 1e-4)],
    )


def same_bytes(place: Place) -> Section:
    """Three rounds: twice, and stopped after one and resumed."""
    rows, differing = [], 0
    configurations = [(m, p) for m in ("trishul", "fedsb", "fullft") for p in ("fp32", "bf16")]
    for method, precision in configurations[: 1 if place.rehearsal else None]:
        common = [f"method={method}", f"model.precision={precision}", "federation.rounds=3"]
        name = f"{method}-{precision}"
        run(place, f"{name}-resumed", *common, stop=1)
        results = [run(place, f"{name}-{which}", *common) for which in ("1", "2", "resumed")]
        digests = {result.digest for result in results if result is not None}
        rows.append([method, precision, "same" if len(digests) == 1 else "DIFFERENT"])
        differing += len(digests) - 1
    return Section(
        "The same run twice, and stopped and resumed",
        ["method", "precision", "bytes"],
        rows,
        goals=[Goal("runs with other bytes", differing, 0)],
    )


def marked_tests(place: Place) -> Section:
    """The tests marked gpu; in a rehearsal they are only collected."""
    needed = ("pytest", "pytest_timeout", "hypothesis")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    title = "Tests marked gpu"
    if missing:
        return Section(title, ["result"], [[f"not run: {', '.join(missing)} missing"]])
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    if place.rehearsal:
        command.append("--collect-only")
    elif importlib.util.find_spec("xdist"):
        command += ["-n", "4"]  # most of the time is the host's
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            [*command, *TESTS],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as stopped:
        output, code = f"{stopped.stdout}\nstopped after {PATIENCE} s", -1
    lines = [line for line in output.splitlines() if line.strip()]
    failed = [line for line in lines if re.match(r"(FAILED|ERROR)", line)]
    return Section(
        title,
        ["result"],
        [[line] for line in [*lines[-1:], *failed]],
        goals=[Goal("exit code of pytest", abs(code), 0)],
        data={"output": lines[-200:]},
    )
