"""The example in docs/adding-a-codec.md is a complete codec, and error feedback corrects it."""

import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from example_plugins import unloaded_after

from trishul_ray.adapters.layout import Unit
from trishul_ray.lab.codecs.base import CodecFields, build_codec
from trishul_ray.lab.codecs.stage import Uploads, UploadsConfig
from trishul_ray.stages import Change, ClientRoundInfo

GUIDE = Path(__file__).parents[3] / "docs" / "adding-a-codec.md"
MODULE = "trishul_ray.lab.codecs.signs"


@pytest.fixture
def example(monkeypatch):
    """Load the example of the guide as a module, for one test."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    with unloaded_after():
        module = types.ModuleType(MODULE)
        monkeypatch.setitem(sys.modules, MODULE, module)
        exec(compile(code, GUIDE.name, "exec"), module.__dict__)
        yield code


def test_example_sends_one_bit_per_entry(example):
    assert len(example.splitlines()) < 45
    sizes = np.array([9, 7])
    change = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    codec = build_codec(CodecFields(codec="signs"))
    payload = codec.encode(change, sizes, np.random.default_rng(0))
    assert len(payload) == 1 + 2 * 4 + 2
    read = codec.decode(payload, sizes)
    np.testing.assert_array_equal(np.sign(read), np.sign(change))
    for part in (slice(0, 9), slice(9, 16)):
        np.testing.assert_allclose(np.abs(read[part]), np.abs(change[part]).mean(), rtol=1e-6)


def test_error_feedback_removes_the_bias(example):
    """The mean of the uploads of one change converges to it over rounds."""
    unit = Unit("head:weight", "classifier", slice(0, 20), slice(0, 20))
    change = Change(np.random.default_rng(0).standard_normal(20).astype(np.float32), {})
    gaps = {}
    for feedback in (False, True):
        config = UploadsConfig(codec="signs", error_feedback=feedback)
        stage = Uploads(config, SimpleNamespace(method=SimpleNamespace(name="fedit")))
        sent, kept = np.zeros(20), {}
        for number in range(1, 201):
            result = stage.send(change, ClientRoundInfo(0, number, 0, 1.0, (unit,), kept=kept))
            sent, kept = sent + result.shared, result.kept
        gaps[feedback] = np.linalg.norm(sent / 200 - change.shared)
    assert gaps[True] < 0.1 * gaps[False]
