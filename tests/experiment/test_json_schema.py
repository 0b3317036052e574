"""The JSON schema for editors accepts what the package reads, and finds typing errors."""

from pathlib import Path

import jsonschema
import pytest
import yaml

import trishul_ray
from trishul_ray.experiment.json_schema import experiment_schema
from trishul_ray.experiment.loading import load_experiment

PRESETS = sorted((Path(trishul_ray.__file__).parent / "presets").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema():
    return jsonschema.Draft202012Validator(experiment_schema())


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_fits_the_schema(preset, schema):
    fields = yaml.safe_load(preset.read_text(encoding="utf-8"))
    fields.pop("extends", None)
    schema.validate(fields)


def test_a_written_configuration_fits_the_schema(schema):
    schema.validate(load_experiment(None, ["partition.alpha=0.1", "method=fedit"]).to_dict())


@pytest.mark.parametrize(
    "text",
    [
        "{dataset: digits, method: fedit, rounds: 3, batch_size: 4}",
        "{method: {name: trishul, lam: 0.1}, model: vit-tiny, partition: {alpha: 1}}",
        "{method: {lam: 0.1}, federation.rounds: 3, plugins: [mine.py]}",
    ],
)
def test_short_names_fit_the_schema(text, schema):
    schema.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    ["{method: fedi}", "{foo: 1}", "{federation: {nope: 1}}", "{partition: {alpha: -1}}"],
)
def test_typing_errors_do_not_fit_the_schema(text, schema):
    assert not schema.is_valid(yaml.safe_load(text))
