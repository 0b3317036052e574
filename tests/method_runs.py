"""Runs of methods without Ray, for the tests of methods."""

import copy

import numpy as np
import torch
from safetensors.torch import load_file

from trishul_ray.adapters.export import export_peft
from trishul_ray.adapters.model import Trained
from trishul_ray.adapters.quantized import dequantize_layers
from trishul_ray.contract.methods import without_timings
from trishul_ray.federation.checkpoint import CheckpointStore, state_digest
from trishul_ray.federation.messages import TrainJob, to_array, to_tensor
from trishul_ray.federation.reduce import Reducer, finish, partial_sum
from trishul_ray.federation.server import Server
from trishul_ray.federation.worker.context import global_model
from trishul_ray.federation.worker.local import train_client
from trishul_ray.methods.base import method_class, method_names
from trishul_ray.methods.base.messages import LocalRun, State
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.runtime.random_streams import torch_rng
from trishul_ray.storage.store import Store

#: The methods of papers: all except methods with private heads.
PUBLISHED = [n for n in method_names() if not n.endswith("-private")]
#: All methods.
SINGLE = [*method_names()]
#: Methods that support stages which act on changes.
BY_MEAN = [name for name in PUBLISHED if method_class(name).aggregates_mean_only]
#: Methods with cores, with LoRA, and with client state. Sections that act on changes do not
#: distinguish methods further; tests/contract/test_sections.py has all.
KINDS = ["trishul", "fedit", "scaffold"]
RUNS = iter(range(10_000))


def server_of(inline, tmp_path, name=None):
    """Create a server with the checkpoints of that name, by default with none."""
    experiment = inline.context.settings
    store = Store.open(str(tmp_path / (name or f"run-{next(RUNS)}")))
    return Server(experiment, inline, CheckpointStore(store, experiment.id), "attempt")


def run(inline, tmp_path, name=None):
    server = server_of(inline, tmp_path, name)
    while not server.finished:
        server.step()
    return server


def resumed(inline, tmp_path, stops=1):
    """Return the checkpoints of a whole run and of a stopped one, after comparing their bytes."""
    whole = run(inline, tmp_path).checkpoint
    for _ in range(stops):  # each time from the last checkpoint
        server_of(inline, tmp_path, "parts").step()
    parts = run(inline, tmp_path, "parts").checkpoint
    assert state_digest(parts.state) == state_digest(whole.state)
    assert without_timings(parts.records) == without_timings(whole.records)
    return whole, parts


