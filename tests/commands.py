"""Commands that a test starts, with all processes that they start."""

import os
import signal
import subprocess
import threading
import time
import uuid
from pathlib import Path

import psutil

#: Marks every process that a test's command starts, children of children too.
MARK = "TRISHUL_TEST_MARK"
#: Seconds for which two agents of Ray may outlive a driver that was killed; see
#: docs/architecture.md.
AGENTS_WAIT = 150
REPOSITORY = Path(__file__).parents[1]


def start_command(*words, cwd, options=(), **environment):
    """Start a command, with what this process has in its environment but for Ray's and ours."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TRISHUL_"))}
    paths = [str(REPOSITORY), *filter(None, [inherited.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    env = {**inherited, **fixed, **environment}
    return Command([str(word) for word in words], env, cwd, **dict(options))


def marked(mark):
    """Live processes that inherited a command's mark."""
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
    except psutil.Error:  # it has ended since it was found
        return ""


#: Undoes what a child inherits of tests in the background (no SIGINT) or of nohup (no SIGHUP). A
#: function that runs in the child would have gRPC's handlers run at the fork: with a Ray in this
#: process, that has aborted it.
HEAR_SIGNALS = ("env", "--default-signal=INT,HUP")


class Command:
    """A command under way, with all the processes it has started."""

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
        """Read the error stream up to a line that holds ``text``; kill all if it does not come."""
        deadline = threading.Timer(seconds, self.sweep)  # a silent stream blocks its reader
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
        """Wait for the end: exit code, stdout, stderr."""
        out, rest = self.process.communicate(timeout=seconds)
        self.errors.append(rest or "")
        return self.process.returncode, out, "".join(self.errors)

    def processes(self, name=""):
        """Its processes that live now, those whose name begins so."""
        return [process for process in marked(self.mark) if _name(process).startswith(name)]

    def left_behind(self, seconds=15):
        """Its processes that still live after a grace period, as text."""
        end = time.monotonic() + seconds
        while (alive := marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.1)
        return [describe(process) for process in alive]

    def kill(self):
        """Kill the driver alone; what it started ends by itself."""
        self.process.kill()
        assert self.left_behind(AGENTS_WAIT) == []

    def sweep(self):
        for process in marked(self.mark):
            process.send_signal(signal.SIGKILL)
        self.process.wait()
