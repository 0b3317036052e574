"""Measured numbers beside the paper's bounds, on the stand-in and from the files of a run."""

import io
import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load as load_tensors
from tiny_run import TINY

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.trishul import slots
from trishul_ray.paper.stand_in import (
    SCALAR_MAX,
    LeastSquares,
    Setting,
    converge,
    local_rounds,
    nuclear,
    shrink,
)
from trishul_ray.paper.theory import (
    LAM,
    Check,
    _variance_checks,
    heads_checks,
    nuclear_checks,
    rounding_checks,
    run_checks,
    stationarity_checks,
    upload_checks,
)
from trishul_ray.report.summary import RunSummary, read_metrics
from trishul_ray.runs.runner import run_experiment
from trishul_ray.spectral.allocation import (
    best_integers,
    round_to_total,
    uniform,
    utility,
    water_fill,
)
from trishul_ray.spectral.svt import svt
from trishul_ray.storage.store import Store
from trishul_ray.tracking.progress import RunProgress

SCORES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4)


@settings(deadline=None)
@given(scores=SCORES, total=st.integers(0, 7))
def test_the_best_integers_are_those_of_a_full_search(scores, total):
    found = best_integers(scores, total)
    assert sum(found) == total and min(found) >= 0
    every = (
        heads
        for heads in itertools.product(range(total + 1), repeat=len(scores))
        if sum(heads) == total
    )
    best = max(utility(scores, heads) for heads in every)
    assert utility(scores, found) == pytest.approx(best, rel=1e-12)


@settings(deadline=None)
@given(scores=st.lists(st.floats(0.01, 100), min_size=1, max_size=10), total=st.integers(0, 40))
def test_the_best_integers_lie_between_rounded_and_continuous_water_filling(scores, total):
    filled = water_fill(scores, total)
    best = utility(scores, best_integers(scores, total))
    slack = 1e-9 * (1 + best)
    assert utility(scores, round_to_total(filled, total)) <= best + slack
    assert utility(scores, uniform(len(scores), total)) <= best + slack
    assert best <= utility(scores, filled) + slack


@pytest.mark.parametrize(("scores", "total"), [([], 3), ([1.0], -1)])
def test_bad_allocations_are_refused(scores, total):
    with pytest.raises(InputError, match=r"scores|total"):
        best_integers(scores, total)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), tau=st.floats(0, 3))
def test_the_prox_is_that_of_the_runs(seed, tau):
    cores = np.random.default_rng(seed).standard_normal((3, 5, 5))
    expected = svt(torch.from_numpy(cores), tau).numpy()
    np.testing.assert_allclose(shrink(cores, tau), expected, atol=1e-6 * np.abs(cores).max() * 5)


def loss(targets, moments, cores, scalars):
    """f_c of one client in torch, for its derivatives."""
    rest = scalars[:, None, None] * cores - targets
    return 0.5 * torch.einsum("hab,hbc,hac->", rest, moments, rest)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), rank=st.integers(1, 3))
