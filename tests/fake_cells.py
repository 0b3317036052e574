"""Fake cells: a store with the files of runs, computed by formulas, and sweeps of them."""

import io
import itertools
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from summaries import invented_hardware, invented_summary

from trishul_ray.data.coverage import Coverage, RowCounts
from trishul_ray.report.layouts import FigureLayout
from trishul_ray.report.outcomes import CellOutcome, SweepOutcome
from trishul_ray.storage.store import Store

METHODS = {
    "FedIT": {"name": "fedit"},
    "SCAFFOLD+LoRA": {"name": "scaffold"},
    "RAVAN": {"name": "ravan"},
    "TRISHUL (λ=0)": {"name": "trishul", "lam": 0.0},
    "TRISHUL": {"name": "trishul", "lam": 0.01},
}
#: Methods with cores, which are the only methods with spectral diagnostics.
WITH_CORES = ("RAVAN", "TRISHUL (λ=0)", "TRISHUL")
ALPHAS = {"dirichlet(0.3)": 0.3, "dirichlet(0.1)": 0.1, "dirichlet(0.05)": 0.05}
LAMBDAS = {"0 (no penalty)": 0.0, "0.001": 0.001, "0.01 (ours)": 0.01, "1": 1.0}
SEEDS = ("0", "1", "2")
EPSILONS = {"2": 2.0, "8": 8.0, "inf": None, "none": None}
ROUNDS, CLIENTS, COHORT, RANK, BLOCKS = 5, 6, 4, 6, 4


def accuracy(labels, number=ROUNDS):
    """Compute the accuracy after a round; it depends on each label and seed."""
    place = [*METHODS].index(labels.get("method", "TRISHUL"))
    return 0.5 + 0.07 * place - 0.3 * math.exp(-number / 3) - penalty(labels) + spread(labels)


def similarity(labels, number=ROUNDS):
    """Compute the principal-angle similarity of updates."""
    place = [*METHODS].index(labels.get("method", "TRISHUL"))
    return 0.4 + 0.08 * place + 0.01 * number - penalty(labels) + spread(labels)


def penalty(labels):
    """Compute the difficulty of a cell's setting."""
    harder = {"20newsgroups": 0.1, "dirichlet(0.1)": 0.1, "dirichlet(0.05)": 0.15, "1": 0.2}
    labels = [label for axis, label in labels.items() if axis != "seed"]
    return sum(harder.get(label, 0.0) for label in labels)


def spread(labels):
    """Compute the deviation of a seed from seed 0."""
    return 0.02 * int(labels["seed"])


def cell_of(folder, labels, config, unfinished, **summary):
    """Create a cell with a separate folder; ``unfinished(labels)`` is its status or None."""
    home = Store.open(str(folder / "-".join(labels.values()).replace("/", "-")))
    name = home.uri.rsplit("/", 1)[-1]
    if status := unfinished(labels):
        return CellOutcome(labels, name, status, "why", "accuracy", None, home)
    with_cores = labels.get("method", "TRISHUL") in WITH_CORES
    rows = [round_of(labels, number, with_cores) for number in range(ROUNDS + 1)]
    home.write("metrics.parquet", parquet(rows))
    if with_cores:
        home.write("diagnostics.npz", arrays(labels, config["method"].get("lam", 0.0)))
    blocks = [f"vit.layers.{i}.attention" for i in range(BLOCKS)]
    summary = {
        "final": {"round": ROUNDS, "accuracy": accuracy(labels), "loss": 1.0},
        "data": Coverage("digits", "", None, RowCounts(9, 9, 9), RowCounts(200, 497, 497)),
        "config": {
            "partition": {"kind": "dirichlet", "alpha": 0.3},
            "model": {"name": "vit-digits"},
            "evaluation": {"top_k": 2},
            "devices": {"kind": "lognormal"},
            **config,
        },
        "heads": dict.fromkeys(blocks, 4) if with_cores else {},
        "block_squared_norms": dict(zip(blocks, [1.0, 2.0, 3.0, 2.0], strict=True)),
        "hardware": invented_hardware(gpus=[], processor="A processor", cpus=2),
    } | summary
    return CellOutcome(labels, name, "finished", "", "accuracy", invented_summary(**summary), home)


