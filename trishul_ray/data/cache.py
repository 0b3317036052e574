"""Remove from the cache what it need not keep: failed preparations, and own data as they were.

A prepared folder of own data is named by their content, so each edit of a table makes a new one.
Those of the same path are bounded, and so are the encoded rows made of them. Public datasets, which
do not change, are kept.
"""

import re
import shutil
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trishul_ray.data.custom import CUSTOM
from trishul_ray.data.prepared import Split
from trishul_ray.errors import InputError

#: Prepared folders of one path that are kept without being used, and seconds until one is unused.
KEPT, UNUSED_SECONDS = 3, 7 * 24 * 3600.0

#: Name of a file in every prepared folder, touched at each use.
LOCK = "lock"

_OWN = re.compile(rf"({'|'.join(CUSTOM)})(-encoded|-validation)?-[0-9a-f]{{12}}")


def remove_leftovers(
    cache: Path, *, keep: int = KEPT, unused_seconds: float = UNUSED_SECONDS
) -> list[Path]:
    """Remove failed preparations and old ones of own data from a cache, and return their folders.

    Args:
        cache: The cache folder.
        keep: How many of a path are kept, those that were used last.
        unused_seconds: Seconds without use before a folder is removed.
    """
    found: dict[str, list[tuple[float, Path]]] = defaultdict(list)
    old: list[Path] = []
    for lock in (cache / "data").glob(f"*/{LOCK}"):
        folder = lock.parent
        with suppress(OSError):
            used = lock.stat().st_mtime
            failed = not any(folder.glob("*.arrow"))
            if failed and time.time() - used > unused_seconds:
                old.append(folder)
            elif not failed and (match := _OWN.fullmatch(folder.name)):
                kind = f"{match[1]}{match[2] or ''}"
                found[f"{kind} {_path_of(folder)}"].append((used, folder))
    for versions in found.values():
        for used, folder in sorted(versions, reverse=True)[keep:]:
            if time.time() - used > unused_seconds:
                old.append(folder)
    return [folder for folder in old if _remove(folder)]


def _path_of(folder: Path) -> str:
    """Return where the rows of a prepared folder came from, as its description has it."""
    try:
        return Split(folder / "train.arrow").info.source.partition(", ")[0]
    except (InputError, KeyError, TypeError):
        return ""  # of an older version


def _remove(folder: Path) -> bool:
    """Remove a prepared folder unless a process prepares or has mapped it; return whether."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"{folder}/" in maps.read_text(errors="replace"):
                return False
    try:
        with FileLock(folder / LOCK, timeout=0):
            shutil.rmtree(folder, ignore_errors=True)
    except (Timeout, OSError):
        return False
    return not folder.exists()
