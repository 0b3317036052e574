"""Simulated devices of the clients, and the duration of a client's round.

A client's round with S local steps takes, in seconds::

    latency + 8 down_bytes / (10^6 down) + S flops / speed + 8 up_bytes / (10^6 up)

The duration depends on counted FLOPs, counted bytes and the devices, never on a measured time. The
medians are our choice; docs/clock.md lists the numbers that have a source.

Legend: N clients, k clients of a round.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import PathText, Section, not_in_id
from trishul_ray.errors import InputError, first_line
from trishul_ray.runtime.lazy import pq
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import RunPlan, StageSettings

#: Fields that only one kind of devices reads.
_READ_BY = {
    "lognormal": ("speed", "speed_spread", "down", "up", "network_spread"),
    "file": ("path",),
}
#: Columns of a file of devices.
_COLUMNS = ("speed", "up", "down")
#: Megabits per byte.
_MEGABITS = 8 / 1e6


class DevicesConfig(Section):
    """Devices of the clients; with devices, a run has a simulated clock."""

    kind: Literal["none", "lognormal", "file"] = Field(
        "none",
        description="none: no clock; lognormal: speeds and bandwidths sampled from the seed; file: "
        "read from devices.path",
    )
    speed: float = Field(1e12, gt=0, description="lognormal: median speed, FLOP/s")
    speed_spread: float = Field(
        1.0, ge=0, le=5, description="lognormal: standard deviation of ln(speed)"
    )
    down: float = Field(20.0, gt=0, description="lognormal: median download bandwidth, Mbit/s")
    up: float = Field(5.0, gt=0, description="lognormal: median upload bandwidth, Mbit/s")
    network_spread: float = Field(
        1.0, ge=0, le=5, description="lognormal: standard deviation of ln(bandwidth) over clients"
    )
    latency: float = Field(
        0.1,
        ge=0,
        description="seconds of each client's round in addition to transfer and computing",
    )
    path: PathText | None = Field(
        None,
        description="file: Parquet with one row per client: client, speed (FLOP/s), up and down "
        "(Mbit/s)",
    )
    path_content: str | None = not_in_id(
        None, "stored when loaded: the hash of devices.path, which replaces the path in the id"
    )

    @property
    def on(self) -> bool:
        """Whether the run has a clock."""
        return self.kind != "none"

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "DevicesConfig":
        if not self.on:
            self.reject_unused(["latency"], "with kind='none': set devices.kind=lognormal or file")
        for kind, names in _READ_BY.items():
            if self.kind != kind:
                condition = f"with kind={self.kind!r}: set devices.kind={kind}"
                self.reject_unused(names, condition)
        if self.kind == "file" and self.path is None:
            raise ValueError("devices.kind=file needs devices.path, a Parquet file")
        return self

    @property
    def defaults(self) -> str:
        """The fields with default values that affect simulated seconds."""
        names = ["latency"]
        if self.kind == "lognormal":
            names = [*_READ_BY["lognormal"], *names]
        fields = type(self).model_fields
        values = {n: fields[n].default for n in names if getattr(self, n) == fields[n].default}
        return ", ".join(f"{name}={value:g}" for name, value in values.items())


@dataclass(frozen=True)
class Devices:
    """The devices of all clients, [N] float64 each.

    Attributes:
        speed: FLOP/s.
        up: Mbit/s to the server.
        down: Mbit/s from the server.
    """

    speed: np.ndarray
    up: np.ndarray
    down: np.ndarray

    @classmethod
    def of(cls, options: DevicesConfig, seed: int, clients: int) -> "Devices":
        """Sample the devices from the seed, or read them from a file.

        Raises:
            InputError: The file cannot be read, or a client is missing from it.
        """
        if options.path is not None:
            return read_devices(options.path, clients)
        # Client c has row c of one stream, so that its device does not depend on N.
        normal = numpy_rng(seed, "device").standard_normal((clients, 2))
        network = np.exp(options.network_spread * normal[:, 1])
        return cls(
            speed=options.speed * np.exp(options.speed_spread * normal[:, 0]),
            up=options.up * network,
            down=options.down * network,
        )


def read_devices(path: str, clients: int) -> Devices:
    """Read the devices of clients 0 to N - 1 from a Parquet file; ignore other rows.

    Raises:
        InputError: The file is not a table of devices, or a client has no row or an invalid value.
    """
    field = f"devices.path={path!r}"
    try:
        place = Path(path).expanduser()
        table = pq.ParquetFile(place).read(["client", *_COLUMNS]).to_pandas().set_index("client")
        rows = table[[*_COLUMNS]].reindex(range(clients)).astype(float)
    except (OSError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise InputError(f"{field} is not a table of devices: {first_line(error)}") from error
    values = rows.to_numpy()
    if (wrong := np.argwhere(~((values > 0) & np.isfinite(values)))).size:
        client, column = wrong[0]
        raise InputError(
            f"{field}: {_COLUMNS[column]} of client {client} is {values[client, column]:g}; each "
            f"of federation.clients={clients} clients needs one row with numbers above 0"
        )
    return Devices(*values.T.copy())


class Moments(NamedTuple):
    """Seconds from the start of a round until clients finish each phase, [k] float64."""

    downloaded: np.ndarray
    trained: np.ndarray
    uploaded: np.ndarray


@dataclass(frozen=True)
class ClientClock:
    """Compute the duration of each client's round.

    Attributes:
        devices: The devices of all clients.
        compute: [N] float64, seconds of the local steps of a round.
        latency: Seconds in addition to transfer and computing.
    """

    devices: Devices
    compute: np.ndarray
    latency: float

    @classmethod
    def of(cls, options: DevicesConfig, settings: StageSettings, plan: RunPlan) -> "ClientClock":
        """Create the clock of a run.

        Raises:
            InputError: The file of devices cannot be read.
        """
        assert plan.flops is not None  # stages with a clock request them
        fed = settings.federation
        devices = Devices.of(options, settings.draw_seed, fed.clients)
        step = (plan.flops.backbone + plan.capacities * plan.flops.adapter) / devices.speed
        return cls(devices, fed.local_steps * step, options.latency)

    def moments(
        self, clients: np.ndarray, down_bytes: np.ndarray | float, up_bytes: np.ndarray | float
    ) -> Moments:
        """Compute when clients [k] finish, given bytes per client or one number for all."""
        down, up = self.devices.down[clients], self.devices.up[clients]
        downloaded = self.latency + _MEGABITS * down_bytes / down
        trained = downloaded + self.compute[clients]
        return Moments(downloaded, trained, trained + _MEGABITS * up_bytes / up)
