"""``trishul check``: a failed check is reported by name in one line."""

from pathlib import Path

import pytest
from example_plugins import unloaded_after

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.lora import LoRA
from trishul_ray.contract.checks import require_hooks
from trishul_ray.contract.plugin_checks import check_plugin, run_check, subjects_of
from trishul_ray.errors import InputError
from trishul_ray.plugins.loading import load_plugin

METHOD = """
from trishul_ray.methods.base import State, register
from trishul_ray.methods.fedit import FedIT
from trishul_ray.runtime.lazy import torch

@register("broken")
class Broken(FedIT):
    "FedIT with a fault."
    summary = "a fault"
    reference = "none"
    communication = "none"
"""
#: Faults of a method, the check that finds each, and its message.
FAULTS = {
    "shape": (
        """
    def upload(self, run, steps):
        return State(run.vector[:-1]), {}
""",
        "uploads what it declares",
        "upload() of Broken of plug-in broken returns shape (",
    ),
    "hook": (
        """
    def agregate(self, state, mean, round_, layout):
        return state
""",
        "describes itself",
        "Broken.agregate is not a hook; did you mean aggregate?",
    ),
    "arguments": (
        """
    def aggregate(self, state, mean, layout):
        return state
""",
        "describes itself",
        "the hook Broken.aggregate gets self, state, mean, round_, layout",
    ),
    "nan": (
        """
    def aggregate(self, state, mean, round_, layout):
        return State(mean.shared / 0 * 0)
""",
        "moves, and the loss falls",
        "aggregate() of Broken of plug-in broken returns a state that is not finite",
    ),
    "memory": (
        """
    calls = 0
    def before_step(self, run):
        type(self).calls += 1
        run.grad *= 1 + 1 / self.calls
""",
        "repeats a client's call",
        "do not store state in the instance",
    ),
    "error": (
        """
    def upload(self, run, steps):
        return State(run.nothing), {}
""",
        "uploads what it declares",
        "broken, line 14: AttributeError",
    ),
}
CODEC = """
import numpy as np
from trishul_ray.lab.codecs.base import Codec, register_codec

@register_codec("lossy")
class Lossy(Codec):
    def pack(self, values, sizes, rng):
        return (values * 0.5).astype("<f4").tobytes()
    def unpack(self, body, sizes):
        return np.frombuffer(body, dtype="<f4")
    def bound(self, values, sizes):
        return np.zeros(len(values))
"""
TASK = """
from trishul_ray.tasks.base import register
from trishul_ray.tasks.sequence_classification import SequenceClassification

@register("halved")
class Halved(SequenceClassification):
    families = ("sequence-classification",)
    def loss(self, outputs, batch):
        return super().loss(outputs, batch) / 2
"""
DATASET = """
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import PublicDataset, TextRows, register_dataset

NOTES = register_dataset(PublicDataset(
    name="notes", description="notes",
    repo=HubRepo("notes", file_patterns=("{split}.csv",)), sizes={"train": 20, "test": 4},
    rows=TextRows(fields=("text",), classes=("good", "bad")),
))
"""
ADAPTER = """
from trishul_ray.adapters.lora import LoRA
from trishul_ray.methods.base import register
from trishul_ray.methods.fedit import FedIT

class Doubled(LoRA):
    def delta(self, weight, constants, params):
        return 2 * super().delta(weight, constants, params)
    def lora_factors(self, weight, constants, params):
        return None

@register("doubled")
class Method(FedIT):
    "FedIT with an update that differs from its forward."
    summary = reference = communication = "none"
    def adapters(self, targets):
        return {n: Doubled(a.rank, a.scale) for n, a in super().adapters(targets).items()}
"""


def outcomes(text, file, only=()):
    """Return the outcomes of the checks of a file, or of some: a method's checks take seconds."""
    file.write_text(text)
    with unloaded_after():
        plugin = load_plugin(file)
        if not only:
            return list(check_plugin(plugin))
        found = [(subject, c) for subject, checks in subjects_of(plugin) for c in checks]
        return [run_check(subject, check) for subject, check in found if check.name in only]


