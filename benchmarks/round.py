"""Cost of a round, beside the limit.

    python benchmarks/round.py [PART ...] [options]

Parts (all by default; minutes on two idle CPU cores):

    backend  (2)  seconds of a round, inline and on Ray at the same number of threads, as multiples
                  of the limit: the frozen backbone's forward and input gradient on the same batches
    scored   (2)  rounds that are scored on a spare actor beside rounds that are not
    small    (1)  a local step of the small ViT (128 wide, 6 blocks) against the limit, by parts
    large    (3)  the same for ViT-B/16 (q, v, 4 heads of rank 110), and the prox's share of it
    clients  (2)  memory and round time of 10,000 registered clients beside 20
    cohorts  (3)  memory and round time of cohorts of 10, 100 and 1,000 of 100,000 clients

Everything is measured by turns (limit, step, limit, step, ...), so that a slow spell of the
machine falls on both sides of a ratio. With a mirror (TRISHUL_HUB, or --hub) the images are
CIFAR-100 and the small ViT is its pretrained backbone; without one, noise and random weights,
which cost the same. Results go to benchmarks/results/.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from _backends import NICENESS, backends, scored
from _clients import Federation
from _limit import PARTS, Steps, time_steps
from _results import Goal, Report, Section, Times, paired, told_by
from _setups import Setup, has_real_data, large, small

ALL = ("backend", "scored", "small", "large", "clients", "cohorts")


def main() -> None:
    """Measure the parts asked for and write the results."""
    options = _arguments()
    for name, value in (("TRISHUL_HUB", options.hub), ("TRISHUL_CACHE", options.cache)):
        if value:
            os.environ[name] = str(value)  # the federations in processes of their own see it too
    if options.data == "auto":
        options.data = "cifar100" if has_real_data() else "synthetic"
    report = Report("round", options)
    os.environ.setdefault(NICENESS, "0")  # before any Ray starts
    shared = [f"resources.threads={options.threads}", f"model.precision={options.precision}"]
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if "backend" in options.parts:
            report.add(backends(small(scratch, options.data, _rounds(options, shared))))
        if "scored" in options.parts:
            one = ["federation.clients_per_round=1", "resources.actors=2", "resources.threads=1"]
            chosen = [*_rounds(options, shared), *one, "evaluation.limit=512"]
            report.add(scored(small(scratch, options.data, chosen)))
        if "small" in options.parts:
            chosen = [*shared, f"federation.batch_size={options.batch}"]
            setup = small(scratch, options.data, chosen)
            report.add(steps(setup, options.steps, "small ViT", 1.6))
        if "large" in options.parts:
            chosen = [*shared, f"federation.batch_size={options.large_batch}"]
            setup = large(scratch, options.data, chosen)
            report.add(steps(setup, options.large_steps, "ViT-B/16", 1.15, prox=0.01))
        if "clients" in options.parts:
            # Only the first call evaluates, a little: what a large batch leaves in the allocator
            # (70 MiB, more or less) would hide what a client costs.
            little = [f"evaluation.every={options.rounds + 1}", "evaluation.limit=64"]
            report.add(clients(options, [*_rounds(options, shared), *little]))
        if "cohorts" in options.parts:
            report.add(cohorts(options.precision))


def _arguments() -> argparse.Namespace:
    parser = told_by(__doc__, ALL)
    add = parser.add_argument
    add("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all)")
    add("--data", choices=["auto", "cifar100", "synthetic"], default="auto")
    add("--hub", type=Path, help="a mirror with CIFAR-100; default TRISHUL_HUB")
    add("--cache", type=Path, help="prepared data; default TRISHUL_CACHE")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="of the frozen backbone")
    add("--rounds", type=int, default=7, help="rounds of backend and clients; the first warms up")
    add("--local-steps", type=int, default=20, help="local steps of backend and clients")
    add("--batch", type=int, default=32, help="batch size of the small ViT")
    add("--steps", type=int, default=60, help="measured steps of the small ViT")
    add("--large-batch", type=int, default=32, help="batch size of ViT-B/16")
    add("--large-steps", type=int, default=5, help="measured steps of ViT-B/16")
    add("--many", type=int, default=10_000, help="registered clients, beside 20")
    options = parser.parse_args()
    if min(options.rounds - 2, options.steps, options.large_steps, options.local_steps) < 1:
        parser.error("--rounds must be at least 3, and steps at least 1")
    return options


def _rounds(options: argparse.Namespace, shared: list[str]) -> list[str]:
    return [
        *shared,
        f"federation.batch_size={options.batch}",
        f"federation.rounds={options.rounds}",
        f"federation.local_steps={options.local_steps}",
        # Every second call is a round with evaluation: both kinds are seen, by turns.
        "evaluation.every=2",
        "resources.actors=1",
    ]


def steps(setup: Setup, count: int, name: str, bound: float, prox: float | None = None) -> Section:
    """Whole local steps against the limit, by parts."""
    found: Steps = time_steps(setup.experiment, setup.prepared, count)
    step, limit = Times.of(found.step), Times.of(found.limit)
    beside = {"forward": Times.of(found.forward), "backward": Times.of(found.backward)}
    rows = []
    for part in PARTS:
        times = Times.of(found.parts[part])
        under = beside.get(part)
        rows.append(
            [
                part,
                times.show(1e3, 1),
                under.show(1e3, 1) if under else "",
                f"{times.median / under.median:.3f}" if under else "",
                f"{times.median / step.median:.2%}",
            ]
        )
    ratio = step.median / limit.median
    rows.append(["whole step", step.show(1e3, 1), limit.show(1e3, 1), f"{ratio:.3f}", "100%"])
    share = Times.of(found.parts["prox"]).median / step.median
    goals = [Goal(f"local step / limit, {name}", ratio, bound)]
    if prox is not None:
        goals.append(Goal(f"prox / step, {name}", share, prox))
    fed = setup.experiment.federation
    return Section(
        f"A local step, {name} ({setup.label})",
        ["part", "step ms", "limit ms", "step / limit", "share of the step"],
        rows,
        [
            f"{setup.experiment.method.name}, batch {fed.batch_size}, "
            f"{setup.experiment.resources.threads} threads, {setup.experiment.model.precision}; "
            f"medians (min-max) of {count} steps by turns with the limit",
            f"step / limit of neighbours: {paired(step, limit).show(digits=3)}",
        ],
        goals,
        {"step": found.step, "limit": found.limit, "parts": found.parts},
    )


def clients(options: argparse.Namespace, overrides: list[str]) -> Section:
    """20 clients and many, each federation in a process of its own, stepped by turns."""
    few = 20
    # The same rows are dealt to all: with 10,000 rows and 10,000 clients, one each.
    with (
        Federation(few, options.data, overrides) as first,
        Federation(options.many, options.data, overrides) as second,
    ):
        both = (first, second)
        seconds: dict[int, list[float]] = {few: [], options.many: []}
        for number in range(1, options.rounds + 1):
            for federation in both if number % 2 else both[::-1]:
                took = federation.ask("step")
                if number > 1:
                    seconds[federation.clients].append(took)
        memory = {federation.clients: federation.ask("memory") for federation in both}
    times = {count: Times.of(values) for count, values in seconds.items()}
    ours = ("driver", "coordinator", "actors")
    total = {count: sum(sizes[role] for role in ours) for count, sizes in memory.items()}
    rows = [
        [
            f"{count:,}",
            *(f"{memory[count][role]:.1f}" for role in ours),
            f"{total[count]:.1f}",
            f"{memory[count]['ray']:.0f}",
            times[count].show(),
            f"{memory[count]['dealing_seconds']:.1f}",
        ]
        for count in times
    ]
    ratio = paired(times[options.many], times[few])
    return Section(
        f"Registered clients ({options.data})",
        [
            "clients",
            "driver MiB",
            "coordinator MiB",
            "actor MiB",
            "together",
            "rest of Ray MiB",
            "round s",
            "data, deal s",
        ],
        rows,
        [
            "memory is the proportional set size after the last round; one actor; the cohort is 3 "
            "in both",
            f"round time of neighbours, many / few: {ratio.show(digits=3)}",
        ],
        [
            Goal("more memory in MB", (total[options.many] - total[few]) * 1.048576, 100),
            Goal("round time, many / few", ratio.median, 1.10),
        ],
        {"seconds": seconds, "memory_mib": memory},
    )


def cohorts(precision: str) -> Section:
    """Cohorts of growing size of the same clients, one local step each, on two actors."""
    registered, rounds = 100_000, 3
    overrides = [f"model.precision={precision}", "resources.threads=1", "resources.actors=2"]
    overrides += ["evaluation.limit=64"]
    overrides += [f"federation.rounds={rounds}", f"evaluation.every={rounds + 1}"]
    overrides += ["federation.local_steps=1", "federation.batch_size=1"]
    times: dict[int, list[float]] = {}
    memory: dict[int, dict[str, float]] = {}
    for cohort in (10, 100, 1000):
        size = f"federation.clients_per_round={cohort}"
        with Federation(registered, "synthetic", [*overrides, size]) as federation:
            times[cohort] = [federation.ask("step") for _ in range(rounds)][1:]
            memory[cohort] = federation.ask("memory")
    rows = [
        [
            f"{cohort:,}",
            *(f"{memory[cohort][role]:.0f}" for role in ("coordinator", "peak", "actors", "ray")),
            Times.of(seconds).show(),
            f"{1e3 * Times.of(seconds).median / cohort:.1f}",
            f"{cohort * memory[cohort]['upload']:.0f}",
        ]
        for cohort, seconds in times.items()
    ]
    more = memory[1000]["peak"] - memory[10]["peak"]
    all_uploads = 1000 * memory[1000]["upload"]
    return Section(
        f"Cohorts of {registered:,} registered clients (synthetic images)",
        ["cohort", "coordinator MiB", "its peak", "actors MiB", "rest of Ray MiB", "round s",
         "ms a client", "all uploads MiB"],
        rows,
        [
            "one local step of one row a client, two actors of one thread; medians of "
            f"{rounds - 1} rounds; memory is the proportional set size at the end, the peak is the "
            "largest resident set; the rest of Ray holds every page its object store has used"
        ],
        [Goal("growth of the peak from 10 to 1,000 / all uploads", more / all_uploads, 0.5)],
        {"seconds": times, "memory_mib": memory},
    )  # fmt: skip


if __name__ == "__main__":
    main()