class Recording:
    """An executor that stores the uploads of its last jobs."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run(self, broadcast, jobs, *more):
        outcome = self.inner.run(broadcast, jobs, *more)
        if outcome.uploads:
            self.broadcast, self.uploads = broadcast, outcome.uploads
        return outcome


def weights_of(inline, broadcast):
    trained = global_model(inline.context, broadcast, 0)
    return inline.context.model.deltas(trained)


def same_run(executor, tmp_path, first, second):
    one, other = (run(executor(*options), tmp_path).checkpoint for options in (first, second))
    np.testing.assert_array_equal(one.state.shared, other.state.shared)


def initial_state(inline):
    context = inline.context
    return context.method.initial_state(context.model.layout, context.initial, {}).map(to_array)


def one_round(inline, clients=(0, 1, 2)):
    spec, context = inline.describe({}), inline.context
    before = initial_state(inline)
    uploads = [train_client(context, before, TrainJob(1, c))[0] for c in clients]
    weighting = context.settings.federation.weighting
    reducer = Reducer(context.method, context.model.layout, weighting, spec.expected)
    mean, trained = finish(partial_sum(uploads, reducer), before, reducer)
    return uploads, mean, trained


def local_run(context, vector):
    run = LocalRun(
        layout=context.model.layout,
        vector=vector,
        grad=torch.zeros_like(vector),
        broadcast=State(context.method.pack(context.model.layout, vector)),
        client_state={},
        optimizer=context.settings.optimizer,
        generator=torch_rng(0, "test"),
        common=torch_rng(0, "common"),
    )
    context.method.start(run, vector)
    return run


def resident(experiment):
    backbone = backbone_of(experiment.model, experiment.storage.paths)
    return backbone.load_resident("image-classification", 10, seed=experiment.seed).model


def assert_that_of_the_dequantized_backbone(small, inline_result, tmp_path, kind, words):
    """Compare a run on a quantized backbone bitwise with the run on the dequantized one."""
    shared = [*words, "federation.rounds=2", "federation.local_steps=2", "adapter.path=factored"]
    run = small(f"model.quantize={kind}", *shared)
    dense = resident(run)
    before = copy.deepcopy(dense)
    dequantize_layers(dense)
    dense.save_pretrained(tmp_path / "dense")
    twin = small(*shared, "model.init=pretrained", f"model.name={tmp_path / 'dense'}")
    ours, theirs = inline_result(run), inline_result(twin)
    assert ours.checkpoint.state.shared.tobytes() == theirs.checkpoint.state.shared.tobytes()
    assert without_timings(ours.checkpoint.records) == without_timings(theirs.checkpoint.records)
    for name, stored in resident(run).named_buffers():
        assert torch.equal(stored, before.get_buffer(name)), name


def assert_alpha_scales_the_update(executor, tmp_path, name, *own):
    """Check exactness, folding and export at alpha = 3 r, where every factor alpha / r counts."""
    one = ["federation.clients=1", "federation.clients_per_round=1"]
    recording = Recording(executor(f"method={name}", "adapter.alpha=24", "budget=8", *own, *one))
    server = server_of(recording, tmp_path)
    server.step()
    context = recording.inner.context
    if name != "ffalora":
        assert {adapter.scale for adapter in context.model.adapters.values()} == {3.0}
    vector = context.initial.clone()
    shared = torch.from_numpy(recording.uploads[0].arrays.shared)
    server.method.unpack(context.model.layout, vector, shared)
    clients = context.model.deltas(Trained(vector))
    found = weights_of(recording.inner, server.broadcast())
    for layer, update in clients.items():
        adapter = context.model.adapters[layer]
        factors = context.model.layout.views(vector)
        left = factors[f"{layer}.lora_B"].double()
        right = factors.get(f"{layer}.lora_A", context.model.constants(layer).get("lora_A"))
        torch.testing.assert_close(update, 24 / adapter.rank * left @ right.double())
        torch.testing.assert_close(found[layer], update, atol=1e-6, rtol=1e-5)
    trained = global_model(context, server.broadcast(), 1)
    export_peft(context.model, trained, tmp_path / "adapter", "base")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for layer, update in found.items():
        path = f"base_model.model.{layer}"
        left, right = (tensors[f"{path}.lora_{side}.weight"].double() for side in "BA")
        torch.testing.assert_close(left @ right, update, atol=1e-6, rtol=1e-5)


#: Responses of a small decoder, whose clients are weighted by label tokens.
ANSWERS = [
    "dataset=synthetic/instructions", "model.name=llama-tiny", "partition.by=group", "budget=8",
]  # fmt: skip


def errors_of_the_mean(executor, tmp_path, name, weighting, own=()):
    """Return the relative error of the global update per layer, against the weighted mean.

    The second round is used, after every factor has changed.
    """
    options = [f"method={name}", f"federation.weighting={weighting}", *own]
    options += ANSWERS if weighting == "tokens" else []
    # Different sizes, so that the two weightings differ.
    recording = Recording(executor(*options, "partition.variant=per-label"))
    server = server_of(recording, tmp_path)
    server.step()
    server.step()
    context = recording.inner.context
    by = {"size": lambda u: u.rows, "tokens": lambda u: u.tokens}.get(weighting, lambda u: 1.0)
    weights = np.array([by(upload) for upload in recording.uploads], dtype=float)
    sent = recording.broadcast.map(to_tensor)
    clients = []
    for upload in recording.uploads:
        vector = context.initial.clone()
        shared = torch.from_numpy(upload.arrays.shared)
        server.method.unpack(context.model.layout, vector, shared)
        clients.append(context.model.deltas(Trained(vector, sent.base, sent.constants)))
    errors = []
    for layer, found in weights_of(recording.inner, server.broadcast()).items():
        exact = sum(w * c[layer] for w, c in zip(weights / weights.sum(), clients, strict=True))
        errors.append(float((found - exact).norm() / exact.norm()))
    return errors