def test_a_hook_with_keyword_arguments_passes():
    require_hooks(LoRA, LayerAdapter)


@pytest.fixture(autouse=True)
def shared_cache(cache, monkeypatch):
    monkeypatch.setenv("TRISHUL_CACHE", str(cache))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_method_is_named(fault, tmp_path):
    body, name, said = FAULTS[fault]
    (found,) = outcomes(METHOD + body, tmp_path / "broken.py", {name})
    assert (found.subject, found.result) == ("method=broken", "failed")
    assert said in found.reason and "learning rate" not in found.reason


def test_whole_method_is_checked_and_faults_reported_once(tmp_path):
    body = "    alters_mean = True\n    def upload(self, run, steps):\n        run.no\n"
    found = outcomes(METHOD + body, tmp_path / "broken.py")
    skipped = [o for o in found if o.result == "skipped"]
    assert [o.reason for o in skipped] == ["its alters_mean is True"]
    results = {o.name: (o.result, o.reason) for o in found}
    assert results["describes itself"] == ("ok", "")
    assert results["uploads what it declares"][1].startswith("broken, line ")
    assert results["repeats a client's call"] == ("failed", "for the same reason")


def test_a_codec_outside_its_bound_is_named(tmp_path):
    pytest.importorskip("trishul_ray.lab")
    first, *others = outcomes(CODEC, tmp_path / "lossy.py")
    assert first.result == "failed" and "more than bound()" in first.reason
    assert {o.result for o in others} == {"ok"}


def test_a_task_that_reports_another_loss_is_named(tmp_path):
    found = {o.name: o for o in outcomes(TASK, tmp_path / "halved.py")}
    failed = [o for o in found.values() if o.result == "failed"]
    assert [o.subject for o in failed] == ["task.kind=halved"]
    assert "loss() is " in failed[0].reason and "score() reports " in failed[0].reason


def test_class_without_rows_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("TRISHUL_HUB", str(tmp_path / "hub"))
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path / "cache"))
    mirror = tmp_path / "hub" / "notes"
    mirror.mkdir(parents=True)
    for split, rows in {"train": 20, "test": 4}.items():
        lines = [f"note {i},{i % 2 if split == 'test' else 0}" for i in range(rows)]
        (mirror / f"{split}.csv").write_text("\n".join(["text,label", *lines]))
    found = outcomes(DATASET, tmp_path / "notes.py")
    assert [(o.subject, o.result) for o in found] == [
        ("data.name=notes", "ok"),
        ("data.name=notes", "failed"),
        ("data.name=notes", "ok"),
    ]
    assert found[1].reason == "no training row of class bad"


def test_an_adapter_that_contradicts_itself_is_named(tmp_path):
    names = {"starts at the pretrained model", "has adapters that agree with themselves"}
    start, failed = outcomes(ADAPTER, tmp_path / "doubled.py", names)
    assert (start.result, failed.result) == ("ok", "failed")
    assert "forward() differs from the update of delta()" in failed.reason


def test_the_exit_code_says_whether_all_is_kept(tmp_path, called):
    pytest.importorskip("trishul_ray.lab")
    good = Path(__file__).parents[1] / "lab" / "stages" / "example_plugins" / "half.py"
    code, said, error = called("check", "--plugin", str(good))
    assert (code, error) == (0, "") and said.splitlines()[0].startswith("ok       codec=half  ")
    (tmp_path / "lossy.py").write_text(CODEC)
    code, said, error = called("check", "--plugin", str(tmp_path / "lossy.py"))
    assert (code, error) == (1, "") and said.startswith("failed   codec=lossy  stays within ")
    code, said, error = called("check")
    assert (code, said) == (2, "") and "trishul check --plugin mine.py" in error


def test_file_that_defines_nothing_is_rejected(tmp_path):
    with pytest.raises(InputError, match=r"nothing that has checks: method, "):
        outcomes("x = 1\n", tmp_path / "empty.py")
