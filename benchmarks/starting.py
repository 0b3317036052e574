"""Measure the start of actors and of the command `trishul run` in several ways.

    python benchmarks/starting.py [options]

`fork` (the default of runs): workers are forks of a process that has imported PyTorch and
transformers. `preload`: Ray imports both in every worker before assigning work
(RAY_preload_python_modules). `monitors`: like `fork`, but Ray starts all of its default processes.
In these three ways, the command has imported Ray before the measurement starts. `typed` is `fork`
without this import. The benchmark also reports when each line of the command appears, and the CPU
time of each process until the first round. Results are written to benchmarks/results/.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import psutil
from _results import Goal, Report, Section, Times, argument_parser, paired

from trishul_ray.federation.on_ray import session
from trishul_ray.federation.on_ray.fork_server import PRELOADED

WAYS = {"actors": ("preload", "fork"), "command": ("preload", "monitors", "fork", "typed")}
#: Goal for the time until the command's first round, in seconds.
FIRST_ROUND = 5.0
#: Options of a run with a short first round.
RUN = (
    *("model.init=random", "federation.clients=4", "federation.clients_per_round=4"),
    *("federation.rounds=1", "federation.local_steps=1", "federation.batch_size=8"),
    *("evaluation.limit=64", "tracking.mlflow=false", "optimizer.lr=0.01", "storage.runs=runs"),
)


def choose(way: str) -> None:
    """Configure how this process starts workers."""
    if way == "preload":
        vars(session)["forks_workers"] = lambda: False
        os.environ["RAY_preload_python_modules"] = ",".join(PRELOADED)  # noqa: SIM112
    elif way == "monitors":
        vars(session)["without_monitors"] = nullcontext


class Actor:
    """Actor that imports the modules of a client."""

    def ready(self) -> int:
        for name in PRELOADED:
            importlib.import_module(name)
        return os.getpid()


def start_actors(count: int) -> dict[str, float]:
    """Start actors concurrently, and measure actors per second, CPU time and memory."""
    import ray

    with session.ray_session(os.cpu_count()):
        time.sleep(20)  # wait for the processes that Ray starts for a new driver
        began = time.perf_counter()
        actor: Any = ray.remote(num_cpus=0.001)(Actor)
        actors = [actor.remote() for _ in range(count)]
        processes = [psutil.Process(pid) for pid in ray.get([a.ready.remote() for a in actors])]
        seconds = time.perf_counter() - began
        spent = sum(sum(process.cpu_times()[:2]) for process in processes)
        servers = {parent for p in processes if "-m" in (parent := p.parent()).cmdline()}
        memory = sum(process.memory_full_info().pss for process in [*processes, *servers])
        return {
            "actors a second": count / seconds,
            "CPU seconds an actor": spent / count,
            "MiB (PSS) an actor": memory / count / 2**20,
        }


def time_command(way: str) -> dict[str, float]:
    """Run the command, and measure when its lines appear, and the CPU time of its processes."""
    words = [sys.executable, __file__, f"--run={way}"]
    if way == "typed":
        words = [sys.executable, "-m", "trishul_ray.cli", "run", *RUN]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True) as command:
            assert command.stderr is not None
            found = {}
            for line in command.stderr:
                found[f"s, {line[:16].strip()}"] = time.perf_counter() - began
                if "round 1/" in line:
                    found |= {"s to the first round": time.perf_counter() - began}
                    found |= cpu_seconds(psutil.Process(command.pid))
                    command.communicate()
                    return found
    raise RuntimeError("the command ended without a round")


def cpu_seconds(command: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds of a command and its child processes, keyed by kind of process."""
    kinds = ("fork_server", "ClientActor", "Coordinator", "Agent", "gcs_server", "raylet")
    found: Counter[str] = Counter()
    for process in (command, *command.children(recursive=True)):
        line = "the command" if process == command else " ".join(process.cmdline())
        kind = next((kind for kind in kinds if kind in line.split("--")[0]), "")
        name = "the command" if process == command else kind or "the rest of Ray"
        found[f"CPU s, {name}"] += sum(process.cpu_times()[:2])
    return dict(found)


def measure(what: str, way: str, count: int) -> dict[str, float]:
    """Run one measurement in a separate process."""
    words = [sys.executable, __file__, f"--measure={what}", f"--way={way}", f"--actors={count}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(what, way, *(f"{name}: {value:.3g}" for name, value in found.items()), file=sys.stderr)
    return found


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--actors", type=int, default=12, help="actors that fit without forks")
    parser.add_argument("--forks", type=int, default=100, help="actors of the final fork test")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", help="measure one way; used by the script")
    parser.add_argument("--way", help="way to measure; used by the script")
    parser.add_argument("--run", help="run the command in one way; used by the script")
    options = parser.parse_args()
    if options.run:
        from trishul_ray.cli import main as trishul

        choose(options.run)
        sys.argv = ["trishul", "run", *RUN]
        trishul()
    elif options.measure == "actors":
        choose(options.way)
        print(json.dumps(start_actors(options.actors)))
    elif options.measure == "command":
        print(json.dumps(time_command(options.way)))
    else:
        report = Report("starting", options, "measure", "way", "run")
        for what, ways in WAYS.items():
            found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for turn in range(options.turns):
                for way in ways[:: 1 if turn % 2 else -1]:
                    found[way].append(measure(what, way, options.actors))
            report.add(section(what, found))
        if options.forks:
            many = measure("actors", "fork", options.forks)
            rows = [[name, f"{value:.3g}"] for name, value in many.items()]
            report.add(Section(f"{options.forks} actors", ["", "fork"], rows, data=dict(many)))


def section(what: str, found: dict[str, list[dict[str, float]]]) -> Section:
    """Build a table of all ways. The goal is that forks are 1.5 times better than preloading."""
    rows, goals = [], []
    names = {name: None for turns in found.values() for name in turns[0]}
    for name in names:
        times = {
            way: Times.of([each.get(name, 0.0) for each in turns]) for way, turns in found.items()
        }
        shown = [each.show() for each in times.values()]
        compared = what == "actors" or name == "s to the first round"
        others = [other for way, other in times.items() if way not in ("fork", "typed")]
        ratios = [paired(times["fork"], other) for other in others if compared]
        rows.append([name, *shown, *([each.show() for each in ratios] or [""] * len(others))])
        if what == "actors":
            worse = 1 / ratios[0].median if name.endswith("a second") else ratios[0].median
            goals.append(Goal(f"{name}, relative to preloading", worse, 1 / 1.5))
        elif compared:
            goals.append(Goal(name, times["typed"].median, FIRST_ROUND))
    columns = ["", *found, *(f"fork / {way}" for way in found if way not in ("fork", "typed"))]
    return Section(what, columns, rows, goals=goals, data={"turns": found})


if __name__ == "__main__":
    main()
