"""Private runs: kinds of methods, resumed runs, empty cohorts, rejections, budgets."""

import math

import numpy as np
import pytest
from method_runs import KINDS, SINGLE, Recording, server_of

from trishul_ray.errors import InputError, PermanentError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver, InlineExecutor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.lab.privacy import accounting
from trishul_ray.lab.privacy.stage import OUTSIDE, SURVEY_NORM, Privacy, guarantee, poisson_cohort
from trishul_ray.methods.base import method_class
from trishul_ray.runs.runner import central_twin
from trishul_ray.stages import Cohort, Stages, norm_of


def refused(*overrides):
    with pytest.raises(InputError) as error:
        load_experiment(None, list(overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_private_run_records_its_epsilon(edge_run):
    result = edge_run("method=trishul", "privacy.noise=1", "federation.rounds=2")
    records = result.checkpoint.records
    epsilons = [record.stages["privacy_epsilon"] for record in records[1:]]
    assert 0 < epsilons[0] < epsilons[1]
    for record in records[1:]:
        clients = poisson_cohort(0, record.round, 4, 3)
        assert record.clients == clients and 0 <= record.stages["privacy_clipped"] <= 1
        assert record.stages["privacy_clip_norm"] > 0
    assert np.isfinite(result.checkpoint.state.shared).all()


def test_first_norm_is_an_optimizer_walk(edge_run):
    result = edge_run("method=scaffold", "privacy.noise=1", "federation.rounds=1")
    numbers = sum(result.spec.expected.lengths.values())
    norm = result.checkpoint.records[1].stages["privacy_clip_norm"]
    assert norm == 0.01 * math.sqrt(4 * numbers)
    # The variate is clipped together with it.
    assert numbers == 2 * len(result.checkpoint.state.shared)


@pytest.mark.parametrize("method", ["fedsvd", "rolora"])
def test_first_norm_counts_uploads_of_a_round(method, edge_run):
    record = edge_run(f"method={method}", "privacy.noise=1", "federation.rounds=1")
    sent = record.checkpoint.records[1].uploaded_parameters // len(
        record.checkpoint.records[1].clients
    )
    norm = record.checkpoint.records[1].stages["privacy_clip_norm"]
    assert norm == 0.01 * math.sqrt(4 * sent)


@pytest.mark.parametrize("method", KINDS)
def test_full_cohort_without_noise_is_plain_mean(method, edge_run):
    """Compare up to rounding, which local steps of later rounds amplify (Adam)."""
    everyone = [f"method={method}", "federation.clients_per_round=4", "rounds=1"]
    plain, private = edge_run(*everyone), edge_run(*everyone, "privacy.noise=0", "privacy.clip=1e6")
    first, second = (run.checkpoint.state.shared for run in (plain, private))
    np.testing.assert_allclose(second, first, atol=1e-6, rtol=0)
    assert "privacy_epsilon" not in private.checkpoint.records[-1].stages  # It has no epsilon.
    assert "privacy: ε = ∞ (privacy.noise=0)" in "".join(private.events)


@pytest.mark.parametrize("method", ["trishul", "scaffold"])
def test_resumed_run_keeps_bytes_and_epsilon(edge_run, tmp_path, method):
    options = ["privacy.epsilon=8", "federation.clients=20"]
    whole = edge_run(f"method={method}", *options, f"storage.runs={tmp_path / 'one'}")
    parts = edge_run(f"method={method}", *options, f"storage.runs={tmp_path / 'two'}", stop=2)
    assert whole.digest == parts.digest
    for one, two in zip(whole.checkpoint.records, parts.checkpoint.records, strict=True):
        assert one.stages == two.stages
    assert whole.checkpoint.records[-1].stages["privacy_epsilon"] == pytest.approx(8, rel=0.01)


def test_run_keeps_its_initial_noise_scale(edge_run, small, monkeypatch, tmp_path):
    """Another version of the library may find another z for the same epsilon."""
    words = ["method=fedit", "privacy.epsilon=8"]
    whole = edge_run(*words, f"storage.runs={tmp_path / 'whole'}")
    experiment = small("resources.backend=inline", *words)
    driver = InlineDriver(experiment, prepare_run(experiment), "a")
    driver.step()
    driver.close()
    known = guarantee(experiment).noise
    monkeypatch.setattr(accounting, "smallest_noise", lambda epsilon, target: 2 * known)
    accounting.with_noise_for.cache_clear()
    assert guarantee(experiment).noise > known
    again = edge_run(*words)
    accounting.with_noise_for.cache_clear()
    assert "continuing after round 1" in again.events and again.digest == whole.digest
    last = again.checkpoint.records[-1].stages
    reports = Stages.of(experiment).reports(again.checkpoint.stages, last)
    assert reports["privacy"]["noise"] == known


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_survey_is_one_more_release(edge_run, small, sampling):
    """Fed-SB's bases: epsilon after t rounds equals t + 1 rounds of a method without a survey."""
    words = ["privacy.noise=2", f"privacy.sampling={sampling}"]
    found = edge_run("method=fedsb", *words, "rounds=2")
    one, two = (record.stages["privacy_epsilon"] for record in found.checkpoint.records[1:])
    plain = guarantee(small("method=fedit", *words, "rounds=3"))
    assert [one, two] == [plain.epsilon(2), plain.epsilon(3)]
    assert any("rounds and a survey" in event for event in found.events)
    assert guarantee(small("method=fedsb", "privacy.epsilon=8", "rounds=2")).epsilon() <= 8


def test_survey_response_is_clipped_noisy_and_normalized(small, tmp_path):
    experiment = small("method=fedsb", "privacy.noise=3", "federation.clients_per_round=2")
    inline = InlineExecutor(experiment, prepare_run(experiment))
    executor = Recording(inline)
    executor.context = inline.context
    server = server_of(executor, tmp_path)
    clients, norms = poisson_cohort(0, 0, 4, 2), []
    total = {}
    for upload in executor.uploads:
        norms.append(norm_of(upload.arrays.extra.values()))
        for layer, answer in upload.arrays.extra.items():
            total[layer] = total.get(layer, 0) + answer.astype(np.float64)
    assert [upload.client for upload in executor.uploads] == clients != []
    assert max(norms) <= SURVEY_NORM and min(norms) > 0.999 * SURVEY_NORM
    mean = server.survey()
    noise = np.concatenate([(mean[layer] - total[layer] / 2).ravel() for layer in mean])
    assert noise.std() == pytest.approx(3 * SURVEY_NORM / 2, rel=5 / np.sqrt(2 * noise.size))
    assert server.checkpoint.records[0].uploaded_parameters == len(clients) * noise.size
    server.stages.cohort = lambda number, cohort: Cohort([])
    again = server.survey()
    for layer, answer in again.items():  # only the same noise
        np.testing.assert_allclose(answer, mean[layer] - total[layer] / 2, atol=1e-12)
    assert server.checkpoint.records[0].uploaded_parameters == 0
    inline.close()


def test_round_with_empty_cohort_adds_noise(edge_run):
    """With 1 of 4 clients on average, some of the seed's first rounds have no clients."""
    result = edge_run(
        "method=fedit", "federation.clients_per_round=1", "federation.rounds=6",
        "privacy.noise=1", "privacy.clip=0.01",
    )  # fmt: skip
    empty = [record for record in result.checkpoint.records[1:] if not record.clients]
    assert empty and all(record.train_loss is None for record in empty)
    assert all("privacy_epsilon" in record.stages and record.scored for record in empty)


@pytest.mark.parametrize("words", ["trishul", "scaffold", "fedit federation.stacked=2"])
def test_diverging_clients_count_as_zeros(words, edge_run):
    """Ending the run would reveal their data. All clients diverge here."""
    options = [*f"method={words}".split(), "optimizer.lr=1e30", "rounds=2"]
    result = edge_run(*options, "privacy.noise=1", "privacy.clip=1e-6")
    for record in result.checkpoint.records[1:]:
        assert record.clients and len(record.refused) == len(record.clients)
        assert record.train_loss is None and record.scored
        assert all(map(math.isfinite, record.metrics().values()))
    assert np.isfinite(result.checkpoint.state.shared).all()
    with pytest.raises(PermanentError, match="is not finite at round 1"):
        edge_run(*options)


def test_limited_units_are_divided_by_expected_share(edge_run):
    """All heads of a layer are equally likely, so their noise has one deviation."""
    result = edge_run(
        "method=ravan", "method.head_fraction=0.5", "federation.rounds=1",
        "privacy.noise=1000", "privacy.clip=1", "federation.clients_per_round=4",
    )  # fmt: skip
    spec = result.spec
    moved = result.checkpoint.state.shared.astype(np.float64) / (1000 / 4)  # z S / m
    units = list(spec.layout.units(spec.wire))
    cores = np.concatenate([moved[unit.wire] for unit in units if unit.rank is not None])
    rest = np.concatenate([moved[unit.wire] for unit in units if unit.rank is None])
    assert cores.std() == pytest.approx(2.0, rel=5 / np.sqrt(cores.size))
    assert rest.std() == pytest.approx(1.0, rel=5 / np.sqrt(rest.size))


def test_head_shares_average_client_capacities():
    from trishul_ray.adapters.layout import Layout
    from trishul_ray.methods.base import build_method

    layout = Layout.of([("a.core", (4, 2, 2)), ("a.scale", (4,)), ("head:w", (3,))])
    method = build_method(load_experiment(None, ["method=ravan"]).method)
    shares = method.unit_shares(layout, [0.25, 0.5, 1.0, 1.0])
    np.testing.assert_allclose(shares, [2.75 / 4] * 4 + [1.0])


@pytest.mark.parametrize(
    "setting",
    ["privacy.noise=1", "uploads.codec=int8", "downloads.codec=int8", "server.optimizer=sgd"],
)
def test_methods_beyond_the_mean_are_rejected(setting):
    section = setting.partition(".")[0]
    needy = [name for name in SINGLE if not method_class(name).aggregates_mean_only]
    assert len(needy) > 5
    for name in needy:
        assert refused(setting, f"method={name}").startswith(f"{section}: needs a method")


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["privacy.epsilon=2", "privacy.noise=1"], "privacy.epsilon=2 and privacy.noise=1"),
        (["privacy.clip=1"], "privacy: clip=1.0 has no effect"),
        (["privacy.epsilon=2", "privacy.budget=3"], "privacy.budget=3 needs privacy.noise"),
        (["privacy.noise=1", "federation.weighting=size"], "federation.weighting='size'"),
        *(
            (["privacy.noise=1", f"method.allocation={name}"], "set method.allocation=waterfill")
            for name in ("gradient", "curvature")
        ),
        (
            ["privacy.noise=1", "method=ravan", "method.selection=weight"],
            "method.selection='weight'",
        ),
        (["privacy.noise=1", "privacy.budget=0.01"], "privacy.budget=0.01 is below the ε"),
        (["privacy.epsilon=-1"], "privacy.epsilon=-1"),
        (["privacy.noise=1", "privacy.delta=2"], "privacy.delta=2"),
    ],
)  # fmt: skip
def test_settings_that_break_the_guarantee_are_rejected(overrides, said):
    assert said in refused(*overrides)


