"""The stage ``devices``: cohorts on a simulated clock. The section ``cohort`` is a part of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from trishul_ray.config.fields import FederationConfig
from trishul_ray.config.section import Section
from trishul_ray.lab.clock import NUMBERS
from trishul_ray.lab.clock.availability import source_of
from trishul_ray.lab.clock.cohorts import COHORTS, CohortConfig, strategy_class
from trishul_ray.lab.clock.devices import Devices, DevicesConfig
from trishul_ray.lab.clock.fleet import Asked, ClockState, Fleet, asked_clients
from trishul_ray.methods.base import Method
from trishul_ray.stages import (
    ArrayState,
    ClientRound,
    Cohort,
    Stage,
    StageSettings,
    register_stage,
)


@register_stage("devices")
class Clock(Stage):
    """Clients are asked, come in time or late, and spend energy, on a simulated clock."""

    Config: ClassVar[type[Section]] = DevicesConfig
    example: ClassVar = {"kind": "lognormal", "network_jitter": 0.3}
    wire = 1
    numbers = NUMBERS

    def __init__(self, config: Section, settings: StageSettings) -> None:
        super().__init__(config, settings)
        self.devices = settings.section(DevicesConfig)
        self.options = settings.section(CohortConfig)
        self._fleet: Fleet | None = None
        self._asked = Asked([])

    @property
    def acts_on_changes(self) -> bool:
        """It decides who takes part, whatever they send."""
        return False

    def check(self, method: Method) -> None:
        """Refuse sections that do not go together."""
        private = self.settings.is_set("privacy")
        check_fleet(self.devices, self.options, self.settings.federation, private=private)

    @property
    def files(self) -> dict[str, str]:
        """The files of devices and windows."""
        return self.devices.files

    def prepare(self) -> Sequence[str]:
        """Read the files, and name the defaults that a run's seconds and joules rest on."""
        if not self.devices.on:
            return ()
        Devices.of(self.devices, self.settings.seed, self.settings.federation.clients)
        source_of(self.devices, self.settings.seed, self.settings.federation.clients)
        line = clock_line(self.devices)
        return () if line is None else (line,)

    @property
    def needs(self) -> frozenset[str]:
        """FLOPs for the length of a step, and the sizes of shards for a strategy."""
        found = {"flops": self.devices.on, "shard_sizes": self.options.select != "uniform"}
        return frozenset(name for name, needed in found.items() if needed)

    def begin(self) -> Sequence[str]:
        """Set up the clients, and start the clock unless a checkpoint holds it."""
        if not self.needs:
            return ()
        plan, sizes = self.plan, self.plan.shard_sizes
        self._fleet = Fleet(
            self.devices,
            self.options,
            self.settings.federation,
            self.settings.seed,
            rows=np.zeros(0, dtype=np.int64) if sizes is None else sizes,
            capacity=plan.capacities,
            flops=plan.flops,
            least=plan.quorum,
        )
        if not self.memory:
            self.memory.update(self._fleet.start().to_memory())
        return ()

    def cohort(self, number: int, cohort: Cohort) -> Cohort:
        """Ask clients until enough of them come in time."""
        if self._fleet is None or number == 0:
            return cohort
        chosen = cohort.clients if cohort.fixed else None
        state = ClockState.of(self.memory)
        self._asked = asked = self._fleet.ask(number, state, cohort.traffic(), chosen)
        earlier = {client for each in asked.plans[:-1] for client in each.clients.tolist()}
        return replace(
            cohort,
            clients=asked.clients,
            steps=asked.steps,
            missing=asked.missing,
            wasted=asked.wasted,
            repeated=frozenset(earlier),
        )

    def end(
        self, number: int, state: ArrayState, clients: Sequence[ClientRound]
    ) -> dict[str, float]:
        """Move the clock to the end of the round."""
        if self._fleet is None:
            return {}
        after, numbers = self._fleet.close(self._asked, number, clients)
        self.memory.update(after.to_memory())
        return numbers


@register_stage("cohort")
class Cohorts(Clock):
    """The same stage, for an experiment that sets the section ``cohort``."""

    Config = CohortConfig
    example: ClassVar = {"select": "power_of_choice"}
    registries: ClassVar = {"select": COHORTS}

    @classmethod
    def parts(cls, config: Section, settings: StageSettings) -> Sequence[Stage]:
        """Return the clock, unless the section ``devices`` brings it."""
        return [] if settings.is_set("devices") else [Clock(DevicesConfig(), settings)]


def check_fleet(
    devices: DevicesConfig,
    cohort: CohortConfig,
    federation: FederationConfig,
    *,
    private: bool = False,
) -> None:
    """Check that the sections go together, and with privacy.

    Raises:
        ValueError: They do not; one line.
    """
    if private:
        select, there = cohort.select, devices.availability
        found = [f"cohort.select={select}"] * (select != "uniform") + cohort.policies
        found += [f"devices.availability={there}"] * (there != "always")
        found += ["devices.battery"] * (devices.battery is not None)
        if found:
            raise ValueError(
                f"{found[0]} has no guarantee with privacy, whose accounting knows only how "
                "clients are drawn (privacy.sampling); set only one"
            )
    needs = strategy_class(cohort.select).needs
    on_clock = cohort.policies + [f"cohort.select={cohort.select}"] * (needs != "nothing")
    if on_clock and not devices.on:
        raise ValueError(f"{on_clock[0]} needs a clock: set devices.kind=lognormal or file")
    if needs == "batteries" and devices.battery is None:
        raise ValueError(f"cohort.select={cohort.select} needs devices.battery, in joules")
    if (asks := asked_clients(cohort, federation)) > federation.participants:
        raise ValueError(
            f"cohort.extra={cohort.extra:g} asks {asks} of federation.clients={federation.clients} "
            + f"(less federation.held_out={federation.held_out:g}) " * (federation.held_out > 0)
            + "clients; it must ask at most all"
        )


def clock_line(devices: DevicesConfig) -> str | None:
    """Return a remark on defaults of our own that a run's seconds and joules rest on, or None."""
    if not devices.on:
        return None
    names = ["latency", "power", "radio"]
    if devices.kind == "lognormal":
        names = ["speed", "speed_spread", "down", "up", "network_spread", *names]
    fields = DevicesConfig.model_fields
    ours = [f"{n}={fields[n].default:g}" for n in names if getattr(devices, n) == fields[n].default]
    if devices.availability == "diurnal":
        ours.append("availability=diurnal")
    if not ours:
        return None
    return (
        "simulated seconds and joules rest on defaults of this program, not on measured devices: "
        f"devices.{{{', '.join(ours)}}}"
    )
