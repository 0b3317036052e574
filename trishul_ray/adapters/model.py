"""The module that stands in for one ``nn.Linear`` of an adapted model."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trishul_ray.adapters.base import LOW_PRECISION, LayerAdapter, Path
from trishul_ray.adapters.layout import HEAD_PREFIX, Layout
from trishul_ray.adapters.low_precision import add_linear, rest_product, split
from trishul_ray.adapters.targets import head_parameters, spec_of
from trishul_ray.errors import InputError


class AdaptedLinear(nn.Module):
    """Stands in for one ``nn.Linear``. Without bound trainables it computes just that layer."""

    def __init__(
        self, linear: nn.Linear, adapter: LayerAdapter, constants: dict[str, Tensor], path: Path
    ) -> None:
        """Keep the linear layer's own weight and bias."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.adapter, self.path = adapter, path
        self.constants = constants  # float32, for exact updates
        #: In the weight's dtype, for the forward: cast once (the same tensors in float32).
        self.working = {k: v.to(linear.weight.dtype) for k, v in constants.items()}
        self.exact, self.swapped = constants, False
        self.low = linear.weight.dtype in LOW_PRECISION
        self.params: dict[str, Tensor] | None = None
        #: The whole weight of a bound state that does not train, formed at its first forward.
        self.merged: Tensor | None = None
        #: The frozen weight for the bound state, where a method has moved it.
        self.moved: Tensor | None = None
        #: In low precision, what ``merged``, or else ``moved``, lacks of the weight it stands for.
        self.rest: Tensor | None = None

    def bind(
        self,
        params: dict[str, Tensor] | None,
        base: Tensor | None = None,
        constants: dict[str, Tensor] | None = None,
    ) -> None:
        """Take trainables by suffix, or None to compute the frozen layer alone.

        Args:
            params: trainables.
            base: [d_out, d_in] float32, added to the frozen weight while bound. In low precision
                the sum is kept as two tensors, so that a small base is not rounded away.
            constants: instead of the layer's own frozen bases, while bound.
        """
        self.params, self.merged = params, None
        self.moved, self.rest = None, None
        if base is not None:
            self.moved, self.rest = self._kept(self.weight.detach().float() + base)
        used = self.constants if constants is None else constants
        self.exact = used
        if constants is not None or self.swapped:
            self.working = {k: v.to(self.weight.dtype) for k, v in used.items()}
        self.swapped = constants is not None

    def forward(self, x: Tensor) -> Tensor:
        """The adapted layer: x [..., d_in] -> [..., d_out]."""
        if self.params is None:
            return nn.functional.linear(x, self.weight, self.bias)
        frozen = self.weight if self.moved is None else self.moved
        if self._merges(self.params):
            if self.merged is None:
                if self.rest is not None:
                    frozen = frozen.float() + self.rest.float()
                whole = self.adapter.merged_weight(frozen, self.exact, self.params)
                self.merged, self.rest = self._kept(whole)
            if self.rest is None:
                return nn.functional.linear(x, self.merged, self.bias)
            x2 = x.reshape(-1, self.in_features)
            y = add_linear(rest_product(x2, self.rest), x2, self.merged, self.bias)  # [n, d_out]
            return y.view(*x.shape[:-1], self.out_features)
        return self.adapter.forward(
            x, frozen, self.bias, self.working, self.params, self.path, self.rest
        )

    def _kept(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """``weight`` in the layer's dtype, and in low precision what that lacks of it."""
        dtype = self.weight.dtype
        return split(weight, dtype) if self.low else (weight.to(dtype), None)

    def _merges(self, params: dict[str, Tensor]) -> bool:
        """Whether the bound state is merged once for all its forwards.

        In low precision a merged weight takes two products, which pays where the method has moved
        the frozen weight, since that takes two by itself.
        """
        trains = any(p.requires_grad for p in params.values())
        return not trains and self.path != "factored" and (not self.low or self.rest is not None)


class WholeParameters:
    """Lets a model compute with other tensors in the place of some of its own parameters.

    A model in bfloat16 sees each tensor rounded to bfloat16 at every forward, as in mixed-precision
    training: a step below 2^-9 of a parameter is not seen at once, but the float32 tensor keeps it,
    and it is seen when such steps have added up. Nothing is lost from step to step or round to
    round.

    Args:
        model: where they stand; a parameter may stand in several places (tied embeddings).
        names: which ones.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        """Find every place of each."""
        self._own = {name: model.get_parameter(name) for name in names}
        known = {id(parameter): name for name, parameter in self._own.items()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self._own}
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if id(parameter) in known:
                    self._places[known[id(parameter)]].append((module, attribute))
        self.leaves: dict[str, Tensor] = {}

    def initial(self) -> dict[str, Tensor]:
        """The model's own values by name, float32 on the CPU."""
        return {name: own.detach().float().cpu() for name, own in self._own.items()}

    def bind(self, leaves: Mapping[str, Tensor]) -> None:
        """Compute with ``leaves`` (float32, by name, of the parameters' shapes) from now on."""
        self.leaves = dict(leaves)
        for name, leaf in self.leaves.items():
            used = leaf.to(self._own[name].dtype)
            for owner, attribute in self._places[name]:
                # A module reads ``_parameters`` for the attribute; any tensor there will do.
                owner._parameters[attribute] = used  # type: ignore[assignment]

    def refresh(self) -> None:
        """Before a forward: a cast is part of one graph, so where there is one it is made anew."""
        if any(own.dtype != torch.float32 for own in self._own.values()):
            self.bind(self.leaves)

    def unbind(self) -> None:
        """Back to the model's own."""
        self.leaves = {}
        for name, places in self._places.items():
            for owner, attribute in places:
                owner._parameters[attribute] = self._own[name]


@dataclass(frozen=True)
class Trained:
    """A trained state: the vector, and what a method may have done to the frozen part.

    Attributes:
        vector: [P] float32.
        base: by layer, [d_out, d_in] added to the frozen weight.
        constants: by layer, frozen tensors instead of those the adapter draws.
    """

    vector: Tensor
    base: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)


