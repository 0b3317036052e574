"""Runs on quantized backbones equal runs on dequantized ones, and folds are stored separately."""

import pytest
import torch
from method_runs import assert_that_of_the_dequantized_backbone
from torch import nn

import trishul_ray
from trishul_ray.adapters.quantized import QuantizedLinear
from trishul_ray.errors import InputError
from trishul_ray.experiment.compatibility import check_fits
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.worker.context import build_context, build_model_context
from trishul_ray.federation.worker.survey import weight_gradients

ROUNDS = ["federation.rounds=2", "federation.local_steps=2"]
KINDS = ("nf4", "int8")
#: Each way in which a method uses a frozen weight, and a path that never merges: a dense weight may
#: be merged, with another order of sums.
WAYS = {
    "thin factors": ["method=fedit"],
    "core heads": ["method=trishul", "method.allocation=uniform"],
    "folded changes": ["method=fedex"],
    "fresh factors": ["method=flora"],
    "dense gradients": ["method=fedsb"],
    "measured gradients": ["method=trishul", "method.allocation=gradient"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hook_gradients_equal_autograd(dtype):
    torch.manual_seed(0)
    shared = nn.Linear(12, 12, bias=False)
    layers = [nn.Linear(7, 12), nn.GELU(), shared, nn.Tanh(), shared, nn.Linear(12, 3)]
    model = nn.Sequential(*layers).to(dtype)
    watched = {name: model.get_submodule(name) for name in ("0", "2", "5")}
    x = torch.randn(2, 5, 7, dtype=dtype)
    wanted = torch.autograd.grad(
        model(x).float().square().sum(), [layer.weight for layer in watched.values()]
    )
    model.requires_grad_(False)
    with weight_gradients(watched) as found:
        model(x).float().square().sum().backward()
    for (name, gradient), want in zip(sorted(found.items()), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=0, atol=0, msg=name)
    assert not any(layer._forward_hooks for layer in watched.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_run_equals_run_on_dequantized_backbone(way, kind, small, inline_result, tmp_path):
    """Compare bitwise: no method ever writes to a quantized weight, or reads another one."""
    assert_that_of_the_dequantized_backbone(small, inline_result, tmp_path, kind, WAYS[way])


def test_bytes_repeat_and_depend_on_the_stage(small, tmp_path):
    def drive(*fields):
        run = small(*ROUNDS, *fields)
        driver = InlineDriver(run, prepare_run(run), "inline")
        standing = driver.begin()
        while not standing.finished:
            standing = driver.step()
        return driver.final().checkpoint.state.shared.tobytes()

    first = drive("model.quantize=nf4", "model.precision=bf16")
    again = drive(
        "model.quantize=nf4", "model.precision=bf16", f"storage.cache={tmp_path}",
        f"storage.runs={tmp_path}",
    )  # fmt: skip
    assert first == again
    checkpointing = "model.gradient_checkpointing=true"
    assert first == drive("model.quantize=nf4", "model.precision=bf16", checkpointing)
    assert first != drive("model.precision=bf16")


def test_heads_are_divided_by_the_unquantized_weights(small):
    blocks = []
    for kind in ("none", "nf4", "int8"):
        run = small("method=trishul", f"model.quantize={kind}")
        context = build_model_context(run, prepare_run(run).dataset.info)
        linear = context.targets.layers[0].name
        stored = getattr(context.model.model.get_submodule(linear), "stored", None)
        assert (stored is None) == (kind == "none")
        blocks.append((context.targets.squared_norms, context.model.layout))
    assert blocks[0] == blocks[1] == blocks[2]


def test_quantization_is_part_of_the_id(small):
    plain, four, eight = (small(*f) for f in ((), *([f"model.quantize={k}"] for k in KINDS)))
    assert small("model.quantize=none").id == plain.id
    assert len({plain.id, four.id, eight.id}) == 3
    assert b"quantize: nf4" in four.to_yaml()


def test_what_cannot_be_is_rejected_in_one_line(small, monkeypatch):
    with pytest.raises(InputError, match=r"^model\.quantize='nf4' is not supported with method="):
        small("method=fullft", "model.quantize=nf4")
    with pytest.raises(InputError, match=r"model\.quantize.*int4.*'none', 'nf4' or 'int8'"):
        small("model.quantize=int4")
    run = small("model.quantize=nf4")
    check_fits(run)
    from trishul_ray.adapters import quantized

    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs bitsandbytes: pip install '\.\[quant\]'"):
        check_fits(run)


def test_a_model_from_python_is_quantized_too(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
            self.classifier = nn.Linear(64, 10)

        def forward(self, pixel_values):
            x = pixel_values.flatten(1)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.classifier(x)

    fields = {"backend": "inline", "rounds": 1, "local_steps": 1, "mlflow": False, "budget": 4}
    torch.manual_seed(0)
    result = trishul_ray.run(
        "digits", model=Net(), runs=tmp_path, cache=tmp_path, progress="off", lr=0.01,
        method="fedit", **{"model.quantize": "nf4"}, **fields,
    )  # fmt: skip
    context = result._trained.context
    kinds = [type(layer.stored) for layer in context.model.model.layers]
    assert kinds == [QuantizedLinear, QuantizedLinear]


def test_survey_of_quantized_model_keeps_no_dense_parameters(small):
    run = small("method=fedsb", "model.quantize=nf4")
    context = build_context(run, prepare_run(run))
    names = {spec.name for spec in context.model.specs}
    held = {name.rpartition(".")[0] for name, _ in context.model.model.named_parameters()}
    assert not names & {name for name in held if name + ".weight" in held}
    assert all(f"{name}.weight" not in context.model.model.state_dict() for name in names)
