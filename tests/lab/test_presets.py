"""The presets of the lab and the sections of its stages in the schema of configurations."""

from pathlib import Path

import jsonschema
import pytest
import yaml

import trishul_ray.lab
from trishul_ray.experiment.json_schema import experiment_schema
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.privacy.config import PrivacyConfig

PRESETS = sorted((Path(trishul_ray.lab.__file__).parent / "presets").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset_loads_and_fits_the_schema(preset):
    fields = yaml.safe_load(preset.read_text(encoding="utf-8"))
    fields.pop("extends", None)
    jsonschema.validate(fields, experiment_schema())
    assert load_experiment(None, [f"preset={preset.stem}"]).name == preset.stem


def test_private_preset_of_fedsvd():
    made = load_experiment(None, ["preset=fedsvd-glue-private", "dataset=glue/mnli"])
    privacy = made.section(PrivacyConfig)
    assert (privacy.unit, privacy.epsilon, privacy.delta, privacy.clip) == ("example", 6, 1e-5, 2)
    public = load_experiment(None, ["preset=fedsvd-glue", "dataset=glue/mnli"])
    assert (made.federation, made.optimizer) == (public.federation, public.optimizer)
    assert made.adapter == public.adapter.model_copy(update={"dropout": 0.0})


def test_sections_of_stages_fit_the_schema():
    schema = experiment_schema()
    made = load_experiment(None, ["privacy.epsilon=8", "method=fedit"])
    jsonschema.validate(made.to_dict(), schema)
    jsonschema.validate({"method": {"lam": 0.1}, "privacy": {"epsilon": 8}}, schema)
