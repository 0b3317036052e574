"""Runs on the clock: changed and unchanged results, in whole runs on digits."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trishul_ray.contract.methods import without_timings
from trishul_ray.errors import InputError, RunError
from trishul_ray.experiment.identity import check_content
from trishul_ray.experiment.loading import build_experiment
from trishul_ray.federation.on_ray.driver import open_driver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.lab.clock.devices import Devices, DevicesConfig
from trishul_ray.lab.clock.stage import Clock
from trishul_ray.runs.runner import central_twin

ON = "devices.kind=lognormal"
#: A backbone of more patches, dominated by its layers, so that some clients miss a deadline.
DIGITS = "model=vit-digits"
#: All policies: some clients disappear, some are late.
ALL = [
    ON, "devices.speed=8e6", "cohort.extra=1.3", "cohort.deadline=60", "cohort.dropout=0.2",
    "federation.clients=12",
]  # fmt: skip


def clocks(result):
    return [record.stages["simulated_seconds"] for record in result.checkpoint.records[1:]]


def without_clock(result):
    records = without_timings(result.checkpoint.records)
    return [{k: v for k, v in r.items() if k not in ("stages", "missing")} for r in records]


def test_devices_do_not_change_cohorts_or_model(edge_run):
    plain, timed = edge_run("method=ravan"), edge_run("method=ravan", ON)
    assert timed.digest == plain.digest
    assert without_clock(timed) == without_clock(plain)
    assert not any(r.stages or r.missing for r in plain.checkpoint.records)
    assert clocks(timed)[0] > 0
    # Selecting exactly m clients and waiting for all is not a policy. Nor is a long deadline.
    for words in (["cohort.extra=1.0", "cohort.deadline=null"], ["cohort.deadline=1e9"]):
        same = edge_run("method=ravan", ON, *words)
        assert (same.digest, clocks(same)) == (plain.digest, clocks(timed))
        assert without_clock(same) == without_clock(plain)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_seconds_follow_from_bytes_and_flops(edge_run, codec):
    codecs = [f"{way}.codec={codec}" for way in ("uploads", "downloads") if codec]
    result = edge_run("method=fedit", ON, "devices.latency=0.25", *codecs)
    flops, devices = result.spec.flops, Devices.of(DevicesConfig(kind="lognormal"), 0, 4)
    seconds = 0.0
    for record in result.checkpoint.records[1:]:
        c, numbers = np.array(record.clients), record.metrics()
        up, down = (8e-6 * numbers[f"{way}loaded_bytes"] / len(c) for way in ("up", "down"))
        transfer = up / devices.up[c] + down / devices.down[c]
        compute = 4 * (flops.backbone + flops.adapter) / devices.speed[c]
        seconds += (0.25 + transfer + compute).max()
        assert record.stages["simulated_seconds"] == pytest.approx(seconds, rel=1e-12)


def test_full_fine_tuning_costs_three_forward_passes(edge_run):
    """A frozen backbone costs two; the adapters are added."""
    full = edge_run("method=fullft", DIGITS, ON, "federation.rounds=1").spec.flops
    lora = edge_run("method=fedit", DIGITS, ON, "federation.rounds=1").spec.flops
    assert full.backbone == lora.backbone > 0
    assert full.adapter / full.backbone == pytest.approx(0.5, rel=0.01)
    assert 0 < lora.adapter < full.adapter


@pytest.mark.parametrize("method", ["ravan", "fedit"])
def test_flops_do_not_depend_on_the_precision(edge_run, method):
    """The same products have other names, and products that are added in place also count."""
    words = [f"method={method}", ON, "federation.rounds=1", "adapter.path=factored"]
    exact, half = (edge_run(*words, f"model.precision={p}") for p in ("fp32", "bf16"))
    assert exact.spec.flops == half.spec.flops


def test_limited_clients_are_faster(edge_run):
    words = ["method=ravan", ON, "devices.speed=1e7", "devices.speed_spread=0"]
    full = edge_run(*words)
    limited = edge_run(*words, "federation.compute=custom", "federation.compute_shares=[1,0,0,0]")
    flops = full.spec.flops
    saved = 3 * 4 * 0.75 * flops.adapter / 1e7
    difference = clocks(full)[-1] - clocks(limited)[-1]
    assert difference == pytest.approx(saved, rel=0.05)  # and less to upload


@pytest.mark.parametrize("select", ["uniform", "power_of_choice"])
def test_a_resumed_run_has_the_same_clock(edge_run, assert_same, tmp_path, select):
    words = ["method=scaffold", DIGITS, *ALL, f"cohort.select={select}", "federation.rounds=4"]
    again = edge_run(*words, stop=2)
    whole = edge_run(*words, f"storage.runs={tmp_path / 'whole'}")
    assert any("continuing after round 2" in event for event in again.events)
    assert_same(again, whole)
    numbers = [record.stages for record in whole.checkpoint.records[1:]]
    assert all(each.keys() == Clock.numbers for each in numbers)
    assert sum(each["lost"] for each in numbers) > 0 < sum(each["late"] for each in numbers)
    for record, found in zip(whole.checkpoint.records[1:], numbers, strict=True):
        assert found["asked"] == found["came"] + found["late"] + found["lost"]
        assert not {str(c) for c in record.clients} & record.missing.keys()


@pytest.mark.slow
def test_clock_is_independent_of_actors(small, inline_result, assert_same, drive_to_end, local_ray):
    experiment = small(
        "method=trishul", *ALL, "cohort.select=power_of_choice", "resources.actors=2"
    )
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        assert driver.slices.actors == 2
        assert_same(drive_to_end(driver), inline_result(experiment))


def test_uncounted_clients_have_received_the_broadcast(edge_run):
    words = ["method=fedit", ON, "federation.clients_per_round=2"]
    plain = edge_run(*words)
    more = edge_run(*words, "cohort.extra=2")
    for one, other in zip(plain.checkpoint.records[1:], more.checkpoint.records[1:], strict=True):
        assert list(other.missing.values()) == ["surplus"] * 2
        assert other.downloaded_parameters == 2 * one.downloaded_parameters
        assert other.uploaded_parameters == one.uploaded_parameters
    assert clocks(more)[-1] < clocks(plain)[-1]


def test_a_strategy_without_a_clock_wastes_no_broadcast(edge_run):
    words = ["method=fedit", "federation.clients_per_round=2"]
    plain, chosen = edge_run(*words), edge_run(*words, "cohort.select=power_of_choice")
    for one, other in zip(plain.checkpoint.records, chosen.checkpoint.records, strict=True):
        assert other.downloaded_parameters == one.downloaded_parameters


def test_round_with_too_few_clients_repeats(edge_run):
    words = ["method=fedit", ON, "cohort.dropout=0.6", "federation.rounds=6"]
    records = edge_run(*words).checkpoint.records[1:]
    assert sum(r.stages["abandoned"] for r in records) > 0
    assert all(2 <= len(r.clients) <= 3 for r in records)  # The quorum is a half.
    for record in records:
        down = record.downloaded_parameters // (record.uploaded_parameters // len(record.clients))
        assert down == record.stages["asked"]


def test_abandoned_attempts_count_and_send_bases_once(edge_run):
    words = ["method=fedsb", ON, "cohort.dropout=0.6", "federation.quorum=1"]
    words += ["federation.clients_per_round=2", "federation.rounds=3"]
    words += ["devices.speed_spread=0", "devices.network_spread=0"]
    found = edge_run(*words)
    assert sum(record.stages["abandoned"] for record in found.checkpoint.records[1:]) > 2
    for record in found.checkpoint.records[1:]:
        reported = record.stages
        assert reported["asked"] == reported["came"] + reported["late"] + reported["lost"]
        assert "kept" not in record.missing.values()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cohort.extra=1.3"], "cohort.extra=1.3 needs a clock: set devices.kind"),
        (["cohort.deadline=5"], "cohort.deadline=5.0 needs a clock"),
        (["cohort.dropout=0.1"], "cohort.dropout=0.1 needs a clock"),
        (["cohort.extra=2", ON], "cohort.extra=2 selects 6 of federation.clients=4 clients"),
        (
            ["cohort.extra=1.3", ON, "privacy.noise=1"],
            "cohort.extra=1.3 is not supported with priv",
        ),
        (["cohort.select=power_of_choice", "privacy.noise=1"], "power_of_choice is not supported"),
        (["devices.up=3"], "devices: up=3.0 has no effect with kind='none'"),
    ],
)
def test_policies_without_what_they_need_are_rejected(small, words, said):
    with pytest.raises(InputError, match=said):
        small(*words)


def test_privacy_draws_the_cohort_that_the_clock_times(edge_run):
    words = [
        "method=fedit",
        "privacy.noise=0.5",
        "privacy.clip=1",
        "federation.clients_per_round=1",
    ]
    plain, timed = edge_run(*words), edge_run(*words, ON)
    assert timed.digest == plain.digest
    records = timed.checkpoint.records[1:]
    assert [r.clients for r in records] == [r.clients for r in plain.checkpoint.records[1:]]
    assert [] in [r.clients for r in records]  # Poisson sampling may select nobody.
    for record, seconds in zip(records, np.diff([0.0, *clocks(timed)]), strict=True):
        assert (seconds > 0) == bool(record.clients)
        assert record.stages["asked"] == len(record.clients)


def test_content_of_device_file_is_in_id(small, tmp_path, edge_run):
    def write(name, speed):
        table = {"client": range(4), "speed": [speed] * 4, "up": [5.0] * 4, "down": [20.0] * 4}
        pq.write_table(pa.table({k: list(v) for k, v in table.items()}), tmp_path / name)
        return ["devices.kind=file", f"devices.path={tmp_path / name}"]

    one, same, other = (small(*write(*words)) for words in (("a", 1e7), ("b", 1e7), ("c", 2e7)))
    assert one.id == same.id != other.id
    # On another machine, without the file, it is the same experiment.
    fields = one.to_dict()
    (tmp_path / "a").unlink()
    assert build_experiment(fields).id == one.id
    write("b", 3e7)
    with pytest.raises(InputError, match=r"devices\.path='.*b' has changed"):
        check_content(same)
    result = edge_run("method=fedit", *write("d", 1e7))
    assert len(set(np.round(np.diff(clocks(result)), 9))) == 1  # all equal


def test_central_training_has_neither_devices_nor_a_cohort(small):
    twin = central_twin(small(*ALL))
    assert not twin.stages and twin.id == central_twin(small("federation.clients=12")).id


def test_unreachable_deadline_fails_at_once(edge_run):
    with pytest.raises(
        RunError, match=r"round 1: in 100 attempts .*cohort.deadline=0.0001.*longer"
    ):
        edge_run("method=fedit", ON, "cohort.deadline=0.0001")


def test_defaults_of_devices_are_named(small):
    (line,) = Clock(None, small(ON, "devices.speed=3e11")).prepare()
    assert "devices.{speed_spread=1, down=20, up=5, network_spread=1, latency=0.1}" in line
