"""Cost of the tables on a cluster, by the cost model; writes docs/what-a-cluster-costs.md.

    python benchmarks/cluster_costs.py          # write the numbers into the page
    python benchmarks/cluster_costs.py --check  # exit with 1 if the page has others

Nothing runs: the hours are those of `trishul plan all` with an empty store. Prices are parameters
of the page, in :data:`MACHINES`.
"""

import heapq
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trishul_ray.experiment import Experiment
from trishul_ray.sweeps.cells import distinct
from trishul_ray.sweeps.cost import work_of
from trishul_ray.sweeps.loading import find_sweeps

PAGE = Path(__file__).parents[1] / "docs" / "what-a-cluster-costs.md"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
#: Numbers of GPUs that work at the same time.
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Price of the head and the driver together, in dollars an hour.
REST = 0.2
#: Minutes until a new node works.
START_MINUTES = 10


@dataclass(frozen=True)
class Machine:
    """A machine with one GPU: its name, the device of the cost model, dollars an hour."""

    name: str
    device: str
    on_demand: float
    spot: float


#: Round prices of us-east-1; for the larger GPUs, an eighth of a machine with eight.
MACHINES = (
    Machine("L4 (g6.2xlarge)", "l4", 0.98, 0.40),
    Machine("A100 (1/8 of p4d.24xlarge)", "a100", 2.75, 1.40),
    Machine("H100 (1/8 of p5.48xlarge)", "h100", 6.90, 3.00),
)


def hours_of(experiments: Iterable[Experiment], device: str) -> dict[str, float]:
    """Return the hours of each run on one device, by id; alike runs are computed once."""
    known: dict[str, float] = {}
    hours = {}
    for experiment in experiments:
        kind = experiment.model_copy(update={"seed": 0}).model_dump_json(
            exclude={"partition", "optimizer"}
        )
        if kind not in known:
            seconds = work_of(experiment).seconds(device, experiment.model.precision)
            known[kind] = seconds / 3600
        hours[experiment.id] = known[kind]
    return hours


def finish_time(hours: Iterable[float], gpus: int) -> float:
    """Return after how many hours the last run ends if each free GPU takes the longest one left."""
    free = [0.0] * gpus
    for each in sorted(hours, reverse=True):
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def by_table() -> dict[str, dict[str, Experiment]]:
    """Return the runs of each table that no earlier table has, scored as they all ask for."""
    sweeps = find_sweeps(["all"], "paper", [])
    left = distinct(sweeps)
    return {
        sweep.name: {id: left.pop(id) for id in distinct([sweep]) if id in left} for sweep in sweeps
    }


def numbers(machines: Iterable[Machine] = MACHINES) -> str:
    """Return the tables of the page, as Markdown."""
    tables = by_table()
    machines = tuple(machines)
    hours = {
        machine.device: {
            name: hours_of(runs.values(), machine.device) for name, runs in tables.items()
        }
        for machine in machines
    }
    lines = ["| table | runs | " + " | ".join(f"{m.name}, hours" for m in machines) + " |"]
    lines.append("|---|---:|" + "---:|" * len(machines))
    for name, runs in tables.items():
        each = (sum(hours[m.device][name].values()) for m in machines)
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(map(_round, each)) + " |")
    whole = {m.device: [h for t in hours[m.device].values() for h in t.values()] for m in machines}
    counts = sum(map(len, tables.values()))
    sums = {m.device: sum(whole[m.device]) for m in machines}
    total = " | ".join(f"**{_round(sums[m.device])}**" for m in machines)
    lines += [f"| **all** | **{counts}** | {total} |", ""]
    lines += ["| GPU | hours | on demand, USD | spot, USD |", "|---|---:|---:|---:|"]
    for m in machines:
        prices = " | ".join(_round(sums[m.device] * price) for price in (m.on_demand, m.spot))
        lines.append(f"| {m.name} | {_round(sums[m.device])} | {prices} |")
    return "\n".join([*lines, "", *_by_gpus(machines[0], whole[machines[0].device])])


def _by_gpus(machine: Machine, hours: list[float]) -> list[str]:
    """Return what more GPUs of a machine change: time, and cost with the head and the start."""
    lines = [f"| {machine.name}: GPUs | hours until the end | speed-up | spot and head, USD |"]
    lines.append("|---:|---:|---:|---:|")
    one = finish_time(hours, 1)
    for gpus in GPUS:
        end = finish_time(hours, gpus)
        start = gpus * START_MINUTES / 60
        cost = (sum(hours) + start) * machine.spot + end * REST
        lines.append(f"| {gpus} | {_round(end)} | {one / end:.1f} | {_round(cost)} |")
    return lines


def _round(number: float) -> str:
    """Return two digits: an estimate has no more."""
    if number >= 100:
        return f"{float(f'{number:.2g}'):,.0f}"
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def main(words: list[str]) -> int:
    """Write the numbers into the page, or compare them; return an exit code."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    new = f"\n{numbers()}\n"
    if "--check" in words:
        return int(new != old)
    PAGE.write_text(f"{before}{BEGIN}{new}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
