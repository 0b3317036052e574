"""The sweeps of the paper's tables and figures, in each profile."""

from pathlib import Path

import pytest
from shipped import shipped

from trishul_ray.paper.numbers import PAPER, records
from trishul_ray.sweeps.cells import distinct
from trishul_ray.sweeps.loading import find_sweeps

#: The paper's numbers per table: records of labels with ``metric`` and ``value``.
RECORDS = records()
#: Cells, and distinct runs, of each profile. The paper's protocol, with five seeds: 600 runs for
#: vision (7 methods x 2 budgets and full fine-tuning, x 8 columns), the same number for language,
#: 175 for GLUE, and the runs of the ablations that no earlier table has: 30 without penalty, 90
#: with another allocation, 30 with fixed scalars, 45 with another lambda, 70 with another alpha and
#: 10 of them without penalty for a figure, 45 with other bases and 15 of RAVAN, 75 with constrained
#: clients, and 2 in which all clients are compared.
COUNTS = {"paper": (2117, 1787), "small": (359, 275), "smoke": (541, 443)}
PROFILES = tuple(COUNTS)
#: Seeds of most sweeps.
SEEDS = {"paper": 5, "small": 3, "smoke": 1}

NAMES = [
    *("vision", "language", "glue", "nuclear", "allocation", "scaling", "lambda"),
    *("heterogeneity", "initialization", "compute", "convergence", "covariance", "overhead"),
]
FIGURES = {
    *("convergence", "overhead", "svt_spectra", "spectral_alignment", "spectral_diagnostics"),
    *("lambda_accuracy", "lambda_diagnostics", "heterogeneity", "accuracy_inconsistency"),
    *("alpha_diagnostics", "waterfilling", "waterfilling_layerwise", "covariance"),
}
METHODS = {
    "Full-FT": "fullft",
    "FedIT": "fedit",
    "FedEx-LoRA": "fedex",
    "FFA-LoRA": "ffalora",
    "Fed-SB": "fedsb",
    "SCAFFOLD+LoRA": "scaffold",
    "RAVAN": "ravan",
    "TRISHUL": "trishul",
    "HetLoRA": "hetlora",
    "FlexLoRA": "flexlora",
}
VIT, T5, LLAMA = (
    *("google/vit-base-patch16-224-in21k", "google-t5/t5-base", "meta-llama/Llama-3.2-1B"),
)
#: Meaning of each label of the paper's records per axis: a function of the experiment, and its
#: value.
MEANING = {
    "dataset": lambda e: e.data.name,
    "clients": lambda e: str(e.federation.clients),
    "budget": lambda e: e.budget,
    "partition": lambda e: {"iid": "iid"}.get(
        e.partition.kind, f"dirichlet({e.partition.alpha:g})"
    ),
    "model": lambda e: {VIT: "ViT-B/16", T5: "T5-Base", LLAMA: "LLaMA3.2-1B"}[e.model.name],
    "lambda": lambda e: {
        0: "0 (no penalty)",
        0.001: "0.001",
        0.01: "0.01 (ours)",
        0.1: "0.1",
        1: "1.0",
    }[e.method.lam],
    "setting": lambda e: {0: "w/o penalty (lambda=0)", 0.01: "w/ penalty (lambda=0.01)"}[
        e.method.lam
    ],
    "allocation": lambda e: {
        "uniform": "Uniform",
        "gradient": "Gradient-norm-based",
        "curvature": "Loss-curvature-based",
        "waterfill": "Concave water-filling (TRISHUL)",
    }[e.method.allocation],
    "scaling": lambda e: {"fixed": "Fixed (s_i=1)", "trainable": "Trainable (TRISHUL)"}[
        e.method.scalars
    ],
    "initialization": lambda e: {
        "random_normal": "Random Normal",
        None: "Gram-Schmidt",  # TRISHUL's default
        "constant": "Constant",
        "shared_subspace": "Shared Subspace",
    }[e.adapter.init],
    "profile": lambda e: {
        "bell": "bell-shaped",
        "uniform": "uniform",
        "skewed-right": "skewed-right",
    }[e.federation.compute],
    "task": lambda e: e.data.name.removeprefix("glue/"),
}


