import torch
from torch import nn

from trishul_ray.adapters.model import WholeParameters


def tied():
    """An embedding whose table is the output layer's weight, too."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def test_a_tied_parameter_is_one_and_stands_in_every_place():
    model = tied()
    own, tokens = model[0].weight, torch.tensor([1, 4])
    whole = WholeParameters(model, ["0.weight"])
    torch.testing.assert_close(whole.initial(), {"0.weight": own.detach()})
    leaf = torch.ones(5, 3, requires_grad=True)
    whole.bind({"0.weight": leaf})
    assert torch.equal(model(tokens), torch.full((2, 5), 3.0))
    model(tokens).sum().backward()
    # From the rows looked up (5 outputs each) and from the output layer (2 tokens of ones).
    expected = torch.full((5, 3), 2.0)
    expected[tokens] += 5.0
    torch.testing.assert_close(leaf.grad, expected)
    whole.unbind()
    assert model[0].weight is own and model[1].weight is own


def test_in_another_precision_every_forward_has_a_graph_of_its_own():
    model = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    whole = WholeParameters(model, ["weight"])
    leaf = torch.ones(1, 2, requires_grad=True)
    whole.bind({"weight": leaf})
    for times in (1, 2):
        whole.refresh()
        assert model.weight.dtype == torch.bfloat16
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        torch.testing.assert_close(leaf.grad, torch.full((1, 2), float(times)))
