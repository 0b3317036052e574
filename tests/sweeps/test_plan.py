"""Counts of a plan: each run once, in the first sweep that has it."""

import dataclasses

import pytest
from summaries import invented_hardware, invented_summary

from trishul_ray.errors import InputError
from trishul_ray.sweeps.cells import distinct
from trishul_ray.sweeps.cost import work_of
from trishul_ray.sweeps.loading import find_sweeps, load_sweep, sweep_from_axes
from trishul_ray.sweeps.plan import device_of, make_plan, plan_notes
from trishul_ray.sweeps.status import CellState

BASE = ["dataset=cifar100", "federation.rounds=10"]


def result(experiment, seconds, *, gpus=(), cpus=1, rounds=None, wall=None):
    """Times of a run in result.json."""
    per_round = [seconds] * (rounds or experiment.federation.rounds)
    return invented_summary(
        identity=experiment.identity(),
        config=experiment.to_dict(),
        round_seconds=per_round,
        wall_seconds=sum(per_round) if wall is None else wall,
        hardware=invented_hardware(gpus=list(gpus), cpus=cpus),
    )


@pytest.fixture
def sweeps():
    """Two sweeps of 6 and 4 cells that share 2 runs."""
    one = sweep_from_axes(["method=fedit,ravan", "seed=0..2"], BASE)
    two = sweep_from_axes(["method=ravan,trishul", "seed=0..1"], BASE)
    return [one, two]


def states_of(sweeps, **given):
    states = {id: CellState("missing", "not run yet") for id in distinct(sweeps)}
    return states | given


def test_a_shared_run_is_counted_once_in_the_first_sweep_that_has_it(sweeps):
    plan = make_plan(sweeps, states_of(sweeps), "h100")
    one, two = plan.sweeps
    assert (one.cells, one.runs, one.shared, one.to_do) == (6, 6, 0, 6)
    assert (two.cells, two.runs, two.shared, two.to_do) == (4, 2, 2, 2)
    assert (plan.total.cells, plan.total.runs, plan.total.shared) == (10, 8, 2)
    hours = {
        cell.experiment.method.name: work_of(cell.experiment).seconds("h100", "fp32") / 3600
        for sweep in sweeps
        for cell in sweep.cells
    }
    assert one.hours_left == pytest.approx(3 * hours["fedit"] + 3 * hours["ravan"])
    assert two.hours_left == pytest.approx(2 * hours["trishul"])
    assert plan.total.hours_left == pytest.approx(one.hours_left + two.hours_left)
    assert make_plan(sweeps[::-1], states_of(sweeps), "h100").sweeps[0].runs == 4


def test_runs_are_counted_by_what_the_store_has_of_them(sweeps):
    ids = list(distinct(sweeps))
    done = result(distinct(sweeps)[ids[0]], 36.0, gpus=["NVIDIA A100-SXM4-80GB"])
    given = {
        ids[0]: CellState("finished", "", done),
        ids[1]: CellState("stale", "the data have changed since it was run"),
        ids[2]: CellState("failed", "out of memory"),
        ids[-1]: CellState("corrupt", "checksum differs"),
    }
    plan = make_plan(sweeps, states_of(sweeps, **given), "h100")
    one, two = (dict(each.states) for each in plan.sweeps)
    assert one == {"finished": 1, "stale": 1, "failed": 1, "missing": 3}
    assert two == {"missing": 1, "corrupt": 1}
    assert (plan.sweeps[0].to_do, plan.total.to_do) == (5, 7)
    assert plan.total.hours_done == pytest.approx(10 * 36 / 3600)
    notes = "\n".join(plan_notes(plan, states_of(sweeps, **given), 1))
    assert "8 distinct runs" in notes and "1 failed: out of memory" in notes
    assert "1 stale: the data have changed since it was run" in notes


