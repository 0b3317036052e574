"""Contract checks of a method, on small single-process runs of digits and a random ViT."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.adapters.check import Trial
from trishul_ray.adapters.export import export_merged, export_peft
from trishul_ray.adapters.model import Trained
from trishul_ray.contract.checks import Check, require, require_close, require_hooks
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import CheckpointStore, arrays_digest, state_digest
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.inline import InlineExecutor
from trishul_ray.federation.messages import Job, Outcome, TrainJob, Upload, to_tensor
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.records import RoundRecord
from trishul_ray.federation.reduce import (
    Reducer,
    configured_weight,
    finish,
    partial_sum,
    rejection_reason,
    round_units,
)
from trishul_ray.federation.server import Server
from trishul_ray.federation.worker.context import WorkerContext, global_model
from trishul_ray.federation.worker.local import train_client
from trishul_ray.methods.base import Method, method_class
from trishul_ray.methods.base.messages import Round
from trishul_ray.models.find_model import quiet_transformers
from trishul_ray.stages import ArrayState
from trishul_ray.storage.store import Store

#: A run that takes seconds and needs no pretraining of the backbone.
SMALL = (
    "dataset=digits", "model=vit-digits", "model.init=random", "federation.clients=4",
    "federation.clients_per_round=3", "federation.rounds=2", "federation.local_steps=4",
    "federation.batch_size=8", "evaluation.limit=64", "evaluation.batch_size=32",
    "optimizer.lr=0.01", "tracking.mlflow=false", "resources.backend=inline",
)  # fmt: skip

#: ``executor("method=mine", ...)`` creates an executor of the small run with these overrides.
Executors: TypeAlias = Callable[..., InlineExecutor]


def small_executor(*overrides: str) -> InlineExecutor:
    """Create an executor of the small run with these overrides."""
    experiment = load_experiment(None, [*SMALL, *overrides])
    return InlineExecutor(experiment, prepare_run(experiment))


def checks_of(name: str) -> list[Check]:
    method = method_class(name)
    beyond = "its alters_mean is True" if method.alters_mean else ""
    single = "" if method.aggregates_mean_only else "its aggregates_mean_only is False"

    # The cache lives as long as the checks: another content of a plug-in needs a new one.
    executor = cache(small_executor)

    def on(check: Callable[..., None]) -> Callable[[Path], None]:
        return partial(check, name=name, executor=executor)

    return [
        Check("describes itself", lambda folder: describes_itself(name)),
        Check("starts at the pretrained model", on(starts_pretrained)),
        Check("uploads what it declares", on(uploads_as_declared)),
        Check("moves, and the loss falls", on(loss_falls)),
        Check("repeats a client's call", on(call_repeats)),
        Check("does not depend on the order of clients", on(order_is_free)),
        Check("resumes with the same bytes", on(resumes)),
        Check("moves by the mean alone, as it says", on(mean_decides), skipped=single),
        Check("trains clients together as alone", on(stacks)),
        Check("with one client is central training", on(is_central), skipped=beyond),
        Check("has adapters that agree with themselves", on(adapters_agree)),
        Check("exports a model of the same logits", on(exports)),
    ]


def describes_itself(name: str) -> None:
    """Check that the class has the texts that ``trishul list methods`` displays."""
    method = method_class(name)
    require(
        method.Config(name=name).name == name, f"its Config is for another method than {name!r}"
    )
    require_hooks(method, Method)
    for field in ("summary", "reference", "communication", "__doc__"):
        text = getattr(method, field, None)
        require(bool(text and text.strip()), f"set {field} of {method.__name__}")


def starts_pretrained(folder: Path, name: str, executor: Executors) -> None:
    """Check that the model of the first broadcast equals the pretrained model."""
    inline = executor(f"method={name}")
    trained = global_model(inline.context, server_of(inline, folder).broadcast(), 0)
    found, plain = logits(inline.context, trained), logits(inline.context)
    require_close(
        found, plain, "logits of the first broadcast and the backbone", atol=1e-6, rtol=1e-6
    )


def uploads_as_declared(folder: Path, name: str, executor: Executors) -> None:
    """Check that uploads have the declared tensors, all finite, and keep untrained units."""
    inline = executor(f"method={name}")
    server = server_of(inline, folder)
    broadcast, expected = server.broadcast(), server.spec.expected
    declared = expected.lengths["shared"]
    require(
        sum(expected.unit_sizes) == declared,
        f"upload_lengths() declares {declared} for shared, but the units have "
        f"{sum(expected.unit_sizes)}",
    )
    for number in (1, 2):
        upload, report = train_client(inline.context, broadcast, TrainJob(number, 2))
        refused = rejection_reason(upload, expected)
        require(refused is None, f"upload() and upload_lengths(): {refused}")
        units = upload.active
        if units is None:
            units = round_units(server.method, server.spec.layout, number)
        rests = 0 if units is None else int(sum(expected.unit_sizes[~units]))
        counted = sum(expected.lengths.values()) - rests
        require(
            report.uploaded == counted, f"counted {report.uploaded} numbers, but declared {counted}"
        )
        if units is not None:
            still = np.repeat(~units, expected.unit_sizes)
            same = np.array_equal(upload.arrays.shared[still], broadcast.shared[still])
            require(same, "upload() changes units that are not trained in the round")


def loss_falls(folder: Path, name: str, executor: Executors) -> None:
    """Check that the final training loss is below the loss of the untuned backbone."""
    inline = executor(f"method={name}", "federation.local_steps=25", "optimizer.lr=0.003")
    records = driven(inline, folder).checkpoint.records
    start, last = records[0].scores["loss"], records[-1].train_loss
    require(
        last is not None and last < start,
        f"training loss is {last}, and was {start:.4f} before training",
    )


def call_repeats(folder: Path, name: str, executor: Executors) -> None:
    """Check that a repeated job gives bitwise-identical results, whatever ran in between."""
    inline = executor(f"method={name}")
    broadcast, job = server_of(inline, folder).broadcast(), TrainJob(3, 1)
    first, kept = train_client(inline.context, broadcast, job)
    train_client(inline.context, broadcast, TrainJob(3, 2))  # another client in between
    torch.rand(5)  # advance torch's global random stream
    second, again = train_client(inline.context, broadcast, job)
    same = state_digest(first.arrays) == state_digest(second.arrays)
    require(same, "the upload of a repeated job differs: do not store state in the instance")
    require(
        arrays_digest(kept.state) == arrays_digest(again.state),
        "the client state of a repeated job differs",
    )


def order_is_free(folder: Path, name: str, executor: Executors) -> None:
    """Check that client order and torch's global random stream do not change the result."""
    inline = executor(f"method={name}")
    plain = driven(inline, folder / "plain").checkpoint
    for seed in (2, 3):
        torch.manual_seed(seed)
        again = driven(Shuffled(inline, seed), folder / f"again{seed}").checkpoint
        require(
            state_digest(again.state) == state_digest(plain.state)
            and without_timings(again.records) == without_timings(plain.records),
            "the result depends on the order of clients or on torch's global random stream: draw "
            "from run.generator",
        )


