"""The devices of the clients: how fast they compute and transfer, and what power they take.

Each client has a speed and a bandwidth of its own, drawn from the seed or read from a file. Client
c has row c of the drawn ones, so that they do not depend on how many clients there are. None of the
medians is a published one: see docs/clock.md for what has a source.

Legend: N clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import NotedText, PathText, Section, not_in_id
from trishul_ray.errors import InputError, first_line
from trishul_ray.lab.clock import DECILES
from trishul_ray.runtime.lazy import pq
from trishul_ray.runtime.random_streams import numpy_rng

if TYPE_CHECKING:
    import pyarrow as pa

#: Numbers of clients in files are below this one: up to here, float64 has every whole number.
CLIENTS_BELOW = 2**53

#: Fields that are read only where another one has this value.
_READ_BY = {
    ("kind", "lognormal"): ("speed", "speed_spread", "down", "up", "network_spread"),
    ("kind", "file"): ("path",),
    ("availability", "file"): ("windows",),
}


class DevicesConfig(Section):
    """Devices of the clients; with them, a run has a simulated clock and counts energy."""

    kind: Literal["none", "lognormal", "file"] = Field(
        "none",
        description="none: no clock; lognormal: speeds and bandwidths drawn from the seed; file: "
        "those of devices.path",
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
    network_jitter: float = Field(
        0.0,
        ge=0,
        le=5,
        description="standard deviation of ln(bandwidth) of a client over rounds",
    )
    latency: float = Field(
        0.1, ge=0, description="seconds of each client's round on top of transfer and computing"
    )
    power: float = Field(4.0, gt=0, description="watts of a device while it computes")
    radio: float = Field(1.5, ge=0, description="watts of a device while it transfers")
    path: PathText | None = Field(
        None,
        description="kind=file: Parquet with a row for each client: client, speed (FLOP/s), up and "
        "down (Mbit/s); optional power (watts)",
    )
    availability: Literal["always", "diurnal", "file"] = Field(
        "always",
        description="when clients can be asked: always; diurnal: mostly in their nights; file: in "
        "the windows of devices.windows",
    )
    windows: PathText | None = Field(
        None,
        description="availability=file: Parquet with a row for each window: client, start and end "
        "(seconds of the clock); repeats after the day on which the last one ends",
    )
    battery: float | None = Field(
        None, gt=0, description="joules of a battery, full at the start; default: no batteries"
    )
    charging: float = Field(
        5.0, ge=0, description="watts into a client's battery while it can be asked"
    )
    battery_low: float = Field(
        0.2, ge=0, lt=1, description="a client whose battery is below this share is not asked"
    )
    path_content: NotedText | None = not_in_id(
        None, "noted when loaded: the hash of devices.path, which replaces it in the id"
    )
    windows_content: NotedText | None = not_in_id(
        None, "noted when loaded: the hash of devices.windows, which replaces it in the id"
    )

    @property
    def files(self) -> dict[str, str]:
        """The files that are read, by field."""
        return {name: path for name in ("path", "windows") if (path := getattr(self, name))}

    @property
    def on(self) -> bool:
        """Whether the run has a clock."""
        return self.kind != "none"

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "DevicesConfig":
        if not self.on:
            own = ("kind", "path_content", "windows_content")
            unread = [name for name in type(self).model_fields if name not in own]
            self.reject_unused(unread, "with kind='none': set devices.kind=lognormal or file")
        for (name, value), readers in _READ_BY.items():
            if (now := getattr(self, name)) != value:
                self.reject_unused(readers, f"with {name}={now!r}, but with {name}={value!r}")
        for place, name in (("path", "kind"), ("windows", "availability")):
            if getattr(self, name) == "file" and getattr(self, place) is None:
                raise ValueError(f"devices.{name}=file needs devices.{place}, a Parquet file")
        if self.battery is None:
            self.reject_unused(["charging", "battery_low"], "without devices.battery")
        return self


@dataclass(frozen=True)
class Devices:
    """The devices of all clients, [N] float64 each.

    Attributes:
        speed: FLOP/s.
        down: Mbit/s from the server.
        up: Mbit/s to the server.
        power: Watts while computing.
    """

    speed: np.ndarray
    down: np.ndarray
    up: np.ndarray
    power: np.ndarray

    @classmethod
    def of(cls, options: DevicesConfig, seed: int, clients: int) -> "Devices":
        """Draw the devices from the seed, or read them.

        Raises:
            InputError: The file cannot be read, or lacks a client.
        """
        if options.path is not None:
            return read_devices(options.path, clients, options.power)
        # One stream for all: client c has row c of it, whatever the number of rows.
        normal = numpy_rng(seed, "device").standard_normal((clients, 2))
        network = np.exp(options.network_spread * normal[:, 1])
        return cls(
            speed=options.speed * np.exp(options.speed_spread * normal[:, 0]),
            down=options.down * network,
            up=options.up * network,
            power=np.full(clients, options.power),
        )

    @cached_property
    def deciles(self) -> np.ndarray:
        """The decile of each client by speed, int8 [N]: 0 has the slowest; ties by client."""
        ranks = np.empty(len(self.speed), dtype=np.int64)
        ranks[np.argsort(self.speed, kind="stable")] = np.arange(len(self.speed))
        return (DECILES * ranks // len(self.speed)).astype(np.int8)


def read_devices(path: str, clients: int, power: float) -> Devices:
    """Read the devices of clients 0..N-1 from a Parquet file; further clients are left out.

    ``power`` is that of a file without such a column.

    Raises:
        InputError: The file is none, lacks a column or a client, or holds a value that is not
            above zero; names it.
    """
    field = "devices.path"
    table = _read(field, path, ("client", "speed", "up", "down"), optional=("power",))
    client = _clients(field, path, table)
    kept = client < clients
    listed, times = np.unique(client[kept], return_counts=True)
    if (double := listed[times > 1]).size:
        raise InputError(f"{field}={path!r}: client {double[0]} is listed twice")
    if (found := int(kept.sum())) < clients:
        lacking = np.setdiff1d(np.arange(clients), client)
        raise InputError(
            f"{field}={path!r} has devices of {found} of federation.clients={clients} clients; "
            f"client {lacking[0]} is not among them"
        )
    order = np.argsort(client[kept])
    columns = {}
    for name in ("speed", "up", "down", "power"):
        values = np.full(len(client), power)
        if name in table.column_names:
            values = _numbers(field, path, table, name)
        if (bad := np.flatnonzero(~(values > 0))).size:
            raise InputError(
                f"{field}={path!r}: {name} of client {client[bad[0]]} is {values[bad[0]]:g}; it "
                "must be above 0"
            )
        columns[name] = values[kept][order]
    return Devices(**columns)


def read_windows(path: str, clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read when clients can be asked: client, start and end of every window, ordered by client.

    Windows of clients beyond N are left out. A client without any is never asked.

    Raises:
        InputError: The file is none, lacks a column, or holds no window of these clients, or one
            that starts before 0 or does not end after its start.
    """
    field = "devices.windows"
    table = _read(field, path, ("client", "start", "end"))
    client = _clients(field, path, table)
    start, end = (_numbers(field, path, table, name) for name in ("start", "end"))
    if (bad := np.flatnonzero(~((start >= 0) & (end > start)))).size:
        raise InputError(
            f"{field}={path!r}: a window of client {client[bad[0]]} is {start[bad[0]]:g} to "
            f"{end[bad[0]]:g}; it must start at 0 or later, and end after that"
        )
    kept = np.flatnonzero(client < clients)
    if not kept.size:
        raise InputError(f"{field}={path!r} has no window of clients 0..{clients - 1}")
    kept = kept[np.lexsort((start[kept], client[kept]))]
    return client[kept], start[kept], end[kept]


