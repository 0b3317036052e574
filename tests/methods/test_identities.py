"""Identities between methods, and against plain references that share no code with them."""

import numpy as np
import pytest
import torch
from method_runs import errors_of_the_mean, initial_state, one_round
from torch.func import functional_call

from trishul_ray.adapters.model import Trained
from trishul_ray.data.sampling import batch_order
from trishul_ray.federation.checkpoint import state_digest
from trishul_ray.federation.messages import TrainJob
from trishul_ray.federation.worker.local import train_client
from trishul_ray.runtime.random_streams import numpy_rng

AS_RAVAN = [
    "method=trishul",
    "method.lam=0",
    "method.allocation=uniform",
    "adapter.init=random_normal",
]


EXACT = {
    "fedex": [],
    "flora": [],
    "ffalora": [],
    "fedsb": [],
    "flexlora": ["method.truncate=false"],
    "ravan": [],
    "trishul": [],
}


def test_trishul_without_its_parts_equals_ravan(executor):
    ravan, trishul = executor("method=ravan"), executor(*AS_RAVAN)
    first, second = one_round(ravan), one_round(trishul)
    assert state_digest(first[1]) == state_digest(second[1])
    # With the prox it is another method: the identity above is not vacuous.
    shrunk = one_round(executor(*AS_RAVAN, "method.lam=1.0"))
    assert state_digest(shrunk[1]) != state_digest(first[1])


@pytest.mark.parametrize("weighting", ["uniform", "size", "tokens"])
@pytest.mark.parametrize("name", [*EXACT, "fedit", "scaffold", "hetlora"])
def test_exact_methods_average_updates_exactly(executor, tmp_path, name, weighting):
    errors = errors_of_the_mean(executor, tmp_path, name, weighting, EXACT.get(name, []))
    if name in EXACT:
        assert max(errors) < 1e-6
    else:
        assert min(errors) > 1e-3


def plain_training(context, method, lam, train_scale=True):
    """Compute Algorithm 1 of the paper for one client with torch's autograd, Adam and SVD."""
    settings = context.settings
    model = context.model
    base = model.merge(Trained(context.initial))  # a plain copy of the backbone
    state = {k: v.detach().clone() for k, v in base.state_dict().items()}
    views = model.layout.views(context.initial.clone())
    leaves = {k: v.detach().clone().requires_grad_() for k, v in views.items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=settings.optimizer.lr)
    fed = settings.federation
    order = batch_order(
        context.shards.shard(0),
        fed.local_steps,
        fed.batch_size,
        numpy_rng(settings.seed, "batches", 1, 0),
    )
    for rows in order:
        batch = context.task.prepare_batch(context.train.batch(rows), "cpu", torch.float32)
        weights = dict(state)
        for spec in model.specs:
            weight, constants = state[f"{spec.name}.weight"], model.constants(spec.name)
            if method == "fedit":
                update = leaves[f"{spec.name}.lora_B"] @ leaves[f"{spec.name}.lora_A"]
            else:
                core, scale = leaves[f"{spec.name}.core"], leaves[f"{spec.name}.scale"]
                left = constants["basis_B"].view(spec.d_out, len(core), -1)
                right = constants["basis_A"].view(len(core), -1, spec.d_in)
                update = torch.einsum("ohr,h,hrs,hsi->oi", left, scale, core, right)
            weights[f"{spec.name}.weight"] = weight + update
        for name, value in leaves.items():
            if name.startswith("head:"):
                weights[name.removeprefix("head:")] = value
        output = functional_call(base, weights, kwargs={"pixel_values": batch["pixel_values"]})
        loss = torch.nn.functional.cross_entropy(output.logits, batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if method == "trishul":
            with torch.no_grad():
                for name, value in leaves.items():
                    if name.endswith(".core"):
                        u, s, vt = torch.linalg.svd(value)
                        s = (s - lam * settings.optimizer.lr).clamp(min=0)
                        value.copy_(u @ torch.diag_embed(s) @ vt)
                    if name.endswith(".scale"):
                        value.clamp_(0, 10)
    uploaded = {}
    for name, value in leaves.items():
        if name.endswith(".core"):
            value = leaves[name.removesuffix("core") + "scale"][:, None, None] * value
        uploaded[name] = value.detach()
    return uploaded


@pytest.mark.parametrize(("method", "lam"), [("trishul", 5.0), ("ravan", 0.0), ("fedit", 0.0)])
def test_a_clients_round_is_the_papers_algorithm(executor, method, lam):
    # lr is small enough that Adam's sign-like first steps do not amplify rounding.
    options = [f"method={method}", "optimizer.lr=0.002", "federation.local_steps=6"]
    if method == "trishul":
        options.append(f"method.lam={lam}")
    inline = executor(*options)
    context = inline.context
    upload, report = train_client(context, initial_state(inline), TrainJob(1, 0))
    expected = plain_training(context, method, lam)
    wire = context.method.wire(context.model.layout)
    flat = torch.cat([expected[name].reshape(-1) for name in wire]).numpy()
    moved = np.abs(flat - initial_state(inline).shared).max()
    assert moved > 1e-3
    # Adam divides by sqrt(v): an entry whose gradient is rounding noise may step either way.
    close = np.isclose(upload.arrays.shared, flat, rtol=1e-3, atol=1e-3 * moved)
    assert close.mean() > 0.995
    if method == "trishul":
        assert report.metrics["svt_zeroed"] > 0.05


def test_without_a_prox_nothing_is_zeroed(executor):
    inline = executor("method=trishul", "method.lam=0", "federation.local_steps=1")
    _, report = train_client(inline.context, initial_state(inline), TrainJob(1, 0))
    assert report.metrics == {"svt_zeroed": 0.0, "svt_energy_removed": 0.0}
    assert not report.spectra