def resumes(folder: Path, name: str, executor: Executors) -> None:
    """Check that a resumed run gives the same bytes as an uninterrupted run."""
    schedule = ["optimizer.schedule=cosine", "optimizer.warmup=0.2", "optimizer.clip_norm=0.5"]
    inline = executor(f"method={name}", *schedule)
    whole = driven(inline, folder / "whole").checkpoint
    server_of(inline, folder / "parts").step()
    parts = driven(inline, folder / "parts").checkpoint
    same = state_digest(parts.state) == state_digest(whole.state)
    require(
        same and without_timings(parts.records) == without_timings(whole.records),
        "a resumed run differs",
    )


def mean_decides(folder: Path, name: str, executor: Executors) -> None:
    """Check that the next state depends only on the mean of the uploads, up to rounding."""
    inline = executor(f"method={name}")
    server = server_of(inline, folder)
    method, state, layout = server.method, server.checkpoint.state, server.spec.layout
    broadcast = server.broadcast()
    same = np.array_equal(broadcast.shared, state.shared)
    require(
        same, "broadcast() changes the shared part of the state: set aggregates_mean_only = False"
    )
    first, second, *rest = inline.run(broadcast, [TrainJob(1, c) for c in range(3)]).uploads
    fed = inline.experiment.federation
    reducer = Reducer(method, layout, fed.weighting, server.spec.expected)
    moved = (first.arrays.shared - broadcast.shared).astype(np.float64)
    units = round_units(method, layout, 1)
    if units is not None:
        moved[np.repeat(~units, server.spec.expected.unit_sizes)] = 0
    spread = np.random.default_rng(0).permutation(moved) * (moved != 0)

    def shifted(upload: Upload, sign: float) -> Upload:
        by = sign * spread * first.rows / configured_weight(fed.weighting, upload)
        shared = (upload.arrays.shared + by).astype(np.float32)
        return replace(upload, arrays=replace(upload.arrays, shared=shared))

    def next_of(uploads: Sequence[Upload]) -> Tensor:
        total = partial_sum(uploads, reducer)
        mean, trained = finish(total, state, reducer)
        round_ = Round(1, len(uploads), fed.clients, torch.from_numpy(trained))
        return method.aggregate(
            state.map(to_tensor), mean.map(to_tensor), round_, layout
        ).shared.double()

    found = next_of([shifted(first, 1.0), shifted(second, -1.0), *rest])
    require_close(
        found, next_of([first, second, *rest]), "next states of two cohorts of one mean",
        atol=1e-5, rtol=1e-3,
    )  # fmt: skip