def test_gradients_and_curvature_are_those_of_the_loss(seed, rank):
    problem = LeastSquares.draw(seed, clients=3, heads=2, rank=rank, spread=1.5)
    cores = np.random.default_rng(seed).standard_normal((2, rank, rank))
    ones = np.ones((3, 2))
    slopes, tilts = problem.gradients(np.broadcast_to(cores, problem.targets.shape), ones)
    value, curvature = 0.0, 0.0
    for c in range(3):
        data = [torch.from_numpy(x[c]) for x in (problem.targets, problem.moments)]
        point = [torch.from_numpy(cores).requires_grad_(), torch.ones(2).double().requires_grad_()]
        each = loss(*data, *point)
        value += float(each.detach()) / 3
        for ours, theirs in zip((slopes, tilts), torch.autograd.grad(each, point), strict=True):
            np.testing.assert_allclose(ours[c], theirs.numpy(), atol=1e-12)

        def flat(vector, data=data):
            size = 2 * rank * rank
            return loss(*data, vector[:size].view(2, rank, rank), vector[size:])

        where = torch.cat([point[0].detach().flatten(), point[1].detach()])
        hessian = torch.autograd.functional.hessian(flat, where)
        curvature = max(curvature, float(torch.linalg.eigvalsh(hessian).abs().max()))
    assert problem.value(cores) == pytest.approx(value)
    assert problem.smoothness_at(cores) == pytest.approx(curvature)
    # With fixed scalars the curvature is the same everywhere, and in no direction larger.
    assert problem.smoothness <= problem.smoothness_at(cores) + 1e-12


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 999), lam=st.sampled_from([0.0, 0.05, 0.5]))
def test_the_minimum_meets_its_optimality_condition(seed, lam):
    """0 in grad F + lam d||H||_*: the gradient is -lam U V^T plus at most lam elsewhere."""
    problem = LeastSquares.draw(seed, clients=4, heads=2, rank=3, spread=1.0)
    cores, value = problem.minimum(lam)
    slope = problem.gradients(cores[None], np.ones((1, 2)))[0].mean(axis=0)
    assert float(np.linalg.norm(slope, 2, axis=(1, 2)).max()) <= lam + 1e-6
    assert float((slope * cores).sum()) == pytest.approx(-lam * nuclear(cores), abs=1e-6)
    assert value == pytest.approx(problem.value(cores) + lam * nuclear(cores))


def test_a_round_of_one_step_without_a_prox_is_a_step_of_gradient_descent():
    problem = LeastSquares.draw(1, clients=4, heads=2, rank=3, spread=1.0)
    cores = np.random.default_rng(0).standard_normal((2, 3, 3))
    mine, scalars, size = local_rounds(problem, cores, Setting(0.0, 0.1, 1, trained=False))
    slopes = problem.gradients(np.broadcast_to(cores, mine.shape), scalars)[0]
    np.testing.assert_allclose(mine, cores - 0.1 * slopes)
    assert (scalars == 1).all()
    assert size == pytest.approx(np.square(slopes).sum(axis=(1, 2, 3)).max())


def test_a_cohort_of_two_settles_where_the_closed_form_says():
    """f_c = (h - a_c)^2 / 2, a = 1 and -1, one of them a round: h' = (1 - eta) h + eta a.

    Its stationary variance is eta / (2 - eta), which is the mean of ||G||^2 = h^2.
    """
    targets = np.array([1.0, -1.0]).reshape(2, 1, 1, 1)
    problem = LeastSquares(targets, np.ones_like(targets))
    course = converge(problem, Setting(0.0, 1 / 8, 1, trained=False), 1, 20000, seed=0)
    assert course.measured == pytest.approx((1 / 8) / (2 - 1 / 8), rel=0.1)
    # Started at the minimum: the bound is 0 without noise of mini-batches.
    assert course.bound == pytest.approx(0.0, abs=1e-12)


def test_trained_scalars_undo_part_of_the_shrinkage():
    """f = (s h - 1)^2 / 2: fixed scalars end at 1 - lam, trained and reset ones above it."""
    one = np.ones((1, 1, 1, 1))
    ends = {}
    for trained in (False, True):
        setting = Setting(0.1, 0.06, 1, trained)
        course = converge(LeastSquares(one, one), setting, 1, 20000, seed=0)
        ends[trained] = float(course.cores[0, 0, 0])
        assert (course.measured <= course.bound) is not trained
    assert ends[False] == pytest.approx(0.9)
    # h' = s'(h - eta (h - 1 + lam)), s' = 1 - eta h (h - 1): fixed where (1 - h)(1 + h^2) = lam.
    root = np.roots([-1, 1, -1, 1 - 0.1]).real.max()
    assert ends[True] == pytest.approx(root, abs=1e-3) and 0.9 < root < 1


def test_the_bound_on_uploads_holds_and_both_sides_fall_as_lam_grows():
    checks = list(upload_checks(seed=3, clients=16))
    assert all(check.holds and check.measured > 0 for check in checks)
    for side in ("measured", "bound"):
        values = [getattr(check, side) for check in checks]
        assert values == sorted(values, reverse=True) and values[-1] < 0.5 * values[0]


