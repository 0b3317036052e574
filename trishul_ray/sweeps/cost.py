"""Estimated cost of a run before anything is measured: its FLOPs on a device.

A run is the local steps of its clients and the evaluations of the global model. A step of a frozen
backbone is a forward pass and the gradient of its inputs; only full fine-tuning also needs the
gradient of the weights. Texts are counted at ``task.max_length`` tokens, so that an estimate is an
upper bound for short ones. Each set of rows that a stage adds to the evaluation, such as the test
rows with an attacker's trigger, is counted with as many rows as the test split, an upper bound,
too; training rows that a stage rewrites stay as many. Messages between server and clients are not
counted.

Legend: n tokens of a row, m tokens of a generated target, d width.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trishul_ray.adapters.base import LayerAdapter
from trishul_ray.data.choose_rows import choose_rows
from trishul_ray.data.prepare import official_rows, prepare
from trishul_ray.experiment import Experiment
from trishul_ray.methods.base import Method, build_method
from trishul_ray.models.shape import DECODER, shape_of
from trishul_ray.runtime.cpu import usable_cores

#: Share of a device's peak that a run's matrix products reach, by precision. At 0.6 in fp32, a
#: vision run of the paper takes 1.1 hours on a V100; RAVAN (arXiv 2506.05568, A.3) names about one.
EFFICIENCY = {"fp32": 0.6, "tf32": 0.4, "bf16": 0.4, "fp64": 0.3}

#: Time of a run beyond its rounds: its data, its clients, its results.
RUN_SECONDS = 3.0

#: Operations of one proximal map of an r x r core, in units of r^3: 19 steps of two products for
#: each of two signs, and four more, of 2 r^3 operations each.
PROX_OPERATIONS = 160


@dataclass(frozen=True)
class Device:
    """Peak speed of a device.

    Attributes:
        peak: Dense peak by precision, in operations per second.
        layer_seconds: Least time of one linear layer with what surrounds it, however small: the
            launches of its kernels and the interpreter.
        note: What a run on it needs or lacks.
    """

    peak: dict[str, float]
    layer_seconds: float
    note: str = ""

    @property
    def is_slow_in_float64(self) -> bool:
        """Whether its float64 peak is less than a sixteenth of that of float32."""
        return bool(self.peak) and self.peak["fp64"] < self.peak["fp32"] / 16


def _device(fp64: float, fp32: float, tf32: float, bf16: float, note: str = "") -> Device:
    tera = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "bf16": bf16}
    return Device({name: value * 1e12 for name, value in tera.items()}, 1e-4, note)


#: Devices by name; peaks in 10^12 operations per second, without sparsity, from NVIDIA's data
#: sheets: H100 SXM5 (H200 is equal), A100 SXM4, V100 SXM2 and T4 (have neither tf32 nor bf16
#: units), L4, A10G.
DEVICES = {
    "h100": _device(fp64=34, fp32=67, tf32=494.7, bf16=989.4),
    "h200": _device(fp64=34, fp32=67, tf32=494.7, bf16=989.4),
    "a100": _device(fp64=9.7, fp32=19.5, tf32=156, bf16=312),
    "v100": _device(
        *(7.8, 15.7, 15.7, 15.7),
        "PyPI's torch has no code for it: install a build for CUDA 12.6; bf16 is emulated",
    ),
    "l4": _device(fp64=0.49, fp32=30.3, tf32=60.5, bf16=121),
    "a10g": _device(fp64=0.49, fp32=31.5, tf32=35, bf16=70),
    "t4": _device(0.25, 8.1, 8.1, 8.1, "bf16 is emulated: fp32 is faster"),
    "cpu": Device({}, 3e-5),
}

#: Peak of one core: two fused multiply-adds of 256 bits per cycle at 3 GHz.
CORE_PEAK = {"fp64": 48e9, "fp32": 96e9, "tf32": 96e9, "bf16": 192e9}


@dataclass(frozen=True)
class Phase:
    """The work of training or of evaluation: operations of the backbone and of the adapters.

    ``layers`` is the number of linear layers that are computed one after the other.
    """

    backbone: float
    adapters: float
    layers: float


@dataclass(frozen=True)
class Work:
    """The work of a run; ``prox`` is operations of the proximal maps, in double precision."""

    training: Phase
    evaluation: Phase
    prox: float

    def seconds(self, device: str, precision: str) -> float:
        """Return the time of the run on one device of :data:`DEVICES`."""
        rate = peak(device, precision) * EFFICIENCY[precision]
        total = RUN_SECONDS + self.prox_seconds(device)
        for phase in (self.training, self.evaluation):
            products = (phase.backbone + phase.adapters) / rate
            total += max(products, phase.layers * DEVICES[device].layer_seconds)
        return total

    def prox_seconds(self, device: str) -> float:
        """Return the time of the proximal maps on one device of :data:`DEVICES`."""
        return self.prox / (peak(device, "fp64") * EFFICIENCY["fp64"])


def peak(device: str, precision: str) -> float:
    """Return the operations per second of a device; of the cpu, all cores of this machine."""
    if device == "cpu":
        return CORE_PEAK[precision] * usable_cores()
    return DEVICES[device].peak[precision]


def work_of(experiment: Experiment) -> Work:
    """Count the work of a run from the shapes of its model; no weights are read.

    Raises:
        InputError: The model or the number of test rows is not known on this machine, or the
            adapters do not fit the model.
    """
    from trishul_ray.experiment.fit import build_site  # imports torch

    fed, options, model = experiment.federation, experiment.evaluation, experiment.model
    shape = shape_of(model, experiment.storage.places)
    n, m = shape.lengths(experiment.task)
    method = build_method(experiment.method, experiment.adapter)
    site = build_site(shape.module, experiment)
    adapters = method.adapters(site)

    def extra(batch: int, *, training: bool) -> float:
        return 2.0 * sum(
            adapters[layer.name].multiplications(
                layer,
                batch * shape.tokens_through(layer.name, n, m),
                training=training,
                path=experiment.adapter.path,
                low_precision=model.precision == "bf16" or model.quantize != "none",
            )
            for layer in site.layers
            if layer.name in adapters
        )

    steps = _local_steps(experiment)
    forward, attention = shape.products(n, m), shape.attention(n, m)
    # The gradient of a product's input costs as much as the product; an attention has two inputs.
    step = 2 * forward + 3 * attention
    step += forward if method.train_all else 0
    step += forward + attention if model.gradient_checkpointing else 0
    training = Phase(
        backbone=steps * fed.batch_size * step,
        adapters=steps * extra(fed.batch_size, training=True),
        layers=steps * 3 * len(shape.widths),
    )
    evaluations = _evaluations(experiment, method)
    scored = evaluated_rows(experiment)
    batches = evaluations * sum(-(-each // options.batch_size) for each in scored)
    # A target is scored at once, and then a text is generated, token by token.
    generated = shape.products(n, m, generated=True) + shape.attention(0, m)
    decoder = [name for name in shape.widths if name.startswith(DECODER)]
    evaluation = Phase(
        backbone=evaluations * sum(scored) * (forward + attention + (generated if decoder else 0)),
        adapters=batches * extra(options.batch_size, training=False),
        layers=batches * (len(shape.widths) + m * len(decoder)),
    )
    return Work(training, evaluation, _prox_operations(method, adapters.values()) * steps)


def _local_steps(experiment: Experiment) -> int:
    """Return the local steps of all clients, with those that are trained to be compared alone."""
    fed = experiment.federation
    compared = 0
    if experiment.evaluation.diagnostics_cohort == "all":
        compared = fed.participants - fed.clients_per_round
    return (fed.rounds * fed.clients_per_round + compared) * fed.local_steps


def _evaluations(experiment: Experiment, method: Method) -> float:
    """Return how often a run scores its rows, with those of personal models."""
    fed, rounds = experiment.federation, experiment.scored_rounds
    evaluations = float(len(rounds))
    if method.personal and experiment.evaluation.per_client:
        # At most all rows again for each client that has taken part by then, on average.
        absent = 1 - fed.clients_per_round / fed.participants
        evaluations += sum(fed.participants * (1 - absent**r) for r in rounds)
    return evaluations


def evaluated_rows(experiment: Experiment) -> tuple[int, ...]:
    """Return how many test rows and (about) how many validation rows an evaluation scores.

    After these two is the largest number of rows of each set that a stage adds.

    Raises:
        InputError: Own data, or rows of ``data.test_groups``, are not on this machine.
    """
    data = experiment.data
    official = official_rows(data.name)
    if official is not None and not data.test_groups:
        test, train = official["test"], official["train"]
    else:
        places = experiment.storage.places
        rows = prepare(data, cache=places.cache, hub=places.hub, download=False)
        rows = choose_rows(
            rows, data.model_copy(update={"validation_share": 0.0}), cache=places.cache
        )
        test, train = len(rows.test), len(rows.train)
    validation = round(data.validation_share * train)
    limit = experiment.evaluation.limit or max(test, validation)
    return min(test, limit), min(validation, limit)


def _prox_operations(method: Method, adapters: Iterable[LayerAdapter]) -> float:
    """Return the operations of the proximal maps, per local step."""
    if not method.steps_per_prox:
        return 0.0
    from trishul_ray.adapters.multihead import MultiHead  # imports torch

    cubes = sum(r**3 for a in adapters if isinstance(a, MultiHead) for r in a.head_ranks)
    return PROX_OPERATIONS * cubes / method.steps_per_prox
