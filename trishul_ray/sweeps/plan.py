"""Plan of sweeps: their runs and the cost, before anything runs.

Each distinct run is counted once, in the first sweep that has it. Its time is that of the most
similar finished run of its kind in the store, or else from :mod:`trishul_ray.sweeps.cost`. Times
are device-hours: the hours of a run times the number of GPUs, or the share of a CPU's cores, that
it holds.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any, get_args

from rich.table import Table

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.slices import plan_slices, with_actors
from trishul_ray.methods.base import build_method
from trishul_ray.report.outcomes import CellStatus
from trishul_ray.report.summary import RunSummary, flatten
from trishul_ray.runtime.lazy import torch
from trishul_ray.sweeps.cells import Sweep, distinct
from trishul_ray.sweeps.cost import DEVICES, work_of
from trishul_ray.sweeps.status import CellState

#: Unwanted states of a run, shown only where there are any.
RARE: tuple[CellStatus, ...] = ("failed", "stale", "corrupt")

#: The ``method.prox_every`` that is named where the prox is slow.
PROX_EVERY = 5

#: Fields that two runs must have in common if the time of one is to tell that of the other.
_KIND = (
    *("data.name", "data.path", "model.name", "model.precision", "model.image_size", "method.name"),
    *("federation.clients_per_round", "federation.local_steps", "federation.batch_size"),
)


@dataclass(frozen=True)
class SweepPlan:
    """Runs of one sweep, or of all of them (``total``).

    Attributes:
        runs: Number of distinct runs that no earlier sweep has.
        shared: Number of distinct runs that an earlier sweep has.
        to_do: Number of runs that have neither finished nor been ended for good by early stopping.
        measured: Number of these whose time is that of a finished run of the same kind.
        unknown: Number of these whose time is not known, because their model or data are not.
        hours_left: Device-hours of the runs to do, without the unknown ones.
        longest: Hours of the longest of them on its slice: more devices do not shorten it.
        hours_done: Device-hours of the finished runs.
        hours_saved: Device-hours that :data:`PROX_EVERY` would save of the modelled ones.
    """

    name: str
    cells: int = 0
    runs: int = 0
    shared: int = 0
    to_do: int = 0
    states: Counter[CellStatus] = field(default_factory=Counter)
    measured: int = 0
    unknown: int = 0
    hours_left: float = 0.0
    longest: float = 0.0
    hours_done: float = 0.0
    hours_saved: float = 0.0

    def __add__(self, other: "SweepPlan") -> "SweepPlan":
        """Return the plan of both, under the name of the first."""
        names = [each.name for each in fields(self)]
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        return SweepPlan(**sums | {"name": self.name, "longest": max(self.longest, other.longest)})

    def hours_on(self, devices: int) -> float:
        """Return the hours that the runs to do take on that many devices, at least."""
        return max(self.hours_left / devices, self.longest)


@dataclass(frozen=True)
class Plan:
    """Runs of sweeps, their sum, and the reason why the time of some is not known."""

    sweeps: tuple[SweepPlan, ...]
    total: SweepPlan
    device: str
    why_unknown: tuple[str, ...]


def make_plan(
    sweeps: Sequence[Sweep],
    states: Mapping[str, CellState],
    device: str,
    measured: Iterable[RunSummary] = (),
) -> Plan:
    """Count the runs of sweeps and estimate their time on a device of ``DEVICES``.

    A sweep that searches adaptively counts with all its samples, as missing. ``measured`` are
    results of further runs in the store.

    Raises:
        InputError: The device is unknown.
    """
    if device not in DEVICES:
        raise InputError(f"device {device!r} is unknown; known: {', '.join(DEVICES)}")
    finished = [state.summary for state in states.values() if state.summary is not None]
    clock = _Clock(device, [*finished, *measured])
    shared = distinct([sweep for sweep in sweeps if not sweep.is_adaptive])
    seen: set[str] = set()
    plans = []
    for sweep in sweeps:
        samples = sweep.search.samples if sweep.search and sweep.is_adaptive else None
        runs = {cell.experiment.id: cell.experiment for cell in sweep.cells}
        runs |= {id: shared[id] for id in runs if id in shared}
        own = {id: experiment for id, experiment in runs.items() if samples or id not in seen}
        if samples:
            counts = Counter[CellStatus]({"missing": samples * len(own)})
            to_do, done = list(own.values()) * samples, []
        else:
            seen |= own.keys()
            counts = Counter(states[id].status for id in own)
            to_do = [own[id] for id in own if states[id].summary is None]
            done = [summary for id in own if (summary := states[id].summary) is not None]
        estimates = [clock.estimate(experiment) for experiment in to_do]
        plans.append(
            SweepPlan(
                name=sweep.name,
                cells=len(sweep.cells) * (samples or 1),
                runs=len(own) * (samples or 1),
                shared=len(runs) - len(own),
                to_do=len(to_do),
                states=counts,
                measured=sum(each.measured for each in estimates),
                unknown=sum(each.hours is None for each in estimates),
                hours_left=sum(each.hours or 0.0 for each in estimates),
                hours_saved=sum(each.saved for each in estimates),
                longest=max((each.alone for each in estimates), default=0.0),
                hours_done=sum(_wall_hours(summary) * _share(summary) for summary in done),
            )
        )
    total = sum(plans, SweepPlan("total"))
    return Plan(tuple(plans), total, device, tuple(clock.why_unknown))


@dataclass(frozen=True)
class _Estimate:
    """Estimated time of a run.

    Attributes:
        hours: Device-hours; None if unknown.
        alone: Hours on what it holds of its machine.
        measured: Whether they are those of a finished run.
        saved: Device-hours that :data:`PROX_EVERY` would save.
    """

    hours: float | None
    alone: float = 0.0
    measured: bool = False
    saved: float = 0.0


class _Clock:
    """Estimates the device-hours of runs on one device."""

    def __init__(self, device: str, results: Iterable[RunSummary]) -> None:
        self.device = device
        self.why_unknown: dict[str, None] = {}
        self._results = results
        self._modelled: dict[tuple[frozenset[tuple[str, str]], int], _Estimate] = {}

    @cached_property
    def _measured(self) -> Mapping[str, list[RunSummary]]:
        """The results on this device, by kind."""
        found: dict[str, list[RunSummary]] = {}
        for result in self._results:
            if result.round_seconds and device_of(result) == self.device:
                found.setdefault(_kind(result.identity), []).append(result)
        return found

    def estimate(self, experiment: Experiment) -> _Estimate:
        """Return what a run takes."""
        identity = experiment.identity()
        every = experiment.evaluation.every
        alike = self._measured.get(_kind(identity))
        if not alike:
            return self._model(experiment, identity, every)
        ours = _decisive(identity)
        nearest = min(alike, key=lambda result: len(ours ^ _decisive(result.identity)))
        alone = _wall_hours(nearest, experiment.federation.rounds)
        then = nearest.config["evaluation"]["every"]
        if then != every:  # the model says by how much other scored rounds differ
            both = [self._model(experiment, identity, each).hours for each in (every, then)]
            alone *= both[0] / both[1] if both[0] and both[1] else 1.0
        return _Estimate(alone * _share(nearest), alone, measured=True)

    def _model(self, experiment: Experiment, identity: Mapping[str, Any], every: int) -> _Estimate:
        """Return the estimate by the cost model of a run that is scored every so many rounds."""
        key = _decisive(identity), every
        if key not in self._modelled:
            evaluation = experiment.evaluation.model_copy(update={"every": every})
            run = experiment.model_copy(update={"evaluation": evaluation})
            try:
                work = work_of(run)
                hours = work.seconds(self.device, run.model.precision) / 3600
                left = min(1.0, build_method(run.method).steps_per_prox / PROX_EVERY)
                saved = (1 - left) * work.prox_seconds(self.device) / 3600
                self._modelled[key] = _Estimate(hours, hours, saved=saved)
            except InputError as error:
                self.why_unknown[str(error)] = None
                self._modelled[key] = _Estimate(None)
        return self._modelled[key]


def device_of(result: RunSummary) -> str:
    """Return what a result was computed on: one of ``DEVICES``, or the name of another GPU."""
    gpus = result.hardware.gpus
    if not gpus or result.config["resources"]["device"] == "cpu":
        return "cpu"
    return _known_gpu(gpus[0]) or gpus[0]


def _known_gpu(name: str) -> str | None:
    words = name.lower().replace("-", " ").split()
    return next((device for device in DEVICES if device in words), None)


def _kind(identity: Mapping[str, Any]) -> str:
    """Return the fields of :data:`_KIND`, as text."""
    fields = flatten(dict(identity))
    return json.dumps([fields.get(name) for name in _KIND])


def _decisive(identity: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the fields that the time of a run depends on; seed, partition and rate are not."""
    sections = {k: v for k, v in identity.items() if k not in ("seed", "partition", "optimizer")}
    return frozenset((name, json.dumps(value)) for name, value in flatten(sections).items())


