"""Time of a run by operator: the ten of PyTorch with most CPU time, here and before.

    python benchmarks/profiled.py [--before CHECKOUT] [options]

The command `trishul run`, inline, under PyTorch's profiler: TRISHUL on a ViT-S/14 at 56 pixels (17
tokens x 16), three clients of 20 steps, after a first run that warms up. `--before` names another
checkout of this repository, which runs by turns with this one. Results go to benchmarks/results/.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _results import Report, Section, told_by

HERE = Path(__file__).parents[1]
#: A run that trains, and scores next to nothing.
RUN = (
    *("dataset=cifar100", "model=trishul/vit-s14-photos", "model.image_size=56"),
    *("federation.rounds=1", "federation.clients=20", "federation.clients_per_round=3"),
    *("federation.local_steps=20", "federation.batch_size=16", "evaluation.limit=16"),
    *("optimizer.lr=0.002", "resources.backend=inline", "tracking.mlflow=false"),
)
STEPS = 60
SHOWN = 10


def profile(words: list[str]) -> dict[str, float]:
    """Run the command; return milliseconds of a local step by operator, in ``all`` of them."""
    import torch
    from torch.profiler import ProfilerActivity

    from trishul_ray.cli import main as trishul

    sys.argv = ["trishul", "run", *words]
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found:
        try:
            trishul()
        except SystemExit as end:
            if end.code:
                raise
    taken = {e.key: e.self_cpu_time_total / 1e3 / STEPS for e in found.key_averages()}
    return {"all": sum(taken.values()), **taken}


def profile_in(checkout: Path, words: list[str]) -> dict[str, float]:
    """Profile the command in a process of its own, with the package of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--run", *words, f"storage.runs={folder}/runs"],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Profile both checkouts and write the results."""
    if sys.argv[1:2] == ["--run"]:
        print("\n" + json.dumps(profile(sys.argv[2:])))
        return
    parser = told_by(__doc__)
    parser.add_argument("--before", help="another checkout")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--methods", nargs="+", default=["trishul", "fedit"])
    options = parser.parse_args()
    report = Report("profiled", options, "before")
    checkouts = {"before": Path(options.before), "now": HERE} if options.before else {"now": HERE}
    for method in options.methods:
        for precision in ("fp32", "bf16"):
            words = [*RUN, f"method={method}", f"model.precision={precision}"]
            words.append(f"resources.threads={options.threads}")
            found = {}
            for _ in range(2):  # the first warms up
                found = {name: profile_in(path, words) for name, path in checkouts.items()}
            report.add(section(f"{method}, {precision}", found))


def section(title: str, found: dict[str, dict[str, float]]) -> Section:
    """Return the operators that take most, in any checkout, in milliseconds of a step."""
    names: dict[str, None] = {"all": None}
    for taken in found.values():
        most = sorted(taken, key=lambda name: -taken[name])
        names |= dict.fromkeys(most[: SHOWN + 1])
    rows = [[name, *(f"{taken.get(name, 0.0):.2f}" for taken in found.values())] for name in names]
    note = f"ms of a local step by operator, its own CPU time alone; {STEPS} steps, with the run"
    note += "'s evaluation and start, and with what the profiler takes"
    return Section(title, ["operator", *found], rows, [note], data=found)


if __name__ == "__main__":
    main()
