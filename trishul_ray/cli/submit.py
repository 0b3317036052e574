"""The command ``submit``: run a trishul command on a Ray cluster, as a Ray job."""

import asyncio
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer

from trishul_ray.cli.output import err, print_field, print_line
from trishul_ray.errors import InputError, RunError, one_line
from trishul_ray.storage.redaction import redact

COMMANDS = ("run", "sweep", "table", "report", "eval")
#: Patterns of files that are not uploaded: data, results, and common names of secrets.
EXCLUDES = """
/data /runs /report /cache mlruns mlartifacts *.db *.safetensors
.git .venv venv __pycache__ *.egg-info .*_cache .hypothesis
.env .env.* *.env .envrc .netrc .npmrc .pypirc .git-credentials .*_history
*.pem *.key *.p12 *.pfx *.keystore id_rsa* id_ecdsa* id_ed25519* .ssh .gnupg
.aws .azure .kube kubeconfig* *.tfstate* .pgpass **/.config/gcloud *service-account*.json
**/.docker/config.json kaggle.json **/huggingface/token auth_token credentials* *secrets*
""".split()  # noqa: SIM905

Address = Annotated[
    str | None,
    typer.Option(help="URL of the cluster's dashboard.", envvar="RAY_API_SERVER_ADDRESS"),
]
ClusterFile = Annotated[Path | None, typer.Option(help="Cluster file of `ray up`.")]
Runs = Annotated[str | None, typer.Option(help="URI of the runs; default: set by cluster.")]
LOCAL, TUNNEL_SECONDS = "http://127.0.0.1:8265", 60.0


def submit(
    words: Annotated[list[str], typer.Argument(metavar="-- COMMAND ...", show_default=False)],
    address: Address = None,
    cluster: ClusterFile = None,
    runs: Runs = None,
    working_dir: Annotated[Path, typer.Option(help="Folder to upload.")] = Path("."),
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the job.")] = False,
) -> None:
    """Run a command on a cluster as a Ray job, and show its output.

    - `trishul submit --cluster cluster/aws.yaml -- table vision --profile paper`
    - `trishul submit --address http://127.0.0.1:8265 --detach -- sweep mine.yaml`

    Ctrl-C stops the output, not the job: see `ray job list`, `ray job logs` and `ray job stop`.
    Repeat the command to resume; finished runs are never repeated. Data, results and files with
    common names of secrets (`.env`, `.aws`, keys, tokens) are not uploaded.
    """
    if words[0] not in COMMANDS:
        raise InputError(f"{words[0]!r} cannot run as a job; submit {', '.join(COMMANDS)}")
    for word in [*words, runs or ""]:
        if redact(word) != word:
            shown = redact(word)
            raise InputError(f"{shown}: the cluster displays its jobs; remove the credentials")
    if runs is not None and "://" not in runs and not Path(runs).is_absolute():
        raise InputError(f"--runs {runs!r} must be a URI or the full path of a shared folder")
    for option, path in (("working-dir", working_dir), ("cluster", cluster)):
        if path is not None and not path.exists():
            raise InputError(f"--{option} {path} does not exist")
    with _tunnel(cluster) if cluster else nullcontext(address or LOCAL) as found:
        _submit(found, words, runs, working_dir, detach)


def _submit(
    address: str, words: list[str], runs: str | None, directory: Path, detach: bool
) -> None:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobStatus, JobSubmissionClient

    id = f"trishul-{words[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    environment = {"PYTHONUNBUFFERED": "1"}
    entrypoint = shlex.join(["python", "-P", "-m", "trishul_ray.cli", *words])
    if runs is not None:
        place, mark, options = runs.partition("?")
        report = f"{place.rstrip('/')}/reports/{id}{mark}{options}"
        environment |= {"TRISHUL_RUNS": runs, "TRISHUL_REPORT": report}
    else:  # the shell of the job expands the variable on its node
        unset = "not set on this cluster; submit with --runs URI or --runs /FOLDER"
        entrypoint = f'TRISHUL_REPORT="${{TRISHUL_RUNS:?{unset}}}/reports/{id}" {entrypoint}'

    async def print_logs() -> None:
        async for text in client.tail_job_logs(id):
            print(text, end="", flush=True)

    try:
        client = JobSubmissionClient(address, headers=_token())
        client.submit_job(
            entrypoint=entrypoint,
            submission_id=id,
            runtime_env={
                "working_dir": str(directory),
                "excludes": EXCLUDES,
                "env_vars": environment,
            },
            # The head may have no CPUs, and spot nodes may be preempted.
            entrypoint_num_cpus=1,
            entrypoint_label_selector={"ray.io/market-type": "!spot"},
        )
        print_field("job", id)
        if detach:
            return
        asyncio.run(print_logs())
        status = client.get_job_status(id)
    except (AuthenticationError, RuntimeError, ValueError, OSError) as error:
        raise RunError(f"the cluster at {redact(address)}: {redact(one_line(error))}") from error
    except KeyboardInterrupt:
        print_line(f"the job is still running; follow it with: ray job logs --follow {id}", err)
        raise typer.Exit(130) from None
    if status != JobStatus.SUCCEEDED:
        raise RunError(
            f"{id}: {status.lower()}; submit it again to resume (finished runs are kept)"
        )


def _token() -> dict[str, str] | None:
    """Return a header with this machine's token, or None."""
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    token = os.environ.get("RAY_AUTH_TOKEN") or (file.read_text() if file.is_file() else "")
    return {"Authorization": f"Bearer {token.strip()}"} if token else None


@contextmanager
def _tunnel(file: Path) -> Iterator[str]:
    """Open a tunnel to the dashboard of a cluster, which listens only on its head.

    Yields:
        The local address of the dashboard.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ray = str(Path(sys.executable).with_name("ray"))
    words = [ray, "dashboard", str(file), "--port", port, "--remote-port", "8265"]
    tunnel = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + TUNNEL_SECONDS
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", int(port))):
                if tunnel.poll() is not None or time.monotonic() > deadline:
                    raise RunError(f"`ray dashboard {file}` did not open a tunnel to the cluster")
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(tunnel.pid, signal.SIGTERM)
        tunnel.wait()
