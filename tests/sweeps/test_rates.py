"""Learning rates selected on validation rows."""

import io

import pytest
from fake_cells import sweep_of
from rich.console import Console
from shipped import shipped
from summaries import invented_summary
from tiny_run import TINY

from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.outcomes import CellOutcome
from trishul_ray.runs.runner import run_experiment
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.loading import find_sweeps, load_sweep
from trishul_ray.sweeps.rates import check_rates, choose_rates, rates_table
from trishul_ray.tracking.progress import RunProgress

LOSS = "validation_loss"
ACCURACY = "validation_accuracy"


@pytest.fixture
def outcome_of(tmp_path):
    """``outcome_of({"fedit": {"0.1": [0.5, None]}}, metric)`` has seeds per method and rate."""

    def make(scores, metric=ACCURACY, missing="failed"):
        def cell(labels):
            method, rate, seed = labels["method"], labels["optimizer.lr"], labels["seed"]
            score = scores[method][rate][int(seed)]
            words = [f"method={method}", f"optimizer.lr={rate}", f"seed={seed}"]
            experiment = load_experiment(None, words)
            final = {metric: score, "accuracy": 1 - (score or 0.0)}
            made = invented_summary(final=final, config=experiment.to_dict())
            summary = made if score else None
            status = "finished" if score else missing
            home = Store.open(str(tmp_path))
            return CellOutcome(labels, experiment.id, status, "", metric, summary, home)

        rates = next(iter(scores.values()))
        seeds = map(str, range(len(next(iter(rates.values())))))
        return sweep_of({"method": [*scores], "optimizer.lr": [*rates], "seed": [*seeds]}, cell)

    return make


def test_best_validation_mean_is_chosen_per_setting(outcome_of):
    outcome = outcome_of(
        {
            "fedit": {"1e-3": [0.5, 0.6], "1e-2": [0.9, 0.3], "1e-1": [0.7, 0.2]},
            "ravan": {"1e-3": [0.1, 0.1], "1e-2": [0.2, 0.2], "1e-1": [0.9, None]},
            "trishul": {"1e-3": [0.4, 0.4], "1e-2": [0.4, 0.4], "1e-1": [0.3, 0.3]},
        }
    )
    chosen = {each.method: each for each in choose_rates(outcome).rates}
    assert {name: each.rate for name, each in chosen.items()} == {
        "fedit": 1e-2,
        "ravan": 1e-2,  # A run of the highest rate failed.
        "trishul": 1e-3,  # the lowest of equal rates
    }
    assert [each.edge for each in chosen.values()] == [None, None, "lowest"]
    fedit = chosen["fedit"]
    assert fedit.score == pytest.approx(0.6) and len(fedit.runs) == 2
    assert fedit.grid == pytest.approx({1e-3: 0.55, 1e-2: 0.6, 0.1: 0.45})
    assert (fedit.dataset, fedit.rank, fedit.partition, fedit.alpha) == (
        "digits",
        4,
        "dirichlet",
        0.3,
    )
    assert chosen["ravan"].grid[0.1] is None
    shown = io.StringIO()
    Console(file=shown, width=200).print(rates_table(choose_rates(outcome)))
    assert "0.6000" in shown.getvalue() and "lowest of the grid" in shown.getvalue()


def test_the_least_loss_is_the_best(outcome_of):
    scores = {"fedit": {"1e-3": [0.5], "1e-2": [0.2]}}
    (best,) = choose_rates(outcome_of(scores, LOSS)).rates
    assert (best.rate, best.edge) == (1e-2, "highest")


def test_rate_with_non_finite_loss_is_not_best(outcome_of):
    scores = {"fedit": {"1e-3": [float("nan")], "1e-2": [0.2], "1e-1": [float("inf")]}}
    (best,) = choose_rates(outcome_of(scores, LOSS)).rates
    assert best.rate == 1e-2 and best.grid == {1e-3: None, 1e-2: 0.2, 0.1: None}


