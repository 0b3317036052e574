"""The storage paths of this machine, the cache and the hub's mirror.

A run does not store them.
"""

import os
from dataclasses import dataclass
from pathlib import Path

#: Fields of an experiment, by section, that are storage paths or MLflow runs of this machine. A run
#: neither stores nor reads them, since it may come from another machine.
LOCAL_FIELDS = {"storage": {"runs", "cache", "hub"}, "tracking": {"uri", "parent_run"}}


@dataclass(frozen=True)
class StoragePaths:
    """The folder of prepared data and backbones, and an optional mirror of the hub."""

    cache: Path
    hub: Path | None

    @classmethod
    def at(cls, cache: str | Path | None = None, hub: str | Path | None = None) -> "StoragePaths":
        """Resolve the paths, by default $TRISHUL_CACHE or ~/.cache/trishul, and $TRISHUL_HUB."""
        cache = cache or os.environ.get("TRISHUL_CACHE") or "~/.cache/trishul"
        hub = hub or os.environ.get("TRISHUL_HUB")
        return cls(Path(cache).expanduser(), Path(hub).expanduser() if hub else None)
