"""A run that will take more than an hour says so, with what would make it shorter."""

import io
import re
import threading

import pytest
from rich.console import Console

from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.data.prepare import Coverage, RowCounts
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.runs import runner
from trishul_ray.runs.runner import DurationNote
from trishul_ray.tracking.progress import RunProgress

TEXTS = DatasetInfo("films", "text", "hub:films", ("bad", "good"), fields=("text",))


def note_of(screen, info=TEXTS, *overrides):
    fields = ["federation.rounds=10", *overrides]
    rows = Coverage(info.name, info.source, None, RowCounts(9, 9, 9), RowCounts(20_000, 1, 1))
    progress = RunProgress(10, Console(file=screen, width=1000))
    return DurationNote(load_experiment(None, fields), info, rows, progress)


@pytest.fixture
def clock(monkeypatch):
    """``clock.append(seconds)`` -> how long each next round takes."""
    times = []
    now = iter(lambda: times.pop(0), None)
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(now))
    return times


def test_the_first_round_tells_and_only_it(clock):
    screen = io.StringIO()
    note = note_of(screen, TEXTS)
    clock += [0.0, 720.0]
    with note.round(0):
        pass
    with note.round(1):
        pass
    assert screen.getvalue().count("this run will take") == 1
    assert screen.getvalue().startswith(
        "this run will take about 2 h 00 min: 10 rounds of about 12 min 00 s. Shorter: "
        "federation.rounds=5 takes an hour; evaluation.limit=1000 or a larger evaluation.every "
        "(20,000 test rows); a smaller task.max_length (256); a smaller backbone"
    )


@pytest.mark.parametrize(("seconds", "said"), [(359.0, False), (361.0, True)])
def test_an_hour_is_the_limit(clock, seconds, said):
    screen = io.StringIO()
    clock += [0.0, seconds]
    with note_of(screen).round(0):
        pass
    assert bool(screen.getvalue()) == said


def test_a_resumed_run_counts_what_is_left(clock):
    screen = io.StringIO()
    clock += [0.0, 1000.0]
    with note_of(screen).round(8):
        pass
    assert screen.getvalue() == ""


def test_a_long_round_is_noted_while_it_runs(monkeypatch):
    monkeypatch.setattr(runner, "LEAST_SECONDS", 0.01)
    monkeypatch.setattr(runner, "UNREMARKED_SECONDS", 0.1)
    noted = threading.Event()
    monkeypatch.setattr(RunProgress, "note", lambda self, text: (lines.append(text), noted.set()))
    lines = []
    with note_of(io.StringIO()).round(0):
        assert noted.wait(30)
    (line,) = lines
    assert re.match("this run will take more than .*: 10 rounds of more than", line)


def test_smaller_images_are_named(clock, tmp_path):
    from transformers import Dinov2Config

    Dinov2Config(image_size=518, patch_size=14).save_pretrained(tmp_path)
    photos = DatasetInfo("images", "image", "images:x", ("a", "b"), image_shape=(3, 128, 128))
    screen = io.StringIO()
    clock += [0.0, 720.0]
    with note_of(screen, photos, f"model={tmp_path}").round(0):
        pass
    assert "model.image_size=140 (518)" in screen.getvalue()