def test_without_a_score_nothing_is_chosen(outcome_of):
    scores = {"fedit": {"1e-3": [0.5], "1e-2": [None]}, "ravan": {"1e-3": [None], "1e-2": [None]}}
    with pytest.raises(RunError, match="all learning rates failed for ravan; add lower rates"):
        choose_rates(outcome_of(scores))
    with pytest.raises(RunError, match=r"run \w+ is missing; run all cells to select rates"):
        choose_rates(outcome_of(scores, missing="missing"))


def test_test_rows_are_not_chosen_on(tmp_path):
    file = tmp_path / "mine.yaml"

    def refused(base, metric):
        file.write_text(
            f"base: {{{base}}}\naxes:\n  method: {{FedIT: {{method: fedit, metric: {metric}}}}}\n"
            "  optimizer.lr: [0.001, 0.01]\n"
        )
        with pytest.raises(InputError) as caught:
            check_rates(load_sweep(file))
        return str(caught.value)

    assert "got accuracy" in refused("data.validation_share: 0.2", "accuracy")
    assert "data.validation_share=0" in refused("seed: 1", ACCURACY)
    file.write_text("axes: {seed: [0, 1]}\n")
    with pytest.raises(InputError, match=r"an axis 'optimizer\.lr'"):
        check_rates(load_sweep(file))
    file.write_text("axes: {optimizer.lr: [0.1, 0.2]}\n")
    (tmp_path / "none.yaml").write_text("rates: []")
    with pytest.raises(InputError, match=r"optimizer\.rates would replace .* remove one"):
        load_sweep(file, [f"optimizer.rates={tmp_path}/none.yaml"])


@pytest.mark.parametrize("profile", ["paper", "small", "smoke"])
def test_shipped_grids_have_several_rates_per_setting(profile):
    (sweep,) = find_sweeps(["rates"], profile)
    check_rates(sweep)
    assert len(sweep.cells) == {"paper": 1256, "small": 273, "smoke": 18}[profile]
    assert {cell.experiment.seed for cell in sweep.cells} == {0}
    assert {1e-3, 1e-2} <= {cell.experiment.optimizer.lr for cell in sweep.cells}
    assert "rates" not in shipped(profile)


def test_the_command_writes_rates_that_a_sweep_reads(called, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [f"storage.cache={cache}", f"storage.runs={tmp_path}/runs"]
    (tmp_path / "mine.yaml").write_text(
        "base: {data.validation_share: 0.2}\naxes:\n"
        f"  method: {{FedIT: {{method: fedit, metric: {ACCURACY}}}}}\n"
        "  optimizer.lr: [1.0e-6, 1.0e-2]\n"
    )
    words = [*TINY, *paths]
    scores = {}
    for cell in load_sweep(tmp_path / "mine.yaml", words).cells:
        quiet = RunProgress(2, Console(file=io.StringIO()))
        final = run_experiment(cell.experiment, quiet).summary.final
        scores[cell.experiment.optimizer.lr] = final[ACCURACY]
    code, out, err = called("sweep", "mine.yaml", "--rates", "rates-custom.yaml", *words)
    assert code == 0, err
    assert "rates-custom.yaml" in out and ACCURACY in out
    tuned = load_experiment(None, ["method=fedit", "optimizer.rates=rates-custom.yaml"])
    assert tuned.optimizer.lr == max(scores, key=scores.get)
    assert "rates-custom.yaml: best of 2 rates, the " in tuned.optimizer.lr_source
    (tmp_path / "table.yaml").write_text("base: {method: fedit}\naxes: {seed: [0, 1]}\n")
    sweep = load_sweep(tmp_path / "table.yaml", ["optimizer.rates=rates-custom.yaml"])
    assert {cell.experiment.optimizer.lr for cell in sweep.cells} == {tuned.optimizer.lr}
