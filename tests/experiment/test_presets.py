"""The presets: the paper's protocol per dataset, and prompts that fit its backbones."""

import functools
from pathlib import Path

import pytest

from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.data.public import DATASETS
from trishul_ray.errors import InputError
from trishul_ray.experiment.compatibility import target_layers
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.methods.base import build_method
from trishul_ray.models.backbone import Backbone
from trishul_ray.tasks.build import build_task

PUBLIC = [*DATASETS.all().values()]
#: Text datasets whose preset leaves the task to the backbone.
TEXTS = [
    source
    for source in PUBLIC
    if source.rows.kind in ("text", "qa")
    and load_experiment(None, [f"dataset={source.name}"]).task.kind == "auto"
]

VIT, T5, LLAMA, ROBERTA = (
    "google/vit-base-patch16-224-in21k",
    "google-t5/t5-base",
    "meta-llama/Llama-3.2-1B",
    "FacebookAI/roberta-large",
)
GLUE = ("mnli", "qnli", "qqp", "sst2", "rte")
#: Tasks of GLUE that the paper does not have.
FIELD = ("cola", "mrpc")


@pytest.mark.parametrize(
    ("dataset", "model", "rounds", "batch", "length"),
    [
        ("cifar100", VIT, 50, 32, None),
        ("svhn", VIT, 50, 32, None),
        ("20newsgroups", T5, 100, 32, 256),
        ("mrqa", T5, 20, 32, 256),
        *((f"glue/{task}", LLAMA, 20, 16, 128) for task in GLUE),
    ],
)
def test_the_papers_protocol(dataset, model, rounds, batch, length):
    made = load_experiment(None, [f"dataset={dataset}"])
    fed = made.federation
    assert (made.model.name, fed.rounds, fed.batch_size) == (model, rounds, batch)
    assert (fed.clients, fed.clients_per_round, fed.local_steps) == (20, 3, 50)
    assert made.data.name == dataset and (length is None or made.task.max_length == length)
    assert made.partition.kind == ("iid" if dataset.startswith("glue") else "dirichlet")
    assert made.partition.by == ("group" if dataset == "mrqa" else "auto")
    assert "RAVAN Table 8" in made.optimizer.lr_source


@pytest.mark.parametrize(
    ("dataset", "clients", "cohort", "rounds", "work", "budget", "rate"),
    [
        ("dolly", 200, 10, 60, (200, 1), 8, None),
        ("dolly-shards", 10, 1, 10, (47, 64), 8, 3e-4),
        ("alpaca-gpt4", 20, 2, 200, (10, 16), 32, 5e-5),
        ("medical", 20, 2, 200, (10, 16), 32, 5e-5),
        ("finance", 50, 5, 200, (10, 16), 32, 5e-5),
        ("code", 10, 2, 200, (10, 16), 32, 5e-5),
        ("gsm8k", 3, 3, 500, (30, 1), 8, 3e-4),
    ],
)
def test_published_protocols_of_instructions(dataset, clients, cohort, rounds, work, budget, rate):
    made = load_experiment(None, [f"dataset={dataset}", "method=fedit"])
    fed = made.federation
    assert made.task.kind == "instruction" and made.task.template == "alpaca"
    assert (fed.clients, fed.clients_per_round, fed.rounds) == (clients, cohort, rounds)
    assert ((fed.local_steps, fed.batch_size), made.lora_rank) == (work, budget)
    assert rate is None or made.optimizer.lr == rate
    assert (made.data.train_limit == 20_000) == (dataset == "alpaca-gpt4")
    # 4-bit weights and recomputation are only for the preset's backbone.
    other = load_experiment(None, [f"dataset={dataset}", "model=llama-tiny"])
    assert other.model.quantize == "none" and not other.model.gradient_checkpointing


@pytest.mark.parametrize("task", [*GLUE, *FIELD])
def test_preset_by_name_replaces_that_of_the_dataset(task):
    made = load_experiment(None, ["preset=ffalora-glue", f"dataset=glue/{task}", "seed=3"])
    fed, again = made.federation, load_experiment({"preset": "ffalora-glue", "seed": 3})
    assert (made.data.name, again.data.name) == (f"glue/{task}", "glue/sst2")
    assert made.model.name == ROBERTA and not made.model.train_head
    assert (fed.clients, fed.clients_per_round, fed.rounds) == (3, 3, 1000)
    assert (fed.local_steps, fed.batch_size, made.lora_rank) == (10, 200, 8)
    assert (made.optimizer.name, made.optimizer.lr, made.partition.alpha) == ("sgd", 0.5, 0.5)
    assert made.task.template is None, "of the dataset's own preset"
    own = load_experiment(None, [f"dataset=glue/{task}"])
    assert (own.model.name == ROBERTA) == (task in FIELD)


def test_preset_must_exist_and_changes_no_id():
    dolly = load_experiment(None, ["dataset=dolly"])
    assert load_experiment(None, ["dataset=dolly", "preset=dolly"]).id == dolly.id
    assert load_experiment(None, ["dataset=gsm8k", "preset=dolly"]).federation == dolly.federation
    with pytest.raises(InputError, match=r"unknown preset 'dollly'; known: .* mean 'dolly'"):
        load_experiment(None, ["preset=dollly"])


def info_of(dataset):
    """Return the facts of the dataset that need no rows."""
    rows = next(source for source in PUBLIC if source.name == dataset).rows
    classes = tuple(getattr(rows, "classes", ()))
    return DatasetInfo(dataset, rows.kind, classes, fields=tuple(getattr(rows, "fields", ())))