def test_what_rounding_loses_is_seen():
    # Residues 0.5 and 0.5, but the first layer gains more from the head.
    checks = list(heads_checks([3.0, 1.0], [1, 1], "two blocks"))
    assert [check.holds for check in checks] == [True, True, False]
    none, optimal = rounding_checks(seed=0, instances=300)
    assert 0.9 < none.measured <= 1 and 0.8 < optimal.measured < 1
    assert not optimal.holds


def test_only_orthogonal_heads_have_norms_that_add_up():
    found = {check.setting.split()[0]: check for check in nuclear_checks(seed=1)}
    assert found.pop("gram_schmidt").holds
    assert found and not any(check.holds for check in found.values())
    assert all(check.ratio < 0.99 for name, check in found.items() if name != "rv_random_normal")


@pytest.fixture(scope="module")
def stationary():
    return list(stationarity_checks(seed=0, rounds=6000))


def test_where_the_theorem_on_convergence_fails(stationary):
    found = {check.setting: check for check in stationary if check.statement.startswith("stat")}
    alone = {setting: check.holds for setting, check in found.items()}
    lam = f"λ={LAM:g}, S=1"
    assert alone == {
        f"all of 8 equal clients, fixed scalars, {lam}": True,
        f"all of 8 equal clients, trained scalars, {lam}": False,
        "all of 8 clients, fixed scalars, λ=0, S=1": True,
        "2 of 8 clients, fixed scalars, λ=0, S=1": False,
        f"all of 8 clients, fixed scalars, {lam}": False,
        f"all of 8 clients, trained scalars, {lam}": False,
        f"2 of 8 clients, trained scalars, {lam}": False,
        f"2 of 8 clients, trained scalars, λ={LAM:g}, S=4": True,
    }
    undone = next(check for check in stationary if "undo" in check.statement)
    assert 0.1 < undone.measured < 1


def test_a_failure_stays_when_rounds_are_doubled(stationary):
    """The bound falls with T; what is measured does not, so it is no matter of patience."""
    problem = LeastSquares.draw(0, clients=8, heads=2, rank=3, spread=2.0)
    setting = Setting(0.0, 1 / (8 * problem.smoothness), 1, trained=False)
    short, long = (converge(problem, setting, 2, rounds, seed=0) for rounds in (3000, 6000))
    assert long.bound == pytest.approx(short.bound / 2)
    assert long.measured == pytest.approx(short.measured, rel=0.1)


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 99))
def test_steps_are_those_that_the_theorem_allows(seed):
    problem = LeastSquares.draw(seed, clients=8, heads=2, rank=3, spread=2.0)
    setting = Setting(LAM, 0.25 / (8 * problem.smoothness), 1, trained=True)
    course = converge(problem, setting, 8, 300, seed)
    assert setting.rate <= 1 / (8 * course.curvature)
    assert SCALAR_MAX > 1


@pytest.mark.parametrize(
    ("relation", "measured", "holds"),
    [("<=", 1.0, True), ("<=", 1.1, False), (">=", 0.9, False), ("=", 1 + 1e-12, True),
     ("=", 0.99, False), (">=", 1 - 1e-12, True)],
)  # fmt: skip
def test_a_check_allows_rounding_and_no_more(relation, measured, holds):
    assert Check("x", "y", measured, relation, 1.0).holds is holds
    assert math.isnan(Check("x", "y", 1.0, relation, 0.0).ratio)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, plain_figures):
    """The folder of a finished run of TRISHUL on overlapping bases, and one of FedIT; their ids."""
    folder = tmp_path_factory.mktemp("runs")
    ids = []
    for fields in (["method=trishul", "adapter.init=random_normal"], ["method=fedit"]):
        experiment = load_experiment(None, [*TINY, *fields, f"storage.runs={folder}"])
        run_experiment(experiment, RunProgress(2, Console(file=io.StringIO())))
        ids.append(experiment.id)
    return str(folder), *ids


