"""The same run on one actor, two, one per client, and inline: the same bytes and metrics."""

import os

import psutil
import pytest
import ray

from trishul_ray.errors import InputError, PermanentError
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.on_ray import driver as driver_module
from trishul_ray.federation.on_ray.driver import RayDriver, open_driver
from trishul_ray.federation.prepare import prepare_run

#: Active heads, weights by size, and clients of different sizes.
MASKED = [
    "method.head_fraction=0.5",
    "federation.weighting=size",
    "partition.variant=per-label",
]
#: Dropout before the selection of heads.
DROPPED = [
    *("model.dropout=true", "budget=2", "method.selection=gradient", "method.head_fraction=0.5"),
]
#: Validation rows in addition to test rows, and both per client.
VALIDATED = ["data.validation_share=0.2", "evaluation.per_client=true"]
#: Random rounding up, with error feedback on the clients, and another codec down.
CODED = [
    *("method=scaffold", "uploads.codec=int8", "uploads.rounding=stochastic"),
    *("uploads.error_feedback=true", "downloads.codec=topk"),
]
#: Stored in four bits, read from one file by all actors, and differentiated by hooks.
QUANTIZED = ["model.quantize=nf4", "method=fedsb"]


@ray.remote(num_cpus=2)
class Occupant:
    """An actor of another user that reserves the whole cluster."""

    def process_id(self):
        return os.getpid()


pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.parametrize(
    ("overrides", "actors"),
    [
        ([*VALIDATED, "federation.clients_per_actor=1"], 4),
        (["method.allocation=gradient", "resources.actors=2"], 2),
        ([*MASKED, "resources.actors=2"], 2),
        ([*CODED, "resources.actors=2"], 2),
        ([*QUANTIZED, "resources.actors=2"], 2),
        ([*DROPPED, "resources.actors=2"], 2),
    ],
    ids=[
        "an actor per client",
        "surveyed heads",
        "masked heads",
        "coded",
        "quantized",
        "dropout",
    ],
)
def test_the_number_of_actors_changes_nothing(
    small, inline_result, assert_same, drive_to_end, dropout_backbone, overrides, actors
):
    """Compare many actors; test_every_shape.py compares one and two, with every shape of a run."""
    if "downloads.codec=topk" in overrides:
        pytest.importorskip("trishul_ray.lab")
    backbone = [f"model.name={dropout_backbone}"] if "model.dropout=true" in overrides else []
    experiment = small(*backbone, *overrides)
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        assert isinstance(driver, RayDriver)
        assert driver.slices.actors == actors
        result = drive_to_end(driver)
        processes = [psutil.Process(pid) for pid in driver.processes()]
    assert_same(result, inline_result(experiment))
    assert len([record.scores["accuracy"] for record in result.checkpoint.records]) == 4
    # Closing the driver ends the coordinator and its clients.
    assert len(processes) >= 2
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_wide_round_waits_and_sums_on_actors(
    small, inline_result, assert_same, drive_to_end, monkeypatch
):
    # 40 uploads are three groups; each of the thousand clients has one row.
    experiment = small(
        "federation.clients=1000",
        "federation.clients_per_round=40",
        "federation.local_steps=1",
        "federation.rounds=1",
        "partition.kind=iid",
    )
    monkeypatch.setattr(driver_module, "WAITING_NOTICE_SECONDS", 0.5)
    occupant = Occupant.remote()
    process = psutil.Process(ray.get(occupant.process_id.remote()))
    notices = []

    def notify(text):
        notices.append(text)
        process.kill()  # frees the cluster

    with open_driver(experiment, prepare_run(experiment), "a", notify) as driver:
        result = drive_to_end(driver)
    assert notices == ["waiting for resources on the cluster for 1 x (1 CPU)"]
    assert len(result.checkpoint.records[1].clients) == 40
    assert_same(result, inline_result(experiment))


def test_input_error_of_an_actor_stays_unchanged(small, tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    folder = tmp_path / "vit"
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_hidden_layers": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(**shape, **sizes)).save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    experiment = small(f"model.name={folder}", "model.init=pretrained", "budget=1")
    with (
        pytest.raises(InputError) as refused,
        open_driver(experiment, prepare_run(experiment), "a") as driver,
    ):
        driver.begin()
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("backend", ["ray", "inline"])
def test_diverging_client_fails_the_run_by_name(small, backend):
    experiment = small("optimizer.lr=1e30", f"resources.backend={backend}", "resources.actors=1")
    with open_driver(experiment, prepare_run(experiment), "a") as driver:
        driver.begin()
        with pytest.raises(
            PermanentError, match=r"client \d is not finite at round 1.*smaller learning"
        ):
            driver.step()


def test_actors_resume_an_inline_run(
    small, inline_result, assert_same, drive_to_end, tmp_path, cache, monkeypatch
):
    # Relative paths: the workers of a cluster start in another directory, with other settings.
    monkeypatch.chdir(tmp_path)
    os.symlink(cache, tmp_path / "link")
    monkeypatch.setenv("TRISHUL_CACHE", "link")
    experiment = small("storage.runs=here", "storage.cache=null", "resources.actors=1")
    prepared = prepare_run(experiment)
    inline = InlineDriver(experiment, prepared, "first")
    inline.begin()
    inline.step()
    with open_driver(experiment, prepared, "second") as driver:
        result = drive_to_end(driver)
    assert "continuing after round 1" in result.__dict__["events"]
    assert result.checkpoint.attempt == "first"
    assert_same(result, inline_result(experiment))
    assert list((tmp_path / "here" / experiment.id / "checkpoints").glob("round-000003-*"))
