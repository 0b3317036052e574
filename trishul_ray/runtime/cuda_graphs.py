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
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    #: A function of tensors whose kernels and shapes depend on no value: it never waits for the
    #: device and draws no random numbers.
    Function = Callable[..., tuple[Tensor, ...]]
    Results = Callable[[], tuple[Tensor, ...]]
    #: A captured function: returns its results for other arguments of the same shapes.
    Replay = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]

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
        self._graphs: dict[Hashable, Replay | None] = {}  # None: called once
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = None if self._stream is None else torch.cuda.graph_pool_handle()

    def call(self, name: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
        """Return ``function(*given)``, which the next call with the same shapes may overwrite.

        ``name`` stands for the function and its data except the arguments. A function of a tensor
        on the host may depend on its values: it is called every time.

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
        replay = self._graphs[key]
        if replay is None:
            replay = self._graphs[key] = self._captured(function, given)
        return replay(given)

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

    def _captured(self, function: Function, given: Sequence[Tensor]) -> Replay:
        inputs = [tensor.clone() for tensor in given]
        compute = self._call_again if self._stream is None else self._capture
        results_of_inputs = compute(function, inputs)

        def replay(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
            for tensor, value in zip(inputs, given, strict=True):
                tensor.copy_(value)
            return results_of_inputs()

        return replay

    def _call_again(self, function: Function, inputs: Sequence[Tensor]) -> Results:
        """Return what calls a function on ``inputs``; the results are always the same tensors."""
        results = tuple(tensor.clone() for tensor in function(*inputs))

        def call() -> tuple[Tensor, ...]:
            for tensor, value in zip(results, function(*inputs), strict=True):
                tensor.copy_(value)
            return results

        return call

    def _capture(self, function: Function, inputs: Sequence[Tensor]) -> Results:
        """Return what launches the kernels of a function on ``inputs``."""
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

        def launch() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return launch


def replayed(name: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
    """Return ``function(*given)`` through the active graphs, if there are any.

    The results are the caller's own; see :meth:`Graphs.call`.
    """
    graphs = _active.get()
    if graphs is None:
        return function(*given)
    return tuple(tensor.clone() for tensor in graphs.call(name, function, *given))
