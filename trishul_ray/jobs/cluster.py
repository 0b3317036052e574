"""Commands of ``trishul`` as Ray jobs on a cluster: submit, find, follow, stop.

A job is known by its command and the place of its results: while one runs, the same command is not
submitted a second time.
"""

import asyncio
import contextlib
import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from trishul_ray.errors import InputError, RunError
from trishul_ray.federation.on_ray.ray_internals import nodes_since_start, send_token
from trishul_ray.redaction import redact

#: What is never shipped, in the syntax of .gitignore, besides what .gitignore itself names.
NOT_SHIPPED = (
    *("/data", "/runs", "/report", "/cache", "mlruns", "mlartifacts", "*.db", "*.safetensors"),
    *(".git", ".venv", "venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"),
)
#: The driver needs a CPU, so that it does not run on a head without CPUs, and takes no machine that
#: the cloud may take away.
DRIVER_CPUS = 1
DRIVER_LABELS = {"ray.io/market-type": "!spot"}
#: Seconds between two looks at a job that has not started.
POLL_SECONDS = 1.0
#: Seconds for which a lost connection to the logs is opened again and again.
RECONNECT_SECONDS = 60.0

_WORDS, _RUNS = "trishul.command", "trishul.runs"  # keys of a job's metadata
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")

#: Seconds in which a job that is asked to end should have saved its state and ended.
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """A command of ``trishul`` on a cluster.

    Attributes:
        id: Its id on the cluster.
        words: The command, without ``trishul``.
        runs: Where its results are.
        status: ``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``.
        message: What Ray says of the status.
        started: When it was submitted, in seconds since the epoch.
        ended: When it ended; None while it runs.
        exit_code: Exit code of the command, if it has ended.
    """

    id: str
    words: tuple[str, ...]
    runs: str
    status: str
    message: str
    started: float
    ended: float | None
    exit_code: int | None

    @property
    def active(self) -> bool:
        """Whether the job waits or runs."""
        return self.status not in _ENDED

    @property
    def command(self) -> str:
        """The command, as it is typed."""
        return shlex.join(["trishul", *self.words])


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, alive or gone.

    Attributes:
        alive: Whether it is still there.
        head: Whether it is the head.
        gpus: Number of its GPUs.
        cpus: Number of its CPUs that the cluster may use.
        hours: How long it has been there.
    """

    alive: bool
    head: bool
    gpus: float
    cpus: float
    hours: float


class Cluster:
    """The jobs API of a cluster, at the address of its dashboard.

    The token of this machine is sent along (``RAY_AUTH_TOKEN``, ``~/.ray/auth_token``), unless
    ``RAY_AUTH_MODE=disabled``.

    Raises:
        InputError: The address is not one of http(s).
        RunError: Nothing answers there, or it refuses the token.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                f"address {redact(address)!r}: name the dashboard, such as http://127.0.0.1:8265"
            )
        self.address = parts.geturl()
        send_token()
        with self._errors():
            self._client = JobSubmissionClient(self.address)  # asks for the version

    def jobs(self) -> list[Job]:
        """Return the jobs that :meth:`submit` has started, the newest first."""
        with self._errors():
            found = [_job(details) for details in self._client.list_jobs()]
        return sorted((job for job in found if job), key=lambda job: -job.started)

    def job(self, id: str) -> Job:
        """Return a job as it is now.

        Raises:
            InputError: There is none with this id.
        """
        jobs = {job.id: job for job in self.jobs()}
        if id not in jobs:
            known = ", ".join(list(jobs)[:5]) or "none"
            raise InputError(f"no job {id!r} on this cluster; jobs: {known}")
        return jobs[id]

    def find_active(self, words: Sequence[str], runs: str) -> Job | None:
        """Return the job that runs, or waits to run, the same command."""
        for job in self.jobs():
            if job.active and (job.words, job.runs) == (tuple(words), runs):
                return job
        return None

    def submit(self, words: Sequence[str], runs: str, directory: Path) -> Job:
        """Start a command on the cluster; see :func:`check_no_secret`, :func:`check_directory`.

        Args:
            words: The command, without ``trishul``.
            runs: Where its results go, unless ``storage.runs`` is one of the words.
            directory: Working directory to ship, without data, results and environments.

        Raises:
            InputError: The directory is too large.
        """
        id = f"trishul-{words[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        environment = {
            "TRISHUL_RUNS": runs,
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "PYTHONUNBUFFERED": "1",
        }
        with self._errors():
            try:
                self._client.submit_job(
                    entrypoint=shlex.join(["python", "-m", "trishul_ray.cli", *words]),
                    submission_id=id,
                    runtime_env={
                        "working_dir": str(directory),
                        "excludes": list(NOT_SHIPPED),
                        "env_vars": environment,
                    },
                    metadata={_WORDS: json.dumps(list(words)), _RUNS: runs},
                    entrypoint_num_cpus=DRIVER_CPUS,
                    entrypoint_label_selector=dict(DRIVER_LABELS),
                )
            except ValueError as error:
                if "exceeds the maximum size" not in str(error):
                    raise
                raise InputError(
                    f"the working directory is too large: {_one_line(error)}; move data and "
                    "results elsewhere, or name them in .gitignore"
                ) from error
        return self.job(id)

    def follow(self, id: str, write: Callable[[str], object]) -> Job:
        """Write the output of a job, from its beginning, until it ends; return the job."""
        output = _Output(write)
        lost: float | None = None
        while True:
            try:
                asyncio.run(self._tail(id, output))
                job = self.job(id)
                if not job.active:
                    return job
                lost = None
            except (RuntimeError, OSError, aiohttp.ClientError, RunError) as error:
                lost = lost or time.monotonic()
                if time.monotonic() - lost > RECONNECT_SECONDS:
                    raise RunError(f"the connection is lost: {_one_line(error)}") from error
            time.sleep(POLL_SECONDS)

    async def _tail(self, id: str, output: "_Output") -> None:
        output.rewind()
        async for text in self._client.tail_job_logs(id):
            output.add(text)

    def stop(self, id: str) -> None:
        """Ask a job to end."""
        with self._errors():
            self._client.stop_job(id)

    def wait_for_end(self, id: str) -> Job:
        """Wait until a job has ended, for at most :data:`STOP_SECONDS`, and return it."""
        end = time.monotonic() + STOP_SECONDS
        while (job := self.job(id)).active and time.monotonic() < end:
            time.sleep(0.5)
        return job

    def nodes(self) -> list[Node]:
        """Return all machines since the cluster started."""
        with self._errors():
            found = nodes_since_start(self._client)
        return [_node(each, time.time()) for each in found]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise what Ray raises as an error of one line."""
        place = redact(self.address)
        try:
            yield
        except AuthenticationError as error:
            raise RunError(
                f"the cluster at {place} refuses the token of this machine: put the cluster's "
                "into ~/.ray/auth_token or RAY_AUTH_TOKEN"
            ) from error
        except (ConnectionError, requests.RequestException) as error:
            raise RunError(
                f"no cluster answers at {place}; start it, or open the tunnel to it"
            ) from error
        except RuntimeError as error:
            raise RunError(f"the cluster at {place} refuses: {_one_line(error)}") from error


class _Output:
    """Passes on text that has not been passed on before, however often it comes."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._written = self._position = 0

    def rewind(self) -> None:
        """Expect the text from its beginning."""
        self._position = 0

    def add(self, text: str) -> None:
        """Take the next part of the text."""
        new = text[max(0, self._written - self._position) :]
        self._position += len(text)
        if new:
            self._write(new)
            self._written = self._position