def stacks(folder: Path, name: str, executor: Executors) -> None:
    """Check that training clients in one forward matches separate training, up to rounding."""
    options = [f"method={name}", "federation.rounds=1", "optimizer.name=sgd"]
    alone, together = (
        driven(executor(*options, f"federation.stacked={k}"), folder / str(k)).checkpoint.state
        for k in (1, 3)
    )
    found, expected = torch.from_numpy(together.shared), torch.from_numpy(alone.shared)
    require_close(found, expected, "states with federation.stacked=3 and 1", atol=1e-4, rtol=1e-3)


def is_central(folder: Path, name: str, executor: Executors, options: Sequence[str] = ()) -> None:
    """Check that the global model equals the client's model if one client trains in every round."""
    one = ["federation.clients=1", "federation.clients_per_round=1"]
    inline = executor(f"method={name}", *one, *options)
    context, server = inline.context, server_of(inline, folder)
    broadcast = server.broadcast()
    for number in (1, 2):
        state = server.checkpoint.client_states.get(0, {})
        with deterministic(inline.experiment):
            upload, _ = train_client(context, broadcast, TrainJob(number, 0, state))
        vector, sent = context.initial.clone(), broadcast.map(to_tensor)
        shared = torch.from_numpy(upload.arrays.shared)
        server.method.unpack(context.model.layout, vector, shared)
        alone = model_of(context, Trained(vector, sent.base, sent.constants))
        server.step()
        broadcast = server.broadcast()
        together = model_of(context, global_model(context, broadcast, 0))
        for key, value in alone.items():
            what = f"weights {key!r} of the client and the global model after round {number}"
            require_close(together[key], value, what, atol=1e-6, rtol=1e-5)


def adapters_agree(folder: Path, name: str, executor: Executors) -> None:
    """Check that forward, merged weight and update of each kind of adapter are consistent."""
    model = executor(f"method={name}").context.model
    kinds = {(type(model.adapters[s.name]), s.d_out, s.d_in): s for s in model.specs}
    for spec in kinds.values():
        require_hooks(type(adapter := model.adapters[spec.name]), LayerAdapter)
        if adapter.shapes(spec):
            trial = Trial.of(adapter, spec)
            trial.forward_is_the_merged_weight()
            trial.factors_are_the_update()