def test_a_finished_run_is_checked_from_its_files(runs):
    folder, trishul, _ = runs
    home = Store.open(str(folder)).child(trishul)
    checks = run_checks(RunSummary.read(home), home)
    found = {check.statement.split(" (")[0]: check for check in checks}
    assert len(checks) == 6
    assert found["variance of uploads"].holds and found["variance of uploads"].measured > 0
    assert found["utility of chosen heads / best integers"].ratio > 0.99
    norm = found["nuclear norm of the update / sum over heads"]
    assert not norm.holds and 0.3 < norm.ratio < 1


def test_the_variance_of_one_upload_is_unbiased_and_one_alone_has_none(runs, tmp_path):
    folder, trishul, _ = runs
    home = Store.open(str(folder)).child(trishul)
    summary = RunSummary.read(home)
    (found, *_) = run_checks(summary, home)
    biased = summary.diagnostics["aggregation_variance"]
    arrays = dict(np.load(io.BytesIO(home.read("diagnostics.npz"))))
    uploads = arrays["clients"].shape[1]
    assert uploads > 1 and found.measured == pytest.approx(biased * uploads / (uploads - 1))
    arrays["clients"][-1, 1:] = -1
    alone = Store.open(str(tmp_path)).child("alone")
    np.savez(buffer := io.BytesIO(), **arrays)
    alone.write("diagnostics.npz", buffer.getvalue())
    alone.write("metrics.parquet", home.read("metrics.parquet"))
    assert not any("variance" in check.statement for check in run_checks(summary, alone))


@pytest.mark.parametrize(("rule", "count"), [("relative", 2), ("edge", 1), ("sure", 1)])
def test_what_the_server_has_shrunk_is_no_upload(rule, count):
    arrays = {f"spectrum_{name}": np.ones((3, 2)) for name in ("uploaded", "before", "after")}
    method = {"name": "trishul-rules", "scalar_max": 10.0, "rule": rule}
    found = list(_variance_checks(1.0, arrays, "a round", method))
    assert [check.bound for check in found] == [2.0, 200.0][:count]


def test_heads_that_have_moved_are_counted_where_they_ended(plain_figures, tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "MARGIN", 1.0)
    moving = ["method=trishul-moving", "method.move_every=1", "method.allocation=uniform"]
    more = ["federation.rounds=6", "federation.local_steps=6", "budget=2", "adapter.overflow=cap"]
    experiment = load_experiment(None, [*TINY, *moving, *more, f"storage.runs={tmp_path}"])
    run_experiment(experiment, RunProgress(6, Console(file=io.StringIO())))
    home = Store.open(str(tmp_path)).child(experiment.id)
    summary, last = RunSummary.read(home), read_metrics(home)[-1]
    ended = {name: int(last[f"heads/{name}"]) for name in summary.heads}
    assert ended != summary.heads
    tensors = load_tensors(home.read("adapter/adapter_model.safetensors"))
    ranks = [len(value) for name, value in tensors.items() if ".lora_A." in name]
    assert min(ranks) > min(ended[n] * summary.ranks[n] for n in ended)  # retired ones, too
    found = {check.statement.split(" (")[0]: check for check in run_checks(summary, home)}
    norm = found["nuclear norm of the update / sum over heads"]
    assert norm.holds and norm.setting.startswith(f"{len(ranks)} layers")
    norms = [summary.block_squared_norms[name] for name in ended]
    chosen = found["utility of chosen heads / uniform"]
    assert chosen.measured == utility(norms, list(ended.values()))


def test_the_command_prints_both(runs, called):
    folder, trishul, fedit = runs
    code, said, _ = called("theory", trishul, "--runs", folder)
    assert code == 0 and "eq. variance_bound" in said and re.search(r"holds +\d of 6", said)
    code, said, _ = called("theory", "--rounds", "20")
    assert code == 0 and "all of 8 equal clients" in said
    code, _, error = called("theory", fedit, "--runs", folder)
    assert code == 2 and "no core heads" in error
