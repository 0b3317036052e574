"""The example in docs/adding-a-codec.md is a complete codec and computes what it says."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from newcomers import unloaded_after

from trishul_ray.adapters.layout import Unit
from trishul_ray.lab.codecs.base import CodecFields, Units, build_codec
from trishul_ray.lab.codecs.stage import UploadCodec, UploadsConfig
from trishul_ray.stages import Change, Sender

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


def test_it_is_short_and_sends_a_bit_an_entry(example):
    assert len(example.splitlines()) < 45
    units = Units(np.array([9, 7]))
    change = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    codec = build_codec(CodecFields(codec="signs"))
    payload = codec.encode(change, units, np.random.default_rng(0))
    assert len(payload) == 1 + 2 * 4 + 2
    read = codec.decode(payload, units)
    np.testing.assert_array_equal(np.sign(read), np.sign(change))
    for part in (slice(0, 9), slice(9, 16)):
        np.testing.assert_allclose(np.abs(read[part]), np.abs(change[part]).mean(), rtol=1e-6)


def test_error_feedback_takes_its_bias_away(example):
    """The mean of what is sent of one change, round after round, tends to it."""
    unit = Unit("head:weight", "classifier", slice(0, 20), slice(0, 20))
    change = Change(np.random.default_rng(0).standard_normal(20).astype(np.float32), {})
    gaps = {}
    for feedback in (False, True):
        each = UploadCodec(UploadsConfig(codec="signs", error_feedback=feedback))
        sent, kept = np.zeros(20), {}
        for number in range(1, 201):
            result = each(change, Sender(0, number, 0, 1.0, (unit,), kept=kept))
            sent, kept = sent + result.shared, result.kept
        gaps[feedback] = np.linalg.norm(sent / 200 - change.shared)
    assert gaps[True] < 0.1 * gaps[False]
