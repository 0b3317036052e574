"""What every registered method must satisfy; new methods are picked up automatically."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from method_runs import SINGLE, resumed, run, server_of
from newcomers import NEWCOMERS
from peft import PeftModel
from pydantic import ValidationError
from tiny_run import untimed

from trishul_ray.adapters.export import FOLDED_ERROR, export_merged, export_peft
from trishul_ray.adapters.model import Trained
from trishul_ray.errors import InputError
from trishul_ray.federation.checkpoint import arrays_digest, state_digest
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.local import train_client
from trishul_ray.federation.messages import Outcome, TrainJob, to_tensor
from trishul_ray.federation.reduce import rejection_reason, round_units
from trishul_ray.federation.workbench import global_model
from trishul_ray.methods.base import method_class

METHODS = [*SINGLE, *NEWCOMERS]
#: Methods whose clients send nothing, so that the global model stays as it was.
SILENT = {"local"}


def logits(bench, trained=None, rows=16):
    batch = bench.task.prepare_batch(bench.test.batch(np.arange(rows)), "cpu", torch.float32)
    with torch.inference_mode():
        if trained is not None:
            bench.model.bind(trained)
        try:
            return bench.model.forward(**bench.task.inputs(batch)).logits
        finally:
            bench.model.unbind()


def test_the_three_prongs_are_among_them():
    assert {"trishul", "ravan", "fedit"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_it_describes_itself(name):
    method = method_class(name)
    assert method.Config(name=name).name == name
    for text in (method.summary, method.reference, method.communication, method.__doc__):
        assert text.strip()


@pytest.mark.parametrize("name", METHODS)
def test_starts_at_the_pretrained_model_or_as_documented(name, executor, tmp_path):
    bench = executor(f"method={name}").bench
    server = server_of(executor(f"method={name}"), tmp_path)
    broadcast = server.broadcast()
    trained = global_model(bench, broadcast, 0)
    if name != "fedsb":
        torch.testing.assert_close(logits(bench, trained), logits(bench), atol=1e-6, rtol=1e-6)
        return
    survey = server.survey()
    # Fed-SB starts at W0 + U S V^T, the rank-r part of -eta0 sign(mean gradient).
    for layer, delta in bench.model.deltas(replace(trained, base={})).items():
        step = -bench.method.config.init_lr * np.sign(survey[layer].astype(np.float64))
        u, s, vt = np.linalg.svd(step)
        rank = trained.constants[layer]["basis_A"].shape[0]
        expected = (u[:, :rank] * s[:rank]) @ vt[:rank]
        np.testing.assert_allclose(delta.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_uploads_are_as_declared_and_finite(name, executor, tmp_path):
    inline = executor(f"method={name}")
    server = server_of(inline, tmp_path)
    broadcast = server.broadcast()
    expected = server.blueprint.expected
    assert sum(expected.unit_sizes) == expected.lengths["shared"]
    for number in (1, 2):
        upload, report = train_client(inline.bench, broadcast, TrainJob(number, 2))
        assert rejection_reason(upload, expected) is None
        assert upload.rows == len(inline.bench.shards.shard(2))
        units = round_units(server.method, server.blueprint.layout, number)
        rests = 0 if units is None else sum(expected.unit_sizes[~units])
        assert report.uploaded == sum(expected.lengths.values()) - rests
        assert report.uploaded > 0 or name in SILENT
        if units is not None:
            still = np.repeat(~units, expected.unit_sizes)
            np.testing.assert_array_equal(upload.arrays.shared[still], broadcast.shared[still])


@pytest.mark.parametrize("name", METHODS)
def test_training_moves_and_the_loss_falls(name, executor, tmp_path):
    inline = executor(f"method={name}", "federation.local_steps=25", "optimizer.lr=0.003")
    server = run(inline, tmp_path)
    losses = [record.train_loss for record in server.checkpoint.records[1:]]
    start = server.checkpoint.records[0].scores["loss"]
    assert losses[-1] < start


@pytest.mark.parametrize("name", METHODS)
def test_a_client_call_can_be_repeated(name, executor, tmp_path):
    inline = executor(f"method={name}")
    broadcast = server_of(inline, tmp_path).broadcast()
    job = TrainJob(3, 1)
    first, kept = train_client(inline.bench, broadcast, job)
    train_client(inline.bench, broadcast, TrainJob(3, 2))  # another client in between
    torch.rand(5)  # and a draw from the global stream
    second, again = train_client(inline.bench, broadcast, job)
    assert state_digest(first.arrays) == state_digest(second.arrays)
    assert arrays_digest(kept.state) == arrays_digest(again.state)


def model_of(bench, trained):
    """Return the update of every weight, and the classification head, in float64."""
    weights = bench.model.deltas(trained)
    head = {k: v.double() for k, v in bench.model.direct_parameters(trained.vector).items()}
    return weights | head


@pytest.mark.parametrize(
    "name", [m for m in METHODS if m in NEWCOMERS or not method_class(m).moves_beyond_mean]
)
def test_one_client_is_central_training(name, executor, tmp_path):
    """With one client that takes part in every round, the global model after each round is the
    client's model."""
    options = ["federation.clients=1", "federation.clients_per_round=1"]
    if name == "flexlora":
        options.append("method.truncate=false")
    inline = executor(f"method={name}", *options)
    server = server_of(inline, tmp_path)
    broadcast = server.broadcast()
    for number in (1, 2):
        state = server.checkpoint.client_states.get(0, {})
        with deterministic(inline.experiment):
            upload, _ = train_client(inline.bench, broadcast, TrainJob(number, 0, state))
        vector = inline.bench.initial.clone()
        server.method.unpack(
            inline.bench.model.layout, vector, torch.from_numpy(upload.arrays.shared)
        )
        sent = broadcast.map(to_tensor)
        alone = Trained(vector, sent.base, sent.constants)
        alone = model_of(inline.bench, alone)
        server.step()
        broadcast = server.broadcast()
        together = model_of(inline.bench, global_model(inline.bench, broadcast, 0))
        for key, value in alone.items():
            torch.testing.assert_close(together[key], value, atol=1e-6, rtol=1e-5)


