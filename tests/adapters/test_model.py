"""Attach, bind, merge and detach the adapters of a whole model."""

import pickle
from dataclasses import fields

import pytest
import torch
from pairwise import pairwise
from tolerances import forward
from torch import nn

from trishul_ray.adapters.linear import AdaptedLinear
from trishul_ray.adapters.lora import LoRA
from trishul_ray.adapters.model import AdaptedModel, ParameterOverrides, Trained
from trishul_ray.adapters.multihead import MultiHead
from trishul_ray.adapters.targets import find_layers
from trishul_ray.errors import InputError

FAMILIES = ["vit", "bert", "roberta", "t5", "llama", "llama-classifier"]
ADAPTERS = ["uneven-heads", "heads", "lora", "mixed"]
PATHS = ["auto", "merged", "factored"]
#: Each family with one kind of adapters, and each kind; gradients are tested with every pair.
EACH_ONCE = pytest.mark.parametrize(
    ("family", "adapters"), [(family, ADAPTERS[n % 4]) for n, family in enumerate(FAMILIES)]
)


def logits(output):
    return output.logits.detach()


def snapshot(model):
    return {
        "modules": {name: (module, module.training) for name, module in model.named_modules()},
        "parameters": {
            name: (p, p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()
        },
    }


def assert_same(model, before):
    after = snapshot(model)
    assert after["modules"] == before["modules"]
    assert after["parameters"].keys() == before["parameters"].keys()
    for name, (parameter, required, value) in before["parameters"].items():
        now, now_required, now_value = after["parameters"][name]
        assert now is parameter
        assert now_required == required
        assert torch.equal(now_value, value)


@EACH_ONCE
def test_the_start_is_the_pretrained_model(make, family, adapters):
    bench = make(family, adapters)
    bench.twin.requires_grad_(False)  # a frozen model may use another attention kernel
    expected = logits(bench.twin(**bench.inputs))
    assert torch.equal(logits(bench.adapted.forward(**bench.inputs)), expected)
    start = bench.adapted.initial()
    bench.adapted.bind(Trained(start))  # Merged only once: W + 0 is W, so the bits are equal.
    assert torch.equal(logits(bench.adapted.forward(**bench.inputs)), expected)
    bench.adapted.bind(Trained(start), torch.zeros_like(start))
    trained = logits(bench.adapted.forward(**bench.inputs))
    torch.testing.assert_close(trained, expected, rtol=0, atol=forward(3, 64, expected))
    bench.adapted.unbind()
    assert torch.equal(logits(bench.adapted.forward(**bench.inputs)), expected)


@EACH_ONCE
def test_detach_restores_the_original_model(make, backbone, family, adapters):
    model = backbone(family).train()
    model.get_submodule(find_layers(model)[0].name).weight.requires_grad_(False)
    before = snapshot(model)
    bench = make(family, adapters)
    adapted = AdaptedModel(model, bench.adapted.adapters, seed=0, train_head=True)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert any(isinstance(module, AdaptedLinear) for module in model.modules())
    vector = adapted.initial()
    grad = torch.zeros_like(vector)
    adapted.bind(Trained(vector), grad)
    logits_before = adapted.forward(**bench.inputs).logits
    logits_before.square().sum().backward()
    with torch.no_grad():
        vector -= grad
    assert grad.abs().sum() > 0
    assert adapted.detach() is model
    assert_same(model, before)
    with pytest.raises(InputError, match="detached"):
        adapted.bind(Trained(vector))


@EACH_ONCE
def test_merge_writes_the_bound_model_into_plain_weights(make, family, adapters):
    bench = make(family, adapters)
    state = bench.random_state()
    bench.adapted.bind(Trained(state))
    expected = logits(bench.adapted.forward(**bench.inputs))
    merged = bench.adapted.merge(Trained(state))
    assert not any(isinstance(module, AdaptedLinear) for module in merged.modules())
    assert [type(m) for m in merged.modules()] == [type(m) for m in bench.twin.modules()]
    plain = logits(merged(**bench.inputs))
    torch.testing.assert_close(plain, expected, rtol=0, atol=forward(3, 64, expected))
    assert not torch.allclose(expected, logits(bench.twin(**bench.inputs)), atol=1e-2)
    # Merging does not unbind or change the adapted model.
    assert torch.equal(logits(bench.adapted.forward(**bench.inputs)), expected)
    assert bench.adapted.attached
    bench.adapted.unbind()
    for name, delta in bench.adapted.deltas(Trained(state)).items():
        weight = bench.twin.get_parameter(name + ".weight")
        assert torch.equal(
            merged.get_parameter(name + ".weight"), (weight.double() + delta).float()
        )
    # An untrained state merges to the pretrained bits.
    plain = bench.adapted.merge(Trained(bench.adapted.initial()))
    for name, parameter in bench.twin.named_parameters():
        assert torch.equal(plain.get_parameter(name), parameter), name


@pytest.mark.parametrize(("family", "adapters", "path"), pairwise(FAMILIES, ADAPTERS, PATHS))
def test_gradients_equal_plain_model_in_float64(make, family, adapters, path):
    """Compare with autograd through `W + delta(params)` written into a plain copy of the model."""
    bench = make(family, adapters, path=path, dtype=torch.float64)
    adapted, state = bench.adapted, bench.random_state()
    grad = torch.zeros_like(state)
    adapted.bind(Trained(state), grad)
    loss = adapted.forward(**bench.inputs).logits.square().mean()
    loss.backward()

    leaf = state.double().requires_grad_()
    views = adapted.layout.views(leaf)
    weights = {}
    for spec in adapted.specs:
        if spec.name + ".core" in views:
            bases = {k: v.double() for k, v in adapted.constants(spec.name).items()}
            core = views[spec.name + ".core"]
            scale = views.get(spec.name + ".scale", torch.ones(len(core), dtype=torch.float64))
            blocks = torch.block_diag(*(scale[:, None, None] * core))
            delta = bases["basis_B"] @ blocks @ bases["basis_A"]
        elif spec.name + ".lora_B" in views:
            frozen = adapted.constants(spec.name)
            factor_A = views.get(spec.name + ".lora_A")
            factor_A = frozen["lora_A"].double() if factor_A is None else factor_A
            factor_B = views[spec.name + ".lora_B"]
            delta = adapted.adapters[spec.name].scale * factor_B @ factor_A
        else:
            continue
        weights[spec.name + ".weight"] = (
            bench.twin.get_parameter(spec.name + ".weight").detach() + delta
        )
    heads = {n.removeprefix("head:"): v for n, v in views.items() if n.startswith("head:")}
    assert set(heads) == set(adapted.direct_parameters(state))
    output = torch.func.functional_call(bench.twin, {**weights, **heads}, (), bench.inputs)
    expected_loss = output.logits.square().mean()
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert leaf.grad is not None
    error = (grad.double() - leaf.grad).abs().max()
    assert error <= 1e-5 * leaf.grad.abs().max()
    for name, value in adapted.layout.views(leaf.grad).items():
        assert value.abs().max() > 0, name  # Zeros would compare equal.


def test_backward_accumulates_into_the_vector(make):
    bench = make("vit", "mixed")
    state = bench.random_state()
    grad = torch.zeros_like(state)
    pointer = grad.data_ptr()
    bench.adapted.bind(Trained(state), grad)

    def backward():
        loss = bench.adapted.forward(**bench.inputs).logits.square().sum()
        loss.backward()
        return loss.detach()

    first = backward()
    once = grad.clone()
    backward()
    torch.testing.assert_close(grad, 2 * once)
    assert grad.data_ptr() == pointer
    assert once.abs().min(dim=0).values >= 0 and (once != 0).float().mean() > 0.9
    # The next forward uses an in-place step without binding again.
    grad.zero_()
    state.sub_(1e-3 * once / once.norm())
    assert backward() < first
    assert state.grad is None


def test_a_bound_state_without_gradients_is_merged_once(make):
    bench = make("vit")
    state = bench.random_state()
    bench.adapted.bind(Trained(state))
    first = logits(bench.adapted.forward(**bench.inputs))
    layers = [m for m in bench.model.modules() if isinstance(m, AdaptedLinear)]
    weights = [layer.merged for layer in layers]
    assert all(weight is not None for weight in weights)
    assert torch.equal(logits(bench.adapted.forward(**bench.inputs)), first)
    assert all(layer.merged is weight for layer, weight in zip(layers, weights, strict=True))
    bench.adapted.bind(Trained(bench.adapted.initial()))
    assert not torch.equal(logits(bench.adapted.forward(**bench.inputs)), first)
    bench.adapted.unbind()
    assert all(layer.merged is None and layer.params is None for layer in layers)


def test_layers_without_heads_keep_their_modules(make):
    bench = make("vit")
    first, second, *_ = bench.adapted.specs
    assert type(bench.model.get_submodule(first.name)) is nn.Linear
    assert type(bench.model.get_submodule(second.name)) is AdaptedLinear
    assert not any(e.name.startswith(first.name) for e in bench.adapted.layout.entries)
    assert set(bench.adapted.adapters) == {spec.name for spec in bench.adapted.specs}


def test_the_classification_head_is_trained_only_on_request(make):
    with_head, without = make("bert"), make("bert", train_head=False)
    assert with_head.adapted.classifier_size == (24 * 24 + 24) + (3 * 24 + 3)  # pooler, classifier
    assert without.adapted.classifier_size == 0
    assert with_head.adapted.layout.size == without.adapted.layout.size + 600 + 75
    state = with_head.random_state()
    head = with_head.adapted.direct_parameters(state)
    with_head.adapted.bind(Trained(state))
    with_head.adapted.forward(**with_head.inputs)
    assert torch.equal(with_head.model.classifier.weight, head["classifier.weight"])
    with_head.adapted.unbind()
    assert isinstance(with_head.model.classifier.weight, nn.Parameter)
    assert torch.equal(with_head.model.classifier.weight, with_head.twin.classifier.weight)


def test_bfloat16_backbones_train_float32_vectors(make):
    bench = make("vit", dtype=torch.bfloat16)
    wide = make("vit")
    state = bench.random_state()
    gradients = []
    for adapted, inputs in ((bench.adapted, bench.inputs), (wide.adapted, wide.inputs)):
        grad = torch.zeros_like(state)
        adapted.bind(Trained(state), grad)
        for _ in range(2):  # The head's cast must not outlive its graph.
            grad.zero_()
            adapted.forward(**inputs).logits.float().square().sum().backward()
        gradients.append(grad)
    low, high = gradients
    assert low.dtype == torch.float32
    assert (low - high).norm() < 0.1 * high.norm()


@pytest.mark.parametrize(
    ("adapters", "clients", "dtype"),
    [
        ("heads", None, torch.float32),
        ("heads", None, torch.bfloat16),
        ("lora", None, torch.bfloat16),
        ("lora", 2, torch.bfloat16),
    ],
)
def test_batched_layers_equal_single_layers_bitwise(make, adapters, clients, dtype):
    """Compare products, casts and their gradients; products of matrices depend on them."""
    bench = make("vit", adapters, dtype=dtype)
    adapted, joint = bench.adapted, bench.adapted._joint
    state = torch.stack([bench.random_state(seed) for seed in range(clients or 1)])
    state = state if clients else state[0]
    grad, alone = torch.zeros_like(state), state.clone().requires_grad_()
    read = joint.read(joint.leaf(state, grad))
    loss, expected_loss = torch.zeros(()), torch.zeros(())
    for name, adapter, params in adapted.iter_layers(alone):
        expected = {"product": adapter.product(params)} if adapters == "heads" else params
        assert read[name].keys() == expected.keys()
        for key, value in expected.items():
            found, value = read[name][key], value.to(dtype)
            assert torch.equal(found, value)
            upstream = torch.randn(value.shape).to(dtype)
            loss = loss + (found * upstream).sum()
            expected_loss = expected_loss + (value * upstream).sum()
    loss.backward()
    expected_loss.backward()
    assert grad.abs().sum() > 0 and torch.equal(grad, alone.grad)


def test_layers_stay_separate_if_bits_would_change(make):
    assert make("vit", "lora").adapted._joint is None  # casts to float32
    for adapters in ("uneven-heads", "mixed"):
        assert make("vit", adapters).adapted._joint is None
    heads = make("vit", "heads")
    states = torch.stack([heads.random_state(seed) for seed in range(2)])
    assert heads.adapted._joint.leaf(states, torch.zeros_like(states)) is None


@pytest.mark.parametrize("parent", [LoRA(rank=2), MultiHead(heads=2, rank=3)])
def test_subclass_with_custom_forward_receives_trainables(backbone, parent):
    seen = []

    class Own(type(parent)):
        def forward(self, x, frozen, params, path="auto"):
            seen.append((set(params), {param.dtype for param in params.values()}))
            return super().forward(x, frozen, params, path)

    model = backbone("vit").bfloat16()
    layer = find_layers(model)[0]
    own = Own(**{field.name: getattr(parent, field.name) for field in fields(parent)})
    adapted = AdaptedModel(model, {layer.name: own}, seed=0, train_head=True)
    state = adapted.initial()
    adapted.bind(Trained(state), torch.zeros_like(state))
    adapted.forward(pixel_values=torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16))
    assert seen == [(set(parent.shapes(layer)), {torch.float32})]