def test_budget_limits_rounds_and_keeps_the_id():
    options = ["privacy.noise=1.5", "federation.clients=100", "federation.clients_per_round=10"]
    cut = load_experiment(None, [*options, "privacy.budget=3", "federation.rounds=100"])
    rounds = cut.federation.rounds
    assert 1 < rounds < 100
    same = load_experiment(None, [*options, f"federation.rounds={rounds}"])
    assert same.id == cut.id
    again = type(cut).model_validate(cut.to_dict())
    assert again.federation.rounds == rounds


def test_unreachable_epsilon_fails_before_any_file(small):
    with pytest.raises(InputError, match=r"privacy\.epsilon=0\.0001 is below"):
        guarantee(small("privacy.epsilon=0.0001"))


def test_a_report_names_the_guarantee_and_its_limits(small):
    stage = Privacy(None, small("method=fedit", "privacy.noise=1", "federation.rounds=2"))
    stage.memory = {"noise": 1.0}
    report = stage.report({"privacy_epsilon": 3.0, "privacy_clip_norm": 0.1})
    assert (report["epsilon"], report["noise"]) == (3.0, 1.0)
    assert "Poisson cohorts of 3 of 4 clients" in report["sentence"]
    remark = Privacy.remark([report, report | {"epsilon": None}])
    assert "(1 runs)" in remark and "cohorts of 3 of 4" in remark
    for text in (report["sentence"], remark):
        assert "noise is reproducible from the seed" in text
        assert f"utside the guarantee: {OUTSIDE}" in text