class AdaptedModel:
    """A frozen model with adapters on the named layers and, if asked, a trainable head.

    Args:
        model: it is changed in place (frozen, adapted, put in evaluation mode) until
            :meth:`detach`.
        adapters: how each layer is adapted, by module name; an adapter without trainables (no
            heads) leaves its layer as it is.
        seed: of the frozen bases and the initial trainables.
        train_head: train the classification head too, where there is one.
        train_all: train every parameter of the model as it is (full fine-tuning); no adapters.
        path: how adapted layers compute.
        device: where the model lies and the frozen bases go.

    Attributes:
        layout: names of all trainables in the flat vector.
        specs: the layers in ``adapters``, in the model's order.
        adapters: as given.
        head_size: numbers in the trainable head (0 where it is not trained).
        whole_size: numbers in other parameters trained as they are (full fine-tuning).

    Raises:
        InputError: a name is no ``nn.Linear`` of the model, or lies in the trainable head; or an
            adapter does not fit its layer.
    """

    def __init__(
        self,
        model: nn.Module,
        adapters: Mapping[str, LayerAdapter],
        *,
        seed: int,
        train_head: bool,
        train_all: bool = False,
        path: Path = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        """Attach; see the class."""
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        self.adapters = dict(adapters)
        self.specs = tuple(
            sorted((spec_of(model, name) for name in adapters), key=lambda s: order[s.name])
        )
        self._seed = seed
        self._model = model
        head = head_parameters(model)
        self._head = head if train_head else []
        if train_all:
            kept = [] if train_head else head
            self._head = [name for name, _ in model.named_parameters() if name not in kept]
        self._check_head()
        shapes = [
            (f"{spec.name}.{suffix}", shape)
            for spec in self.specs
            for suffix, shape in self.adapters[spec.name].shapes(spec).items()
        ]
        head_shapes = [
            (HEAD_PREFIX + name, tuple(model.get_parameter(name).shape)) for name in self._head
        ]
        self.layout = Layout.of([*shapes, *head_shapes])
        self.head_size = sum(model.get_parameter(n).numel() for n in self._head if n in head)
        self.whole_size = sum(model.get_parameter(n).numel() for n in self._head if n not in head)

        constants = {
            spec.name: self.adapters[spec.name].constants(spec, seed, device)
            for spec in self.specs
            if self.adapters[spec.name].shapes(spec)
        }
        # Nothing has been changed up to here: a refused adapter leaves the model as it was.
        self._required = {name: p.requires_grad for name, p in model.named_parameters()}
        self._training = {name: module.training for name, module in model.named_modules()}
        model.requires_grad_(False)
        model.eval()
        self._linears: dict[str, nn.Linear] = {}
        self._layers: dict[str, AdaptedLinear] = {}
        for name, frozen in constants.items():
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            layer = AdaptedLinear(linear, self.adapters[name], frozen, path).eval()
            self._linears[name], self._layers[name] = linear, layer
            model.set_submodule(name, layer)
        self._whole = WholeParameters(model, self._head)

    def _check_head(self) -> None:
        for spec in self.specs:
            if any(name.startswith(spec.name + ".") for name in self._head):
                raise InputError(
                    f"adapter.targets: {spec.name!r} is part of the classification head, which is "
                    "trained whole; leave it out or set model.train_head=false"
                )

    @property
    def model(self) -> nn.Module:
        """The adapted model itself."""
        return self._model

    @property
    def attached(self) -> bool:
        """False once :meth:`detach` was called."""
        return all(self._model.get_submodule(n) is layer for n, layer in self._layers.items())

    def initial(self) -> Tensor:
        """The untrained vector [P], float32 on the CPU: zero update, the model's own head."""
        values = {
            f"{spec.name}.{suffix}": value
            for spec in self.specs
            for suffix, value in self.adapters[spec.name].initial(spec, self._seed).items()
        }
        values |= {HEAD_PREFIX + name: value for name, value in self._whole.initial().items()}
        return self.layout.pack(values)

    def bind(
        self,
        vector: Tensor,
        grad: Tensor | None = None,
        base: Mapping[str, Tensor] | None = None,
        constants: Mapping[str, dict[str, Tensor]] | None = None,
    ) -> None:
        """Let the layers compute with ``vector`` until :meth:`unbind`.

        With ``grad``, ``backward`` adds into it (it is not zeroed here), and ``vector`` may change
        in place between steps. Without, nothing is trained, updates are merged into weights at the
        first forward, and ``vector`` must stay as it is while bound.

        Args:
            vector: [P] float32 on the model's device.
            grad: [P] float32 on the same device, or None.
            base: by layer, [d_out, d_in] added to the frozen weight while bound; kept to at least
                16 significant bits whatever the weight's dtype.
            constants: by layer, frozen tensors to use instead of its own while bound.

        Raises:
            InputError: a shape, dtype or device differs; or the adapters were detached.
        """
        if not self.attached:
            raise InputError("the adapters were detached from this model: attach them again")
        for name, given in (("vector", vector), ("grad", grad)):
            if given is not None and (given.dtype, given.device) != (torch.float32, vector.device):
                raise InputError(
                    f"{name} is {given.dtype} on {given.device}, expected torch.float32 on "
                    f"{vector.device}"
                )
        leaves = self.layout.views(vector.detach())
        if grad is not None:
            for name, slot in self.layout.views(grad.detach()).items():
                # A leaf whose .grad exists is added to in place: the sums land in ``grad``.
                leaves[name].requires_grad_()
                leaves[name].grad = slot
        for spec in self.specs:
            if spec.name in self._layers:
                suffixes = self.adapters[spec.name].shapes(spec)
                self._layers[spec.name].bind(
                    {s: leaves[f"{spec.name}.{s}"] for s in suffixes},
                    None if base is None else base.get(spec.name),
                    None if constants is None else constants.get(spec.name),
                )
        self._whole.bind({name: leaves[HEAD_PREFIX + name] for name in self._head})

    def unbind(self) -> None:
        """Let go of the vector: the model computes as it was pretrained."""
        for layer in self._layers.values():
            layer.bind(None)
        self._whole.unbind()

    def forward(self, **inputs: Any) -> Any:
        """The model's output for ``inputs``, with the bound vector or, unbound, as pretrained."""
        self._whole.refresh()
        return self._model(**inputs)

    def train(self, mode: bool = True) -> None:
        """Switch the backbone's dropout on or off; trainables are not concerned."""
        self._model.train(mode)

    def detach(self) -> nn.Module:
        """Restore the original model: the same linear modules, flags and modes; return it."""
        self.unbind()
        for name, linear in self._linears.items():
            self._model.set_submodule(name, linear)
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(self._required[name])
        for name, module in self._model.named_modules():
            module.training = self._training[name]
        return self._model

    def states(self, vector: Tensor) -> Iterator[tuple[str, LayerAdapter, dict[str, Tensor]]]:
        """Name, adapter and trainables by suffix (views into ``vector``) of each adapted layer."""
        views = self.layout.views(vector)
        for spec in self.specs:
            if spec.name in self._layers:
                adapter = self.adapters[spec.name]
                suffixes = adapter.shapes(spec)
                yield spec.name, adapter, {s: views[f"{spec.name}.{s}"] for s in suffixes}

    def constants(self, name: str) -> dict[str, Tensor]:
        """The frozen tensors of one adapted layer, float32."""
        return self._layers[name].constants

    def head(self, vector: Tensor) -> dict[str, Tensor]:
        """The trainable head's tensors by parameter name, views into ``vector``."""
        views = self.layout.views(vector)
        return {name: views[HEAD_PREFIX + name] for name in self._head}

    def deltas(
        self,
        vector: Tensor,
        base: Mapping[str, Tensor] | None = None,
        constants: Mapping[str, dict[str, Tensor]] | None = None,
    ) -> dict[str, Tensor]:
        """The update of each adapted weight, float64 [d_out, d_in], by module name.

        Args:
            vector: [P].
            base: by layer, what else was added to the frozen weight; part of the update.
            constants: by layer, instead of its own frozen tensors.
        """
        base, constants = base or {}, constants or {}
        found = {}
        for name, adapter, params in self.states(vector):
            update = adapter.delta(constants.get(name, self.constants(name)), params)
            found[name] = update + base[name].double() if name in base else update
        return found

    @torch.no_grad()
    def merge(
        self,
        vector: Tensor,
        base: Mapping[str, Tensor] | None = None,
        constants: Mapping[str, dict[str, Tensor]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """A plain copy of the model with updates and head written into its weights.

        Sums are taken in float64 and cast once; a zero update leaves a weight bitwise as it is.
        This model stays adapted and as it was.

        Args:
            vector: as in :meth:`deltas`.
            base: likewise.
            constants: likewise.
            dtype: of the copy; the model's own by default, in which bfloat16 rounds away updates
                below 2^-9 of a weight.
        """
        with self._plain():
            merged = copy.deepcopy(self._model)
        if dtype is not None:
            merged = merged.to(dtype)
        for name, delta in self.deltas(vector, base, constants).items():
            weight = merged.get_parameter(name + ".weight")
            weight.copy_((weight.double() + delta.to(weight.device)).to(weight.dtype))
        for name, value in self.head(vector).items():
            merged.get_parameter(name).copy_(value)
        return merged

    @contextmanager
    def _plain(self) -> Iterator[None]:
        leaves = self._whole.leaves
        self._whole.unbind()  # the layers, out of the model, stay bound
        for name, linear in self._linears.items():
            self._model.set_submodule(name, linear)
        try:
            yield
        finally:
            for name, layer in self._layers.items():
                self._model.set_submodule(name, layer)
            self._whole.bind(leaves)
