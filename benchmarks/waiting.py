"""How long waiting threads should spin: seconds of a round by policy, quiet and beside other work.

    python benchmarks/waiting.py [options]

Between two parallel regions, OpenMP's threads wait: spinning (fast to wake, but the core is lost to
other processes) or asleep (slow to wake). Each policy runs the same rounds in a process of its own,
one process at a time and by turns; then again beside a process that keeps one core busy.
Results go to benchmarks/results/.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _results import Goal, Report, Section, Times, paired, told_by
from _stepped import Stepped, answer_all

from trishul_ray.federation.determinism import ENVIRONMENT, WAITING

#: Environment by policy; ``spinning`` is what the library's own default does.
POLICIES: dict[str, dict[str, str]] = {
    "spinning": {},
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "ours": WAITING,
}


def serve(threads: int, steps: int) -> None:
    """Run a round for each line of standard input."""
    from _setups import small

    from trishul_ray.federation.inline import InlineDriver

    with tempfile.TemporaryDirectory() as scratch:
        chosen = [
            f"resources.threads={threads}",
            "resources.backend=inline",
            f"federation.local_steps={steps}",
            "federation.rounds=1000",
            "evaluation.every=1000",
            "evaluation.limit=64",
        ]
        setup = small(Path(scratch), "synthetic", chosen)
        driver = InlineDriver(setup.experiment, setup.prepared, "benchmark")
        driver.begin()

        def step(_: str) -> float:
            began = time.perf_counter()
            driver.step()
            return time.perf_counter() - began

        answer_all(step)


def measure(policies: dict[str, dict[str, str]], rounds: int, options: list[str]) -> dict[str, Any]:
    """Seconds of each round by policy, by turns."""
    found: dict[str, list[float]] = {name: [] for name in policies}
    # What this process has set of such variables does not reach them.
    ours = {*ENVIRONMENT, *WAITING, "OMP_WAIT_POLICY"}
    plain = {k: v for k, v in os.environ.items() if k not in ours}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(Stepped([__file__, "--serve", *options], plain | policy))
            for name, policy in policies.items()
        }
        for process in processes.values():
            process.ask("step")  # warms up
        for number in range(rounds):
            for name in list(processes)[:: 1 if number % 2 else -1]:
                found[name].append(processes[name].ask("step"))
    return found


def main() -> None:
    """Measure quiet and busy, and write the results."""
    parser = told_by(__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--spin", type=int, nargs="*", default=[], help="further GOMP_SPINCOUNTs")
    parser.add_argument("--preload", help="another OpenMP runtime, such as .../libiomp5.so")
    parser.add_argument("--serve", action="store_true", help="run one policy; used by the script")
    options = parser.parse_args()
    if options.serve:
        serve(options.threads, options.local_steps)
        return
    policies = POLICIES | {f"spin {n}": {"GOMP_SPINCOUNT": str(n)} for n in options.spin}
    if options.preload:
        policies = {name: each | {"LD_PRELOAD": options.preload} for name, each in policies.items()}
    passed = [f"--threads={options.threads}", f"--local-steps={options.local_steps}"]
    what = "waiting-" + Path(options.preload).stem if options.preload else "waiting"
    report = Report(what, options, "serve")
    quiet = {name: Times.of(s) for name, s in measure(policies, options.rounds, passed).items()}
    fastest = min(times.median for times in quiet.values())
    goal = Goal("ours / the fastest", quiet["ours"].median / fastest, 1.03)
    report.add(section("Nothing beside", quiet, goal))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            # What the library does by itself takes minutes here, for each round.
            taken = {name: policies[name] for name in policies if name != "spinning"}
            found = measure(taken, options.rounds, passed)
        finally:
            other.kill()
    busy = {name: Times.of(seconds) for name, seconds in found.items()}
    # Each of our threads and the other process get an equal part of the cores.
    share = quiet["ours"].median * (options.threads + 1) / options.threads
    goal = Goal("ours / its share of the cores", busy["ours"].median / share, 2.0)
    report.add(section("One busy process beside", busy, goal))


def section(title: str, times: dict[str, Times], goal: Goal) -> Section:
    """Return the times of all policies side by side."""
    name, base = next(iter(times.items()))
    rows = [[n, each.show(), paired(each, base).show(digits=3)] for n, each in times.items()]
    raw = {name: each.values for name, each in times.items()}
    return Section(title, ["policy", "round s", f"of {name}"], rows, [], [goal], {"times": raw})


if __name__ == "__main__":
    main()
