import json
import warnings
from pathlib import Path

import pytest
import torch
from pairwise import pairwise
from peft import LoraConfig, PeftModel
from safetensors import safe_open

from trishul_ray.adapters.export import FOLDED_ERROR, decompose, export_merged, export_peft
from trishul_ray.adapters.model import Trained
from trishul_ray.errors import InputError


def trained_logits(bench, state):
    bench.adapted.bind(Trained(state))
    with torch.no_grad():
        result = bench.adapted.forward(**bench.inputs).logits
    bench.adapted.unbind()
    return result


@pytest.mark.parametrize(
    ("family", "adapters", "train_head"),
    pairwise(
        ("vit", "bert", "roberta", "t5", "llama", "llama-classifier"),
        ("uneven-heads", "lora", "mixed"),
        (True, False),
    ),
)
def test_peft_loads_the_adapter_with_equal_logits(make, family, adapters, train_head, tmp_path):
    bench = make(family, adapters, train_head=train_head)
    state = bench.random_state()
    expected = trained_logits(bench, state)
    folder = tmp_path / "adapter"
    exported = export_peft(bench.adapted, Trained(state), folder, f"tiny/{family}")
    assert not exported.folded and exported.error == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing.*")  # a missing adapter key
        loaded = PeftModel.from_pretrained(bench.twin, folder)
    with torch.no_grad():
        got = loaded(**bench.inputs).logits
    assert (got - expected).abs().max() <= 1e-4
    bench_plain = make(family)
    with torch.no_grad():
        assert (bench_plain.twin(**bench.inputs).logits - expected).abs().max() > 1e-2
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_ranks_differ_by_layer_without_headless_layers(make, tmp_path):
    bench = make("vit")
    export_peft(bench.adapted, Trained(bench.random_state()), tmp_path / "adapter", "tiny/vit")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    ranks = {
        s.name: a.heads * a.rank
        for s in bench.adapted.specs
        for a in [bench.adapted.adapters[s.name]]
    }
    without = [name for name, rank in ranks.items() if rank == 0]
    assert without
    assert sorted(config["target_modules"]) == sorted(set(ranks) - set(without))
    for name in config["target_modules"]:
        assert config["rank_pattern"].get(name, config["r"]) == ranks[name]
        assert config["alpha_pattern"].get(name, config["lora_alpha"]) == ranks[name]
    assert config["base_model_name_or_path"] == "tiny/vit"
    assert config["modules_to_save"] == ["classifier"]
    # Omitted fields have PEFT's defaults, and written fields have PEFT's names.
    read = LoraConfig.from_pretrained(tmp_path / "adapter").to_dict()
    usual = LoraConfig(peft_type="LORA").to_dict()
    assert config.keys() <= read.keys()
    assert {name for name in read if read[name] != usual[name]} <= config.keys()
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        for name in config["target_modules"]:
            factor_A = file.get_tensor(f"base_model.model.{name}.lora_A.weight")
            assert factor_A.shape == (ranks[name], 24)


@pytest.mark.parametrize("adapters", ["uneven-heads", "mixed"])
def test_the_merged_model_is_loaded_by_from_pretrained(make, family, adapters, tmp_path):
    bench = make(family, adapters)
    state = bench.random_state()
    expected = trained_logits(bench, state)
    folder = export_merged(bench.adapted, Trained(state), tmp_path / "model")
    loaded = type(bench.twin).from_pretrained(folder).eval()
    with torch.no_grad():
        got = loaded(**bench.inputs).logits
    assert (got - expected).abs().max() <= 1e-4
    assert bench.adapted.attached


@pytest.mark.parametrize("export", ["peft", "merged"])
def test_only_an_empty_folder_is_written_to(make, export, tmp_path, monkeypatch):
    bench = make("vit")
    state = bench.adapted.initial()

    def write(directory):
        if export == "peft":
            export_peft(bench.adapted, Trained(state), directory, "tiny/vit")
        else:
            export_merged(bench.adapted, Trained(state), directory)
        return [p.name for p in directory.iterdir()]

    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="full exists and is not an empty folder"):
        write(full)
    assert [p.name for p in full.iterdir()] == ["notes.txt"]
    with pytest.raises(InputError, match="not an empty folder"):
        write(full / "notes.txt")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert write(empty) == write(tmp_path / "deep" / "new") != []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "empty", "full"]
    with pytest.raises(InputError):
        write(empty)
    (tmp_path / "named").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "named")
    assert write(tmp_path / "link") == write(tmp_path / "new") != []
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="here is the current folder; choose another one"):
        write(Path())


def test_a_model_without_adapters_has_nothing_to_export(make, tmp_path):
    bench = make("vit")
    bench.adapted.adapters.clear()
    empty = type(bench.adapted)(bench.twin, {}, seed=0, train_head=True)
    with pytest.raises(InputError, match="no layer is adapted"):
        export_peft(empty, Trained(empty.initial()), tmp_path / "adapter", "tiny/vit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1, 5, 12])
def test_an_update_is_decomposed_at_its_rank(rank):
    generator = torch.Generator().manual_seed(rank)
    left, right = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((12, rank), (rank, 20))
    )
    noise = 1e-8 * torch.randn(12, 20, generator=generator, dtype=torch.float64)
    update = left @ right + (noise if rank else 0)
    factor_B, factor_A, error = decompose(update)
    assert factor_A.shape[0] == max(1, rank)
    lost = (factor_B @ factor_A - update).norm() / max(float(update.norm()), 1e-300)
    assert error <= FOLDED_ERROR and abs(float(lost) - error) <= 1e-12


def test_higher_ranks_are_truncated_and_the_error_reported(make, tmp_path):
    bench = make("vit")
    trained = Trained(bench.random_state())
    exported = export_peft(bench.adapted, trained, tmp_path / "adapter", "tiny/vit", rank=3)
    assert max(exported.ranks.values()) == 3
    lost = []
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        for name, adapter, params in bench.adapted.iter_layers(trained.vector):
            weight = bench.adapted.frozen_weight(name, trained)
            update = adapter.delta(weight, bench.adapted.constants(name), params)
            key = f"base_model.model.{name}.lora_{{}}.weight"
            factors = [file.get_tensor(key.format(each)).double() for each in "BA"]
            best = torch.linalg.svdvals(update)[3:].norm()
            error = torch.linalg.norm(factors[0] @ factors[1] - update)
            assert error == pytest.approx(float(best), rel=1e-4, abs=1e-6)
            lost.append(float(error / torch.linalg.norm(update)))
    assert exported.error == pytest.approx(max(lost), rel=1e-4)


def test_changes_of_frozen_weights_are_in_the_adapter(make, tmp_path):
    bench = make("vit", "lora")
    state = bench.random_state()
    name = bench.adapted.specs[0].name
    weight = bench.adapted.model.get_parameter(f"{name}.weight")
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) / 10
    bench.adapted.bind(Trained(state, {name: change}))
    with torch.no_grad():
        expected = bench.adapted.forward(**bench.inputs).logits
    bench.adapted.unbind()
    exported = export_peft(bench.adapted, Trained(state, {name: change}), tmp_path / "a", "tiny")
    assert exported.folded and exported.ranks[name] == min(weight.shape)
    loaded = PeftModel.from_pretrained(bench.twin, tmp_path / "a")
    with torch.no_grad():
        assert (loaded(**bench.inputs).logits - expected).abs().max() <= 1e-4
