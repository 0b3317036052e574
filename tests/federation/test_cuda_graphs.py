"""Graphs of functions, on a CPU: a replay calls the function on copies of its arguments."""

import pytest
import torch

from trishul_ray.errors import PermanentError
from trishul_ray.runtime.cuda_graphs import MOST, Graphs, replayed


@pytest.fixture
def calls():
    """Count the calls of :func:`doubled` per shape."""
    return {}


@pytest.fixture
def doubled(calls):
    def double(x):
        calls[x.shape] = calls.get(x.shape, 0) + 1
        return (2 * x,)

    return double


def test_graph_results_reuse_the_previous_memory(doubled):
    graphs, given = Graphs(torch.device("cpu")), [torch.full((3,), float(i)) for i in range(4)]
    found = [graphs.call("double", doubled, x)[0] for x in given]
    assert found[1].data_ptr() == found[2].data_ptr() == found[3].data_ptr()
    assert found[3].tolist() == [6.0] * 3


def test_replayed_results_are_the_callers_own(doubled):
    graphs, given = Graphs(torch.device("cpu")), [torch.full((3,), float(i)) for i in range(4)]
    with graphs.active():
        found = [replayed("double", doubled, x)[0] for x in given]
    for x, y in zip(given, found, strict=True):
        assert torch.equal(y, 2 * x)


def test_without_graphs_a_function_is_called(doubled):
    x = torch.ones(2)
    assert torch.equal(replayed("double", doubled, x)[0], 2 * x)


def test_two_names_have_separate_graphs(doubled):
    graphs, x = Graphs(torch.device("cpu")), torch.ones(2)
    for _ in range(3):
        assert torch.equal(graphs.call("double", doubled, x)[0], torch.full((2,), 2.0))
        assert torch.equal(graphs.call("negate", lambda x: (-x,), x)[0], -x)


def test_shapes_beyond_graph_limit_run_eagerly(doubled):
    graphs = Graphs(torch.device("cpu"))
    for length in range(MOST + 5):
        for value in (1.0, 2.0, 3.0):
            x = torch.full((length + 1,), value)
            assert torch.equal(graphs.call("double", doubled, x)[0], 2 * x)


@pytest.mark.gpu
def test_a_capture_that_fails_names_the_field():
    graphs, x = Graphs(torch.device("cuda")), torch.ones(1, device="cuda")

    def reads_a_value(x):
        return (x * float(x),)

    graphs.call("read", reads_a_value, x)
    with pytest.raises(PermanentError, match=r"resources\.cuda_graphs=true: .* set it to false"):
        graphs.call("read", reads_a_value, x)


@pytest.mark.gpu
def test_values_on_the_host_are_not_kept():
    graphs, x = Graphs(torch.device("cuda")), torch.ones(1, device="cuda")
    found = [
        graphs.call("scale", lambda x, y: (x * y.item(),), x, torch.tensor([value]))[0].item()
        for value in (1.0, 2.0, 3.0)
    ]
    assert found == [1.0, 2.0, 3.0]