@pytest.mark.parametrize("source", PUBLIC, ids=lambda source: source.name)
def test_every_dataset_has_a_preset_of_its_protocol(source):
    made = load_experiment(None, [f"dataset={source.name}"])
    assert made.name == source.name.replace("/", "-"), "the preset is missing"
    assert made.data.name == source.name


@pytest.mark.parametrize(
    ("dataset", "model"),
    [
        *((s.name, "t5-tiny") for s in TEXTS),
        *((s.name, "bert-tiny") for s in TEXTS if s.rows.kind == "text"),
        *((f"glue/{task}", "llama-tiny") for task in (*GLUE, *FIELD)),
    ],
)
def test_prompts_fit_fields_classes_and_families(dataset, model, text_rows):
    made = load_experiment(None, [f"dataset={dataset}", f"model={model}"])
    info = info_of(dataset)
    task = build_task(made.task, info, Backbone(made.model, StoragePaths(Path("none"), None)))
    columns = task.encoder.encode(text_rows(info), lambda done: None)
    assert columns["input_ids"].shape[0] == 2
    assert columns["length"].max() <= made.task.max_length


@pytest.fixture
def text_rows(tmp_path):
    import numpy as np
    import pyarrow as pa

    from trishul_ray.data.dataset import Split, write_split

    def make(info):
        fields = info.fields if info.kind == "text" else ("question", "context")
        columns = {name: pa.array(["short", "and long " * 60]) for name in fields}
        if info.kind == "text":
            columns["label"] = np.array([0, info.num_classes - 1])
        else:
            columns["answers"] = pa.array(['["one"]', '["two", "2"]'])
        write_split(tmp_path / "test.arrow", columns, info)
        return Split(tmp_path / "test.arrow")

    return make


def test_verbalizers_follow_the_order_of_classes():
    words = load_experiment(None, ["dataset=20newsgroups"]).task.verbalizers
    named = dict(zip(info_of("20newsgroups").classes, words, strict=True))
    assert named["sci.med"] == "medicine" and named["rec.sport.hockey"] == "hockey"
    for task, expected in {
        "mnli": {"entailment": "yes", "neutral": "maybe", "contradiction": "no"},
        "qnli": {"entailment": "yes", "not_entailment": "no"},
        "rte": {"entailment": "yes", "not_entailment": "no"},
        "qqp": {"not_duplicate": "no", "duplicate": "yes"},
        "sst2": {"negative": "negative", "positive": "positive"},
        "cola": {"unacceptable": "no", "acceptable": "yes"},
        "mrpc": {"not_equivalent": "no", "equivalent": "yes"},
    }.items():
        words = load_experiment(None, [f"dataset=glue/{task}"]).task.verbalizers
        assert dict(zip(info_of(f"glue/{task}").classes, words, strict=True)) == expected


@pytest.mark.parametrize(
    ("dataset", "trishul", "ravan"),
    [
        # The main row of the paper's table of initializations; RAVAN's default is random normal.
        ("cifar100", "gram_schmidt", "random_normal"),
        ("svhn", "gram_schmidt", "random_normal"),
        ("20newsgroups", "random_normal", "random_normal"),
        ("mrqa", "random_normal", "random_normal"),
        *((f"glue/{task}", "random_normal", "random_normal") for task in GLUE),
    ],
)
@pytest.mark.parametrize("budget", ["lower", "higher"])
def test_bases_and_ranks_match_the_papers_tables(dataset, trishul, ravan, budget):
    """Check initialization and ranks in each table on the shapes of the paper's backbone."""
    ranks = {"lower": (110, 64, 221), "higher": (156, 128, 313)}[budget]
    names = {"trishul": ranks[0], "ravan": ranks[0], "ffalora": ranks[1], "fedsb": ranks[2]}
    for name, rank in names.items():
        words = [f"dataset={dataset}", f"method={name}", f"budget={budget}"]
        adapters = adapters_of(load_experiment(None, words))
        assert {adapter.rank for adapter in adapters} == {rank}
        if name in ("trishul", "ravan"):
            assert {a.init for a in adapters} == {trishul if name == "trishul" else ravan}


@functools.cache
def shapes_of(config):
    return Backbone(config, StoragePaths(Path("none"), None)).meta_model()


def adapters_of(experiment):
    targets = target_layers(shapes_of(experiment.model), experiment)
    return list(build_method(experiment.method).adapters(targets).values())


def test_preset_ranks_apply_only_to_its_backbone():
    assert load_experiment(None, ["dataset=glue/rte"]).adapter.matching == "published"
    same = ["dataset=glue/rte", "model=llama-3.2-1b"]
    assert load_experiment(None, same).adapter.matching == "published"
    other = ["dataset=glue/rte", "model=llama-tiny"]
    assert load_experiment(None, other).adapter.matching == "matched"
    explicit = load_experiment(None, [*other, "adapter.matching=published"])
    assert explicit.adapter.matching == "published"


def test_preset_random_weights_apply_only_to_its_backbone():
    def init(*words):
        return load_experiment(None, ["dataset=synthetic/rte", *words]).model.init

    assert init() == init("model=llama-tiny") == "random"
    assert init("model=all-MiniLM-L6-v2") == "pretrained"
    assert init("model=all-MiniLM-L6-v2", "model.init=random") == "random"
