"""Parameters that are trained as they are: a classification head, or every one of a model."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


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