def _wall_hours(result: RunSummary, rounds: int | None = None) -> float:
    """Return the hours of a finished run, for another number of rounds if one is given."""
    took, done = sum(result.round_seconds), len(result.round_seconds)
    training = took if rounds is None else took / done * rounds
    return (training + result.wall_seconds - took) / 3600


def _share(result: RunSummary) -> float:
    """Return how many GPUs a finished run held, or which share of its machine's cores."""
    cpus, gpus = result.hardware.cpus or 1, len(result.hardware.gpus)
    if held := result.held:
        return held["GPU"] or held["CPU"] / cpus
    sections = {name: result.config[name] for name in ("resources", "federation")}
    return _share_of(json.dumps(sections), cpus, gpus)


@cache
def _share_of(sections: str, cpus: float, gpus: int) -> float:
    free = {"CPU": float(cpus), "GPU": float(gpus)}
    try:
        experiment = Experiment.model_validate_json(sections)
        if experiment.resources.backend == "inline":
            experiment = with_actors(experiment, 1)
        slices = plan_slices(experiment, free)
    except ValueError:
        return 1.0  # it ran on a cluster of several machines
    return slices.actors * (slices.gpus or slices.cpus / free["CPU"])


def plan_table(plan: Plan, *, devices: int = 1, price: float | None = None) -> Table:
    """Show a plan for devices at a price for an hour: a row for each sweep, and the total."""
    table = Table(box=None, pad_edge=False)
    table.add_column("sweep", no_wrap=True, min_width=max(len(s.name) for s in plan.sweeps))
    known: tuple[CellStatus, ...] = get_args(CellStatus)
    statuses = [s for s in known if s in ("finished", "missing") or plan.total.states[s]]
    unit = "CPU-hours" if plan.device == "cpu" else "GPU-hours"
    numbers = ["cells", "runs", "shared", *statuses, "measured", "hours", unit]
    for name in numbers if price is None else [*numbers, "cost"]:
        table.add_column(name, justify="right")
    for each in (*plan.sweeps, plan.total):
        if each is plan.total:
            table.add_section()
        left = _hours(each.hours_left)
        table.add_row(
            each.name,
            *(f"{n:,}" for n in (each.cells, each.runs, each.shared)),
            *(f"{each.states[s]:,}" for s in statuses),
            f"{each.measured:,}",
            _hours(each.hours_on(devices)),
            f"{left} + ?" if each.unknown else left,
            *((f"{each.hours_left * price:,.0f}",) if price is not None else ()),
        )
    return table


