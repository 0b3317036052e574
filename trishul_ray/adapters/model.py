"""A frozen model with adapters attached, controlled by one flat vector of trainables.

Lifecycle of an :class:`AdaptedModel`: *attach* (the constructor) freezes a model in place and
replaces its targeted ``nn.Linear`` modules by :class:`~trishul_ray.adapters.linear.AdaptedLinear`.
*bind* makes it compute with a given vector, and ``backward`` add into a given gradient. *merge*
writes a vector into a plain copy of the model. *detach* restores the original modules. Parameters
trained directly, without an adapter (the classification head, or every parameter in full
fine-tuning), are replaced by :class:`ParameterOverrides`.

Legend: P length of the vector; d_out, d_in widths of a layer.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trishul_ray.adapters.base import ComputePath, LayerAdapter, LayerSpec
from trishul_ray.adapters.joint import JointTrainables
from trishul_ray.adapters.layout import HEAD_PREFIX, Layout
from trishul_ray.adapters.linear import AdaptedLinear
from trishul_ray.adapters.quantized import dequantize_layers
from trishul_ray.adapters.stacked import Stack
from trishul_ray.adapters.targets import classifier_parameters, spec_of
from trishul_ray.errors import InputError


@dataclass(frozen=True)
class Trained:
    """A trained state: the vector, and a method's changes to the frozen part.

    Attributes:
        vector: [P] float32, or [k, P] for k clients that train together.
        base: Changes [d_out, d_in] to add to the frozen weights, keyed by layer. They keep at least
            16 significant bits, regardless of the weight's dtype.
        constants: Frozen tensors that replace the adapters' own, keyed by layer.
    """

    vector: Tensor
    base: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)


class BlockForward:
    """Forward pass of a block of the model during a run, set as the block's attribute ``forward``.

    It can be copied with the block. :meth:`AdaptedModel.merge` removes it.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block


#: Fields of a decoder's configuration that transform the logits of its linear head.
_HEAD_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def scales_logits(model: nn.Module) -> bool:
    """Return whether a model transforms the logits of its linear head."""
    return any(getattr(model.config, name, None) for name in _HEAD_SCALES)