def _read(field: str, path: str, needed: Sequence[str], optional: Sequence[str] = ()) -> "pa.Table":
    place = Path(path).expanduser()
    if not place.is_file():
        raise InputError(f"{field}={path!r} is no file here; it must be a Parquet file")
    try:
        names = pq.read_schema(place).names
        if lacking := [name for name in needed if name not in names]:
            raise InputError(
                f"{field}={path!r} lacks the column {', '.join(lacking)}; it has {', '.join(names)}"
            )
        return pq.read_table(place, columns=[*needed, *(o for o in optional if o in names)])
    except (OSError, ValueError, NotImplementedError) as error:  # those of Arrow are among them
        if isinstance(error, InputError):
            raise
        reason = first_line(error)
        raise InputError(f"{field}={path!r} is no Parquet file: {reason}") from error


def _numbers(field: str, path: str, table: "pa.Table", name: str) -> np.ndarray:
    """Return a column as float64; NaN where it has no value."""
    try:
        values: np.ndarray = table.column(name).to_numpy().astype(np.float64)
    except (TypeError, ValueError) as error:
        kind = table.schema.field(name).type
        raise InputError(f"{field}={path!r}: {name} is of type {kind}, not of numbers") from error
    if np.isinf(values).any():
        raise InputError(f"{field}={path!r}: {name} holds an infinite value")
    return values


def _clients(field: str, path: str, table: "pa.Table") -> np.ndarray:
    """Return the column ``client`` as int64."""
    values = _numbers(field, path, table, "client")
    right = (values >= 0) & (values == np.floor(values)) & (values < CLIENTS_BELOW)
    if (bad := np.flatnonzero(~right)).size:
        given = table.column("client")[int(bad[0])].as_py()
        raise InputError(
            f"{field}={path!r}: client {given} in row {bad[0]}; clients are whole numbers from 0 "
            f"to {CLIENTS_BELOW - 1}"
        )
    return values.astype(np.int64)
