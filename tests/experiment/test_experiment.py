"""The identity of an experiment: only fields that can change its results."""

import json
import pickle

import pytest
from damage import DAMAGE
from pydantic import ValidationError

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.compatibility import check_layers
from trishul_ray.experiment.loading import field_names, load_experiment
from trishul_ray.stages import STAGES, stage_names


def test_every_field_is_described():
    experiment = load_experiment()
    for name in field_names():
        *parents, last = name.split(".")
        section = experiment
        for parent in parents:
            section = (
                STAGES[parent].Config() if parent in stage_names() else getattr(section, parent)
            )
        info = type(section).model_fields[last]
        assert info.description or last == "name", f"{name} has no description"


#: Ids of three experiments. A changed id makes finished runs start over: it needs a new NUMERICS,
#: or a reason.
IDS = {
    "": "fbb6234922d6",
    "method=fedit seed=3 budget=8 federation.rounds=5": "dd2ad649fd67",
    "dataset=cifar100 method=ravan model=trishul/vit partition.kind=iid": "0c8ae42cb316",
}


@pytest.mark.parametrize("words", IDS)
def test_ids_are_stable(words):
    assert load_experiment(None, words.split()).id == IDS[words]


def test_identity_has_only_changed_fields():
    assert Experiment().identity() == {"method": {"name": "trishul"}}
    made = Experiment(seed=1, name="label", federation={"rounds": 3}, resources={"actors": 2})
    found = made.identity()
    assert found == {"method": {"name": "trishul"}, "seed": 1, "federation": {"rounds": 3}}
    assert Experiment(method="fedit", adapter={"heads": 2}).identity() == {
        "method": {"name": "fedit"}
    }, "FedIT does not read the number of heads"
    task = {"kind": "instruction"}
    assert Experiment(task=task | {"max_length": 512}).identity()["task"] == task


def test_fields_outside_the_id_are_known():
    assert Experiment.may_identify("federation.rounds")
    assert not Experiment.may_identify("evaluation.every")
    assert not Experiment.may_identify("storage.runs")


def test_it_is_frozen():
    experiment = Experiment()
    with pytest.raises(ValidationError):
        experiment.seed = 3


def test_equal_experiments_have_equal_ids_in_any_process():
    first, second = Experiment(seed=5), Experiment.model_validate(Experiment(seed=5).to_dict())
    assert first.id == second.id
    assert len(first.id) == 12


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("t5-base", "google-t5/t5-base"),
        ("LLaMA-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("vit-b16", "google/vit-base-patch16-224-in21k"),
        ("vit-digits", "vit-digits"),
    ],
)
def test_short_model_name_gives_the_same_id(short, full):
    one, other = (
        load_experiment(None, [f"model={short}"]),
        load_experiment(None, [f"model={full}"]),
    )
    assert one.model.name == full and one.id == other.id


def test_copy_has_the_id_of_its_fields():
    first = load_experiment(None, ["seed=1"])
    assert first.id == load_experiment(None, ["seed=1"]).id
    other = first.model_copy(update={"seed": 2})
    assert other.id == load_experiment(None, ["seed=2"]).id != first.id
    assert first.model_copy() == first and first.model_copy().id == first.id
    assert pickle.loads(pickle.dumps(first)).id == first.id
    assert "id" not in first.to_dict()


def test_places_reach_another_process_and_no_file():
    words = [
        "storage.runs=s3://key:hunter2@bucket/runs", "storage.cache=/my/hunter2",
        "storage.hub=hunter2", "tracking.uri=http://me:hunter2@host:5000",
    ]  # fmt: skip
    experiment = load_experiment(None, words)
    assert b"hunter2" not in experiment.to_yaml()
    assert "hunter2" not in json.dumps(experiment.to_dict())
    sent = pickle.loads(pickle.dumps(experiment))
    for other in (sent, Experiment.model_validate(experiment.to_dict(sources=True))):
        assert (other.storage, other.tracking) == (experiment.storage, experiment.tracking)
    assert Experiment.model_validate(experiment.to_dict()).id == experiment.id


def test_stored_layers_avoid_an_import(tmp_path, monkeypatch):
    words = [f"storage.cache={tmp_path}"]
    fits, wide = load_experiment(None, words), load_experiment(None, [*words, "budget=64"])
    assert check_layers(fits) == ""
    (note,) = tmp_path.glob("layers/*")
    whole = note.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("trishul_ray.models.choose_backbone.backbone_of", None)
        assert check_layers(fits) == ""
    for name in DAMAGE:
        note.write_bytes(DAMAGE[name](whole))
        assert check_layers(fits) == ""
        with pytest.raises(InputError, match="exceeds the width 64"):
            check_layers(wide)
    note.write_bytes(whole.replace(b'"d_out": 64', b'"d_out": 8'))  # of another model
    assert check_layers(fits) == ""
