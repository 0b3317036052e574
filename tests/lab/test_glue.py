"""STS-B, regression and correlations; the presets of the lab."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from trishul_ray.config.paths import StoragePaths
from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.lab.datasets.commonsense import TEST_SETS
from trishul_ray.lab.tasks.correlations import Correlations
from trishul_ray.models.backbone import Backbone
from trishul_ray.runs.evaluate import exact_match
from trishul_ray.tasks.build import build_task
from trishul_ray.tasks.sums import EvalSums, RowScores


def write_stsb(hub, labels):
    folder = hub / "nyu-mll/glue/stsb"
    folder.mkdir(parents=True)
    for split, numbers in labels.items():
        texts = [f"text {n}" for n in range(len(numbers))]
        columns = {"sentence1": texts, "sentence2": texts, "label": pa.array(numbers, pa.float32())}
        pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")


def test_labels_of_stsb_are_numbers_in_order(tmp_path):
    write_stsb(tmp_path, {"train": [5.0, 3.8, 0.0, 3.8], "validation": [2.25, 5.0]})
    data = prepare("glue/stsb", cache=tmp_path, hub=tmp_path)
    assert data.info.classes == ("0", "2.25", "3.8", "5")
    assert data.train.labels.tolist() == [3, 2, 0, 2] and data.test.labels.tolist() == [1, 3]
    with pytest.raises(InputError, match=r"labels are numbers, not classes: set task.kind=reg"):
        task_of(data.info, "task.kind=auto")
    assert task_of(data.info).numbers == (0.0, 2.25, 3.8, 5.0)


def task_of(info, *words):
    made = load_experiment(None, ["dataset=glue/stsb", "model=bert-tiny", *words])
    return build_task(made.task, info, Backbone(made.model, StoragePaths(Path("none"), None)))


@pytest.mark.parametrize("wrong", [-1.0, 5.1, math.nan])
def test_label_outside_the_range_is_rejected(tmp_path, wrong):
    write_stsb(tmp_path, {"train": [1.0, wrong], "validation": [1.0]})
    with pytest.raises(CorruptFileError, match=r"train, row 1: label is .*, not a number in 0..5"):
        prepare("glue/stsb", cache=tmp_path, hub=tmp_path)


@pytest.fixture
def regression(tmp_path):
    words = ["dataset=synthetic/stsb", "task.kind=regression", f"storage.cache={tmp_path}"]
    words += [f"storage.runs={tmp_path}", "tracking.mlflow=false", "method=fedit", "budget=4"]
    words += ["rounds=3", "optimizer.lr=3e-3", "federation.clients=3", "resources.backend=inline"]
    return load_experiment(None, words)


def test_regression_learns_and_reports_correlations(regression, drive_to_end):
    driver = drive_to_end(InlineDriver(regression, prepare_run(regression), "a"))
    first, *_, last = (record.scores for record in driver.checkpoint.records)
    assert last["loss"] < 0.9 * first["loss"] and last["pearson"] > 0.1
    assert {"closeness", "pearson", "spearman"} < last.keys()


def test_regression_is_the_squared_error():
    task = task_of(DatasetInfo("scores", "text", tuple("012345"), fields=("text",)))
    outputs = torch.tensor([[1.5], [9.0], [float("nan")]])
    batch = {"labels": torch.tensor([2, 0, 5])}
    rows = task.score(outputs, batch)
    assert rows.loss[:2].tolist() == [0.25, 81.0] and rows.loss[2].isnan()
    np.testing.assert_allclose(rows.scores["closeness"], [0.9, 0.0, 0.0], rtol=1e-6)
    pair = {"labels": batch["labels"][:2]}
    assert float(task.loss(outputs[:2], pair)) == (0.25 + 81.0) / 2
    assert task.answers(outputs[:2], task.numbers) == ["1.5", "9"]


@pytest.mark.parametrize(
    ("classes", "fault"),
    [
        (("yes", "no"), "a label is not a number .*'yes'"),
        (("1",), "labels must be two or more finite numbers"),
        (("1", "inf"), "labels must be two or more finite numbers"),
    ],
)
def test_labels_must_be_numbers(classes, fault):
    with pytest.raises(InputError, match=f"task.kind=regression: {fault}"):
        task_of(DatasetInfo("scores", "text", classes, fields=("text",)))


def sums_of(pairs):
    kept = torch.tensor(pairs, dtype=torch.float64)
    rows = RowScores(kept[:, 0], {"closeness": kept[:, 0]}, kept=kept)
    return EvalSums.of(rows, Correlations(("closeness",)), {})


def test_correlations_of_all_batches_equal_scipy():
    pairs = np.random.default_rng(0).integers(0, 9, (40, 2)).astype(float)
    found = Correlations(("closeness",)).merge([sums_of(pairs[:7]), sums_of(pairs[7:])])
    assert found["pearson"] == pytest.approx(pearsonr(*pairs.T).statistic, abs=1e-12)
    assert found["spearman"] == pytest.approx(spearmanr(*pairs.T).statistic, abs=1e-12)
    reverse = Correlations(("closeness",)).merge([sums_of(pairs[7:]), sums_of(pairs[:7])])
    assert reverse == found


@pytest.mark.parametrize("last", [1.0, math.nan, math.inf])
def test_correlation_that_is_not_defined_is_omitted(last):
    found = Correlations(("closeness",)).merge([sums_of([(1.0, 2.0), (last, 3.0)])])
    assert not {"pearson", "spearman"} & found.keys()


def test_preset_of_fedsvd():
    made = load_experiment(None, ["preset=fedsvd-glue", "dataset=glue/qnli"])
    fed = made.federation
    assert (made.model.name, made.method.name) == ("FacebookAI/roberta-large", "fedsvd")
    assert (fed.clients, fed.clients_per_round, fed.rounds) == (6, 3, 100)
    assert (fed.local_steps, fed.batch_size, fed.weighting) == (10, 128, "size")
    assert (made.lora_rank, made.adapter.alpha, made.adapter.dropout) == (8, 8, 0.05)
    assert (made.optimizer.name, made.optimizer.lr, made.partition.alpha) == ("sgd", 0.5, 0.5)


def test_commonsense_has_eight_test_sets_with_answers(tmp_path):
    row = {"instruction": "Is it?", "input": "", "answer": "true"}
    answers = ["true", "solution2", "answer1", "ending4", "option2", "answer3", "answer4", "false"]
    folder = tmp_path / "commonsense-15k"
    folder.mkdir()
    outputs = {
        name: f"the correct answer is {a}" for name, a in zip(TEST_SETS, answers, strict=True)
    }
    for name, output in ({"train": "the correct answer is true"} | outputs).items():
        (folder / f"{name}.json").write_text(json.dumps([row | {"output": output}]))
    data = prepare("commonsense-15k", cache=tmp_path, hub=tmp_path)
    assert data.info.groups == tuple(TEST_SETS) and data.test.column("group").tolist() == [
        *range(8)
    ]
    made = load_experiment(None, ["dataset=commonsense-15k"])
    for answer, output in zip(answers, data.test.texts("output").to_pylist(), strict=True):
        for other in answers:
            found = exact_match(f"I say {other}.", output, pattern=made.task.answer_pattern)
            assert found == (other == answer)
