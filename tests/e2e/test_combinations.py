"""Every dataset, backbone family and method: build, train a round, measure.

TRISHUL runs on every pair of the paper, every other method on one of them, because methods do not
depend on datasets. Rows are a few rows of the test in the hub's layout; backbones are small
built-ins with random weights, so the scores are meaningless.
"""

import itertools
import math

import pyarrow.parquet as pq
import pytest
from method_runs import PUBLISHED
from public_mirror import write_mirror

from trishul_ray.data.public import DATASETS
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.methods.base import method_class

PUBLIC = [*DATASETS.all().values()]

#: The paper's pairs of dataset and backbone family, with the primary metric.
PAIRS = {
    ("cifar100", "vit-digits"): "accuracy",
    ("svhn", "vit-digits"): "accuracy",
    ("20newsgroups", "t5-tiny"): "accuracy",
    ("mrqa", "t5-tiny"): "f1",
    ("glue/rte", "llama-tiny"): "accuracy",
}
#: GLUE's other tasks differ from RTE only in the reading of rows and the prompt.
OTHERS = ("glue/mnli", "glue/qnli", "glue/qqp", "glue/sst2")
#: In addition to the paper: an encoder with a head, a decoder with a head, a T5 that generates the
#: label.
BESIDE = (
    ("20newsgroups", "bert-tiny", "auto"),
    ("glue/rte", "llama-tiny", "classification"),
    ("glue/rte", "t5-tiny", "auto"),
    ("glue/sst2", "bert-tiny", "auto"),
)
ROWS = {"train": 12, "test": 4}
#: Files of the hub with the test rows of the paper's datasets, and the columns that are read.
HUB_FILES = {
    "uoft-cs/cifar100/cifar100/test": {"img", "fine_label"},
    "ufldl-stanford/svhn/cropped_digits/test": {"image", "label"},
    "SetFit/20_newsgroups/data/test": {"text", "label"},
    "mrqa-workshop/mrqa/data/validation": {"subset", "question", "context", "answers"},
    "nyu-mll/glue/sst2/validation": {"sentence", "label"},
    "nyu-mll/glue/mnli/validation_matched": {"premise", "hypothesis", "label"},
    "nyu-mll/glue/mnli/validation_mismatched": {"premise", "hypothesis", "label"},
    "nyu-mll/glue/qnli/validation": {"question", "sentence", "label"},
    "nyu-mll/glue/qqp/validation": {"question1", "question2", "label"},
    "nyu-mll/glue/rte/validation": {"sentence1", "sentence2", "label"},
}


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """Create a mirror with a few rows of every dataset of the paper."""
    folder, names = tmp_path_factory.mktemp("hub"), {name for name, _ in PAIRS} | {*OTHERS}
    for source in PUBLIC:
        if source.name in names:
            write_mirror(folder, source, ROWS)
    return folder


@pytest.fixture
def one_round(hub, cache, tmp_path, drive_to_end):
    """``one_round(dataset, model, method)`` returns the result of a round of two steps."""

    def run(dataset, model, method, kind="auto"):
        experiment = load_experiment(
            None,
            [
                f"dataset={dataset}",
                f"model={model}",
                "model.init=random",
                f"method={method}",
                f"task.kind={kind}",
                "task.max_length=160",
                "task.target_length=24",
                "budget=2",
                "adapter.heads=2",
                "optimizer.lr=0.01",
                "federation.clients=3",
                "federation.clients_per_round=2",
                "federation.rounds=1",
                "federation.local_steps=2",
                "federation.batch_size=2",
                "evaluation.batch_size=4",
                "tracking.mlflow=false",
                "resources.backend=inline",
                f"storage.hub={hub}",
                f"storage.cache={cache}",
                f"storage.runs={tmp_path}",
            ],
        )
        return drive_to_end(InlineDriver(experiment, prepare_run(experiment), "a"))

    return run


def check(final, metric, method="trishul"):
    before, after = final.checkpoint.records
    for record in (before, after):
        assert 0.0 <= record.scores[metric] <= 1.0 and math.isfinite(record.scores["loss"])
    assert math.isfinite(after.train_loss) and after.refused == {}
    if not method_class(method).personal:  # those may keep all trained parameters on the clients
        assert after.uploaded_parameters > 0
        # Training changed the outputs of the global model.
        assert after.scores["loss"] != before.scores["loss"]


def test_rows_lie_where_the_hub_has_them(hub):
    for place, columns in HUB_FILES.items():
        schema = pq.read_schema(hub / f"{place}-00000-of-00001.parquet")
        assert {*schema.names} == columns


@pytest.mark.parametrize(
    ("pair", "method"),
    [
        *((pair, "trishul") for pair in PAIRS),
        *zip(itertools.cycle(PAIRS), [n for n in PUBLISHED if n != "trishul"], strict=False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_one_round_of_each_pair_and_method(pair, method, one_round):
    check(one_round(*pair, method), PAIRS[pair], method)


@pytest.mark.parametrize("dataset", OTHERS)
def test_a_round_of_each_glue_task(dataset, one_round):
    final = one_round(dataset, "llama-tiny", "trishul")
    check(final, "accuracy")
    parts = {name for name in final.checkpoint.records[0].scores if name.startswith("accuracy_")}
    groups = {"accuracy_matched", "accuracy_mismatched"} if dataset == "glue/mnli" else set()
    assert parts == groups


@pytest.mark.parametrize(("dataset", "model", "kind"), BESIDE)
def test_one_round_of_combinations_beyond_the_paper(dataset, model, kind, one_round):
    check(one_round(dataset, model, "trishul", kind), "accuracy")