def test_central_twin_has_no_privacy_and_no_traffic(small):
    sections = ["privacy.noise=1", "uploads.codec=int4", "downloads.codec=int4"]
    twin, plain = central_twin(small(*sections)), central_twin(small())
    assert twin.id == plain.id and twin.to_dict().keys() == plain.to_dict().keys()


@pytest.mark.parametrize(
    ("words", "codec"),
    [
        ("trishul", "topk"), ("scaffold", "int8"), ("scaffold", "none"),
        ("trishul method.head_fraction=0.5", "none"), ("trishul method.head_fraction=0.5", "topk"),
    ],
)  # fmt: skip
def test_encoded_and_masked_contributions_are_clipped(small, tmp_path, words, codec):
    """Decoded uploads have at most the norm, over all tensors of a client; epsilon is the same."""
    options = [*f"method={words}".split(), f"uploads.codec={codec}"]
    experiment = small("privacy.noise=1", "privacy.clip=0.05", *options)
    inline = InlineExecutor(experiment, prepare_run(experiment))
    executor = Recording(inline)
    executor.context = inline.context
    server = server_of(executor, tmp_path)
    server.step()
    norms = [norm_of([u.arrays.shared, *u.arrays.extra.values()]) for u in executor.uploads]
    assert norms and max(norms) <= 0.05 and min(norms) > 0.0499  # All changes were longer.
    sizes = server.spec.expected.unit_sizes
    for upload in executor.uploads:
        assert (upload.active is None) == ("fraction" not in words)
        if upload.active is not None:
            rests = np.repeat(~upload.active, sizes)
            assert rests.any() and not upload.arrays.shared[rests].any()
    record = server.checkpoint.records[-1]
    assert record.stages["privacy_epsilon"] == guarantee(experiment).epsilon(1)
    assert record.stages["privacy_clipped"] == 1
    inline.close()
