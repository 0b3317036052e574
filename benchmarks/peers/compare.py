"""Compare a round of the same work in trishul-ray, pfl-research, Flower and a plain loop.

    python benchmarks/peers/compare.py [options]

The work (``workload.py``) is FedIT: LoRA on q, k, v and o of a small vision transformer with plain
averaging, 20 clients, 3 clients per round, 20 local steps of 32 images. The peers train with PEFT
and a typical user's loop. Each system runs in a separate process, and the systems run their rounds
alternately, in rotating order. The comparison stops if a system trains fewer local steps. Peers run
in separate environments, which the first call installs in a few minutes.
"""

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from _results import Goal, Report, Section, Times, argument_parser, paired
from _stepped import Stepped
from workload import Workload

HERE = Path(__file__).resolve().parent
#: Script and arguments of each system, and the requirement of its environment, or "" for this one.
SYSTEMS: dict[str, tuple[Sequence[str], str]] = {
    "a plain loop": (("bare.py",), ""),
    "trishul-ray, inline": (("with_trishul.py", "inline"), ""),
    "trishul-ray, Ray": (("with_trishul.py", "ray"), ""),
    "trishul-ray, Ray, bf16": (("with_trishul.py", "ray", "model.precision=bf16"), ""),
    "pfl-research": (("with_pfl.py",), "pfl[pytorch]==0.6.0"),
    "Flower": (("with_flower.py",), "flwr[simulation]==1.41.0"),
}
OURS, PEERS = "trishul-ray, Ray", ("pfl-research", "Flower", "a plain loop")


def environment(requirement: str, folder: Path) -> str:
    """Install a peer with our PyTorch, transformers and PEFT, and return its Python interpreter."""
    if not requirement:
        return sys.executable
    home = folder / requirement.partition("[")[0]
    python = home / "bin" / "python"
    installed = home / "installed"
    shared = [f"{name}=={metadata.version(name)}" for name in ("transformers", "peft")]
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    wanted = "\n".join([torch, *shared, requirement])
    if not installed.exists() or installed.read_text() != wanted:
        print(f"installing {requirement} in {home}: some minutes, once", flush=True)
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *wanted.splitlines()]
        subprocess.run(pip, check=True)
        installed.write_text(wanted)
    return str(python)


def measure(work: Workload, systems: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Measure the rounds of all systems alternately, after a warm-up round.

    Args:
        work: Workload of a round.
        systems: Python interpreter of each system.
        rounds: Number of measured rounds.

    Returns:
        Seconds of each round, keyed by system.

    Raises:
        SystemExit: A system trained a different number of steps.
    """
    words = json.dumps(asdict(work))
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    with ExitStack() as stack:
        running = {}
        for name, python in systems.items():
            script, *more = SYSTEMS[name][0]
            command = [str(HERE / script), words, *more]
            running[name] = stack.enter_context(Stepped(command, python=python))
        names = list(systems)
        for number in range(rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                answer = running[name].ask("round")
                if answer["steps"] != work.cohort * work.steps and number:
                    raise SystemExit(f"{name} trained {answer['steps']} steps in a round")
                if number:
                    seconds[name].append(answer["seconds"])
            print(f"round {number} of {rounds}", flush=True)
    return seconds


def section(work: Workload, seconds: dict[str, list[float]]) -> Section:
    """Compare our rounds with the rounds of every other system."""
    times = {name: Times.of(values) for name, values in seconds.items()}
    rows, goals = [], []
    for name, each in times.items():
        ratio = paired(times[OURS], each).show() if name != OURS else ""
        rows.append([name, each.show(), ratio])
    for name, goal in zip(PEERS, (0.7, 0.7, 1.0), strict=True):
        if name in times:
            median = paired(times[OURS], times[name]).median
            goals.append(Goal(f"a round on Ray / {name}", median, goal))
    return Section(
        "A round of the same work",
        ["system", "round s", "trishul-ray on Ray / it"],
        rows,
        [
            f"FedIT of rank {work.rank} on q, k, v, o of a ViT {work.width}x{work.blocks}, "
            f"{work.cohort} clients x {work.steps} steps of {work.batch}, {work.threads} threads; "
            f"medians (min-max) of {len(times[OURS].values)} rounds, ratios of adjacent rounds",
            "trishul-ray writes a checkpoint in every round; no system evaluates; fp32 unless the "
            "name of the system has bf16",
        ],
        goals,
        {"seconds": seconds},
    )


def main() -> None:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=10, help="measured rounds; one before them warms up")
    add("--batch", type=int, default=Workload.batch)
    add("--steps", type=int, default=Workload.steps, help="local steps")
    add("--threads", type=int, default=Workload.threads)
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--environments", type=Path, default=HERE.parents[1] / "build" / "peers")
    options: argparse.Namespace = parser.parse_args()
    if OURS not in options.systems:
        parser.error(f"--systems must name {OURS!r}")
    work = Workload(steps=options.steps, batch=options.batch, threads=options.threads)
    systems = {
        name: environment(SYSTEMS[name][1], options.environments) for name in options.systems
    }
    report = Report("peers", options, "environments")
    report.add(section(work, measure(work, systems, options.rounds)))


if __name__ == "__main__":
    main()