def test_the_time_of_a_similar_run_counts_more_than_the_model(sweeps):
    cells = {cell.labels["method"]: cell.experiment for cell in sweeps[1].cells}
    ravan = cells["ravan"]
    other_rate = ravan.model_copy(
        update={"seed": 9, "optimizer": ravan.optimizer.model_copy(update={"lr": 0.5})}
    )
    longer = ravan.model_copy(
        update={"federation": ravan.federation.model_copy(update={"rounds": 20, "clients": 50})}
    )
    h100 = ["NVIDIA H100 80GB HBM3"]
    measured = [
        result(longer, 1.0, gpus=h100),
        result(other_rate, 72.0, gpus=h100, rounds=5, wall=5 * 72 + 36),
        result(cells["trishul"], 5.0, gpus=["NVIDIA L4"]),
        result(cells["trishul"], 5.0),
    ]
    plan = make_plan(sweeps[1:], states_of(sweeps), "h100", measured)
    (only,) = plan.sweeps
    assert only.measured == 2
    trishul = work_of(cells["trishul"]).seconds("h100", "fp32") / 3600
    # The rounds of the nearest run, as many as this one has, and what that run took around them.
    assert only.hours_left == pytest.approx(2 * (10 * 72 + 36) / 3600 + 2 * trishul)
    assert make_plan(sweeps[1:], states_of(sweeps), "a100", measured).sweeps[0].measured == 0


def test_the_plan_counts_the_scores_that_are_asked_for():
    def hours(every):
        cell = sweep_from_axes([], [*BASE, "method=ravan", f"evaluation.every={every}"]).cells[0]
        return work_of(cell.experiment).seconds("h100", "fp32") / 3600

    def plan(*every, measured=()):
        sweeps = [
            sweep_from_axes(["seed=0..2"], [*BASE, "method=ravan", f"evaluation.every={n}"])
            for n in every
        ]
        return make_plan(sweeps, states_of(sweeps), "h100", measured)

    few = plan(0)
    assert few.total.hours_left == pytest.approx(3 * hours(0)) and hours(0) < hours(1)
    # One that shares its runs with a curve scores every round of them.
    both = plan(0, 1)
    assert both.sweeps[0].hours_left == pytest.approx(3 * hours(1))
    # A finished run that was scored in every round took longer than one will that is not.
    (cell,) = sweep_from_axes([], [*BASE, "method=ravan", "seed=7"]).cells
    measured = plan(0, measured=[result(cell.experiment, 100.0, gpus=["NVIDIA H100"])])
    assert measured.total.measured == 3
    expected = 3 * 1000 / 3600 * hours(0) / hours(1)
    assert measured.total.hours_left == pytest.approx(expected)


def test_more_devices_do_not_shorten_the_longest_run(sweeps):
    plan = make_plan(sweeps, states_of(sweeps), "h100")
    longest = max(
        work_of(cell.experiment).seconds("h100", "fp32") / 3600
        for sweep in sweeps
        for cell in sweep.cells
    )
    assert plan.total.longest == pytest.approx(longest)
    assert plan.total.hours_on(2) == plan.total.hours_left / 2
    assert plan.total.hours_on(1000) == plan.total.longest
    assert f"the longest run takes {longest:.2f} hours" in "\n".join(plan_notes(plan, {}, 1000))


def test_device_hours_are_hours_times_what_the_run_held(sweeps):
    experiment = next(iter(distinct(sweeps).values()))
    two = result(experiment, 360.0, gpus=["NVIDIA H100"] * 2, cpus=16)
    plan = make_plan(sweeps[:1], states_of(sweeps), "h100", [two])
    assert plan.sweeps[0].measured == 3 and plan.sweeps[0].hours_left > 6
    resources = experiment.resources.model_copy(update={"actors": 1, "device": "cpu"})
    small = experiment.model_copy(update={"resources": resources})
    quarter = result(small, 360.0, cpus=4)
    states = states_of(sweeps, **{experiment.id: CellState("finished", "", quarter)})
    assert make_plan(sweeps[:1], states, "cpu").total.hours_done == pytest.approx(0.25)
    # A cell of a sweep holds a part of its machine, as its result says; in one process, a core.
    cell = dataclasses.replace(result(experiment, 360.0, cpus=4), held={"CPU": 1.0, "GPU": 0.0})
    resources = experiment.resources.model_copy(update={"backend": "inline"})
    inline = result(experiment.model_copy(update={"resources": resources}), 360.0, cpus=4)
    for run in (cell, inline):
        states = states_of(sweeps, **{experiment.id: CellState("finished", "", run)})
        assert make_plan(sweeps[:1], states, "cpu").total.hours_done == pytest.approx(0.25)