def _hours(number: float) -> str:
    return f"{number:,.1f}" if number >= 10 else f"{number:.2f}"


def plan_notes(plan: Plan, states: Mapping[str, CellState], devices: int) -> list[str]:
    """Return what the table does not say: where its numbers are from, and what is unusual."""
    name = plan.device.upper() if plan.device != "cpu" else "machine like this one"
    count = f"{devices} {name}s" if devices > 1 else f"one {name}"
    modelled = plan.total.to_do - plan.total.measured - plan.total.unknown
    notes = [
        f"{plan.total.runs:,} distinct runs; hours on {count}: {plan.total.measured:,} runs "
        f"measured, {modelled:,} from the cost model"
    ]
    if note := DEVICES[plan.device].note:
        notes.append(f"{name}: {note}")
    if DEVICES[plan.device].is_slow_in_float64 and plan.total.hours_saved:
        saved = f"{_hours(plan.total.hours_saved)} of {_hours(plan.total.hours_left)}"
        notes.append(
            f"{name} computes float64, as the prox needs, at a small rate: "
            f"method.prox_every={PROX_EVERY} would save {saved} hours, as another experiment "
            "(other ids, other numbers)"
        )
    if plan.total.longest:
        longest = _hours(plan.total.longest)
        notes.append(f"the longest run takes {longest} hours, which more devices do not shorten")
    if plan.total.hours_done:
        notes.append(f"finished runs took {_hours(plan.total.hours_done)} hours of their devices")
    if plan.total.unknown:
        why = "; ".join(plan.why_unknown[:3])
        notes.append(f"{plan.total.unknown:,} runs of unknown time are not counted: {why}")
    reasons = Counter(
        f"{state.status}: {state.reason}" for state in states.values() if state.status in RARE
    )
    notes += [f"{count} {reason}" for reason, count in reasons.most_common(5)]
    unchecked = Counter(state.note for state in states.values() if state.note)
    notes += [f"{count} finished runs {note}" for note, count in unchecked.most_common(3)]
    return notes


def usual_device(profiles: Collection[str]) -> str:
    """Return the GPU of this machine, if its peak is known, or what profiles are made for."""
    drivers = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # torch takes a second to import
    if sys.platform != "linux" or any(map(os.path.exists, drivers)):
        if torch.cuda.is_available() and (known := _known_gpu(torch.cuda.get_device_name())):
            return known
    return "h100" if "paper" in profiles else "cpu"
