"""Every dataset, backbone family and method of the paper: builds, trains a round, is measured.

Rows are a few of the test's own, in the hub's layout; backbones are the built-in small ones with
random weights, so nothing is said about quality.
"""

import io
import itertools
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.methods.base import method_class, method_names
from trishul_ray.rng import numpy_rng

#: The paper's pairs of dataset and backbone family, with the metric that counts.
PAIRS = {
    ("cifar100", "vit-digits"): "accuracy",
    ("svhn", "vit-digits"): "accuracy",
    ("20newsgroups", "t5-tiny"): "accuracy",
    ("mrqa", "t5-tiny"): "f1",
    ("glue/rte", "llama-tiny"): "accuracy",
}
#: GLUE's other tasks differ from RTE in the reading of rows and the prompt alone.
OTHERS = ("glue/mnli", "glue/qnli", "glue/qqp", "glue/sst2")
#: Beside the paper's: an encoder with a head, a decoder with a head, a T5 that names the label.
BESIDE = (
    ("20newsgroups", "bert-tiny", "auto"),
    ("glue/rte", "llama-tiny", "classification"),
    ("glue/rte", "t5-tiny", "auto"),
    ("glue/sst2", "bert-tiny", "auto"),
)
ROWS = {"train": 12, "test": 4}
PAIRED = {"glue/mnli": ("premise", "hypothesis"), "glue/qnli": ("question", "sentence")}
PAIRED |= {"glue/qqp": ("question1", "question2"), "glue/rte": ("sentence1", "sentence2")}


def write(hub, where, columns):
    file = hub / f"{where}-00000-of-00001.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)


def images(rows, rng):
    encoded = []
    for _ in range(rows):
        sink = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(sink, "PNG")
        encoded.append({"bytes": sink.getvalue(), "path": None})
    return encoded


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A mirror with a few rows of every dataset of the paper."""
    folder, rng = tmp_path_factory.mktemp("hub"), numpy_rng(0, "combinations")
    for split, rows in ROWS.items():
        numbers = list(range(rows))
        texts = [f"sentence number {n} is about {n % 2}" for n in numbers]
        labels = [n % 2 for n in numbers]
        pictures = images(rows, rng)
        write(folder, f"uoft-cs/cifar100/cifar100/{split}",
              {"img": pictures, "fine_label": numbers, "coarse_label": labels})  # fmt: skip
        write(folder, f"ufldl-stanford/svhn/cropped_digits/{split}",
              {"image": pictures, "label": labels})  # fmt: skip
        write(folder, f"SetFit/20_newsgroups/data/{split}",
              {"text": texts, "label": numbers, "label_text": texts})  # fmt: skip
        validation = "validation" if split == "test" else split
        subsets = [("SQuAD", "HotpotQA")[n % 2] for n in numbers]
        asked = {"subset": subsets, "question": texts, "context": texts}
        write(folder, f"mrqa-workshop/mrqa/data/{validation}",
              asked | {"answers": [[str(n % 2), "number"] for n in numbers]})  # fmt: skip
        write(folder, f"nyu-mll/glue/sst2/{validation}",
              {"sentence": texts, "label": labels, "idx": numbers})  # fmt: skip
        for name, (first, second) in PAIRED.items():
            ends = (validation,)
            if name == "glue/mnli" and split == "test":
                ends = ("validation_matched", "validation_mismatched")
            for end in ends:
                write(folder, f"nyu-mll/{name}/{end}",
                      {first: texts, second: texts, "label": labels, "idx": numbers})  # fmt: skip
    return folder


@pytest.fixture
def one_round(hub, cache, tmp_path, drive_to_end):
    """``one_round(dataset, model, method)`` -> the result of a round of two steps on a mirror."""

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


def check(final, headline, method="trishul"):
    before, after = final.checkpoint.records
    for record in (before, after):
        assert 0.0 <= record.scores[headline] <= 1.0 and math.isfinite(record.scores["loss"])
    assert math.isfinite(after.train_loss) and after.refused == {}
    if not method_class(method).personal:  # those may leave all that counts with the clients
        assert after.uploaded_parameters > 0
        # It trained: the global model answers otherwise than before.
        assert after.scores["loss"] != before.scores["loss"]


@pytest.mark.parametrize(
    ("pair", "method"),
    [*itertools.product(PAIRS, method_names())],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else value,
)
def test_a_round_of_every_combination(pair, method, one_round):
    check(one_round(*pair, method), PAIRS[pair], method)


@pytest.mark.parametrize("dataset", OTHERS)
def test_a_round_of_each_glue_task(dataset, one_round):
    final = one_round(dataset, "llama-tiny", "trishul")
    check(final, "accuracy")
    parts = {name for name in final.checkpoint.records[0].scores if name.startswith("accuracy_")}
    groups = {"accuracy_matched", "accuracy_mismatched"} if dataset == "glue/mnli" else set()
    assert parts == groups


@pytest.mark.parametrize(("dataset", "model", "kind"), BESIDE)
def test_a_round_of_what_the_paper_does_not_run(dataset, model, kind, one_round):
    check(one_round(dataset, model, "trishul", kind), "accuracy")