def test_layouts_and_vectors_depend_only_on_seed(make):
    one, two, other = make("t5", "mixed"), make("t5", "mixed"), make("t5", "mixed", seed=6)
    assert one.adapted.layout == two.adapted.layout
    assert pickle.loads(pickle.dumps(one.adapted.layout)) == one.adapted.layout
    assert torch.equal(one.adapted.initial(), two.adapted.initial())
    assert not torch.equal(one.adapted.initial(), other.adapted.initial())
    state = one.random_state()
    for name, delta in one.adapted.deltas(Trained(state)).items():
        assert torch.equal(delta, two.adapted.deltas(Trained(state))[name])


def test_rejected_adapters_leave_the_model_unchanged(backbone):
    model = backbone("vit").train()
    before = snapshot(model)
    good, bad = find_layers(model)[:2]
    for adapters, message in [
        ({good.name: MultiHead(1, 2), bad.name: MultiHead(9, 4)}, "width|fit"),
        ({"vit.layers.9.attention.q_proj": MultiHead(1, 2)}, "no such module"),
        ({"classifier": MultiHead(1, 2)}, "part of the classification head"),
        ({"vit.layernorm": MultiHead(1, 2)}, "is a LayerNorm"),
    ]:
        with pytest.raises(InputError, match=message):
            AdaptedModel(model, adapters, seed=0, train_head=True)
        assert_same(model, before)


