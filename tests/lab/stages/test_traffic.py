"""Messages of runs: real bytes, error feedback, encoded broadcasts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from example_plugins import unloaded_after
from hypothesis import given
from hypothesis import strategies as st
from method_runs import Recording
from tolerances import rounding

from trishul_ray.adapters.layout import Unit
from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.lab.codecs.base import CODECS, build_codec
from trishul_ray.lab.codecs.stage import DownloadsConfig, Uploads, UploadsConfig, coded, unit_sizes
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import Change, ClientRoundInfo, stage_names

HALF = Path(__file__).parent / "example_plugins" / "half.py"
#: A core head, another one, and a tensor.
UNITS = tuple(
    Unit("name", kind, slice(first, last), slice(first, last), rank)
    for kind, first, last, rank in (
        ("core", 0, 16, 4), ("core", 16, 32, 4), ("classifier", 32, 50, None),
    )
)  # fmt: skip
SIZES = np.array([unit.size for unit in UNITS])


def uploads(codec, **fields):
    """Return the upload hook of a run of FedIT."""
    settings = SimpleNamespace(method=SimpleNamespace(name="fedit"))
    return Uploads(UploadsConfig(codec=codec, **fields), settings).send


def sender(round_number=1, active=None, kept=None):
    return ClientRoundInfo(0, round_number, 7, 1.0, UNITS, active, kept or {})


def change_of(rng, active=None, scale=1.0):
    values = (scale * rng.standard_normal(50)).astype(np.float32)
    if active is not None:
        values[np.repeat(~active, SIZES)] = 0
    return Change(values, {})


@pytest.mark.parametrize("name", CODECS.names())
def test_bytes_are_counted_and_untrained_units_skipped(name):
    active = np.array([True, False, True])
    each, change = uploads(name), change_of(np.random.default_rng(0), active)
    sent = each(change, sender(active=active))
    entries = np.repeat(active, SIZES)
    assert not sent.shared[~entries].any() and sent.shared[entries].any()
    codec = build_codec(UploadsConfig(codec=name))
    payload = codec.encode(change.shared, SIZES, sender().rng("codec"))
    assert sent.uploaded_bytes == len(payload) + 1  # and which units were trained
    np.testing.assert_array_equal(sent.shared, codec.decode(payload, SIZES))
    error = np.linalg.norm(sent.shared - change.shared) / np.linalg.norm(change.shared)
    assert sent.metrics["codec_error"] == pytest.approx(error)
    assert not sent.kept
    # The first filter must also not write to given arrays.
    np.testing.assert_array_equal(change.shared, change_of(np.random.default_rng(0), active).shared)


@pytest.mark.parametrize("name", CODECS.names())
def test_extra_vectors_of_a_method_are_coded(name):
    rng = np.random.default_rng(0)
    each = uploads(name, error_feedback=True)
    alone = each(change_of(rng), sender())
    change = replace(
        change_of(rng), extra={"control": change_of(rng).shared, "few": np.ones(3, "f4")}
    )
    both = each(change, sender())
    assert both.uploaded_bytes > alone.uploaded_bytes
    assert both.extra.keys() == {"control", "few"} and both.extra["few"].shape == (3,)
    for key in ("shared", "control"):
        given = change.shared if key == "shared" else change.extra[key]
        got = both.shared if key == "shared" else both.extra[key]
        np.testing.assert_array_equal(both.kept[f"left/{key}"], given - got)


@pytest.mark.parametrize("name", CODECS.names())
def test_short_vectors_are_sent_unchanged(name):
    """They are not changes: a fraction of 1 must not be read as 0, or corrected later."""
    rng, few = np.random.default_rng(0), np.float32([1, 1e-6, 0.5])
    each = uploads(name, error_feedback=True)
    alone, change = each(change_of(rng), sender()), change_of(np.random.default_rng(0))
    both = each(replace(change, extra={"few": few}), sender())
    np.testing.assert_array_equal(both.extra["few"], few)
    assert (
        both.uploaded_bytes == alone.uploaded_bytes + 12 and both.kept.keys() == alone.kept.keys()
    )


def test_change_that_is_not_finite_is_unchanged():
    change = change_of(np.random.default_rng(0))
    change.shared[3] = np.nan
    sent = uploads("int4", error_feedback=True)(change, sender())
    assert np.isnan(sent.shared[3]) and not sent.kept and sent.uploaded_bytes == 200


@pytest.mark.parametrize("name", CODECS.names())
@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 6), partly=st.booleans())
def test_error_feedback_sends_all_but_the_residual(name, seed, rounds, partly):
    rng = np.random.default_rng(seed)
    each = uploads(name, error_feedback=True)
    total, sent, kept, size = np.zeros(50), np.zeros(50), {}, 0.0
    for number in range(1, rounds + 1):
        active = rng.random(3) < 0.5 if partly else None
        change = change_of(rng, active, scale=10.0 ** rng.integers(-3, 3))
        result = each(change, sender(number, active, kept))
        if active is not None:
            idle = np.repeat(~active, SIZES)
            assert not result.shared[idle].any()
            before = kept.get("left/shared", np.zeros(50))
            np.testing.assert_array_equal(result.kept["left/shared"][idle], before[idle])
        kept = result.kept
        total += change.shared
        sent += result.shared
        size += np.abs(change.shared).max() + np.abs(kept["left/shared"]).max()
    # Two roundings per round: of the sum, and of its remainder.
    allowed = rounding(2, 2 * size + np.abs(sent).max())
    np.testing.assert_allclose(sent, total - kept["left/shared"], atol=allowed, rtol=0)


def records_of(result):
    return result.checkpoint.records[1:]


@pytest.mark.parametrize("codec", [*CODECS.names(), "half"])
def test_run_sends_fewer_bytes_with_every_codec(codec, edge_run):
    with unloaded_after():
        result = edge_run(
            "method=trishul", "rounds=2", f"plugins={HALF}", f"uploads.codec={codec}",
            f"downloads.codec={codec}",
        )  # fmt: skip
    for record in records_of(result):
        assert not record.refused and record.train_loss < 10
        assert record.uploaded_bytes < 0.55 * 4 * record.uploaded_parameters
        assert record.downloaded_bytes < 0.55 * 4 * record.downloaded_parameters
        metrics = record.metrics()
        assert metrics["uploaded_bytes"] == record.uploaded_bytes
        assert metrics["downloaded_bytes"] == record.downloaded_bytes
        assert record.stages["codec_error"] < 1


@pytest.mark.parametrize(
    ("method", "codec"),
    [("trishul", "int4"), ("scaffold", "int8"), ("scaffold", "topk")],
)
def test_resumed_run_sends_the_same_bytes(method, codec, edge_run, small, assert_same, tmp_path):
    options = [f"method={method}", f"uploads.codec={codec}", "uploads.error_feedback=true"]
    options += [f"downloads.codec={codec}", "method.head_fraction=0.5"][: 1 + (method == "trishul")]
    again = edge_run(*options, stop=2)
    place = f"storage.runs={tmp_path / 'whole'}"
    whole = edge_run(*options, place)
    assert_same(again, whole)
    stored = [
        open_checkpoints(small("resources.backend=inline", *options, *more)).newest().kept
        for more in ([], [place])
    ]
    assert len(stored[0]) == 4 and stored[0].keys() == stored[1].keys()
    for client, kept in stored[0].items():
        assert kept.keys() == stored[1][client].keys() >= {"left/shared"}
        for name, values in kept.items():
            np.testing.assert_array_equal(values, stored[1][client][name])
    assert not again.checkpoint.kept  # A result is small.


def test_run_bytes_follow_the_format(edge_run):
    result = edge_run("method=fedit", "uploads.codec=int8", "rounds=2", "downloads.codec=int8")
    units = list(result.spec.layout.units(result.spec.wire))
    each = sum(unit.size for unit in units) + 4 * len(units) + -(-len(units) // 8)
    assert records_of(result)[1].uploaded_bytes == 3 * each
    assert records_of(result)[1].downloaded_bytes == 3 * each


def test_training_uses_coded_broadcast_and_scores_state(small):
    experiment = small("resources.backend=inline", "method=fedit", "downloads.codec=int4")
    server = InlineDriver(experiment, prepare_run(experiment), "a")
    inner = server.executor
    server.executor = recording = Recording(inner)
    scored, inner_evaluate = [], inner.evaluate
    inner.evaluate = lambda sent, job: scored.append(sent) or inner_evaluate(sent, job)
    sizes = unit_sizes(server.spec.layout.units(server.spec.wire))
    codec = build_codec(experiment.section(DownloadsConfig))
    for number in (1, 2):
        whole = server.broadcast()
        server.step()
        rng = numpy_rng(experiment.seed, "codec-down", number)
        read = coded(codec, {"shared": whole.shared}, sizes, rng)[0]["shared"]
        np.testing.assert_array_equal(recording.broadcast.shared, read)
        assert (read != whole.shared).any()
        np.testing.assert_array_equal(scored[-1].shared, whole.shared)
    server.close()


def test_server_stores_the_exact_state(edge_run):
    """With one of ten entries sent, the server keeps the unsent nine tenths."""
    options = ["method=fedit", "rounds=1"]
    plain = edge_run(*options)
    coded = edge_run(*options, "downloads.codec=topk", "downloads.density=0.1")
    before, after = plain.checkpoint.state.shared, coded.checkpoint.state.shared
    assert (before != after).any()
    assert (after != 0).mean() > 0.5
    # The server's state is scored: before the first round, the untuned backbone.
    assert plain.checkpoint.records[0].scores == coded.checkpoint.records[0].scores


@pytest.mark.parametrize("method", ["trishul", "fedsb"])  # with and without a survey
def test_run_without_sections_has_no_stage(method, small, drive_to_end):
    experiment = small("resources.backend=inline", f"method={method}", "rounds=1")
    assert not {*stage_names()} & experiment.identity().keys()
    server = InlineDriver(experiment, prepare_run(experiment), "a")
    assert not list(server.stages) and not list(server.executor.context.stages)
    checkpoint = drive_to_end(server).checkpoint
    assert not checkpoint.kept and not checkpoint.stages
    assert not any(record.stages for record in checkpoint.records)
    server.close()


def test_codec_file_is_recorded_by_its_runs():
    with unloaded_after():
        used = load_experiment(None, [f"plugins={HALF}", "downloads.codec=half"])
        assert [plugin.name for plugin in used.plugins] == ["half"]
        assert used.identity()["plugins"] == [used.plugins[0].content]
        assert not load_experiment(None, [f"plugins={HALF}", "uploads.codec=int8"]).plugins


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["uploads.codec=int9"], r"uploads: unknown codec 'int9'; known: .*'int8'"),
        (["uploads.density=0.1"], r"uploads: density=0\.1 has no effect with codec='none'"),
        (["uploads.error_feedback=true"], r"uploads: error_feedback=true needs a codec"),
        (["downloads.codec=topk", "downloads.density=2"], r"downloads\.density=2"),
        (["downloads.error_feedback=true"], "unknown field 'downloads.error_feedback'"),
        (
            ["uploads.codec=int8", "uploads.error_feedback=true", "method=fedsvd"],
            r"uploads\.error_feedback=true .* method='fedsvd' changes its bases",
        ),
        (["method=flora", "downloads.codec=int8"], r"downloads: needs a method .*'flora'"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(InputError, match=message):
        load_experiment(None, fields)
