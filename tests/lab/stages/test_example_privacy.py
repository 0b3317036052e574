"""DP-SGD in local steps: gradients per example, clipping, noise, accounting, bad input."""

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from method_runs import PUBLISHED, SINGLE, server_of
from opacus.accountants import PRVAccountant
from scipy.stats import chi2, chisquare, norm

from trishul_ray.adapters.model import AdaptedModel
from trishul_ray.data.sampling import uniform_cohort
from trishul_ray.errors import InputError, PermanentError
from trishul_ray.experiment.compatibility import check_fits
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.messages import TrainJob
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.context import bound
from trishul_ray.federation.worker.local import LocalSteps
from trishul_ray.lab.privacy.accounting import multiplier, spent
from trishul_ray.lab.privacy.config import CLIP_NORM, CLIPPED, EPSILON, NORM
from trishul_ray.lab.privacy.example import (
    NOISE,
    OUTSIDE,
    SIGNAL,
    ExamplePrivacy,
    Exposure,
    clip_factors,
    most_exposed,
    noise_for,
    row_norms,
)
from trishul_ray.lab.privacy.stage import Privacy
from trishul_ray.methods.base import method_class
from trishul_ray.stages import LocalStep, Stages

EXAMPLE = "privacy.unit=example"
ADAPTERS = [name for name in PUBLISHED if not method_class(name).train_all]
#: Methods that read rows only in local steps; Fed-SB also reads them in its survey.
ACCEPTED = [
    name
    for name in SINGLE
    if not method_class(name).train_all and not method_class(name).reads_rows and name != "fedsb"
]


def refused(*overrides):
    with pytest.raises(InputError) as error:
        load_experiment(None, [EXAMPLE, *overrides])
    assert "\n" not in str(error.value)
    return str(error.value)


def stage_with(*overrides):
    (stage,) = Stages.of(load_experiment(None, [EXAMPLE, *overrides]))
    return stage


def step_of(gradients, *, noise=0.0, norm=1.0, batch_size=None, number=1, seed=0):
    """A step on rows whose gradients are given, [n, P]; by default with sampling rate 1."""
    table = torch.as_tensor(gradients, dtype=torch.float32)
    return LocalStep(
        seed=seed, round=1, client=0, step=number, rows=np.arange(len(table)),
        batch_size=batch_size or len(table), grad=torch.full(table.shape[1:], 7.0), trained=None,
        instructions={NOISE: noise, CLIP_NORM: norm}, metrics={},
        examples=lambda rows: (torch.ones(len(rows)), table[rows]),
    )  # fmt: skip


@pytest.fixture
def local(small, tmp_path):
    """``local("method=ravan", ...)`` -> the steps of a client in round 2, at moved adapters."""

    def make(*overrides, double=False):
        experiment = small("resources.backend=inline", "evaluation.limit=8", *overrides)
        inline = InlineExecutor(experiment, prepare_run(experiment))
        server = server_of(inline, tmp_path, experiment.id)
        server.step()
        context, state = inline.context, server.checkpoint.client_states.get(0, {})
        if double:
            module, context.dtype = context.model.detach().double(), torch.float64
            context.model = AdaptedModel(
                module, context.method.adapters(context.targets), seed=0, train_head=True
            )
        job = TrainJob(2, 0, state, instructions=server.stages.instruct(2))
        steps = LocalSteps(context, server.broadcast(), [job])
        generator = torch.Generator().manual_seed(1)
        vector = steps.clients[0].run.vector
        vector += 0.02 * torch.randn(vector.shape, generator=generator)
        return steps

    return make


def gradients_of(steps, rows):
    """The gradient of the mean loss of some rows as plain steps compute it, [P]."""
    (client,) = steps.clients
    context, grad = steps.context, torch.zeros_like(client.run.vector)
    with bound(context, client.trained, grad):
        context.task.losses(context.model, context.train_batch(rows), 1).sum().backward()
    mask = client.step(1).trained
    return grad if mask is None else grad * mask