class Shuffled:
    """Run the jobs of an executor in a random order."""

    def __init__(self, inner, seed):
        self.inner, self.seed = inner, seed

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run(self, broadcast, jobs, *more):
        order = np.random.default_rng(self.seed).permutation(len(jobs))
        done = {int(i): self.inner.run(broadcast, [jobs[i]]) for i in order}
        merged = Outcome([], [], [])
        for i in range(len(jobs)):
            merged.uploads += done[i].uploads
            merged.reports += done[i].reports
            merged.evaluations += done[i].evaluations
        return merged


def with_dropout(name, backbone):
    """Return options with dropout on and, where a method has it, selection by gradient."""
    options = [f"method={name}", f"model.name={backbone}", "model.dropout=true", "budget=2"]
    if "selection" in method_class(name).Config.model_fields:
        options += ["method.selection=gradient", "method.head_fraction=0.5"]
    return options


@pytest.mark.parametrize("name", METHODS)
def test_dropout_draws_from_the_clients_own_stream(name, executor, dropout_backbone, tmp_path):
    """Neither the order of work, nor earlier jobs, nor torch's global stream changes anything."""
    inline = executor(*with_dropout(name, dropout_backbone))
    torch.manual_seed(1)
    plain = run(inline, tmp_path, "plain")
    for seed in (2, 3):
        inline.bench.model.train(True)  # as a job that was interrupted may leave it
        torch.manual_seed(seed)
        again = run(Shuffled(inline, seed), tmp_path, f"again{seed}")
        assert state_digest(again.checkpoint.state) == state_digest(plain.checkpoint.state)
        assert untimed(again.checkpoint.records) == untimed(plain.checkpoint.records)