def exports(folder: Path, name: str, executor: Executors) -> None:
    """Check that the merged model, and the backbone with the PEFT adapter, reproduce the logits."""
    from peft import PeftModel

    inline = executor(f"method={name}", "federation.local_steps=10")
    context = inline.context
    trained = global_model(context, driven(inline, folder / "run").broadcast(), 2)
    ours = logits(context, trained)
    moved = bool((ours - logits(context)).abs().max() > 1e-3)
    require(moved, "training does not change the global model")
    batch = context.task.inputs(_batch(context))
    with quiet_transformers(), warnings.catch_warnings():
        # PEFT uses a deprecated function of transformers.
        warnings.simplefilter("ignore", FutureWarning)
        export_merged(context.model, trained, folder / "merged")
        base: Any = context.model.merge(Trained(context.initial))
        models = {"merged model": type(base).from_pretrained(folder / "merged").eval()}
        if context.model.specs:
            export_peft(context.model, trained, folder / "adapter", "base")
            adapted = PeftModel.from_pretrained(base, str(folder / "adapter"))
            models["PEFT adapter"] = adapted.eval()
    for what, model in models.items():
        with torch.inference_mode():
            found = model(**batch).logits
        require_close(found, ours, f"logits of the {what} and the run", atol=1e-4, rtol=1e-4)


def server_of(inline: InlineExecutor, folder: Path) -> Server:
    """Create a server that stores its checkpoints in a folder and continues from them."""
    store, id = Store.open(str(folder)), inline.experiment.id
    return Server(inline.experiment, inline, CheckpointStore(store, id), "attempt")


def driven(inline: InlineExecutor, folder: Path) -> Server:
    """Create a server as in :func:`server_of`, and run it to the end."""
    server = server_of(inline, folder)
    while not server.finished:
        server.step()
    return server


def logits(context: WorkerContext, trained: Trained | None = None) -> Tensor:
    """Compute the logits of the first test rows, of the backbone if ``trained`` is None."""
    batch = _batch(context)
    with torch.inference_mode():
        if trained is not None:
            context.model.bind(trained)
        try:
            found: Tensor = context.model.forward(**context.task.inputs(batch)).logits
            return found
        finally:
            context.model.unbind()


def _batch(context: WorkerContext) -> dict[str, Tensor]:
    return context.task.prepare_batch(
        context.test.batch(np.arange(16)), context.device, context.dtype
    )


def model_of(context: WorkerContext, trained: Trained) -> dict[str, Tensor]:
    """Return the update of every weight, and the classification head, both in float64."""
    weights = context.model.deltas(trained)
    head = {k: v.double() for k, v in context.model.direct_parameters(trained.vector).items()}
    return weights | head


def without_timings(records: Iterable[RoundRecord]) -> list[dict[str, Any]]:
    """Return the fields of each record without durations."""
    return [{k: v for k, v in vars(r).items() if not k.endswith("seconds")} for r in records]


class Shuffled(InlineExecutor):
    """Executor that runs the jobs of another executor in a random order."""

    def __init__(self, inner: InlineExecutor, seed: int) -> None:
        self.__dict__.update(vars(inner))
        self.inner, self.seed = inner, seed

    def run(
        self,
        broadcast: ArrayState,
        jobs: Sequence[Job],
        reducer: Reducer | None = None,
        trained: Callable[[Sequence[Any]], None] | None = None,
    ) -> Outcome:
        """Run each job separately, and return the outcome in the original order."""
        order = np.random.default_rng(self.seed).permutation(len(jobs))
        done = {int(i): self.inner.run(broadcast, [jobs[i]]) for i in order}
        each = [done[i] for i in range(len(jobs))]
        return Outcome(
            [upload for one in each for upload in one.uploads],
            [report for one in each for report in one.reports],
            [scored for one in each for scored in one.evaluations],
        )