KINDS = [
    *([f"method={name}"] for name in ADAPTERS),
    *(["method=fedavg", f"method.adapter={kind}"] for kind in ("lora", "ffa", "multihead")),
    ["method=trishul", "adapter.path=merged"],
    ["method=ravan", "federation.compute=uniform"],
    ["method=fedit", "dataset=synthetic/sst2", "model=bert-tiny", "task.max_length=16"],
]


@pytest.mark.parametrize("words", KINDS, ids=" ".join)
def test_gradients_per_example_equal_a_loop(words, local):
    """In float64, up to float32 of the sums of a leaf; BERT's pooler is among the trainables."""
    steps = local(*words, double=True)
    (client,) = steps.clients
    rows = client.step(1).rows[:5]
    losses, found = client.step(1).examples(rows)
    expected = torch.stack([gradients_of(steps, rows[i : i + 1]) for i in range(len(rows))])
    assert found.shape == expected.shape and losses.shape == (5,)
    for name, view in steps.context.model.layout.views(found).items():
        other = steps.context.model.layout.views(expected)[name]
        torch.testing.assert_close(view, other, rtol=1e-5, atol=2e-7 * float(other.abs().max()))
    trained = client.step(1).trained
    moves = found.abs().amax(dim=0) > 0
    shared = torch.ones_like(moves) if trained is None else trained.bool()
    assert float(moves[shared].float().mean()) > 0.5  # the adapter and the head have gradients


@pytest.mark.parametrize("words", ["trishul", "fedit model.precision=bf16", "rolora"])
def test_step_without_noise_and_clipping_is_plain(words, local):
    options = [f"method={words.split()[0]}", *words.split()[1:], "privacy.noise=0"]
    steps = local(EXAMPLE, "privacy.clip=1e9", *options)
    (client,), stage = steps.clients, steps.context.stages.of_gradients
    step = client.step(1)
    draws = step.rng("example-batch").random(len(step.rows))
    rows = step.rows[draws < step.batch_size / len(step.rows)]
    with steps.bound():
        loss = stage.gradient(step)
    share = len(rows) / step.batch_size  # the denominator is q n, not the size of the batch
    expected = gradients_of(steps, rows) * share
    limit = 2e-2 if "bf16" in words else 1e-5
    assert float((step.grad - expected).norm() / expected.norm()) < limit
    assert len(rows) != step.batch_size and 0 < float(loss) < 10
    assert step.metrics[CLIPPED] == 0.0 < step.metrics[NORM]


def test_chunks_change_only_rounding(local):
    steps = local(EXAMPLE, "privacy.noise=0", "privacy.chunk=3")
    (client,) = steps.clients
    stages = [stage_with("privacy.noise=0", f"privacy.chunk={n}") for n in (3, 64)]
    found = []
    with steps.bound():
        for stage in stages:
            step = client.step(2)
            stage.gradient(step)
            found.append(step.grad.clone())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@given(
    values=arrays(np.float32, (6, 9), elements=st.floats(-1e6, 1e6, width=32)),
    bound=st.floats(1e-3, 1e3),
)
def test_clipped_gradients_and_neighbors_are_within_clip(values, bound):
    gradients = torch.from_numpy(values)
    clipped = (clip_factors(row_norms(gradients), bound)[:, None] * gradients).double()
    norms = clipped.norm(dim=1)
    assert float(norms.max()) <= bound * (1 + 1e-6)
    long = gradients.double().norm(dim=1) > bound
    assert torch.allclose(norms[long], torch.tensor(bound, dtype=torch.float64), rtol=1e-6)
    assert torch.equal(clipped[~long], gradients[~long].double())
    # The sum of a step with and without an example: with rate 1 it is the gradient times n.
    stage, whole = stage_with("privacy.noise=0"), step_of(values, norm=bound)
    stage.gradient(whole)
    for left_out in range(6):
        rest = step_of(np.delete(values, left_out, axis=0), norm=bound)
        stage.gradient(rest)
        moved = (whole.grad.double() * 6 - rest.grad.double() * 5).norm()
        assert float(moved) <= bound * (1 + 1e-5)


