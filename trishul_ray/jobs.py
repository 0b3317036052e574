"""Commands of ``trishul`` as Ray jobs on a cluster: submit, follow, stop, and see how far they are.

A job is known by its command and the place of its results: while one runs, the same command is not
submitted a second time. The dashboard of a cluster that `ray up` started listens on localhost of
its head; Ray's commands open the SSH connections to it.
"""

import asyncio
import itertools
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests
import yaml
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from trishul_ray.errors import InputError, RunError, join_limited, one_line
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import round_of
from trishul_ray.federation.on_ray.ray_internals import (
    matcher,
    nodes_since_start,
    quiet_jobs,
    send_token,
    shipped_paths,
)
from trishul_ray.redaction import redact
from trishul_ray.report.outcomes import CellStatus
from trishul_ray.runs.folder import RunFolder
from trishul_ray.sweeps.status import NOT_RUN, CellState, examine
from trishul_ray.tracking.progress import Pace

#: Files that are never shipped, in the syntax of .gitignore, besides those that .gitignore names.
NOT_SHIPPED = (
    *("/data", "/runs", "/report", "/cache", "mlruns", "mlartifacts", "*.db", "*.safetensors"),
    *(".git", ".venv", "venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"),
)
#: Files that may hold secrets, in the same syntax and in lower case: shipped only if named.
SECRETS = (
    # environments and keys
    *(".env", ".env.*", "*.env", ".envrc", "!.env.example", "!.env.sample", "!.env.template"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", ".*_history"),
    *(".ssh", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "!id_*.pub", ".gnupg"),
    # clouds and clusters
    *(".aws", ".azure", ".boto", ".s3cfg", "rclone.conf", ".oci", ".kube", "kubeconfig*"),
    *("**/.config/gcloud", "*service-account*.json", "*service_account*.json", "*.tfstate*"),
    *("client_secret*.json", "application_default_credentials.json", ".databrickscfg"),
    # packages, repositories and hubs
    *(".netrc", "_netrc", ".git-credentials", "**/.config/gh", ".npmrc", ".pypirc", ".dockercfg"),
    *("**/.docker/config.json", ".kaggle", "kaggle.json", "**/huggingface/token", ".huggingface"),
    *("**/huggingface/stored_tokens", ".vault-token", ".pgpass", ".my.cnf", ".mylogin.cnf"),
    # Ray, MLflow, and the names that people choose
    *("auth_token", "credentials", "credentials.*", "*[-_]credentials.*", "*.credentials"),
    *("secrets", "secrets.*", ".secrets", ".secrets.*"),
)
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
#: Seconds in which a tunnel must be open, and in which the head must say how it is.
TUNNEL_SECONDS, STATUS_SECONDS = 60.0, 60.0
#: A cell without a new file for this long is not running, unless its rounds take longer: at most
#: this many rounds.
QUIET_SECONDS, QUIET_ROUNDS = 600.0, 5.0

_WORDS, _RUNS = "trishul.command", "trishul.runs"  # keys of a job's metadata
_DASHBOARD_PORT = 8265


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
        """Start a command on the cluster; see :func:`check_no_secret`, :func:`check_directory`.

        Its results go to ``runs``, unless ``storage.runs`` is one of the words; its report, unless
        the words name a place, to ``reports/<job>`` in there. The directory is shipped without
        data, results and environments, and without what is ``left_out``; see :func:`find_secrets`.

        Raises:
            InputError: The directory is too large.
        """
        id = f"trishul-{words[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        path, mark, options = runs.partition("?") if "://" in runs else (runs, "", "")
        report = f"{path.rstrip('/')}/reports/{id}{mark}{options}"
        with self._errors():
            try:
                self._client.submit_job(
                    entrypoint=shlex.join(["python", "-P", "-m", "trishul_ray.cli", *words]),
                    submission_id=id,
                    runtime_env={
                        "working_dir": str(directory),
                        "excludes": [*NOT_SHIPPED, *map(_exactly, left_out)],
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


# Before a command is submitted.


def check_no_secret(words: Sequence[str]) -> None:
    """Refuse a command with credentials: the cluster shows the commands of jobs."""
    for word in words:
        if redact(word) != word:
            raise InputError(
                f"{redact(word)}: no credentials in the command, which the cluster shows to all "
                "its users; give its nodes a role, or set the environment there"
            )


def check_directory(directory: Path) -> None:
    """Refuse a directory in which a file or package hides an installed module, or one of Python.

    Ray puts the directory before all others on ``sys.path``, in the job and in its workers. A
    checkout of this package may be there.
    """
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for path in sorted(directory.iterdir()):
        name = path.stem
        if not (path.suffix == ".py" or (path / "__init__.py").is_file()) or name == "trishul_ray":
            continue
        found = PathFinder.find_spec(name, list(installed))
        owner = "Python's" if name in sys.stdlib_module_names else "the installed"
        if owner == "Python's" or (found and found.origin):
            raise InputError(f"{path}: hides {owner} module {name!r} from the job; rename it")


def find_secrets(directory: Path, wanted: Sequence[str] = ()) -> list[str]:
    """Return what may hold secrets of a working directory that Ray would ship otherwise.

    These are paths in the directory; a folder, which ends with ``/``, stands for all that is in it.
    Names count (:data:`SECRETS`), contents do not; that of a symbolic link is also its target's.

    Args:
        directory: The working directory.
        wanted: Paths in it that are shipped although they may hold secrets.

    Raises:
        InputError: One that is wanted is not among them.
    """
    quiet_jobs()
    is_secret = matcher(SECRETS)
    shipped = {name.removeprefix("./").rstrip("/") for name in wanted}
    unused, found = set(shipped), dict[str, bool]()
    for path in shipped_paths(directory, NOT_SHIPPED):
        name = path.relative_to(directory).as_posix()
        names = [name, path.resolve().as_posix()[1:]] if path.is_symlink() else [name]
        around = {name, *(parent.as_posix() for parent in Path(name).parents)}
        if not any(is_secret(each.lower()) for each in names) or around & found.keys():
            continue
        if around & shipped:
            unused -= around
        elif not any(each.startswith(f"{name}/") for each in shipped):
            found[name] = path.is_dir()
    left_out = sorted(f"{name}/" if folder else name for name, folder in found.items())
    if unused:
        raise InputError(
            f"--ship {min(unused)}: is not among what may hold secrets and is left out: "
            f"{join_limited(left_out, 10) or 'nothing'}"
        )
    return left_out


def _exactly(path: str) -> str:
    """Return the pattern of .gitignore that matches one path."""
    return "/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", path.rstrip("/"))


# A cluster that `ray up` started.


def results_of(file: Path) -> str | None:
    """Return where the nodes of a cluster file store runs: the argument of setup-node.sh.

    A file that cannot be read, or is no cluster file, is an InputError.
    """
    try:
        config: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cluster file {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise InputError(f"cluster file {file}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or "cluster_name" not in config:
        raise InputError(f"cluster file {file}: it has no cluster_name; see cluster/aws.yaml")
    for command in config.get("setup_commands") or ():
        for script, place in itertools.pairwise(shlex.split(str(command))):
            if Path(script).name == "setup-node.sh":
                return f"{place.rstrip('/')}/runs"
    return None


@contextmanager
def open_tunnel(file: Path) -> Iterator[str]:
    """Yield the address on this machine of a cluster's dashboard, by `ray dashboard`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["dashboard", str(file), "--port", str(port), "--remote-port", str(_DASHBOARD_PORT)]
    with tempfile.TemporaryFile("w+") as log:
        tunnel = subprocess.Popen(
            [*_ray(), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + TUNNEL_SECONDS
            while not _answers(port):
                if tunnel.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    lines = [line.strip() for line in log if line.strip()]
                    why = redact(lines[-1]) if lines else "ssh does not answer"
                    raise RunError(f"no tunnel to the cluster of {file}: {why}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(tunnel.pid, signal.SIGTERM)
            tunnel.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def shortages(file: Path) -> list[str]:
    """Return what the autoscaler of a cluster waits for and what failed, one line each.

    Ray keeps this to itself: it is in no log that a user reads, and not on the dashboard.
    """
    words = [*_ray(), "exec", str(file), "ray status --verbose"]
    try:
        reply = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STATUS_SECONDS
        )
    except subprocess.TimeoutExpired:
        return ["the head does not answer"]
    return read_shortages(reply.stdout)


def read_shortages(status: str) -> list[str]:
    """Return the pending and failed nodes in the output of ``ray status --verbose``."""
    found = []
    section = ""
    for line in status.splitlines():
        if heading := re.fullmatch(r"([A-Z][\w ]*):\s*", line):
            section = heading[1]
        elif not line.startswith(" "):
            section = ""
        elif section in ("Pending", "Recent failures") and not line.strip().startswith("(no "):
            found.append(f"{section.lower()}: {redact(line.strip())}")
    return found


def _ray() -> list[str]:
    return [str(Path(sys.executable).with_name("ray"))]


# Progress of a job's cells, by the store of results.


@dataclass(frozen=True)
class Progress:
    """The cells of a job.

    Attributes:
        states: How many cells have each status; those that run are not in it.
        running: How many cells run.
        pace: The rounds of the running cells together, by their last two checkpoints.
        rounds_left: Rounds that unfinished cells still need.
    """

    states: Counter[CellStatus]
    running: int
    pace: Pace
    rounds_left: int

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.states.total() + self.running


def read_progress(experiments: Mapping[str, Experiment], now: float | None = None) -> Progress:
    """Read how far experiments are; ``now`` is in seconds since the epoch.

    Raises:
        InputError: The bucket of a store does not exist.
        StorageError: A store cannot be read.
    """
    now = time.time() if now is None else now
    states: Counter[CellStatus] = Counter()
    running = left = 0
    rate = 0.0
    for id, state in examine(experiments).items():
        if state.status in ("finished", "stopped"):
            states[state.status] += 1
            continue
        done, pace, runs = _rounds(experiments[id], state, now)
        left += max(0, experiments[id].federation.rounds - done)
        if runs:
            running += 1
            rate += pace.rate
        else:
            states[state.status] += 1
    return Progress(states, running, Pace(rate, 1.0) if rate else Pace(), left)


def _rounds(experiment: Experiment, state: CellState, now: float) -> tuple[int, Pace, bool]:
    """Return the rounds that are done, their pace, and whether the cell runs."""
    if state == NOT_RUN:
        return 0, Pace(), False
    home = RunFolder.of(experiment).home
    checkpoints = home.child("checkpoints").modified()
    saved = sorted(
        (number, when)
        for name, when in checkpoints.items()
        if (number := round_of(name)) is not None
    )
    (before, since), (done, until) = [(0, 0.0), (0, 0.0), *saved][-2:]
    pace = Pace(done - before, until - since) if len(saved) > 1 else Pace()
    patience = max(QUIET_SECONDS, pace.seconds_for(QUIET_ROUNDS) if pace.done else 0.0)
    quiet = now - max([*home.modified().values(), *checkpoints.values()], default=0.0)
    return done, pace, quiet <= patience and state.status != "failed"