def sweeps(profile):
    return (*shipped(profile).values(),)


def positions(sweep, table):
    """Return the cells of each position of a table, keyed by their labels."""
    found = {}
    for cell in sweep.cells:
        if all(cell.labels[axis] in labels for axis, labels in table.where.items()):
            labels = tuple((axis, cell.labels[axis]) for axis in (*table.rows, *table.columns))
            found.setdefault(labels, []).append(cell)
    return found


def matches(record, labels):
    return all(record.get(axis) in (None, label) for axis, label in labels)


@pytest.mark.parametrize("profile", PROFILES)
def test_tables_figures_and_counts(profile):
    found = sweeps(profile)
    assert [sweep.name for sweep in found] == NAMES  # in the order of the paper
    assert {sweep.profile for sweep in found} == {profile}
    cells, runs = COUNTS[profile]
    assert sum(len(sweep.cells) for sweep in found) == cells
    assert len(distinct(found)) == runs
    figures = [figure.kind for sweep in found for figure in sweep.figures]
    assert len(figures) == len(FIGURES) and set(figures) == FIGURES
    # Every figure of the paper with results appears once.
    keys = [figure.paper for sweep in found for figure in sweep.figures]
    assert sorted(keys) == sorted(PAPER.figures())
    assert list(PAPER.figures().values()) == list(range(5, 18))
    tables = [table.paper for sweep in found for table in sweep.tables if table.paper]
    assert len(tables) == len(set(tables)) == 10
    assert {*tables, "fig:overhead"} == {*PAPER.tables()}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_file_of_a_profile_loads(profile):
    files = sorted(Path(__file__).parents[2].glob(f"sweeps/{profile}/[!_]*.yaml"))
    assert len(files) > len(NAMES)
    for sweep in find_sweeps([file.stem for file in files], profile):
        assert sweep.cells and sweep.description, sweep.name


@pytest.mark.parametrize("profile", PROFILES)
def test_what_no_figure_shows_is_not_scored(profile):
    """Tables need round 0 and the last round; curves also need the rounds in between."""
    shown = {
        cell.experiment.id
        for sweep in sweeps(profile)
        if any(figure.kind == "convergence" for figure in sweep.figures)
        for cell in sweep.cells
    }
    assert shown
    for id, run in distinct(sweeps(profile)).items():
        step = (5 if profile == "small" else 1) if id in shown else run.federation.rounds
        assert run.scored_rounds == {*range(0, run.federation.rounds, step), run.federation.rounds}


@pytest.mark.parametrize("profile", PROFILES)
def test_each_position_shows_seeds_of_one_setting(profile):
    """A table averages only over the seed."""
    for sweep in sweeps(profile):
        for table in sweep.tables:
            for labels, cells in positions(sweep, table).items():
                settings = {
                    str(c.experiment.model_copy(update={"seed": 0}).identity() | {"": c.metric})
                    for c in cells
                }
                assert len(settings) == 1, (sweep.name, labels)
                assert [c.experiment.seed for c in cells] == list(range(len(cells)))
                assert len(cells) in ((3, 1) if profile == "smoke" else (SEEDS[profile],))


def test_paper_records_have_unique_positions():
    found = []
    for sweep in sweeps("paper"):
        places = [(t.paper, positions(sweep, t), t) for t in sweep.tables if t.paper]
        if sweep.name == "overhead":
            cells = {tuple(c.labels.items())[:2]: [c] for c in sweep.cells}
            places = [("fig:overhead", cells, None)]
        for key, cells, table in places:
            records = RECORDS["tables"][key]
            labels = list(cells)
            if table is not None and table.average:
                rows = len(table.rows)
                labels += sorted({(*each[:rows], ("task", "average")) for each in cells})
            assert all(PAPER.table_value(key, dict(each)) is not None for each in labels), key
            for record in records:
                assert len([each for each in labels if matches(record, each)]) == 1, record
            assert len(labels) == len(records)
            found.append(key)
    assert sorted(found) == sorted(PAPER.tables())