def test_what_a_rarer_prox_would_save_is_said_of_cards_of_little_float64():
    def notes(device, *words):
        sweep = sweep_from_axes([], ["dataset=cifar100", "model.precision=bf16", *words])
        plan = make_plan([sweep], states_of([sweep]), device)
        return plan, "\n".join(plan_notes(plan, {}, 1))

    plan, said = notes("l4")
    work = work_of(sweep_from_axes([], ["dataset=cifar100"]).cells[0].experiment)
    assert plan.total.hours_saved * 3600 == pytest.approx(0.8 * work.prox_seconds("l4"))
    assert 0 < plan.total.hours_saved < plan.total.hours_left
    assert "method.prox_every=5 would save" in said and "another experiment" in said
    assert "prox_every" not in notes("h100")[1]
    assert "prox_every" not in notes("t4", "method=fedit")[1]
    assert "prox_every" not in notes("a10g", "method.prox_every=5")[1]
    assert "V100: PyPI's torch has no code for it" in notes("v100")[1]


def test_devices_are_known_by_name():
    experiment = sweep_from_axes([], BASE).cells[0].experiment
    names = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A100-SXM4-40GB",
        "Tesla V100-SXM2-16GB",
        "NVIDIA A10G",
        "Tesla T4",
        "NVIDIA L40S",
    ]
    assert [device_of(result(experiment, 1.0, gpus=[name])) for name in names] == [
        *("h100", "a100", "v100", "a10g", "t4"),
        "NVIDIA L40S",
    ]
    assert device_of(result(experiment, 1.0)) == "cpu"
    with pytest.raises(InputError, match=r"device 'tpu' is unknown; known: h100, h200, a100"):
        make_plan([], {}, "tpu")


def test_runs_of_unknown_models_are_named_and_not_guessed():
    sweep = sweep_from_axes(["model=nobody/nothing,vit-digits"], ["method=fedit"])
    plan = make_plan([sweep], states_of([sweep]), "cpu")
    assert (plan.total.to_do, plan.total.unknown) == (2, 1) and plan.total.hours_left > 0
    assert "1 runs of unknown time are not counted: model.name='nobody/nothing'" in "\n".join(
        plan_notes(plan, {}, 1)
    )


def test_an_adaptive_search_counts_with_all_its_samples(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "base: {dataset: digits, method: fedit}\n"
        "axes: {seed: [0, 1]}\n"
        "search: {kind: optuna, rows: test, samples: 7, space: {lr: {log: [0.001, 0.1]}}}\n"
    )
    plan = make_plan([load_sweep(file)], {}, "cpu")
    assert (plan.total.cells, plan.total.runs, plan.total.states["missing"]) == (14, 14, 14)


def test_the_command_prints_runs_hours_and_cost(called, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    (found,) = find_sweeps(["allocation"], "paper")
    count = str(len(found.cells))
    code, out, err = called("plan", "allocation", "--price", "2.5", "--device", "h100")
    assert code == 0, err
    cells = out.splitlines()[0].split(), out.splitlines()[1].split()
    row = dict(zip(*cells, strict=True))
    assert (row["sweep"], row["cells"], row["runs"], row["missing"]) == ("allocation", *[count] * 3)
    assert float(row["cost"]) == pytest.approx(2.5 * float(row["hours"]), rel=0.02)
    monkeypatch.setenv("COLUMNS", "40")  # no number is cut, as by a pipe's 80 columns
    assert called("plan", "allocation", "--price", "2.5", "--device", "h100")[1] == out
    assert f"{count} distinct runs; hours on one H100: 0 runs measured, {count} from" in out
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "mine.yaml").write_text("base: {dataset: digits}\naxes: {seed: [0, 1]}\n")
    code, out, err = called("plan", "mine.yaml")
    assert code == 0 and "CPU-hours" in out and "one machine like this one" in out, out + err
    assert called("plan", "visoin")[0] == 2 and called("plan", "nuclear", "--device", "x")[0] == 2