@pytest.mark.parametrize(
    ("vector", "grad", "message"),
    [
        (lambda v: v[:-1], None, r"vector has shape"),
        (lambda v: v.double(), None, "vector is torch.float64"),
        (lambda v: v, lambda v: v.double(), "grad is torch.float64"),
        (lambda v: v, lambda v: v[1:], "vector has shape"),
    ],
)
def test_mismatched_vectors_raise(make, vector, grad, message):
    bench = make("vit")
    state = bench.adapted.initial()
    with pytest.raises(InputError, match=message):
        bench.adapted.bind(Trained(vector(state)), None if grad is None else grad(state))


def tied():
    """Build a model whose embedding table is also the weight of the output layer."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def test_a_tied_parameter_is_replaced_in_every_module():
    model = tied()
    original, tokens = model[0].weight, torch.tensor([1, 4])
    overrides = ParameterOverrides(model, ["0.weight"])
    torch.testing.assert_close(overrides.initial(), {"0.weight": original.detach()})
    leaf = torch.ones(5, 3, requires_grad=True)
    overrides.bind({"0.weight": leaf})
    assert torch.equal(model(tokens), torch.full((2, 5), 3.0))
    model(tokens).sum().backward()
    # Contributions of the looked-up rows (5 outputs each) and of the output layer (2 tokens of
    # ones).
    expected = torch.full((5, 3), 2.0)
    expected[tokens] += 5.0
    torch.testing.assert_close(leaf.grad, expected)
    overrides.unbind()
    assert model[0].weight is original and model[1].weight is original


def test_each_precision_has_a_separate_graph():
    model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    overrides = ParameterOverrides(model, ["weight"])
    leaf = torch.ones(1, 2, requires_grad=True)
    overrides.bind({"weight": leaf})
    for times in (1, 2):
        overrides.refresh()
        assert model.weight.dtype == torch.bfloat16
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        torch.testing.assert_close(leaf.grad, torch.full((1, 2), float(times)))