def test_long_gradients_are_clipped_to_1e_6():
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(4, 300_001, generator=generator) * torch.logspace(-3, 3, 4)[:, None]
    factors = clip_factors(row_norms(gradients), 0.1)
    norms = (factors[:, None].double() * gradients.double()).norm(dim=1)
    assert float((norms / 0.1 - 1).abs().max()) < 1e-6


def test_noise_has_its_mean_variance_and_distribution():
    """At 1e5 numbers, with limits at 1e-6; every step has separate noise that repeats."""
    stage, numbers, noise, bound = stage_with("privacy.noise=1"), 100_000, 1.7, 3.0
    found = []
    for number in (1, 1, 2):
        step = step_of(np.zeros((4, numbers)), noise=noise, norm=bound, number=number)
        stage.gradient(step)
        found.append(step.grad.double().numpy() * 4 / (noise * bound))
    np.testing.assert_array_equal(found[0], found[1])
    assert abs(np.corrcoef(found[0], found[2])[0, 1]) < 5 / math.sqrt(numbers)
    for values in found[1:]:
        assert abs(values.mean()) < 5 / math.sqrt(numbers)
        assert chi2.ppf(1e-6, numbers) < np.square(values).sum() < chi2.isf(1e-6, numbers)
        counts = np.histogram(values, norm.ppf(np.linspace(0, 1, 101)))[0]
        assert chisquare(counts).pvalue > 1e-6


def test_batches_are_poisson_samples():
    stage, sizes, rows = stage_with("privacy.noise=0"), [], np.ones((50, 1))
    for number in range(1, 2001):
        step = step_of(rows, norm=1e9, batch_size=5, number=number)
        stage.gradient(step)
        sizes.append(round(float(step.grad[0]) * 5))
    # Sums of 2,000 draws of Binomial(50, 0.1): limits at five standard deviations.
    assert abs(np.mean(sizes) - 5) < 5 * math.sqrt(4.5 / 2000)
    assert np.var(sizes) == pytest.approx(4.5, rel=0.2) and min(sizes) == 0


def test_empty_batch_is_a_step_of_noise(local):
    steps = local(EXAMPLE, "privacy.noise=1", "federation.batch_size=1")
    (client,) = steps.clients

    def is_empty(number):
        step = client.step(number)
        return not (step.rng("example-batch").random(len(step.rows)) < 1 / len(step.rows)).any()

    number = next(n for n in range(1, 100) if is_empty(n))
    before, step = client.run.vector.clone(), client.step(number)
    with steps.bound():
        loss = steps._stage.gradient(step)
        steps.finish(1, loss[None])
    assert float(loss) == 0 and (client.run.vector != before).float().mean() > 0.99


def test_clients_report_clipping_and_signal():
    stage = stage_with("privacy.noise=1")
    step = step_of([[3.0, 4.0], [0.3, 0.4]], noise=2.0)
    stage.gradient(step)
    second = replace(step, step=2, examples=lambda rows: (torch.ones(2), torch.zeros(2, 2)))
    stage.gradient(second)
    assert step.metrics[CLIPPED] == pytest.approx((0.5 + 0) / 2)
    assert step.metrics[NORM] == pytest.approx((2.75 + 0) / 2)
    assert step.metrics[SIGNAL] == pytest.approx(1.5 / (2 * math.sqrt(2)) / 2)


CASES = [
    (0.7, 32 / 22449, 96), (1.0, 0.01, 1000), (1.1, 0.05, 400), (0.6, 0.0089, 100),
    (2.0, 0.5, 60), (5.0, 1.0, 20),
]  # fmt: skip


