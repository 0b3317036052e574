"""The jobs of a cluster: submit a command of ``trishul``, follow and stop it; the machines there.

A job is known by its command and the place of its results: while one runs, the same command is not
submitted a second time.
"""

import asyncio
import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from trishul_ray.errors import InputError, RunError, one_line
from trishul_ray.federation.on_ray.ray_internals import nodes_since_start, quiet_jobs, send_token
from trishul_ray.jobs.shipping import not_shipped
from trishul_ray.storage.durable import scratch_for_libraries
from trishul_ray.storage.redaction import redact

#: The driver needs a CPU, so that it does not run on a head without CPUs, and takes no machine that
#: the cloud may take away.
DRIVER_CPUS = 1
DRIVER_LABELS = {"ray.io/market-type": "!spot"}
#: The environment of a job, besides the place of its results.
ENVIRONMENT = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PYTHONUNBUFFERED": "1"}
#: Seconds between two looks at a job that has not started.
POLL_SECONDS = 1.0
#: Seconds for which a lost connection to the logs is opened again and again.
RECONNECT_SECONDS = 60.0
#: Seconds in which a job that is asked to end should have saved its state and ended.
STOP_SECONDS = 60.0

_WORDS, _RUNS = "trishul.command", "trishul.runs"  # keys of a job's metadata


@dataclass(frozen=True)
class Job:
    """A command of ``trishul`` on a cluster: what Ray knows of it.

    Attributes:
        id: Its id on the cluster.
        words: The command, without ``trishul``.
        runs: Where its results are.
        details: Status, times and exit code.
    """

    id: str
    words: tuple[str, ...]
    runs: str
    details: JobDetails

    @property
    def status(self) -> str:
        """``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""
        return str(self.details.status.value)

    @property
    def active(self) -> bool:
        """Whether the job waits or runs."""
        return not self.details.status.is_terminal()

    @property
    def command(self) -> str:
        """The command, as it is typed; without what a terminal would obey."""
        typed = shlex.join(["trishul", *self.words])
        return "".join(c if c.isprintable() else "?" for c in typed)

    @property
    def fault(self) -> str:
        """Reason why the cluster could not run the command at all; empty if it could."""
        said = self.details.message or ""  # its last lines are those of the log
        if self.details.driver_exit_code == 127:
            return "the cluster has no command `python`"
        if self.status == "FAILED" and re.search(r"No module named '?trishul_ray\b", said):
            return "the Python of the cluster has no trishul_ray"
        return ""

    @property
    def started(self) -> float:
        """Time of submission, in seconds since the epoch."""
        return (self.details.start_time or 0) / 1000

    @property
    def seconds(self) -> float:
        """Duration, until now if it still runs."""
        end = self.details.end_time
        return (end / 1000 if end else time.time()) - self.started


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, alive or gone; its GPUs, and the CPUs that the cluster may use."""

    alive: bool
    head: bool
    gpus: float
    cpus: float
    hours: float  # for which it has been there


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
        quiet_jobs()
        with self._errors():
            self._client = JobSubmissionClient(self.address)  # asks for the version

    def jobs(self) -> list[Job]:
        """Return the jobs that :meth:`submit` has started, the newest first."""
        with self._errors():
            found = self._client.list_jobs()
        jobs = [
            Job(each.submission_id, tuple(map(str, words)), noted[_RUNS], each)
            for each in found
            if each.submission_id and {_WORDS, _RUNS} <= (noted := each.metadata or {}).keys()
            if (words := json.loads(noted[_WORDS]))
        ]
        return sorted(jobs, key=lambda job: -job.started)

    def job(self, id: str) -> Job:
        """Return a job as it is now, or raise an InputError if there is none with this id."""
        jobs = {job.id: job for job in self.jobs()}
        if id not in jobs:
            known = ", ".join(list(jobs)[:5]) or "none"
            raise InputError(f"no job {id!r} on this cluster; jobs: {known}")
        return jobs[id]

    def find_active(self, words: Sequence[str], runs: str) -> Job | None:
        """Return the job of a command that waits or runs, if there is one."""
        wanted = tuple(words), runs
        return next((j for j in self.jobs() if j.active and (j.words, j.runs) == wanted), None)

    def submit(
        self, words: Sequence[str], runs: str, directory: Path, left_out: Sequence[str]
    ) -> Job:
        """Start a command on the cluster; see the checks of :mod:`~trishul_ray.jobs.shipping`.

        Its results go to ``runs``, unless ``storage.runs`` is one of the words; its report, unless
        the words name a place, to ``reports/<job>`` in there. The directory is shipped without
        data, results and environments, and without what is ``left_out``.

        Raises:
            InputError: The directory is too large.
        """
        id = f"trishul-{words[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        path, mark, options = runs.partition("?") if "://" in runs else (runs, "", "")
        report = f"{path.rstrip('/')}/reports/{id}{mark}{options}"
        with self._errors(), scratch_for_libraries("submit"):  # where Ray packs the directory
            try:
                self._client.submit_job(
                    entrypoint=shlex.join(["python", "-P", "-m", "trishul_ray.cli", *words]),
                    submission_id=id,
                    runtime_env={
                        "working_dir": str(directory),
                        "excludes": not_shipped(left_out),
                        "env_vars": {"TRISHUL_RUNS": runs, "TRISHUL_REPORT": report, **ENVIRONMENT},
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
        written = 0

        async def tail() -> None:
            nonlocal written
            position = 0  # every connection begins with the first line
            async for text in self._client.tail_job_logs(id):
                if new := text[max(0, written - position) :]:
                    write(new)
                position += len(text)
                written = max(written, position)

        lost: float | None = None
        while True:
            try:
                asyncio.run(tail())
                job = self.job(id)
                if not job.active:
                    return job
                lost = None
            except (RuntimeError, OSError, aiohttp.ClientError, RunError) as error:
                lost = lost or time.monotonic()
                if time.monotonic() - lost > RECONNECT_SECONDS:
                    raise RunError(f"the connection is lost: {_one_line(error)}") from error
            time.sleep(POLL_SECONDS)

    def stop(self, id: str) -> None:
        """Ask a job to end."""
        with self._errors():
            self._client.stop_job(id)

    def wait_for_end(self, id: str) -> Job:
        """Wait until a job has ended, for at most :data:`STOP_SECONDS`, and return it."""
        end = time.monotonic() + STOP_SECONDS
        while (job := self.job(id)).active and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return job

    def nodes(self) -> list[Node]:
        """Return all machines since the cluster started."""
        with self._errors():
            found = nodes_since_start(self._client)
        return [_node(each) for each in found]

    @contextmanager
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


def _node(fields: Mapping[str, Any]) -> Node:
    resources: Mapping[str, float] = fields["resources_total"] or {}
    alive = fields["state"] == "ALIVE"
    end = time.time() if alive or not fields["end_time_ms"] else fields["end_time_ms"] / 1000
    return Node(
        alive=alive,
        head=bool(fields["is_head_node"]),
        gpus=resources.get("GPU", 0.0),
        cpus=resources.get("CPU", 0.0),
        hours=max(0.0, end - (fields["start_time_ms"] or 0) / 1000) / 3600,
    )


def _one_line(error: BaseException) -> str:
    return redact(one_line(error))[:300]
