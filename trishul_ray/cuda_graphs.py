"""CUDA graphs: hundreds of kernels in one launch.

A GPU may compute the kernels of a local step faster than the host launches them one by one. A graph
holds the kernels of a function, with the addresses of its arguments and results, and one launch
replays them all: the same kernels on the same shapes give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from trishul_ray.errors import FailsAgainError
from trishul_ray.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    #: A function of tensors whose kernels and shapes depend on no value: it never waits for the
    #: device and draws no random numbers.
    Function = Callable[..., tuple[Tensor, ...]]

#: Number of graphs of one process, of functions and shapes. Batches of text have many shapes.
MOST = 16

_active: ContextVar[Graphs | None] = ContextVar("graphs", default=None)


class Graphs:
    """The CUDA graphs of one device, by function and by the shapes of its arguments.

    A function is called at the first arguments of some shapes, captured at the second and replayed
    from then on. On a CPU, which has no graphs, a replay calls the function again on the same
    copies of its arguments, and copies its results to the same places.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: called once
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = None if self._stream is None else torch.cuda.graph_pool_handle()

    def call(self, name: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
        """Return ``function(*given)``, which the next call with the same shapes may overwrite.

        ``name`` stands for the function and all that it reads beside its arguments. A function of
        a tensor on the host may depend on its values: it is called every time.

        Raises:
            FailsAgainError: A GPU cannot capture the function.
        """
        if any(tensor.device.type != self.device.type for tensor in given):
            return function(*given)
        key = (name, *((tensor.shape, tensor.dtype) for tensor in given))
        if key not in self._graphs and len(self._graphs) < MOST:
            self._graphs[key] = None
            return self._beside(function, given)
        if key not in self._graphs:
            return function(*given)
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = self._captured(function, given)
        return graph.replay(given)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let :func:`replayed` use these graphs inside."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def _beside(self, function: Function, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call a function on the stream of the captures, whose libraries are then set up."""
        if self._stream is None:
            return function(*given)
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            results = function(*given)
        here.wait_stream(self._stream)
        for tensor in results:
            tensor.record_stream(here)
        return results

    def _captured(self, function: Function, given: Sequence[Tensor]) -> _Graph:
        inputs = [tensor.clone() for tensor in given]
        if self._stream is None:
            kept = tuple(tensor.clone() for tensor in function(*inputs))

            def again() -> tuple[Tensor, ...]:
                for tensor, value in zip(kept, function(*inputs), strict=True):
                    tensor.copy_(value)
                return kept

            return _Graph(inputs, again)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                results = function(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise FailsAgainError(
                "resources.cuda_graphs=true: this step cannot be captured as a CUDA graph "
                f"({reason}): set it to false"
            ) from error

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return _Graph(inputs, replay)


class _Graph:
    """A captured function: ``replay_inputs`` computes its results from ``inputs``."""

    def __init__(
        self, inputs: Sequence[Tensor], replay_inputs: Callable[[], tuple[Tensor, ...]]
    ) -> None:
        self._inputs, self._replay_inputs = inputs, replay_inputs

    def replay(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results for other arguments of the same shapes, at the same addresses."""
        for tensor, value in zip(self._inputs, given, strict=True):
            tensor.copy_(value)
        return self._replay_inputs()


def replayed(name: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
    """Return ``function(*given)`` through the active graphs, if there are any.

    The results are the caller's own; see :meth:`Graphs.call`.
    """
    graphs = _active.get()
    if graphs is None:
        return function(*given)
    return tuple(tensor.clone() for tensor in graphs.call(name, function, *given))
