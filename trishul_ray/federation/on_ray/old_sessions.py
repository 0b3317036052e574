"""Remove what local clusters of finished runs left in Ray's temporary folder.

Ray keeps the folder of every session for ever. Ours are marked, and removed by a later run once no
process uses them and nothing has been written for :data:`QUIET_SECONDS`, so that the logs of a run
that failed can still be read.
"""

import shutil
import time
from contextlib import suppress
from pathlib import Path

import psutil

#: Name of the file that marks a session as ours.
MARK = "started_by_trishul"

#: Seconds without a line in the logs. A live session writes one every few seconds; its processes
#: may be in a container that cannot be seen from here.
QUIET_SECONDS = 3600.0


def mark_session(session: Path) -> None:
    """Mark the folder of a session as one that may be removed when it is over."""
    with suppress(OSError):
        (session / MARK).touch()


def remove_old_sessions(root: Path) -> list[Path]:
    """Remove the marked sessions in Ray's temporary folder that are over, and return them."""
    marked = [mark.parent for mark in root.glob(f"session_*/{MARK}")]
    over = [s for s in marked if not s.is_symlink() and time.time() - _written(s) > QUIET_SECONDS]
    if not over:
        return []
    commands = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            commands.append(" ".join(process.cmdline()))
    unused = [s for s in over if not any(s.name in command for command in commands)]
    for session in unused:
        shutil.rmtree(session, ignore_errors=True)
    return [session for session in unused if not session.exists()]


def _written(session: Path) -> float:
    """Return when something was last written into a session's logs, in seconds of the clock."""
    with suppress(OSError):
        return max(f.stat().st_mtime for f in [session, *(session / "logs").glob("*")])
    return time.time()
