"""Invented outcomes of sweeps, as collected by `trishul report`: no run has these numbers."""

import hashlib
from collections.abc import Callable

import numpy as np
from summaries import invented_summary

from trishul_ray.experiment import Experiment
from trishul_ray.report.layouts import FigureLayout, TableLayout
from trishul_ray.report.outcomes import CellOutcome, DrawnFigure, SweepOutcome
from trishul_ray.storage.store import Store

VERSIONS = {"trishul_ray": "0.1.0", "numerics": "3", "python": "3.11.7", "torch": "2.13.0"}

#: Invented skill of each method, in points.
LEVELS = {
    "Full-FT": 8.0, "FedIT": -9.0, "FedEx-LoRA": -11.0, "FFA-LoRA": -16.0, "Fed-SB": -8.0,
    "SCAFFOLD+LoRA": -3.0, "RAVAN": -0.8, "TRISHUL": 0.0,
}  # fmt: skip
FIELDS = {
    "Full-FT": "fullft", "FedIT": "fedit", "FedEx-LoRA": "fedex", "FFA-LoRA": "ffalora",
    "Fed-SB": "fedsb", "SCAFFOLD+LoRA": "scaffold", "RAVAN": "ravan", "TRISHUL": "trishul",
}  # fmt: skip


def random_of(*words):
    """Return a generator that depends only on the words."""
    digest = hashlib.sha256("/".join(words).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def invent_run(labels, value, *, status="finished", reason="", metric="accuracy", seconds=18.0):
    """Create one cell; ``value`` is in percent."""
    method = FIELDS.get(labels.get("method", ""), "trishul")
    experiment = Experiment(method=method, seed=int(labels.get("seed", 0)))
    name = hashlib.sha256(repr(sorted(labels.items())).encode()).hexdigest()[:12]
    home = Store.open("memory-of-no-run").child(name)
    summary = None
    if status == "finished":
        summary = invented_summary(
            id=name,
            final={"round": 50, metric: value / 100, "loss": 1.5 - value / 100},
            round_seconds=[seconds] * 5,
            wall_seconds=6 * seconds,
            uploaded_bytes=40_000_000,
            downloaded_bytes=40_000_000,
            versions=VERSIONS,
            config=experiment.to_dict(),
            identity=experiment.identity(),
            checksum=name,
        )
    return CellOutcome(labels, name, status, reason, metric, summary, home)


def product(axes):
    """Return all combinations of labels."""
    combinations = [{}]
    for axis, labels in axes.items():
        combinations = [{**found, axis: label} for found in combinations for label in labels]
    return combinations


def invent_sweep(
    name,
    axes,
    rows,
    columns,
    *,
    profile="paper",
    title="",
    level: Callable | None = None,
    noise=0.4,
    status: Callable = lambda labels: ("finished", ""),
    left_out: Callable = lambda labels: False,
    figures=(),
    titles=None,
    **layout,
):
    """Create a sweep with one table. ``level(labels)`` is the mean in percent."""
    cells = []
    for labels in product(axes):
        if left_out(labels):
            continue
        draw = random_of(name, *labels.values())
        mean = level(labels) if level else 75 + LEVELS.get(labels.get("method", ""), 0.0)
        state, reason = status(labels)
        value = float(np.clip(mean + noise * draw.normal(), 0, 100))
        cells.append(invent_run(labels, value, status=state, reason=reason))
    title = title or f"Invented {name}"
    # Not validated: names may be hostile.
    table = TableLayout.model_construct(
        name=name, title=title, rows=rows, columns=columns, **layout
    )
    return SweepOutcome(
        name=name,
        title=title,
        profile=profile,
        description=f"Reproduces nothing: {name} is invented.\nExpected: nothing.",
        axes=axes,
        titles=titles or {},
        tables=(table,),
        figures=tuple(figures),
        cells=tuple(cells),
        command=f"trishul sweep {name} --profile {profile}",
    )


def vision(*, seeds=3, profile="paper", paper="tab:vision", **options):
    """Create a table like the paper's table of CIFAR-100 and SVHN."""
    axes = {
        "method": tuple(LEVELS),
        "budget": ("lower", "higher"),
        "dataset": ("cifar100", "svhn"),
        "clients": ("20", "50"),
        "partition": ("iid", "dirichlet(0.3)"),
        "seed": tuple(map(str, range(seeds))),
    }

    def level(labels):
        base = {"cifar100": 82.0, "svhn": 92.0}[labels["dataset"]]
        base -= 6.0 * (labels["partition"] != "iid") + 1.0 * (labels["clients"] == "50")
        spread = random_of(*(v for k, v in labels.items() if k != "seed")).normal()
        base += LEVELS[labels["method"]] * (0.4 + 0.6 * (labels["partition"] != "iid"))
        return base + 0.5 * spread + 0.8 * (labels["budget"] == "higher")

    return invent_sweep(
        "vision",
        axes,
        ("budget", "method"),
        ("dataset", "clients", "partition"),
        title="Accuracy on CIFAR-100 and SVHN",
        paper=paper,
        profile=profile,
        level=level,
        left_out=lambda labels: labels["method"] == "Full-FT" and labels["budget"] == "higher",
        titles={
            "dataset": {"cifar100": "CIFAR-100", "svhn": "SVHN"},
            "clients": {"20": "20 clients", "50": "50 clients"},
            "partition": {"iid": "IID", "dirichlet(0.3)": "Dirichlet(0.3)"},
        },
        **options,
    )


def sensitivity(*, seeds=3, profile="paper", **options):
    """Create a table like the paper's table of λ, with a column of means."""
    axes = {
        "lambda": ("0 (no penalty)", "0.001", "0.01 (ours)", "0.1", "1.0"),
        "dataset": ("cifar100", "svhn", "20newsgroups"),
        "seed": tuple(map(str, range(seeds))),
    }
    levels = dict(zip(axes["lambda"], (76.3, 77.8, 79.4, 78.1, 60.3), strict=True))
    return invent_sweep(
        "lambda",
        axes,
        ("lambda",),
        ("dataset",),
        title="Sensitivity to λ",
        paper="tab:lambda_sensitivity",
        average=True,
        profile=profile,
        level=lambda labels: levels[labels["lambda"]],
        titles={"dataset": {"cifar100": "CIFAR-100", "svhn": "SVHN"}},
        **options,
    )


def initialization(*, seeds=3, profile="paper", **options):
    """Create a table of one column, in which three seeds are inconclusive."""
    axes = {
        "initialization": ("Random Normal", "Gram-Schmidt", "Constant", "Shared Subspace"),
        "dataset": ("20newsgroups",),
        "seed": tuple(map(str, range(seeds))),
    }
    levels = dict(zip(axes["initialization"], (78.2, 79.4, 58.3, 57.5), strict=True))
    return invent_sweep(
        "initialization",
        axes,
        ("initialization",),
        ("dataset",),
        title="Initialization of the bases",
        paper="tab:ablation_init",
        profile=profile,
        level=lambda labels: levels[labels["initialization"]],
        titles={"dataset": {"20newsgroups": "20 Newsgroups"}},
        **options,
    )


def half_missing(labels):
    """Create the states of a sweep with many unfinished and some failed runs."""
    draw = random_of("state", *labels.values()).random()
    if labels.get("method") == "FFA-LoRA" and labels["dataset"] == "svhn":
        reason = "out of memory on round 12: CUDA tried to allocate 2.00 GiB; 3 attempts"
        return "failed", reason
    if draw < 0.05:
        return "stale", "the content of the training data has changed"
    if draw < 0.08:
        return "corrupt", "result.json is unreadable (Expecting value: line 1 column 1)"
    return ("missing", "") if draw < 0.5 else ("finished", "")


def square(figure, sweep):
    """Return a figure without content."""
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><title>{figure.title}</title></svg>'
    return DrawnFigure(svg.encode(), b"%PDF-", "x,value\n1,2\n", f"profile {sweep.profile}")


FIGURE = FigureLayout(name="curve", title="Accuracy by round", kind="convergence")