def test_dropout_is_on_only_if_configured(executor, dropout_backbone, tmp_path):
    options = with_dropout("fedit", dropout_backbone)
    options[2:3] = ["model.dropout=false"]
    plain = run(executor(*options), tmp_path, "plain").checkpoint.records
    dropped = run(executor(*with_dropout("fedit", dropout_backbone)), tmp_path, "dropped")
    dropped = dropped.checkpoint.records
    assert plain[0].scores == dropped[0].scores, "evaluation knows no dropout"
    assert plain[1].train_loss != dropped[1].train_loss


@pytest.fixture(scope="module")
def wide_backbone(vit_folder):
    """One block of the paper's width: there, sums depend on the number of threads."""
    return vit_folder(width=768, layers=1)


@pytest.mark.parametrize("name", METHODS)
def test_ambient_threads_change_nothing(name, executor, wide_backbone, tmp_path):
    """The caller's number of threads does not affect the run."""
    inline = executor(
        f"method={name}",
        f"model.name={wide_backbone}",
        "federation.rounds=1",
        "federation.local_steps=1",
        "evaluation.limit=8",
    )
    before, digests = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            server = run(inline, tmp_path, f"with{threads}")
            digests.add((state_digest(server.checkpoint.state), state_digest(server.broadcast())))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


@pytest.mark.parametrize("name", METHODS)
def test_stop_and_resume_changes_nothing(name, executor, tmp_path):
    """Nor does it to schedules and clipping, which depend on the round and step alone."""
    schedule = ["optimizer.schedule=cosine", "optimizer.warmup=0.2", "optimizer.clip_norm=0.5"]
    resumed(executor(f"method={name}", *schedule), tmp_path)


@pytest.mark.parametrize("name", METHODS)
def test_exports_give_the_same_logits(name, executor, tmp_path):
    inline = executor(f"method={name}", "federation.local_steps=10")
    bench = inline.bench
    server = run(inline, tmp_path)
    trained = global_model(bench, server.broadcast(), 2)
    ours = logits(bench, trained)
    moved = (ours - logits(bench)).abs().max() > 1e-3
    assert moved != (name in SILENT), "training must have moved the model"
    batch = bench.task.inputs(
        bench.task.prepare_batch(bench.test.batch(np.arange(16)), "cpu", torch.float32)
    )
    export_merged(bench.model, trained, tmp_path / "merged")
    base = bench.model.merge(Trained(bench.initial))
    merged = type(base).from_pretrained(tmp_path / "merged").eval()
    with torch.inference_mode():
        torch.testing.assert_close(merged(**batch).logits, ours, atol=1e-4, rtol=1e-4)
    if not bench.model.specs:
        with pytest.raises(InputError, match="export: no layer is adapted"):
            export_peft(bench.model, trained, tmp_path / "adapter", "base")
        return
    exported = export_peft(bench.model, trained, tmp_path / "adapter", "base")
    assert exported.folded == bool(trained.base) and exported.error <= FOLDED_ERROR
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(**batch).logits, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_invalid_hyperparameters_are_refused(name):
    config = method_class(name).Config
    with pytest.raises(ValidationError, match="nonsense"):
        config(name=name, nonsense=1)
    for field, info in config.model_fields.items():
        if info.annotation in (int, float):
            for bad in (-1, float("nan"), "many"):
                with pytest.raises(ValidationError, match=field):
                    config(name=name, **{field: bad})


@pytest.mark.parametrize("method", ["fedit", "flexlora", "flora", "frlora", "fedsvd"])
def test_a_rank_may_exceed_the_width_of_a_matrix(method, executor, tmp_path):
    """The factors then have directions that stay zero."""
    inline = executor(f"method={method}", "adapter.rank=80", "federation.rounds=1")
    server = run(inline, tmp_path)
    assert all(min(spec.d_out, spec.d_in) < 80 for spec in inline.bench.model.specs)
    assert np.isfinite(server.checkpoint.state.shared).all()
