"""Records of result.json: the best round; processor, kernels and libraries."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace

import pytest

from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import coverage_of, prepare_run
from trishul_ray.report.summary import ATTEMPT, read_note, write_note
from trishul_ray.runs.results import summarize
from trishul_ray.storage.integrity import to_checked_json
from trishul_ray.storage.store import Store


def test_the_kernels_in_use_are_recorded():
    """Run in another process: limits of the instruction set are read when torch is loaded."""
    code = (
        "import json; from trishul_ray.runs.results import hardware; "
        "print(json.dumps(vars(hardware())))"
    )
    limits = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | limits,
        capture_output=True,
        text=True,
        check=True,
    )
    recorded = json.loads(done.stdout)
    assert recorded["cpu_capability"] == "DEFAULT" and recorded["processor"].strip()
    assert recorded["kernels"]["blas"] != "unknown" and recorded["kernels"]["libraries"]
    assert limits.items() <= recorded["kernels"]["environment"].items()


def final_of(experiment):
    driver = InlineDriver(experiment, prepare_run(experiment), "test")
    while not driver.step().finished:
        pass
    return driver.final()


@pytest.fixture
def summary_of(small):
    """``summary_of(result, experiment, test=..., validation=...)`` uses invented accuracies."""

    def summary(experiment, result, **accuracies):
        records = deepcopy(result.checkpoint.records)
        for name, values in accuracies.items():
            for record, value in zip(records, values, strict=True):
                record.scores[name] = value
        coverage = coverage_of(experiment, prepare_run(experiment))
        result = replace(result, checkpoint=replace(result.checkpoint, records=records))
        return summarize(experiment, result, coverage, 1.0, None)

    return summary


def test_best_round_is_chosen_on_validation_rows(small, summary_of):
    experiment = small("data.validation_share=0.2", "evaluation.per_client=true")
    result = final_of(experiment)
    assert all(
        0 <= record.scores["validation_accuracy"] <= 1 for record in result.checkpoint.records
    )
    last = result.checkpoint.records[-1]
    assert last.scores["validation_loss"] != last.scores["loss"]
    assert "validation_per_client_mean" in last.metrics()
    found = summary_of(
        experiment, result, accuracy=(0.9, 0.8, 0.3, 0.4), validation_accuracy=(0.9, 0.1, 0.7, 0.2)
    )
    best = found.best
    assert (best["round"], best["accuracy"], best["validation_accuracy"]) == (2, 0.3, 0.7)
    assert best["chosen_on"] == "validation" and found.final["validation_accuracy"] == 0.2
    assert found.data.validation == 64
    assert "64 validation rows and 64 of" in found.data.sentence


@pytest.mark.parametrize("accuracies", [(0.9, 0.1, 0.2, 0.1), (0.2, 0.1, 0.2, 0.2)])
def test_untuned_backbone_is_never_the_best(small, summary_of, accuracies):
    experiment = small()
    found = summary_of(experiment, final_of(experiment), accuracy=accuracies)
    assert found.best["round"] == 2 and found.best["chosen_on"] == "test"
    assert "validation_accuracy" not in found.final and found.data.validation == 0


def test_damaged_or_foreign_note_is_ignored(tmp_path):
    home, other = (Store.open(str(tmp_path / name)) for name in ("a", "b"))
    write_note(home, ATTEMPT, "0123abc")
    content = home.read(ATTEMPT)
    assert read_note(home, ATTEMPT) == "0123abc"
    other.write(ATTEMPT, content)
    assert read_note(other, ATTEMPT) == ""
    for damaged in (content.replace(b"0123abc", b"0123abb"), to_checked_json({"id": "a"})):
        home.write(ATTEMPT, damaged)
        assert read_note(home, ATTEMPT) == ""
