"""Runs whose data or weights change.

Local files are in the id by content: a changed file is another run. The content of a name on the
mirror is not: the run is rejected, and the message reports the change.
"""

import json
from dataclasses import replace

import pytest
from tiny_files import TINY_TEXT, change_config, change_weights, save_bert, write_notes

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.messages import changed_sources
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.context import build_context

OWN = ["dataset=table", "data.path=hub/me/notes/train.csv", "model=hub/me/bert"]
WORDS = ["dataset=hub", "data.path=me/notes", "model=me/bert", *TINY_TEXT]


@pytest.fixture
def place(tmp_path, cache, monkeypatch):
    """Create the working directory, with a mirror of a table and a backbone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))
    monkeypatch.setenv("TRISHUL_HUB", str(tmp_path / "hub"))
    change_notes(tmp_path, "left")
    save_bert(tmp_path / "hub/me/bert")
    return tmp_path


def change_notes(place, first="other"):
    write_notes(place / "hub/me/notes/train.csv", first)


def change_bert(place):
    change_weights(place / "hub/me/bert")


@pytest.fixture
def trishul(place, called):
    """``trishul("run")`` returns exit code and standard error."""

    def call(*words):
        code, _, stderr = called(*words)
        return code, stderr

    return call


def result_of(place):
    (file,) = place.glob("runs/*/result.json")
    return json.loads(file.read_text())


def test_changed_data_of_a_finished_run_are_named(trishul, place):
    code, stderr = trishul("run", *WORDS)
    assert code == 0, stderr
    first = result_of(place)
    assert set(first["sources"]) == {"rows", "tokens", "backbone"}
    code, stderr = trishul("run", *WORDS)
    assert code == 0 and "this run has already finished" in stderr

    change_notes(place)
    code, stderr = trishul("run", *WORDS)
    assert code == 2 and stderr.splitlines()[-1] == (
        f"error: the data of run {first['id']} have changed since it finished; restore them, or "
        "start over with --fresh"
    )
    assert result_of(place) == first
    code, stderr = trishul("run", *WORDS, "--fresh")
    assert code == 0, stderr
    again = result_of(place)
    assert again["id"] == first["id"]
    assert again["sources"]["rows"] != first["sources"]["rows"]
    assert again["state_sha256"] != first["state_sha256"]

    change_bert(place)
    code, stderr = trishul("run", *WORDS)
    assert code == 2 and "the weights of the backbone of run" in stderr
    assert trishul("run", *WORDS, "--fresh")[0] == 0

    (place / "hub/me/notes/train.csv").unlink()
    code, stderr = trishul("run", *WORDS)
    assert code == 0 and "not compared with this finished run: the data (" in stderr


def test_same_rows_in_a_new_file_change_nothing(trishul, place):
    assert trishul("run", *WORDS)[0] == 0
    first = result_of(place)
    change_notes(place, "left")
    code, stderr = trishul("run", *WORDS)
    assert code == 0 and "this run has already finished" in stderr
    code, stderr = trishul("run", *WORDS, "--fresh")
    assert code == 0 and result_of(place)["sources"] == first["sources"]


def test_changed_files_of_ones_own_are_another_run(trishul, place):
    words = [*WORDS, *OWN]
    assert trishul("run", *words)[0] == 0
    first = result_of(place)
    for change in (change_notes, change_bert, lambda place: change_config(place / "hub/me/bert")):
        change(place)
        code, stderr = trishul("run", *words)
        assert code == 0 and "had finished" not in stderr
    results = [json.loads(file.read_text()) for file in place.glob("runs/*/result.json")]
    assert len({result["id"] for result in results}) == 4
    assert len({result["state_sha256"] for result in results}) == 4
    # The same files are the same run in any location and spelling.
    change_notes(place, "left")
    (place / "hub/me/notes/train.csv").rename(place / "notes.csv")
    moved = ["data.path=./notes.csv", f"model={place}/hub/../hub/me/bert"]
    experiments = [load_experiment(None, [*words, "data.path=notes.csv"])]
    experiments += [load_experiment(None, [*words, *moved])]
    assert len({experiment.id for experiment in experiments}) == 1 and first["id"] not in {
        experiments[0].id
    }


def test_files_changed_after_loading_are_named(place):
    experiment = load_experiment(None, [*WORDS, *OWN])
    change_notes(place)
    with pytest.raises(InputError, match=r"^data.path='hub/me/notes/train.csv' has changed: exp"):
        prepare_run(experiment)


@pytest.mark.parametrize(
    ("change", "named"),
    [(change_notes, "data"), (change_bert, "weights of the backbone")],
    ids=["data", "weights"],
)
def test_unfinished_run_rejects_changed_sources(trishul, place, change, named):
    experiment = load_experiment(None, WORDS)
    driver = InlineDriver(experiment, prepare_run(experiment), "first")
    driver.begin()
    driver.step()
    change(place)
    code, stderr = trishul("run", *WORDS)
    text = " ".join(stderr.split())
    assert code == 1
    assert f"run {experiment.id} was started with different {named}: restore the original" in text
    assert not list(place.glob("runs/*/result.json"))
    code, stderr = trishul("run", *WORDS, "--fresh")
    assert code == 0 and "continuing" not in stderr


def test_an_export_requires_the_backbone_of_the_training(trishul, place):
    assert trishul("run", *WORDS)[0] == 0
    run = result_of(place)["id"]
    assert trishul("export", run, "adapter")[0] == 0
    assert (place / "adapter/adapter_model.safetensors").is_file()
    change_bert(place)
    code, stderr = trishul("export", run, "other", "--merged")
    text = " ".join(stderr.split())
    assert code == 1 and f"the weights of the backbone of run {run} have changed" in text
    assert not (place / "other").exists()


def test_node_with_other_data_is_named(place):
    """An actor that cannot read the driver's cache prepares the data from its local files."""
    experiment = load_experiment(None, WORDS)
    prepared = prepare_run(experiment)
    elsewhere = experiment.storage.model_copy(update={"cache": str(place / "node")})
    there = experiment.model_copy(update={"storage": elsewhere})
    moved = replace(prepared.dataset, folder=place / "not-here")
    away = replace(prepared, dataset=moved)
    assert build_context(there, away).sources == build_context(experiment, prepared).sources
    change_notes(place)
    with pytest.raises(InputError, match=r"^node .* has different data than the driver: provide "):
        build_context(there, away)


def test_only_sources_known_on_both_sides_are_compared():
    known = {"rows": "a", "tokens": "b", "backbone": "c"}
    assert changed_sources({}, known) == changed_sources(known, known) == ""
    assert changed_sources(known, known | {"tokens": "x"}) == "tokens of the data"
    assert changed_sources(known, known | {"rows": "x", "tokens": "x"}) == "data"
    both = changed_sources(known, known | {"rows": "x", "backbone": "x"})
    assert both == "data and weights of the backbone"
