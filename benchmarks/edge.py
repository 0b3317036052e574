"""Cost of sections: codecs by themselves, and whole rounds with and without each section.

    python benchmarks/edge.py [PART ...] [options]

Parts (all by default):

    codecs  encoding and decoding one upload of 96 core heads of 110x110 (ViT-B/16 at the lower
            budget): milliseconds, bytes and relative error of every codec, for a change of full
            rank and for one whose spectrum was cut
    round   what each section adds to a round of a small ViT, by turns with rounds without any

Times are CPU time of the one thread that runs, which does not depend on what else the machine does.
Results go to benchmarks/results/.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import Goal, Report, Section, Times, told_by
from _setups import small

from trishul_ray.experiment.loading import build_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.lab.codecs.base import CodecFields, Units, build_codec, codec_names
from trishul_ray.lab.privacy.accounting import Guarantee

ALL = ("codecs", "round")
RANK, CORES = 110, 96
#: Codecs with other than their defaults.
CHOICES = (
    {"codec": "int8", "rounding": "stochastic"},
    {"codec": "int4", "deflate": True},
    {"codec": "topk", "density": 0.05},
)
#: Sections of the edge, and the share of a round that they may cost.
SECTIONS = {
    "the seam (server.optimizer=sgd)": (["server.optimizer=sgd", "server.momentum=0"], 0.01),
    "uploads.codec=int8": (["uploads.codec=int8"], 0.03),
    "int8 up and down": (["uploads.codec=int8", "downloads.codec=int8"], 0.03),
    "int4, error feedback": (["uploads.codec=int4", "uploads.error_feedback=true"], None),
    "uploads.codec=skeleton": (["uploads.codec=skeleton"], None),
    # The same clients as without it: fixed cohorts, not Poisson ones, whose accountant is apart.
    "privacy": (["privacy.noise=1", "privacy.sampling=fixed"], 0.03),
    "a clock": (["devices.kind=lognormal"], 0.01),
}

ACCOUNTANT = "privacy's accountant of Poisson cohorts"


def main() -> None:
    """Measure the parts that are asked for."""
    parser = told_by(__doc__, ALL)
    add = parser.add_argument
    add("--times", type=int, default=7, help="encodings of each codec")
    add("--rounds", type=int, default=16, help="rounds with each section")
    add("--local-steps", type=int, default=10, help="of the round that shares are of")
    add("--sections", nargs="+", help="parts of the names of sections: those alone", default=[""])
    options = parser.parse_args()
    report = Report("edge", options)
    torch.set_num_threads(1)
    if "codecs" in options.parts:
        report.add(codecs(options))
    if "round" in options.parts:
        report.add(rounds(options))


def codecs(options: argparse.Namespace) -> Section:
    """Every codec at its defaults, and some choices."""
    rng = np.random.default_rng(0)
    units = Units(np.full(CORES, RANK * RANK), np.full(CORES, RANK))
    full = rng.standard_normal(units.length).astype(np.float32)
    ranks = rng.integers(1, RANK // 2, CORES)
    cut = [rng.standard_normal((RANK, k)) @ rng.standard_normal((k, RANK)) for k in ranks]
    changes = {
        "full rank": full,
        f"rank {ranks.mean():.0f}": np.array(cut, dtype=np.float32).ravel(),
    }
    rows, data = [], {}
    chosen: list[dict[str, Any]] = [*({"codec": name} for name in codec_names()), *CHOICES]
    for fields in chosen:
        codec = build_codec(CodecFields.model_validate(fields))
        label = ", ".join(str(v) if k == "codec" else f"{k}={v}" for k, v in fields.items())
        for kind, change in changes.items():
            there, back = [], []
            for _ in range(options.times):
                began = time.process_time()
                payload = codec.encode(change, units, rng)
                there.append(time.process_time() - began)
                began = time.process_time()
                read = codec.decode(payload, units)
                back.append(time.process_time() - began)
            error = float(np.linalg.norm(read - change) / np.linalg.norm(change))
            share = len(payload) / change.nbytes
            encoding, decoding = Times.of(there), Times.of(back)
            spent = [encoding.show(1e3, 1), decoding.show(1e3, 1)]
            rows.append([label, kind, *spent, f"{len(payload):,}", f"{share:.3f}", f"{error:.2g}"])
            data[f"{label}; {kind}"] = {
                "encode": there, "decode": back, "bytes": len(payload), "error": error
            }  # fmt: skip
    return Section(
        f"One upload of {CORES} core heads of {RANK}x{RANK}: {4 * units.length:,} bytes in float32",
        ["codec", "change", "encode ms", "decode ms", "bytes", "of float32", "relative error"],
        rows,
        ["normal entries; CPU time of one thread, median (min-max)"],
        data=data,
    )


def rounds(options: argparse.Namespace) -> Section:
    """Cost of each section in a round of one local step, as a share of a round of many.

    The cost does not depend on local steps, and a short round hides less of it.
    """
    asked = {k: v for k, v in SECTIONS.items() if any(part in k for part in options.sections)}
    whole = f"none, {options.local_steps} local steps"
    variants = {"none": ([], None), **asked}
    seconds: dict[str, list[float]] = {label: [] for label in (*variants, whole)}
    with tempfile.TemporaryDirectory() as folder:

        def driver(steps: int, *overrides: str) -> InlineDriver:
            shared = [
                f"federation.rounds={options.rounds + 1}", f"federation.local_steps={steps}",
                "evaluation.every=0", "evaluation.diagnostics_every=0", "evaluation.limit=64",
                "resources.backend=inline", "tracking.mlflow=false",
            ]  # fmt: skip
            setup = small(Path(folder), "synthetic", [*shared, *overrides])
            fields = setup.experiment.to_dict()
            fields["storage"]["runs"] = str(Path(folder) / "runs")
            return InlineDriver(build_experiment(fields), setup.prepared, "benchmark")

        drivers = {label: driver(1, *overrides) for label, (overrides, _) in variants.items()}
        drivers[whole] = driver(options.local_steps)
        for _ in range(options.rounds + 1):  # the first one warms up
            for label, each in drivers.items():
                began = time.process_time()
                each.step()
                seconds[label].append(time.process_time() - began)
        for each in drivers.values():
            each.close()
    plain = Times.of(seconds["none"][1:])
    round_ = Times.of(seconds[whole][1:])
    rows, goals = [[whole, round_.show(1000, 0), "", ""]], []
    for label, (_, most) in variants.items():
        times = Times.of(seconds[label][1:])
        added = Times.of([a - b for a, b in zip(times.values, plain.values, strict=True)])
        share = added.median / round_.median
        rows.append([label, times.show(1000, 0), added.show(1000, 1), f"{100 * share:.2f} %"])
        if most is not None:
            goals.append(Goal(f"a round with {label} / without", 1 + share, 1 + most))
    if any(part in ACCOUNTANT for part in options.sections):
        spent = Times.of(accounting(options.rounds))
        share = spent.median / round_.median
        rows.append([ACCOUNTANT, "", spent.show(1000, 1), f"{100 * share:.2f} %"])
        goals.append(Goal(f"a round with {ACCOUNTANT} / without", 1 + share, 1 + 0.03))
    return Section(
        f"{options.rounds} rounds of a ViT 128x6: 3 clients, one step of 32",
        ["section", "CPU ms a round", "more than none", f"of {options.local_steps} steps"],
        rows,
        [
            "48 core heads of 22x22; evaluation and diagnostics off; by turns, differences of "
            "neighbours, median (min-max)",
        ],
        goals,
        {"seconds": seconds},
    )


def accounting(rounds: int) -> list[float]:
    """Return the CPU seconds of ε after each round, as a record has it, with Poisson cohorts."""
    promised, found = Guarantee("poisson", 0.69, 100_000, 1000, 1e-5, rounds), []
    promised.epsilon(1)  # imports the library, and makes the distribution of one round
    for number in range(1, rounds + 1):
        began = time.process_time()
        promised.epsilon(number)
        found.append(time.process_time() - began)
    return found


if __name__ == "__main__":
    main()
