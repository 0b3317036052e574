"""Capture functions as CUDA graphs, which launch hundreds of kernels at once.

A GPU may execute the kernels of a local step faster than the host launches them one by one. A graph
records the kernels of a function with the addresses of its arguments and results, and replays them
in a single launch. The results are bitwise identical, since kernels and shapes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from trishul_ray.errors import PermanentError
from trishul_ray.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    #: A function of tensors whose kernels and shapes do not depend on values. It must not
    #: synchronize with the device or use random numbers.
    Function = Callable[..., tuple[Tensor, ...]]
    Results = Callable[[], tuple[Tensor, ...]]
    #: A captured function, which can be called with other arguments of the same shapes.
    Replay = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]

#: Maximum number of graphs per process. It is limited because text batches have many shapes.
MOST = 16

_active: ContextVar[Graphs | None] = ContextVar("graphs", default=None)


class Graphs:
    """CUDA graphs of one device, keyed by function and argument shapes.

    For each combination of shapes, the first call runs the function, the second call captures it,
    and later calls replay it. On a CPU, which does not support graphs, a replay calls the function
    on the same copies of its arguments, and copies the results to the same tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Hashable, Replay | None] = {}  # None after the first call
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = None if self._stream is None else torch.cuda.graph_pool_handle()

    def call(self, name: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
        """Compute ``function(*given)``.

        If a tensor is not on the device, the function is always called directly, as it may depend
        on values.

        Args:
            name: Identifies the function and all of its data except the arguments.
            function: The function to call, capture or replay.
            *given: The arguments.

        Returns:
            The results. The next call with the same shapes may overwrite them.

        Raises:
            PermanentError: The function cannot be captured on a GPU.
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
        """Make :func:`replayed` use these graphs inside the context."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def _beside(self, function: Function, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call a function on the capture stream, to initialize libraries for that stream."""
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
        """Return a function that recomputes the results for ``inputs`` into the same tensors."""
        results = tuple(tensor.clone() for tensor in function(*inputs))

        def call() -> tuple[Tensor, ...]:
            for tensor, value in zip(results, function(*inputs), strict=True):
                tensor.copy_(value)
            return results

        return call

    def _capture(self, function: Function, inputs: Sequence[Tensor]) -> Results:
        """Capture a function on ``inputs``, and return a function that launches the graph."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                results = function(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PermanentError(
                "resources.cuda_graphs=true: this step cannot be captured as a CUDA graph "
                f"({reason}); set it to false"
            ) from error

        def launch() -> tuple[Tensor, ...]:
            graph.replay()
            return results

        return launch


def replayed(name: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
    """Compute ``function(*given)``, using the active graphs if there are any.

    The results are copies, which later calls do not overwrite; see :meth:`Graphs.call`.
    """
    graphs = _active.get()
    if graphs is None:
        return function(*given)
    return tuple(tensor.clone() for tensor in graphs.call(name, function, *given))
