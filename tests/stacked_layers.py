"""Compare the stacked layers of clients with the layer of each client."""

import torch

from trishul_ray.adapters.base import FrozenLinear, LayerAdapter, LayerSpec


def check_stacked(
    adapter: LayerAdapter, path: str, clients: int, tokens: int, widths: tuple[int, int], seed: int
) -> None:
    """Compare outputs, and the gradients of inputs and trainables, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    spec = LayerSpec("layer", "block", *widths)
    constants = {name: draw(*c.shape) for name, c in adapter.constants(spec, 0).items()}
    frozen = FrozenLinear(draw(*widths), draw(widths[0]), constants)
    shapes = adapter.shapes(spec)
    params = {name: draw(clients, *shape).requires_grad_() for name, shape in shapes.items()}
    rows = draw(clients, tokens, widths[1]).requires_grad_()
    wanted = draw(clients, tokens, widths[0])

    def own(i):
        return adapter.forward(rows[i], frozen, {n: p[i] for n, p in params.items()}, path)

    leaves = [rows, *params.values()]
    alone = torch.stack([own(i) for i in range(clients)])
    expected = torch.autograd.grad((alone * wanted).sum(), leaves)
    plain = super(type(adapter), adapter).forward_stacked(rows, frozen, params, path)
    torch.testing.assert_close(plain, alone)
    y = adapter.forward_stacked(rows, frozen, params, path)
    torch.testing.assert_close(y, alone, rtol=1e-11, atol=1e-11)
    found = torch.autograd.grad((y * wanted).sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