def round_of(labels, number, with_cores):
    """Create the record of a round."""
    row = {"round": number, "loss": 1.0, "accuracy": accuracy(labels, number)}
    if number == 0:
        return row
    pace = 1.1 if labels.get("method") == "TRISHUL" else 1.0
    row["client_seconds"] = 9.0 if number == 1 else pace * (0.8 + 0.1 * number)
    row["seconds"] = row["client_seconds"] + 5.0  # with evaluation
    row |= {"uploaded_bytes": 1e6 * (1 + int(labels["seed"])), "downloaded_bytes": 2e6}
    row |= {"simulated_seconds": 1800.0 * number}
    if not with_cores:
        return row
    near, seed = similarity(labels, number), int(labels["seed"])
    for prefix, more in (("delta_", 0.0), ("", 0.1)):
        row |= {
            f"{prefix}principal_angle_similarity": near + more,
            f"{prefix}dominant_similarity": near + more + 0.05,
            f"{prefix}spectral_entropy": 1.8 - near - more,
            f"{prefix}effective_rank": 6 - 3 * near - more,
            f"{prefix}aggregation_variance": (2.0 - near) * (1 + 0.1 * number) * 10**seed,
            f"{prefix}relative_variance": 4.0 - near,
        }
    return row


def parquet(rows):
    """``metrics.parquet``."""
    names = dict.fromkeys(name for row in rows for name in row)
    sink = io.BytesIO()
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), sink)
    return sink.getvalue()


def arrays(labels, lam):
    """Create ``diagnostics.npz``: random cohorts, updates and spectra, depending on the seed."""
    rng = np.random.default_rng(int(labels["seed"]))
    clients = np.stack([np.sort(rng.permutation(CLIENTS)[:COHORT]) for _ in range(ROUNDS)])
    # The correlation of two clients' updates is 0.5, or 0.8 with a penalty.
    shared = rng.normal(size=(ROUNDS + 1, 1, 400))
    own = rng.normal(size=(ROUNDS + 1, CLIENTS, 400))
    updates = shared + own * (0.5 if lam else 1.0)
    updates /= np.linalg.norm(updates, axis=2, keepdims=True)
    cosine = updates @ updates.mT
    before = np.sort(rng.gamma(0.5, 0.1, (10, RANK)), axis=1)[:, ::-1] * np.exp(-np.arange(RANK))
    threshold = 0.05 * lam
    after = np.maximum(before - threshold, 0.0)
    found = {
        "round": np.arange(1, ROUNDS + 1),
        "clients": clients,
        "cosine": np.stack([m[np.ix_(c, c)] for c, m in zip(clients, cosine, strict=False)]),
        "everyone_clients": np.arange(CLIENTS),
        "everyone_cosine": cosine[-1],
        "spectrum_uploaded": 1.1 * after,
    }
    if lam:
        prox = {"before": before, "after": after, "threshold": np.array([threshold])}
        found |= {f"spectrum_{name}": values for name, values in prox.items()}
    sink = io.BytesIO()
    np.savez(sink, **found)
    return sink.getvalue()


def sweep_of(axes, cell, titles=None):
    """Create a sweep with a cell per combination: ``cell(labels)``."""
    combinations = itertools.product(*axes.values())
    cells = tuple(cell(dict(zip(axes, labels, strict=True))) for labels in combinations)
    axes = {axis: tuple(labels) for axis, labels in axes.items()}
    return SweepOutcome("fake", "Fake", "smoke", "", axes, titles or {}, (), (), cells)


def by_method(folder, unfinished=lambda labels: None):
    """Create datasets x methods x seeds; TRISHUL takes 10% more time."""

    def cell(labels):
        config = {"method": METHODS[labels["method"]]}
        return cell_of(folder, labels, config, unfinished)

    axes = {"dataset": ("cifar100", "20newsgroups"), "method": METHODS, "seed": SEEDS}
    return sweep_of(axes, cell, {"dataset": {"cifar100": "digits (for CIFAR-100)"}})


def by_alpha(folder, unfinished=lambda labels: None):
    """Create methods with cores x α x seeds."""

    def cell(labels):
        partition = {"kind": "dirichlet", "alpha": ALPHAS[labels["partition"]]}
        config = {"method": METHODS[labels["method"]], "partition": partition}
        return cell_of(folder, labels, config, unfinished)

    return sweep_of({"method": WITH_CORES, "partition": ALPHAS, "seed": SEEDS}, cell)


