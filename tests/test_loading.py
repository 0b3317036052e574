"""Layers of configuration, and the one line that each mistake gets."""

import pytest
import yaml

from trishul_ray.errors import InputError
from trishul_ray.loading import field_names, load_experiment


def test_the_quickstart_needs_nothing():
    experiment = load_experiment()
    assert (experiment.data.name, experiment.model.name) == ("digits", "vit-digits")
    assert experiment.method.name == "trishul"


def test_layers_later_wins(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("dataset: cifar100\nbudget: higher\nfederation: {clients: 50}\n")
    experiment = load_experiment(path, ["federation.clients=30", "method.lam=0.1"])
    assert experiment.data.name == "cifar100"
    assert experiment.lora_rank == 64
    assert experiment.federation.clients == 30
    assert experiment.federation.local_steps == 50  # the preset's
    assert experiment.method.lam == 0.1


def test_short_names_and_method_switch():
    experiment = load_experiment(None, ["method=ravan", "model=some/where"])
    assert experiment.method.name == "ravan"
    assert experiment.model.name == "some/where"
    deep = load_experiment(None, ["method=ravan", "method.scalars=fixed"])
    assert deep.method.scalars == "fixed"


def test_numbers_may_be_written_as_people_do():
    assert load_experiment(None, ["optimizer.lr=1e-3"]).optimizer.lr == 1e-3


def test_a_resolved_config_reads_back_as_itself(tmp_path):
    experiment = load_experiment(None, ["method=fedit", "seed=3"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(experiment.to_dict()))
    assert load_experiment(path) == experiment
    assert load_experiment(path).id == experiment.id


def test_field_names_are_the_fields_own():
    names = set(field_names())
    assert {
        "partition.alpha",
        "budget",
        "seed",
        "method.lam",
        "federation.clients",
        "federation.clients_per_round",
        "federation.local_steps",
        "federation.rounds",
    } <= names


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["federation.cilents=3"], "did you mean 'federation.clients'?"),
        (["alpha=0.3"], "did you mean 'partition.alpha'?"),
        (["partition.alpa=0.3"], "did you mean 'partition.alpha'?"),
        (["method.lamda=0.3"], "did you mean 'method.lam'?"),
        (["method=fedit", "method.lam=0.3"], "unknown field 'method.lam'"),
        (["partition.alpha=0"], "partition.alpha=0: input should be greater than 0"),
        (["partition.alpha=-1"], "partition.alpha=-1: input should be greater than 0"),
        (["partition.alpha=.nan"], "partition.alpha=nan: input should be a finite number"),
        (
            ["partition.kind=shards"],
            "partition.kind='shards': input should be 'iid', 'dirichlet' or 'natural'",
        ),
        (["budget=huge"], "budget='huge'"),
        (["budget=0"], "budget=0"),
        (["seed=-1"], "seed=-1: input should be greater than or equal to 0"),
        (["seed=1.5"], "seed=1.5"),
        (["method=nosuch"], "unknown method 'nosuch'; known: "),
        (["method.lam=-1"], "method.lam=-1: input should be greater than or equal to 0"),
        (["method.prox_every=0"], "method.prox_every=0"),
        (["method.head_fraction=1.5"], "method.head_fraction=1.5"),
        (["optimizer.lr=fast"], "optimizer.lr='fast': input should be a valid number"),
        (["optimizer.name=lion"], "optimizer.name='lion': input should be 'adam' or 'sgd'"),
        (
            ["federation.clients=2", "federation.clients_per_round=3"],
            "exceeds federation.clients=2",
        ),
        (["federation.rounds=0"], "federation.rounds=0"),
        (["federation.quorum=0"], "federation.quorum=0"),
        (["federation=3"], "federation"),
        (["federation.clients.x=3"], "federation.clients"),
        (["rounds"], "'rounds' is not of the form key=value"),
        (["=3"], "'=3' is not of the form key=value"),
        (["adapter.init=[1"], "value is not YAML"),
        (["resources.actors=0"], "resources.actors"),
        (["resources.actors=2", "federation.clients_per_actor=1"], "exclude each other"),
        (["model.precision=fp16"], "model.precision='fp16'"),
    ],
)
def test_one_clear_line(overrides, says):
    with pytest.raises(InputError) as caught:
        load_experiment(None, overrides)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1, 2\n", "is not YAML"),
        ("- 1\n- 2\n", "must hold key: value pairs, not a list"),
        ("just words\n", "must hold key: value pairs, not a text"),
        ("!!python/object/apply:os.system ['true']\n", "is not YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path, text, says):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        load_experiment(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no\.yaml does not exist"):
        load_experiment(tmp_path / "no.yaml")