def test_labels_match_the_paper():
    for sweep in sweeps("paper"):
        for key in {table.paper for table in sweep.tables if table.paper} or {"fig:overhead"}:
            table = next((table for table in sweep.tables if table.paper), None)
            for record in RECORDS["tables"][key]:
                for labels, cells in (positions(sweep, table) if table else {}).items():
                    if matches(record, labels):
                        check_meaning(record, cells)
        if sweep.name == "overhead":
            for cell in sweep.cells:
                check_meaning(cell.labels, [cell])


def test_paper_numbers_match_points_of_figures():
    """Each record of a figure is found by the labels of the cells from which it is drawn."""
    found = {
        (figure.paper, metric, value)
        for sweep in sweeps("paper")
        for figure in sweep.figures
        for cell in sweep.cells
        for metric in ("accuracy", "seconds_per_round", "overhead", "principal_angle_similarity",
                       "fewest_heads", "most_heads")
        if (value := PAPER.figure_value(figure.paper, metric, cell.labels)) is not None
    }  # fmt: skip
    assert {value for key, _, value in found if key == "fig:alpha_diagnostics"} == {0.35, 0.15, 0.0}
    assert {value for key, _, value in found if key == "fig:waterfilling"} == {2.0, 6.0}
    overhead = {(metric, value) for key, metric, value in found if key == "fig:overhead"}
    assert {value for metric, value in overhead if metric == "overhead"} == {1.09, 0.96, 0.83}
    assert len(overhead) == 9
    assert len([1 for key, *_ in found if key == "fig:lambda"]) == 15
    assert len([1 for key, *_ in found if key == "fig:heterogeneity"]) == 21
    assert len([1 for key, *_ in found if key == "fig:convergence"]) == 4


def check_meaning(record, cells):
    for cell in cells:
        made, method = cell.experiment, record.get("method", "TRISHUL")
        assert made.method.name == METHODS[method.partition(" (")[0]]
        if "(" in method:
            assert made.method.selection == method.partition(" (")[2].partition("-")[0].strip(")")
        assert made.optimizer.name == "adam" and made.federation.local_steps == 50
        assert (made.federation.clients_per_round, made.seed in range(5)) == (3, True)
        task, _, rows = record.get("task", "").partition("_")
        if rows:
            assert cell.metric == f"accuracy_{rows}"
        for axis, meaning in MEANING.items():
            if record.get(axis) is not None:
                expected = task if axis == "task" else record[axis]
                if axis == "initialization" and made.data.name == "20newsgroups":
                    assert (made.adapter.init is None) == (expected == "Gram-Schmidt")
                assert meaning(made) == expected, (axis, record, cell.labels)


@pytest.mark.parametrize("profile", PROFILES)
def test_quantized_backbones_differ_only_by_weights(profile):
    (quantized,) = find_sweeps(["quantized"], profile)
    runs = distinct([quantized]).values()
    datasets = {"paper": 3, "small": 1, "smoke": 2}[profile]
    assert len(runs) == 2 * 4 * datasets * SEEDS[profile]
    kinds = {(run.model.precision, run.model.quantize) for run in runs}
    assert kinds == {("fp32", "none"), ("bf16", "none"), ("bf16", "int8"), ("bf16", "nf4")}
    alike = {run.model_copy(update={"model": runs_model(run)}).id for run in runs}
    assert 4 * len(alike) == len(runs) and quantized.name not in NAMES


def runs_model(run):
    return run.model.model_copy(update={"precision": "fp32", "quantize": "none"})


def test_smoke_needs_nothing_but_the_package():
    for made in distinct(sweeps("smoke")).values():
        assert made.data.name == "digits" or made.data.name.startswith("synthetic/")
        assert made.model.name.endswith(("-digits", "-tiny"))
        assert made.model.name == "vit-digits" or made.model.init == "random"
        assert (made.federation.rounds, made.resources.actors) == (2, 1)


def test_small_is_small():
    for made in distinct(sweeps("small")).values():
        assert made.model.name in ("all-MiniLM-L6-v2", "trishul/vit-s14-photos")
        assert made.data.name in ("20newsgroups", "cifar100", "glue/sst2", "glue/rte")
        assert made.budget == 8 and made.adapter.matching == "matched"