@pytest.mark.parametrize(("noise", "rate", "steps"), CASES)
def test_epsilon_equals_that_of_other_accountants(noise, rate, steps):
    found = spent(noise, rate, steps, 1e-5)
    prv = PRVAccountant()
    prv.history = [(noise, rate, steps)]
    assert found == pytest.approx(prv.get_epsilon(delta=1e-5, eps_error=1e-3), rel=0.01)
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = pld.PLDAccountant(relation).compose(event, steps)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)


exposure_lists = st.lists(
    st.builds(Exposure, st.sampled_from([0.01, 0.02, 0.1]), st.integers(1, 50)), min_size=1
)


@given(found=exposure_lists)
def test_front_has_every_largest_exposure(found):
    front = most_exposed(found)
    for each in found:
        assert any(e.rate >= each.rate and e.steps >= each.steps for e in front)
        assert (each in front) != any(
            e != each and e.rate >= each.rate and e.steps >= each.steps for e in found
        )


def test_noise_is_the_smallest_within_epsilon():
    front = (Exposure(0.1, 50), Exposure(0.05, 150))
    noise = noise_for(2.0, front, 1e-5)

    def largest(z):
        return max(spent(z, each.rate, each.steps, 1e-5) for each in front)

    number = next(n for n in range(31_001) if multiplier(n) == noise)
    assert largest(noise) <= 2.0 < largest(multiplier(number - 1))


def test_run_spends_its_epsilon_on_the_worst_client(edge_run, small):
    options = [EXAMPLE, "privacy.epsilon=3", "method=fedit", "federation.clients_per_round=2"]
    result, sizes = edge_run(*options), prepare_run(small(*options)).shards.sizes
    records, memory = result.checkpoint.records[1:], result.checkpoint.stages["privacy"]
    trained = np.zeros(4, dtype=np.int64)
    for record in records:
        drawn = uniform_cohort(0, record.round, 4, 2)
        assert record.clients == drawn
        trained[drawn] += 4  # local steps
        each = [
            spent(memory["noise"], min(1.0, 8 / n), int(t), 1e-5)
            for n, t in zip(sizes, trained, strict=True)
        ]
        assert record.stages[EPSILON] == max(each)
        assert 0 < record.stages[CLIPPED] <= 2 and record.stages[SIGNAL] > 0
    assert 2.9 < max(each) <= 3 and memory["median"] == np.median(each)
    first, second = (event for event in result.events if event.startswith("privacy"))
    assert f"ε = {max(each):.3g} at most ({np.median(each):.3g} for the median client)" in first
    assert f"z = {memory['noise']:g}" in first and "signal-to-noise ratio of a step" in second


@pytest.mark.parametrize("method", ["fedit", "ffalora", "fedsvd", "fedex", "trishul", "scaffold"])
def test_adapters_change_and_runs_resume(method, edge_run, tmp_path):
    options = [EXAMPLE, "privacy.noise=1", f"method={method}"]
    whole = edge_run(*options, f"storage.runs={tmp_path / 'one'}")
    parts = edge_run(*options, f"storage.runs={tmp_path / 'two'}", stop=2)
    assert whole.digest == parts.digest
    spec, state = whole.spec, whole.checkpoint.state
    start = spec.initial
    moved = 0
    for unit in spec.layout.units(spec.wire):
        if unit.kind != "classifier":
            moved += int((state.shared[unit.wire] != start[unit.span]).sum())
    assert moved > 0 or state.base
    last = whole.checkpoint.records[-1].stages
    assert last == parts.checkpoint.records[-1].stages and last[EPSILON] > 0


def test_infinite_epsilon_is_reported(edge_run):
    result = edge_run(EXAMPLE, "privacy.noise=0", "method=fedit", "federation.rounds=1")
    assert EPSILON not in result.checkpoint.records[-1].stages
    assert "privacy: ε = ∞ (privacy.noise=0)" in "".join(result.events)


