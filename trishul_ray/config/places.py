"""The places of this machine, which are not stored with a run: the cache and the hub's mirror."""

import os
from dataclasses import dataclass
from pathlib import Path

#: The fields of an experiment, by section, with places and MLflow runs of this machine.
#: They are not stored with a run, and are not read from one: a run may come from elsewhere.
PLACES = {"storage": {"runs", "cache", "hub"}, "tracking": {"uri", "parent_run"}}


@dataclass(frozen=True)
class Places:
    """Folder of prepared data and backbones, and a mirror of the hub, if any."""

    cache: Path
    hub: Path | None

    @classmethod
    def at(cls, cache: str | Path | None = None, hub: str | Path | None = None) -> "Places":
        """Return these places; defaults: ``TRISHUL_CACHE`` or ~/.cache/trishul, ``TRISHUL_HUB``."""
        cache = cache or os.environ.get("TRISHUL_CACHE") or "~/.cache/trishul"
        hub = hub or os.environ.get("TRISHUL_HUB")
        return cls(Path(cache).expanduser(), Path(hub).expanduser() if hub else None)