def check_no_secret(words: Sequence[str]) -> None:
    """Check that a command has no credentials: the cluster shows the commands of jobs.

    Raises:
        InputError: It has some.
    """
    for word in words:
        if redact(word) != word:
            raise InputError(
                f"{redact(word)}: no credentials in the command, which the cluster shows to all "
                "its users; give its nodes a role, or set the environment there"
            )


def check_directory(directory: Path) -> None:
    """Check that Python works in a directory once it is shipped.

    Raises:
        InputError: A file at its top hides a module of Python's standard library.
    """
    for path in sorted(directory.glob("*.py")):
        if path.stem in sys.stdlib_module_names:
            raise InputError(
                f"{path}: hides Python's module {path.stem!r} from the job; rename the file"
            )


def _job(details: Any) -> Job | None:
    metadata: Mapping[str, str] = details.metadata or {}
    if _WORDS not in metadata or details.submission_id is None:
        return None
    return Job(
        id=details.submission_id,
        words=tuple(json.loads(metadata[_WORDS])),
        runs=metadata[_RUNS],
        status=str(details.status.value),
        message=details.message or "",
        started=(details.start_time or 0) / 1000,
        ended=details.end_time / 1000 if details.end_time else None,
        exit_code=details.driver_exit_code,
    )


def _node(fields: Mapping[str, Any], now: float) -> Node:
    resources: Mapping[str, float] = fields["resources_total"] or {}
    alive = fields["state"] == "ALIVE"
    end = now if alive or not fields["end_time_ms"] else fields["end_time_ms"] / 1000
    return Node(
        alive=alive,
        head=bool(fields["is_head_node"]),
        gpus=resources.get("GPU", 0.0),
        cpus=resources.get("CPU", 0.0),
        hours=max(0.0, end - (fields["start_time_ms"] or 0) / 1000) / 3600,
    )


def _one_line(error: BaseException) -> str:
    return redact(" ".join(str(error).split()))[:300] or type(error).__name__