class AdaptedModel:
    """A frozen model with adapters on named layers and, optionally, a trainable head.

    Args:
        model: Changed in place (frozen, adapted, in evaluation mode) until :meth:`detach`.
        adapters: Adapters, keyed by module name. An adapter without trainables (no heads) leaves
            its layer unchanged.
        seed: Seed of the frozen bases and the initial trainables.
        train_head: Whether to train the classification head, if the model has one.
        train_all: Whether to train every parameter of the model directly (full fine-tuning),
            without adapters.
        path: Computation of the adapted layers.
        device: Device of the model and of the frozen bases.

    Attributes:
        model: The adapted model.
        layout: Names of all trainables in the flat vector.
        specs: The layers in ``adapters``, in the model's order.
        adapters: The argument ``adapters``.
        classifier_size: Number of trainable entries of the classification head.
        backbone_size: Number of backbone entries that are trained directly (full fine-tuning).

    Raises:
        InputError: A name is not an ``nn.Linear`` of the model or belongs to the trainable
            classification head, or an adapter does not fit its layer. The model is then unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        adapters: Mapping[str, LayerAdapter],
        *,
        seed: int,
        train_head: bool,
        train_all: bool = False,
        path: ComputePath = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        self.model = model
        self.adapters = dict(adapters)
        specs = (spec_of(model, name) for name in adapters)
        self.specs = tuple(sorted(specs, key=lambda spec: order[spec.name]))
        self._seed = seed
        classifier = classifier_parameters(model)
        # Parameters trained directly, without an adapter.
        self._direct = classifier if train_head else []
        if train_all:
            frozen = [] if train_head else classifier
            self._direct = [name for name, _ in model.named_parameters() if name not in frozen]
        self._check_targets()
        shapes = [
            (f"{spec.name}.{suffix}", shape)
            for spec in self.specs
            for suffix, shape in self.adapters[spec.name].shapes(spec).items()
        ]
        direct = {name: model.get_parameter(name) for name in self._direct}
        shapes += [(HEAD_PREFIX + name, tuple(p.shape)) for name, p in direct.items()]
        self.layout = Layout.of(shapes)
        self.classifier_size = sum(p.numel() for n, p in direct.items() if n in classifier)
        self.backbone_size = sum(p.numel() for n, p in direct.items() if n not in classifier)

        constants = {
            spec.name: self.adapters[spec.name].constants(spec, seed, device)
            for spec in self.specs
            if self.adapters[spec.name].shapes(spec)
        }
        # The model changes only from here on: a rejected adapter leaves it unchanged.
        self._required = {name: p.requires_grad for name, p in model.named_parameters()}
        self._training = {name: module.training for name, module in model.named_modules()}
        model.requires_grad_(False)
        model.eval()
        self._linears: dict[str, nn.Linear] = {}
        self._layers: dict[str, AdaptedLinear] = {}
        for name, layer_constants in constants.items():
            self._adapt(name, layer_constants, path)
        self._overrides = ParameterOverrides(model, self._direct)
        self._joint = JointTrainables.of(self.layout, self._layers)
        self._leaf: Tensor | None = None  # leaf of the joint trainables, while they are trained
        self._stack: Stack | None = None
        #: Arguments of the last call of :meth:`bind`; None while unbound.
        self.bound: tuple[Trained, Tensor | None] | None = None

    def _adapt(self, name: str, constants: dict[str, Tensor], path: ComputePath) -> None:
        linear = self.model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        layer = AdaptedLinear(linear, self.adapters[name], constants, path).eval()
        self._linears[name], self._layers[name] = linear, layer
        self.model.set_submodule(name, layer)

    def _check_targets(self) -> None:
        for spec in self.specs:
            if any(name.startswith(spec.name + ".") for name in self._direct):
                raise InputError(
                    f"adapter.targets: {spec.name!r} is part of the classification head, which is "
                    "trained directly; remove it or set model.train_head=false"
                )

    @property
    def attached(self) -> bool:
        """Whether the adapters are in the model; False after :meth:`detach`."""
        return all(self.model.get_submodule(n) is layer for n, layer in self._layers.items())

    def initial(self) -> Tensor:
        """Return the untrained vector [P], float32 on the CPU: zero updates, the model's head."""
        return self._packed(lambda spec: self.adapters[spec.name].initial(spec, self._seed))

    def start(self) -> Tensor:
        """Return the vector [P] of the first global state; see :meth:`LayerAdapter.start`."""

        def values(spec: LayerSpec) -> dict[str, Tensor]:
            adapter, layer = self.adapters[spec.name], self._linears.get(spec.name)
            return {} if layer is None else adapter.start(spec, self._seed, layer.weight)

        return self._packed(values)

    def _packed(self, of_layer: Callable[[LayerSpec], dict[str, Tensor]]) -> Tensor:
        values = {
            f"{spec.name}.{suffix}": value
            for spec in self.specs
            for suffix, value in of_layer(spec).items()
        }
        values |= {HEAD_PREFIX + name: value for name, value in self._overrides.initial().items()}
        return self.layout.pack(values)

    def bind(self, trained: Trained, grad: Tensor | None = None) -> None:
        """Compute with a trained state, on the model's device, until :meth:`unbind`.

        With ``grad``, float32 [P], ``backward`` adds into it (without zeroing it first), and the
        vector may change in place between steps. Without ``grad`` nothing is trained, updates are
        merged into the weights in the first forward, and the vector must not change while bound.

        Vectors of k clients [k, P] are bound to be trained together. The batch then contains
        equally many examples of each client, one client after the other.

        Raises:
            InputError: A shape, dtype or device does not match, or the adapters are detached.
        """
        if not self.attached:
            raise InputError("the adapters are detached from this model; attach them again")
        vector = trained.vector
        for name, given in (("vector", vector), ("grad", grad)):
            if given is not None and (given.dtype, given.device) != (torch.float32, vector.device):
                raise InputError(
                    f"{name} is {given.dtype} on {given.device}, expected torch.float32 on "
                    f"{vector.device}"
                )
        leaves = self.layout.views(vector.detach())
        self._leaf = None
        if grad is not None:
            if self._joint is not None:
                self._leaf = self._joint.leaf(vector, grad)
            own = list(leaves)
            if self._leaf is not None:
                own = [HEAD_PREFIX + name for name in self._direct]
            views = self.layout.views(grad.detach())
            for name in own:
                # Autograd adds in place to an existing .grad, so the sums are written to ``grad``.
                leaves[name].requires_grad_()
                leaves[name].grad = views[name]
        self._overrides.unbind()
        self._stack = Stack(len(vector)) if vector.dim() == 2 else None
        for name, _, params in self._iter_layers(leaves):
            layer = self._layers[name]
            base, constants = trained.base.get(name), trained.constants.get(name)
            layer.bind(params, base, constants, self._stack)
        direct = {name: leaves[HEAD_PREFIX + name] for name in self._direct}
        self._overrides.bind(direct, self._stack)
        self.bound = trained, grad

    def unbind(self) -> None:
        """Release the vector, so that the model computes as pretrained."""
        for layer in self._layers.values():
            layer.bind(None)
        self._overrides.unbind()
        self._leaf = self._stack = self.bound = None

    def check_stackable(self) -> None:
        """Check that several clients can train together, or have gradients per example.

        Raises:
            InputError: A directly trained parameter does not belong to a linear layer.
        """
        self._overrides.linear_layers()

    def forward(self, **inputs: Any) -> Any:
        """Compute the model's output, with the bound vector or, if unbound, as pretrained."""
        self._before_forward(inputs)
        return self.model(**inputs)

    def _before_forward(self, inputs: Mapping[str, Any]) -> None:
        if self._joint is not None and self._leaf is not None:
            for name, params in self._joint.read(self._leaf).items():
                self._layers[name].params = params
        if self._stack is None:
            self._overrides.refresh()
        else:
            self._stack.examples = next(len(x) for x in inputs.values() if torch.is_tensor(x))

    def hidden_states(self, **inputs: Any) -> tuple[Tensor, nn.Linear] | None:
        """Compute the input [b, n, d] of a decoder's head, and return it with the head.

        Returns None if the head is trained, or is more than a linear layer. Call :meth:`forward`
        instead.
        """
        untyped: Any = self.model
        head = untyped.get_output_embeddings()
        if type(head) is not nn.Linear or scales_logits(self.model) or self._direct:
            return None
        self._before_forward(inputs)
        return untyped.base_model(**inputs).last_hidden_state, head

    def train(self, mode: bool = True) -> None:
        """Enable or disable the backbone's dropout; it does not affect the trained parameters."""
        self.model.train(mode)

    def detach(self) -> nn.Module:
        """Restore and return the original model: its linear modules, flags and modes."""
        self.unbind()
        self._set_modules(self._linears)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._required[name])
        for name, module in self.model.named_modules():
            module.training = self._training[name]
        return self.model

    def iter_layers(self, vector: Tensor) -> Iterator[tuple[str, LayerAdapter, dict[str, Tensor]]]:
        """Yield name, adapter and trainables (views of ``vector``) of each adapted layer."""
        return self._iter_layers(self.layout.views(vector))

    def _iter_layers(
        self, views: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, LayerAdapter, dict[str, Tensor]]]:
        for spec in self.specs:
            if spec.name in self._layers:
                adapter = self.adapters[spec.name]
                suffixes = adapter.shapes(spec)
                yield spec.name, adapter, {s: views[f"{spec.name}.{s}"] for s in suffixes}

    def constants(self, name: str) -> dict[str, Tensor]:
        """Return the frozen tensors of one adapted layer, float32."""
        return self._layers[name].constants

    def direct_parameters(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parameters trained without an adapter, as views of ``vector``, by name."""
        views = self.layout.views(vector)
        return {name: views[HEAD_PREFIX + name] for name in self._direct}

    def frozen_weight(self, name: str, trained: Trained) -> Tensor:
        """Return the dequantized weight that an adapter acts on, including the layer's base.

        It is [d_out, d_in] in float32 or float64.
        """
        layer = self._layers[name]
        weight = layer.weight if layer.stored is None else layer.stored.weight
        weight = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        return weight + trained.base[name] if name in trained.base else weight

    def deltas(self, trained: Trained) -> dict[str, Tensor]:
        """Compute the update of each adapted weight, including its base, float64 [d_out, d_in]."""
        updates = {}
        for name, adapter, params in self.iter_layers(trained.vector):
            constants = trained.constants.get(name, self.constants(name))
            weight = self.frozen_weight(name, trained)
            updates[name] = adapter.delta(weight, constants, params)
            if name in trained.base:
                updates[name] = updates[name] + trained.base[name].double()
        return updates

    @torch.no_grad()
    def merge(self, trained: Trained, dtype: torch.dtype | None = None) -> nn.Module:
        """Create a plain copy of the model with updates and directly trained parameters merged.

        Sums are computed in float64 and cast once; a zero update leaves a weight bitwise unchanged.
        This model stays adapted and bound. Quantized weights are dequantized to the values used in
        training.

        Args:
            trained: The trained state.
            dtype: Dtype of the copy, by default of the model; bfloat16 rounds away updates below
                2^-9 of a weight.
        """
        with self._original_modules():
            merged = copy.deepcopy(self.model)
        for module in merged.modules():
            if isinstance(vars(module).get("forward"), BlockForward):
                del module.forward
        dequantize_layers(merged)
        if dtype is not None:
            merged = merged.to(dtype)
        for name, delta in self.deltas(trained).items():
            weight = merged.get_parameter(name + ".weight")
            weight.copy_((weight.double() + delta.to(weight.device)).to(weight.dtype))
        for name, value in self.direct_parameters(trained.vector).items():
            merged.get_parameter(name).copy_(value)
        return merged

    @contextmanager
    def _original_modules(self) -> Iterator[None]:
        leaves = self._overrides.leaves
        self._overrides.unbind()  # The adapted layers leave the model and stay bound.
        self._set_modules(self._linears)
        try:
            yield
        finally:
            self._set_modules(self._layers)
            self._overrides.bind(leaves)

    def _set_modules(self, modules: Mapping[str, nn.Module]) -> None:
        for name, module in modules.items():
            self.model.set_submodule(name, module)


class ParameterOverrides:
    """Replace some parameters of a model by other tensors, in every place where they occur.

    A bfloat16 model uses each tensor rounded to bfloat16 in every forward, as in mixed-precision
    training: a step below 2^-9 of a parameter has no immediate effect, but the float32 tensor keeps
    it, and such steps accumulate over steps and rounds.

    Args:
        model: A parameter may occur in several of its modules (tied embeddings).
        names: The parameters to replace.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._originals = {name: model.get_parameter(name) for name in names}
        names_by_id = {id(parameter): name for name, parameter in self._originals.items()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {n: [] for n in self._originals}
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if id(parameter) in names_by_id:
                    self._places[names_by_id[id(parameter)]].append((module, attribute))
        self.leaves: dict[str, Tensor] = {}
        self._stacked: list[nn.Linear] = []  # layers that compute for several clients

    def initial(self) -> dict[str, Tensor]:
        """Return the model's values, float32 on the CPU, keyed by name."""
        return {name: p.detach().float().cpu() for name, p in self._originals.items()}

    def linear_layers(self) -> dict[nn.Linear, dict[str, str]]:
        """Return the linear layers that contain the parameters, with parameter names per attribute.

        Raises:
            InputError: A parameter belongs to another kind of module.
        """
        found: dict[nn.Linear, dict[str, str]] = {}
        for name, places in self._places.items():
            for module, attribute in places:
                if type(module) is not nn.Linear:
                    raise InputError(
                        f"{name!r} of the classification head belongs to a "
                        f"{type(module).__name__}; federation.stacked and gradients per example "
                        "only train linear layers: set model.train_head=false"
                    )
                found.setdefault(module, {})[attribute] = name
        return found

    def bind(self, leaves: Mapping[str, Tensor], stack: Stack | None = None) -> None:
        """Compute with ``leaves``, float32 tensors of the parameters' shapes, keyed by name.

        With a ``stack`` they belong to several clients, [k, ...].
        """
        self.leaves = dict(leaves)
        if stack is not None:
            for layer, names in self.linear_layers().items():
                own = {attribute: self.leaves[name] for attribute, name in names.items()}
                # An attribute of the instance takes precedence over the method of its class.
                layer.forward = partial(  # type: ignore[method-assign]
                    stack.linear, weight=own["weight"], bias=own.get("bias")
                )
                self._stacked.append(layer)
            return
        for name, leaf in self.leaves.items():
            self._set(name, leaf.to(self._originals[name].dtype))

    def refresh(self) -> None:
        """Renew the casts before a forward: a cast belongs to the graph of one forward."""
        if any(p.dtype != torch.float32 for p in self._originals.values()):
            self.bind(self.leaves)

    def unbind(self) -> None:
        """Restore the model's parameters."""
        self.leaves = {}
        for name, parameter in self._originals.items():
            self._set(name, parameter)
        while self._stacked:
            del self._stacked.pop().forward

    def _set(self, name: str, tensor: Tensor) -> None:
        for module, attribute in self._places[name]:
            # Attribute access reads ``_parameters``, which may contain any tensor.
            module._parameters[attribute] = tensor  # type: ignore[assignment]
