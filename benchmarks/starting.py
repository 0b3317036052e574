"""How actors start: as forks of one process, or by Ray's own preloading of modules.

    python benchmarks/starting.py [options]

`preload`: Ray imports PyTorch and transformers in every worker before it gives it work
(RAY_preload_python_modules). `fork`: workers are forks of a process that has imported them. Actors
are started at once, and the command `trishul run`, by turns. Results go to benchmarks/results/.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time

import psutil
from _results import Goal, Report, Section, Times, paired, told_by

from trishul_ray.federation.on_ray import session
from trishul_ray.federation.on_ray.fork_server import PRELOADED

WAYS = ("preload", "fork")
#: A run whose first round is short.
RUN = (
    *("model.init=random", "federation.clients=4", "federation.clients_per_round=4"),
    *("federation.rounds=1", "federation.local_steps=1", "federation.batch_size=8"),
    *("evaluation.limit=64", "tracking.mlflow=false", "optimizer.lr=0.01", "storage.runs=runs"),
)


def choose(way: str) -> None:
    """Let this process start its workers in one way."""
    if way == "preload":
        session.has_gpu = lambda: True  # where nothing is forked
        os.environ["RAY_preload_python_modules"] = ",".join(PRELOADED)  # noqa: SIM112


class Actor:
    """What has imported what a client needs."""

    def ready(self) -> int:
        """Import it, unless it is there, and return the process id."""
        for name in PRELOADED:
            importlib.import_module(name)
        return os.getpid()


def start_actors(count: int) -> dict[str, float]:
    """Start actors at once: how many are ready a second, and the memory of all their processes."""
    import ray

    with session.ray_session(os.cpu_count()):
        time.sleep(20)  # what Ray starts for a new driver is there, in either way
        began = time.perf_counter()
        actors = [ray.remote(num_cpus=0.001)(Actor).remote() for _ in range(count)]
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
    """Run a command, and return how long its first round took from the start."""
    words = [sys.executable, __file__, f"--run={way}"]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True) as command:
            assert command.stderr is not None
            for line in command.stderr:
                if "round 1/" in line:
                    seconds = time.perf_counter() - began
                    command.communicate()
                    return {"seconds to the first round": seconds}
    raise RuntimeError("the command ended without a round")


def measure(what: str, way: str, count: int) -> dict[str, float]:
    """Measure one way once, in a process of its own."""
    words = [sys.executable, __file__, f"--measure={what}", f"--way={way}", f"--actors={count}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(what, way, *(f"{name}: {value:.3g}" for name, value in found.items()), file=sys.stderr)
    return found


def main() -> None:
    """Measure all ways by turns and write the results."""
    parser = told_by(__doc__)
    parser.add_argument("--actors", type=int, default=12, help="as many as fit without forks")
    parser.add_argument("--forks", type=int, default=100, help="actors of a last turn of forks")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", help="measure one way; used by the script")
    parser.add_argument("--way", help="that way")
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
        for what in ("actors", "command"):
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for turn in range(options.turns):
                for way in WAYS[:: 1 if turn % 2 else -1]:
                    found[way].append(measure(what, way, options.actors))
            report.add(section(what, found))
        if options.forks:
            many = measure("actors", "fork", options.forks)
            rows = [[name, f"{value:.3g}"] for name, value in many.items()]
            report.add(Section(f"{options.forks} actors", ["", "fork"], rows, data=dict(many)))


def section(what: str, found: dict[str, list[dict[str, float]]]) -> Section:
    """Return both ways side by side; forks are to be 1.5 times better."""
    rows, goals = [], []
    for name in found["fork"][0]:
        times = {way: Times.of([each[name] for each in turns]) for way, turns in found.items()}
        ratios = paired(times["fork"], times["preload"])
        rows.append([name, *(each.show() for each in times.values()), ratios.show()])
        worse = 1 / ratios.median if name.endswith("a second") else ratios.median
        goals.append(Goal(f"{name}: how much of preloading's", worse, 1 / 1.5))
    columns = ["", *found, "fork / preload"]
    return Section(what, columns, rows, goals=goals, data={"turns": found})


if __name__ == "__main__":
    main()
