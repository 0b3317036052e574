"""Commands that a test starts, with all their processes."""

import os
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path

import psutil

#: Marks every process that a test's command starts, including descendants.
MARK = "TRISHUL_TEST_MARK"
#: Seconds for which two agents of Ray may outlive a killed driver; see docs/architecture.md.
AGENTS_WAIT = 150
REPOSITORY = Path(__file__).parents[1]


def start_command(*words, cwd, options=(), **environment):
    """Start a command in this environment, without variables of Ray and this package."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TRISHUL_"))}
    paths = [str(REPOSITORY), *filter(None, [inherited.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    env = {**inherited, **fixed, **environment}
    return Command([str(word) for word in words], env, cwd, **dict(options))


def marked(mark):
    """Return the live processes that inherited a command's mark."""
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        info = process.info
        if info["status"] != psutil.STATUS_ZOMBIE and (info["environ"] or {}).get(MARK) == mark:
            found.append(process)
    return found


def describe(process):
    try:
        return " ".join(process.cmdline())[:150]
    except psutil.Error:
        return "gone"


def _name(process):
    try:
        return process.name()
    except psutil.Error:  # It has ended in the meantime.
        return ""


#: Undoes the signal settings that a child inherits from tests in the background (no SIGINT) or
#: under nohup (no SIGHUP). A Python function in the child would run gRPC's fork handlers, which
#: have aborted a process with a Ray.
HEAR_SIGNALS = ("env", "--default-signal=INT,HUP")


class Command:
    """A running command, with all processes that it has started."""

    def __init__(self, words, env, cwd, **options):
        self.mark = uuid.uuid4().hex
        self.errors: list[str] = []
        plain = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            [*HEAR_SIGNALS, *words],
            env={**env, MARK: self.mark},
            cwd=cwd,
            start_new_session=True,
            **(plain | options),
        )

    def wait_for(self, text, seconds=90):
        """Read the error stream up to a line with ``text``; kill all if it does not come."""
        deadline = threading.Timer(seconds, self.sweep)  # A silent stream would block its reader.
        deadline.start()
        try:
            for line in self.process.stderr:
                self.errors.append(line)
                if text in line:
                    return line
        finally:
            deadline.cancel()
        raise AssertionError(f"{text!r} never came:\n{''.join(self.errors)}")

    def end(self, seconds=120):
        """Wait for the end; return exit code, stdout, stderr."""
        out, rest = self.process.communicate(timeout=seconds)
        self.errors.append(rest or "")
        return self.process.returncode, out, "".join(self.errors)

    def processes(self, name=""):
        """Return the live processes of the command, optionally only those with this name prefix."""
        return [process for process in marked(self.mark) if _name(process).startswith(name)]

    def left_behind(self, seconds=15):
        """Return the processes that still live after a grace period, as text."""
        end = time.monotonic() + seconds
        while (alive := marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.1)
        return [describe(process) for process in alive]

    def kill(self):
        """Kill only the driver; its processes end by themselves."""
        self.process.kill()
        assert self.left_behind(AGENTS_WAIT) == []

    def sweep(self):
        for process in marked(self.mark):
            process.send_signal(signal.SIGKILL)
        self.process.wait()
