"""Plans of sweeps: each run counts once, and its time is measured or estimated."""

import pytest
from summaries import invented_hardware, invented_summary

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.runtime.stack import Stack
from trishul_ray.sweeps.cells import distinct
from trishul_ray.sweeps.loading import load_sweep, sweep_from_axes
from trishul_ray.sweeps.plan import plan_table, seconds_of
from trishul_ray.sweeps.status import CellState

BASE = ["dataset=digits", "model.init=random", "federation.rounds=10"]


@pytest.fixture
def sweeps(tmp_path):
    """Create two sweeps of 6 and 4 cells that share 2 runs."""
    words = [*BASE, f"storage.runs={tmp_path}"]
    return [
        sweep_from_axes(["method=fedit,ravan", "seed=0..2"], words),
        sweep_from_axes(["method=ravan,trishul", "seed=0..1"], words),
    ]


def planned(sweeps, device="h100", **states):
    """Return the cells of the plan's rows per sweep and column, and the notes."""
    known = dict.fromkeys(distinct([s for s in sweeps if not s.search]), CellState("missing"))
    table, notes = plan_table(sweeps, known | states, device)
    names = [column.header for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return [dict(zip(names, map(str, row), strict=True)) for row in rows], notes


def test_shared_run_counts_once_in_the_first_sweep(sweeps):
    (one, two, total), _ = planned(sweeps)
    assert [(row["cells"], row["runs"]) for row in (one, two, total)] == [
        ("6", "6"),
        ("4", "2"),
        ("10", "8"),
    ]
    assert planned(sweeps[::-1])[0][0]["runs"] == "4"


def test_runs_count_by_their_state(sweeps):
    first, second, *_, last = distinct(sweeps)
    experiment = distinct(sweeps)[first]
    done = invented_summary(
        identity=experiment.identity(),
        config=experiment.to_dict(),
        round_seconds=[360.0] * 10,
        hardware=invented_hardware(gpus=["NVIDIA H100 80GB HBM3"]),
    )
    states = {
        first: CellState("finished", "", done),
        second: CellState("failed", "out of memory"),
        last: CellState("corrupt", "checksum differs"),
    }
    (one, two, _), notes = planned(sweeps, **states)
    assert (one["finished"], one["missing"], one["failed"]) == ("1", "4", "1")
    assert (two["missing"], two["corrupt"]) == ("1", "1")
    assert "1 failed: out of memory" in notes
    # Two more runs of FedIT take an hour each, like the finished run; RAVAN's are estimated.
    assert 2.0 < float(one["hours on h100"]) < 2.1
    (one, *_), _ = planned(sweeps, "a100", **states)
    assert float(one["hours on a100"]) < 0.1


def test_plan_reports_finished_runs_of_another_stack(sweeps):
    first = next(iter(distinct(sweeps)))
    experiment = distinct(sweeps)[first]
    done = invented_summary(
        identity=experiment.identity(),
        config=experiment.to_dict(),
        stacks=[Stack("2.12.0", "2.4", "5.30", "NVIDIA L4")],
    )
    _, notes = planned(sweeps, **{first: CellState("finished", "", done)})
    (note,) = notes
    assert note.startswith("1 finished runs have torch 2.12.0 and not ")


def test_run_with_new_files_is_running(sweeps, tmp_path):
    folder = tmp_path / next(iter(distinct(sweeps))) / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "round-000001").touch()
    (one, *_), _ = planned(sweeps)
    assert (one["running"], one["missing"]) == ("1", "5")


def test_estimate_follows_work_and_device():
    def hours(*words, device="h100"):
        model = ["dataset=cifar100", "model.init=random", "method=fedit"]
        return seconds_of(load_experiment(None, [*model, *words]), device) / 3600

    base = hours()
    assert 0.01 < base < 1
    assert hours("federation.rounds=100") == pytest.approx(2 * base, rel=0.1)
    assert hours("method=fullft") > 1.2 * base
    assert hours("model.precision=bf16") < base < hours(device="a100") < hours(device="t4")
    assert hours("method=trishul", device="l4") > 1.5 * hours(device="l4")  # float64


@pytest.mark.parametrize(("graphs", "steps"), [(False, 50 * 3 * 0.0722), (True, 1.88)])
def test_estimate_is_near_measured_steps_and_evaluations(graphs, steps):
    """The seconds of a round come from benchmarks/results/gpu_h200_2026-11-26.md."""
    measured = 50 * (steps + 1.22)
    words = ["dataset=cifar100", "model.init=random", "model.precision=bf16", "evaluation.every=1"]
    experiment = load_experiment(None, [*words, f"resources.cuda_graphs={graphs}"])
    assert measured / 2 < seconds_of(experiment, "h200") < 2 * measured


def test_adaptive_search_counts_all_its_samples(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "base: {dataset: digits, method: fedit}\naxes: {seed: [0, 1]}\n"
        "search: {kind: optuna, rows: test, samples: 7, space: {lr: {log: [0.001, 0.1]}}}\n"
    )
    (row,), _ = planned([load_sweep(file)], "cpu")
    assert (row["cells"], row["missing"]) == ("14", "14")


def test_hours_are_of_all_evaluations_of_a_run(tmp_path):
    little = ["federation.local_steps=1", "federation.batch_size=1", "federation.rounds=1000"]

    def sweep(every):
        words = [*BASE, *little, f"storage.runs={tmp_path}", f"evaluation.every={every}"]
        return sweep_from_axes(["seed=0..99"], words)

    def hours(*sweeps):
        return [float(row["hours on cpu"]) for row in planned(sweeps, "cpu")[0]]

    (seldom,), (often,) = hours(sweep(500)), hours(sweep(1))
    assert seldom < often
    assert hours(sweep(500), sweep(1)) == [often, 0.0, often]


def test_hours_depend_on_the_limit_of_evaluations(tmp_path):
    words = [*BASE, f"storage.runs={tmp_path}", "federation.rounds=1000"]
    limits = "evaluation.limit=1", "evaluation.limit=360"

    def hours(*axes):
        (row,), _ = planned([sweep_from_axes(["seed=0..99", *axes], words)], "cpu")
        return float(row["hours on cpu"])

    few, all_rows = (hours(limit) for limit in limits)
    assert few < all_rows
    assert hours("evaluation.limit=1,360") == pytest.approx(few + all_rows, abs=0.015)


def test_runs_of_unknown_models_are_named(tmp_path):
    words = [*BASE, "model=nobody/nothing", f"storage.hub={tmp_path}"]
    (row,), notes = planned([sweep_from_axes(["seed=0..1"], words)])
    assert row["hours on h100"] == "0.00"
    assert notes and notes[0].startswith("2 runs of unknown duration: ")


def test_unknown_device_is_rejected(sweeps):
    with pytest.raises(InputError, match="--device 'h1' is unknown; known: h200, h100"):
        planned(sweeps, "h1")