@pytest.mark.parametrize("method", ACCEPTED)
def test_methods_without_a_survey_are_accepted(method):
    experiment = load_experiment(None, [EXAMPLE, "privacy.noise=1", f"method={method}"])
    (stage,) = Stages.of(experiment)
    assert isinstance(stage, ExamplePrivacy) and experiment.is_set("privacy")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("method=fedsb", "reads rows in a survey"),
        ("method.allocation=gradient", "reads rows in a survey"),
        ("method=ditto", "method='ditto' reads rows outside of local steps"),
        ("method=scaffold method.option=I", "method.option='I' reads rows"),
        ("method=ravan method.selection=gradient", "method.selection='gradient'"),
        ("method=fullft", "method='fullft' trains the backbone"),
        ("federation.stacked=2", "federation.stacked=2: privacy computes"),
        ("method=fedit adapter.dropout=0.1", "set adapter.dropout=0"),
        ("model.dropout=true", "set model.dropout=false"),
        ("resources.cuda_graphs=true", "resources.cuda_graphs=true: privacy"),
        ("privacy.budget=3", "privacy: budget=3.0 has no effect with privacy.unit='example'"),
        ("privacy.sampling=fixed", "privacy: sampling='fixed' has no effect with"),
        ("privacy.noise=0.001", "too small for an accountant"),
        ("privacy.unit=client privacy.chunk=8", "privacy: chunk=8 has no effect with"),
        ("devices.kind=lognormal cohort.deadline=1", "is not supported with privacy"),
    ],
)
def test_unsupported_experiments_are_rejected_in_one_line(words, said):
    assert said in refused("privacy.noise=1", *words.split())


def test_methods_that_read_rows_are_rejected(monkeypatch):
    monkeypatch.setattr(method_class("fedit"), "reads_rows", True)
    assert "method='fedit' reads rows outside of" in refused("privacy.noise=1", "method=fedit")


def test_unit_without_epsilon_is_rejected():
    assert "unit='example' has no effect without privacy.epsilon" in refused()


def test_unreachable_epsilon_is_rejected_before_a_run(small):
    experiment = small(EXAMPLE, "privacy.epsilon=0.001")
    with pytest.raises(InputError, match=r"privacy\.epsilon=0\.001 is below the ε of the most"):
        prepare_run(experiment)


def test_token_means_are_rejected_before_a_run(small):
    words = ["dataset=synthetic/sst2", "model=t5-tiny", EXAMPLE, "privacy.noise=1"]
    with pytest.raises(InputError, match="is a mean over the tokens of a batch"):
        prepare_run(small(*words))


def test_other_gradients_than_of_steps_are_rejected(local):
    steps = local(EXAMPLE, "privacy.noise=1")
    with pytest.raises(PermanentError, match=r"Trishul reads run\.gradient\(\), and the section"):
        steps.clients[0].run.gradient(1)


def test_report_names_the_guarantee(small):
    experiment = small(EXAMPLE, "privacy.noise=1", "method=fedit")
    (stage,) = Stages.of(experiment)
    stage.memory = {"noise": 1.0, "delta": 1e-5, "rate": 0.1, "steps": 12, "median": 2.0}
    report = stage.report({EPSILON: 3.0})
    assert (report["epsilon"], report["epsilon_median"], report["noise"]) == (3.0, 2.0, 1.0)
    client = {"epsilon": 2.0, "clients": 4, "cohort": 3}
    for text in (report["sentence"], Privacy.remark([report]), Privacy.remark([report, client])):
        assert "noise is reproducible from the seed" in text and OUTSIDE in text
    assert "cohorts of 3 of 4" in Privacy.remark([report, client])


def test_layers_of_the_head_are_checked(small, monkeypatch):
    from trishul_ray.experiment import compatibility

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.classifier = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)

    monkeypatch.setattr(compatibility, "_shapes", lambda experiment: Net())
    experiment = small(EXAMPLE, "privacy.noise=1", "adapter.targets=query", "method=fedit")
    with pytest.raises(InputError, match="gradients per example only train linear layers"):
        check_fits(experiment)
    check_fits(small("adapter.targets=query", "method=fedit"))