def by_lambda(folder, unfinished=lambda labels: None):
    """Create datasets x λ x seeds of TRISHUL."""

    def cell(labels):
        config = {"method": {"name": "trishul", "lam": LAMBDAS[labels["lambda"]]}}
        return cell_of(folder, labels, config, unfinished)

    axes = {"dataset": ("cifar100", "20newsgroups"), "lambda": LAMBDAS, "seed": SEEDS}
    return sweep_of(axes, cell)


def by_epsilon(folder, unfinished=lambda labels: None):
    """Create methods with cores x ε x seeds; also without noise, and without privacy."""

    def cell(labels):
        epsilon = EPSILONS[labels["epsilon"]]
        config, reports = {"method": METHODS[labels["method"]]}, {}
        if labels["epsilon"] != "none":
            config["privacy"], reports = {"epsilon": epsilon}, {"privacy": {"epsilon": epsilon}}
        return cell_of(folder, labels, config, unfinished, reports=reports)

    return sweep_of({"method": WITH_CORES, "epsilon": EPSILONS, "seed": SEEDS}, cell)


def by_draw(folder, unfinished=lambda labels: None):
    """Create methods with cores x draws x seeds."""

    def cell(labels):
        config = {"method": METHODS[labels["method"]], "draw": int(labels["draw"])}
        return cell_of(folder, labels, config, unfinished)

    return sweep_of({"method": WITH_CORES, "draw": ("7", "8"), "seed": SEEDS}, cell)


def by_allocation(folder, unfinished=lambda labels: None):
    """Create uniform and water-filled heads x seeds."""

    def cell(labels):
        counts = (2, 4, 6, 4) if labels["allocation"] == "water-filling" else (4, 4, 4, 4)
        heads = {f"vit.layers.{i}.attention": count for i, count in enumerate(counts)}
        config = {"method": METHODS["TRISHUL"]}
        return cell_of(folder, labels, config, unfinished, heads=heads)

    return sweep_of({"allocation": ("uniform", "water-filling"), "seed": SEEDS}, cell)


def by_client(folder, unfinished=lambda labels: None):
    """Create methods x seeds, with clients scored by global and personalized models."""

    def cell(labels):
        scores = {name: 0.1 * place for place, name in enumerate("abcde")}
        gain = {"a": -0.1, "b": 0.0, "c": 0.2, "d": 0.1, "e": 0.05 * int(labels["seed"])}
        own = {name: score + gain[name] for name, score in scores.items()}
        own = own if labels["method"] == "TRISHUL" else {}
        config = {"method": METHODS[labels["method"]]}
        return cell_of(folder, labels, config, unfinished, per_client=scores, personal=own)

    return sweep_of({"method": WITH_CORES, "seed": SEEDS}, cell)


_ONE_DATASET = {"dataset": ("cifar100",)}
#: A sweep per kind of figure, and the options of the figure.
CASES = {
    "convergence": (by_method, {}),
    "megabytes": (by_method, {}),
    "hours": (by_method, {}),
    "overhead": (by_method, {"method": ("RAVAN", "TRISHUL")}),
    "svt_spectra": (by_method, {"method": WITH_CORES} | _ONE_DATASET),
    "spectral_alignment": (by_method, {"method": WITH_CORES} | _ONE_DATASET),
    "spectral_diagnostics": (by_method, {"method": WITH_CORES} | _ONE_DATASET),
    "lambda_accuracy": (by_lambda, {}),
    "lambda_diagnostics": (by_lambda, _ONE_DATASET),
    "heterogeneity": (by_alpha, {}),
    "accuracy_inconsistency": (by_alpha, {}),
    "alpha_diagnostics": (by_alpha, {}),
    "waterfilling": (by_allocation, {}),
    "waterfilling_layerwise": (by_allocation, {}),
    "privacy": (by_epsilon, {}),
    "draws": (by_draw, {}),
    "personal": (by_client, {}),
    "covariance": (by_method, {"method": ("RAVAN", "TRISHUL")} | _ONE_DATASET),
}


def figure_of(kind, where=None, **fields):
    """Create a figure of a kind."""
    return FigureLayout(
        name=f"a-{kind}", title="A <title> & more", kind=kind, where=where or {}, **fields
    )
