import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from damage import DAMAGE
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import CorruptFileError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.compute import cast, run_dtype
from trishul_ray.storage.integrity import SEAL, take_remarks

ROOT = Path(__file__).parents[2]
KINDS = [
    ("vit-digits", "image-classification", 10),
    ("bert-tiny", "sequence-classification", 3),
    ("t5-tiny", "seq2seq-lm", None),
    ("llama-tiny", "causal-lm", None),
    ("llama-tiny", "sequence-classification", 3),
]


def tensors(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def plain(config, kind, classes, cache, seed=0):
    model = Backbone(config, StoragePaths(cache, None)).load(kind, classes, seed=seed)
    cast(model, run_dtype(config))
    return model


def resident(config, kind, classes, cache, seed=0):
    return Backbone(config, StoragePaths(cache, None)).load_resident(kind, classes, seed=seed)


def assert_same_bits(one, two):
    first, second = tensors(one), tensors(two)
    assert list(first) == list(second)
    for name, value in first.items():
        assert value.dtype == second[name].dtype and torch.equal(value, second[name]), name
    assert one.config.to_diff_dict().keys() - {"use_cache"} == (
        two.config.to_diff_dict().keys() - {"use_cache"}
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "kind", "classes"), KINDS)
def test_shared_weights_equal_a_plain_load(name, kind, classes, precision, tmp_path):
    config = ModelConfig(name=name, init="random", precision=precision)
    want = plain(config, kind, classes, tmp_path, seed=3)
    first, second = (resident(config, kind, classes, tmp_path, seed=3).model for _ in range(2))
    assert_same_bits(first, want)
    assert_same_bits(second, want)
    assert not second.training
    assert all(t.data_ptr() % 64 == 0 for t in tensors(second).values())
    shared = [n for n, p in second.named_parameters(remove_duplicate=False)]
    assert len(shared) - len(list(second.parameters())) == (
        len(list(want.named_parameters(remove_duplicate=False))) - len(list(want.parameters()))
    )
    assert len(list((tmp_path / "weights").glob("*/weights.pt"))) == 1


@pytest.fixture
def bert(tmp_path):
    """Write a folder with a masked language model: no pooler, no classifier."""
    model = AutoModelForMaskedLM.from_config(BUILTINS["bert-tiny"].config())
    model.save_pretrained(tmp_path / "bert")
    return ModelConfig(name=str(tmp_path / "bert"))


def test_drawn_head_is_not_stored(bert, tmp_path):
    kind = "sequence-classification"
    models = [resident(bert, kind, 3, tmp_path, seed=n).model for n in (0, 1, 0)]
    for model, seed in zip(models, (0, 1, 0), strict=True):
        assert_same_bits(model, plain(bert, kind, 3, tmp_path, seed=seed))
    assert not torch.equal(models[0].classifier.weight, models[1].classifier.weight)
    (file,) = (tmp_path / "weights").glob("*/weights.pt")
    stored = torch.load(file)
    assert {"classifier.weight", "classifier.bias"} <= {*stored["drawn"]}
    assert not {*stored["drawn"]} & stored["tensors"].keys()


def test_file_name_covers_everything_behind_the_weights(bert, tmp_path):
    def name(config, classes=3, seed=0):
        backbone = Backbone(config, StoragePaths(tmp_path, None))
        return backbone.resident_key("sequence-classification", classes, seed=seed)

    drawn = ModelConfig(name="bert-tiny", init="random")
    half = bert.model_copy(update={"precision": "bf16"})
    assert name(bert) == name(bert, seed=1)
    names = {name(bert), name(bert, classes=4), name(half), name(drawn), name(drawn, seed=1)}
    before = name(bert)
    file = tmp_path / "bert/model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert len(names) == 5 and name(bert) != before


def test_source_depends_only_on_the_content(bert, tmp_path):
    kind = "sequence-classification"
    first = resident(bert, kind, 3, tmp_path).source
    shutil.copytree(tmp_path / "bert", tmp_path / "copy")
    copied = bert.model_copy(update={"name": str(tmp_path / "copy"), "precision": "bf16"})
    assert first.startswith("sha256:")
    assert resident(copied, kind, 2, tmp_path).source == first
    file = tmp_path / "copy/model.safetensors"
    state = load_file(file)
    state["bert.embeddings.word_embeddings.weight"][7, 7] += 1.0
    save_file(state, file, metadata={"format": "pt"})
    assert resident(copied, kind, 2, tmp_path).source != first
    drawn = ModelConfig(name="bert-tiny", init="random")
    assert resident(drawn, kind, 3, tmp_path).source == ""


def test_a_write_stays_in_the_process(bert, tmp_path):
    model = resident(bert, "sequence-classification", 3, tmp_path).model
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.zero_()
    again = resident(bert, "sequence-classification", 3, tmp_path).model
    assert_same_bits(again, plain(bert, "sequence-classification", 3, tmp_path))


@pytest.mark.parametrize("name", ["weights.pt", SEAL])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_made_again(bert, name, damage, tmp_path):
    kind = "sequence-classification"
    resident(bert, kind, 3, tmp_path)
    take_remarks()
    (folder,) = (tmp_path / "weights").glob("*/")
    file = folder / name
    data = file.read_bytes()
    file.write_bytes(DAMAGE[damage](data))
    assert_same_bits(resident(bert, kind, 3, tmp_path).model, plain(bert, kind, 3, tmp_path))
    (line,) = take_remarks()
    assert line.startswith(f"{folder} is damaged (") and line.endswith("); recreating it")
    assert file.read_bytes() == data
    resident(bert, kind, 3, tmp_path)
    assert take_remarks() == ()


def test_a_malformed_checkpoint_leaves_no_file(bert, tmp_path):
    file = tmp_path / "bert/model.safetensors"
    state = load_file(file)
    state["bert.embeddings.word_embeddings.weight"][7, 7] = float("nan")
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(CorruptFileError, match=r"word_embeddings\.weight of checkpoint"):
        resident(bert, "sequence-classification", 3, tmp_path)
    assert not list((tmp_path / "weights").glob("*/weights.pt"))


HOLD = """
import sys
from pathlib import Path
from trishul_ray.config.fields import ModelConfig
from trishul_ray.models.backbone import Backbone
from trishul_ray.config.paths import StoragePaths
config = ModelConfig(name="bert-tiny", init="random")
backbone = Backbone(config, StoragePaths(Path(sys.argv[1]), None))
model = backbone.load_resident("sequence-classification", 3, seed=0).model
print(*(line for line in Path("/proc/self/maps").read_text().splitlines() if "/weights/" in line))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="no /proc on this system")
def test_two_processes_map_the_same_file(tmp_path):
    config = ModelConfig(name="bert-tiny", init="random")
    model = resident(config, "sequence-classification", 3, tmp_path).model
    (file,) = (tmp_path / "weights").glob("*/weights.pt")
    written = file.stat().st_ino
    other = subprocess.run(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=True,
    ).stdout  # fmt: skip
    here = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    starts = [int(line.split("-")[0], 16) for line in here]
    ends = [int(line.split("-")[1].split()[0], 16) for line in here]
    for parameter in model.parameters():
        place = parameter.data_ptr()
        assert any(start <= place < end for start, end in zip(starts, ends, strict=True))
    inodes = {int(line.split()[4]) for line in [*here, *other.splitlines()]}
    assert str(file) in other and inodes == {written}
