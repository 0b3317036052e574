"""What every registered method must keep. New methods are found by themselves."""

import numpy as np
import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError

from trishul_ray.adapters.export import export_merged, export_peft
from trishul_ray.federation.checkpoint import CheckpointStore, state_digest
from trishul_ray.federation.inline import pinned_threads
from trishul_ray.federation.jobs import TrainJob, to_arrays, to_tensors
from trishul_ray.federation.local import global_vector, train_client
from trishul_ray.federation.reduce import judge
from trishul_ray.federation.server import Outcome, Server
from trishul_ray.methods.registry import method_class, method_names
from trishul_ray.storage import Store

METHODS = method_names()


def run(executor, tmp_path, name="run"):
    experiment = executor.bench.settings
    checkpoints = CheckpointStore(Store.open(str(tmp_path / name)), experiment.id)
    server = Server(experiment, executor, checkpoints, "attempt")
    while not server.finished:
        server.step()
    return server


def logits(bench, vector=None, rows=16):
    batch = bench.task.prepare_batch(bench.test.batch(np.arange(rows)), "cpu", torch.float32)
    with torch.inference_mode():
        if vector is not None:
            bench.model.bind(vector)
        try:
            return bench.model.forward(**bench.task.inputs(batch)).logits
        finally:
            bench.model.unbind()


def test_the_three_prongs_are_among_them():
    assert {"trishul", "ravan", "fedit"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_it_says_what_it_is(name):
    method = method_class(name)
    assert method.Config(name=name).name == name
    for text in (method.summary, method.reference, method.communication, method.__doc__):
        assert text.strip()


@pytest.mark.parametrize("name", METHODS)
def test_starts_at_the_pretrained_model(name, executor):
    bench = executor(f"method={name}").bench
    blueprint = executor(f"method={name}").describe()
    vector = global_vector(bench, blueprint.initial_state, 0)
    torch.testing.assert_close(logits(bench, vector), logits(bench), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_uploads_are_as_declared_and_finite(name, executor):
    inline = executor(f"method={name}")
    blueprint = inline.describe()
    upload, report = train_client(inline.bench, blueprint.initial_state, TrainJob(1, 2))
    assert judge(upload, blueprint.expected) is None
    assert upload.rows == len(inline.bench.shards.shard(2))
    assert report.notes["uploaded_parameters"] == sum(blueprint.expected.lengths.values())
    assert sum(blueprint.expected.unit_sizes) == blueprint.expected.lengths["shared"]


@pytest.mark.parametrize("name", METHODS)
def test_training_moves_and_the_loss_falls(name, executor):
    inline = executor(f"method={name}", "federation.local_steps=20")
    state = inline.describe().initial_state
    _, first = train_client(inline.bench, state, TrainJob(1, 0))
    upload, _ = train_client(inline.bench, state, TrainJob(1, 0))
    _, second = train_client(inline.bench, upload.arrays, TrainJob(2, 0))
    assert second.loss < first.loss


@pytest.mark.parametrize("name", METHODS)
def test_a_client_call_can_be_repeated(name, executor):
    inline = executor(f"method={name}")
    state = inline.describe().initial_state
    job = TrainJob(3, 1)
    first, _ = train_client(inline.bench, state, job)
    train_client(inline.bench, state, TrainJob(3, 2))  # another client in between
    torch.rand(5)  # and somebody drawing from the global stream
    second, _ = train_client(inline.bench, state, job)
    assert state_digest(first.arrays) == state_digest(second.arrays)


@pytest.mark.parametrize("name", METHODS)
def test_one_client_is_central_training(name, executor, tmp_path):
    """A federation of one client that always takes part is that client training alone."""
    inline = executor(f"method={name}", "federation.clients=1", "federation.clients_per_round=1")
    server = run(inline, tmp_path)
    state = inline.describe().initial_state
    with pinned_threads(1):
        for number in (1, 2):
            broadcast = to_arrays(server.method.broadcast(to_tensors(state)))
            upload, _ = train_client(inline.bench, broadcast, TrainJob(number, 0))
            state = upload.arrays
    np.testing.assert_allclose(server.state["shared"], state["shared"], rtol=0, atol=0)


class Shuffled:
    """Runs the jobs of an executor in another order than they are given."""

    def __init__(self, inner, seed):
        self.inner, self.seed = inner, seed

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run(self, broadcast, jobs):
        order = np.random.default_rng(self.seed).permutation(len(jobs))
        done = {int(i): self.inner.run(broadcast, [jobs[i]]) for i in order}
        merged = Outcome([], [], [])
        for i in range(len(jobs)):
            merged.uploads += done[i].uploads
            merged.reports += done[i].reports
            merged.evaluations += done[i].evaluations
        return merged


@pytest.mark.parametrize("name", METHODS)
def test_the_order_of_work_changes_nothing(name, executor, tmp_path):
    inline = executor(f"method={name}")
    digests = {
        state_digest(run(inline, tmp_path, "plain").state),
        state_digest(run(Shuffled(inline, 1), tmp_path, "one").state),
        state_digest(run(Shuffled(inline, 2), tmp_path, "two").state),
    }
    assert len(digests) == 1


@pytest.mark.parametrize("name", METHODS)
def test_stop_and_resume_changes_nothing(name, executor, tmp_path):
    inline = executor(f"method={name}")
    whole = run(inline, tmp_path, "whole")
    checkpoints = CheckpointStore(Store.open(str(tmp_path / "parts")), whole.experiment.id)
    Server(whole.experiment, inline, checkpoints, "attempt").step()
    resumed = run(inline, tmp_path, "parts")
    assert state_digest(resumed.state) == state_digest(whole.state)
    for before, after in zip(whole.records, resumed.records, strict=True):
        timeless = {k: v for k, v in before.items() if "seconds" not in k}
        assert timeless == {k: v for k, v in after.items() if "seconds" not in k}


@pytest.mark.parametrize("name", METHODS)
def test_exports_give_the_same_logits(name, executor, tmp_path):
    inline = executor(f"method={name}", "federation.local_steps=10")
    bench = inline.bench
    server = run(inline, tmp_path)
    vector = global_vector(bench, server.state, 2)
    ours = logits(bench, vector)
    assert (ours - logits(bench)).abs().max() > 1e-3, "training must have moved the model"
    batch = bench.task.inputs(
        bench.task.prepare_batch(bench.test.batch(np.arange(16)), "cpu", torch.float32)
    )
    export_merged(bench.model, vector, tmp_path / "merged")
    base = bench.model.merge(bench.initial)
    merged = type(base).from_pretrained(tmp_path / "merged")
    export_peft(bench.model, vector, tmp_path / "adapter", "base")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.inference_mode():
        torch.testing.assert_close(merged(**batch).logits, ours, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(loaded(**batch).logits, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_nonsense_is_refused(name):
    config = method_class(name).Config
    with pytest.raises(ValidationError, match="nonsense"):
        config(name=name, nonsense=1)
    for field, info in config.model_fields.items():
        if info.annotation in (int, float):
            for bad in (-1, float("nan"), "many"):
                with pytest.raises(ValidationError, match=field):
                    config(name=name, **{field: bad})
