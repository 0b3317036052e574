"""Cost of the commands that read finished runs, with thousands of them.

    python benchmarks/store.py [--runs 10000] [options]

One short run is made. Its result stands, under their own ids, for all other cells of a sweep: they
are as large as real ones, and read and checked in the same way. Then `trishul plan`, `report` and
`table` read them, in processes of their own, a few times each: from a folder, and from a bucket of
a server on this machine (moto), which a first `plan` has copied. None has anything to run.
Results go to benchmarks/results/.
"""

import argparse
import io
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
from _results import Goal, Report, Section, Times, told_by
from botocore.exceptions import EndpointConnectionError
from rich.console import Console

from trishul_ray.report.summary import RunSummary
from trishul_ray.runs.runner import run_experiment
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.loading import load_sweep
from trishul_ray.tracking.progress import RunProgress

#: Seconds that each command may take with 10,000 runs.
BOUND = 5.0
SWEEP = """
title: Many runs
base: {{storage.runs: '{runs}', tracking.mlflow: false, resources.backend: inline, dataset: digits,
  federation.rounds: 2, federation.local_steps: 1, evaluation.every: 0}}
axes:
  method: [fedit, fedex, ffalora, ravan, trishul]
  partition.alpha: [0.1, 0.3]
  seed: 0..{last}
tables:
  - {{name: many, title: Many runs, rows: [method], columns: [partition.alpha]}}
"""
COMMANDS = ("plan", "report", "table")


def main() -> None:
    """Make the runs, time the commands, and write the results."""
    options = _arguments()
    report = Report("store", options)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = folder / "many.yaml"
        file.write_text(SWEEP.format(runs=folder / "runs", last=options.runs // 10 - 1))
        count = fill(file)
        report.add(commands_on(file, folder, f"{count:,} finished runs in a local folder", options))
        with bucket() as uri:
            os.environ["TRISHUL_CACHE"] = str(folder / "cache")
            file.write_text(SWEEP.format(runs=uri, last=options.runs // 10 - 1))
            upload(folder / "runs", uri, [cell.experiment.id for cell in load_sweep(file).cells])
            cpu, wall = timed("plan", file, folder)
            note = f"a first `trishul plan`, which copied all, took {cpu:.0f} s of it, {wall:.0f} s"
            title = f"{count:,} finished runs in a bucket"
            report.add(commands_on(file, folder, title, options, note))


def commands_on(
    file: Path, folder: Path, title: str, options: argparse.Namespace, *notes: str
) -> Section:
    """Time the commands on a sweep by turns."""
    times: dict[str, tuple[list[float], list[float]]] = {c: ([], []) for c in COMMANDS}
    for _ in range(options.times):
        for command, (cpu, wall) in times.items():
            seconds = timed(command, file, folder)
            cpu.append(seconds[0])
            wall.append(seconds[1])
    rows = [
        [f"trishul {c}", Times.of(cpu).show(), Times.of(wall).show()]
        for c, (cpu, wall) in times.items()
    ]
    goals = [
        Goal(f"trishul {c}, seconds of the processor", Times.of(cpu).median, BOUND)
        for c, (cpu, _) in times.items()
    ]
    how = f"medians (min-max) of {options.times} calls each, by turns; nothing is left to run"
    data = {c: {"cpu": cpu, "wall": wall} for c, (cpu, wall) in times.items()}
    columns = ["command", "s of the processor", "s"]
    return Section(title, columns, rows, [how, *notes], goals, data)


@contextmanager
def bucket() -> Iterator[str]:
    """Yield the URI of a folder in a bucket of an S3 server on localhost."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        client = s3_client(port)
        while True:
            with suppress(EndpointConnectionError):
                client.create_bucket(Bucket="runs")
                break
            time.sleep(0.2)
        options = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        yield f"s3://runs/runs?{options}"
    finally:
        server.terminate()
        server.wait()


def s3_client(port: int) -> Any:
    """Return a client of the server on a port."""
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")


def upload(folder: Path, uri: str, ids: Sequence[str]) -> None:
    """Put the files of finished runs into the bucket, with the note that they have finished."""
    client = s3_client(int(uri.partition("127.0.0.1:")[2].partition("&")[0]))
    for id in ids:
        for file in (folder / id).iterdir():
            client.put_object(Bucket="runs", Key=f"runs/{id}/{file.name}", Body=file.read_bytes())
        client.put_object(Bucket="runs", Key=f"runs/finished/{id}", Body=b"")


def _arguments() -> argparse.Namespace:
    parser = told_by(__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="finished runs, a multiple of 10")
    parser.add_argument("--times", type=int, default=3, help="calls of each command")
    return parser.parse_args()


def fill(file: Path) -> int:
    """Run the first cell of a sweep, and write its result for all others; return their number."""
    cells = load_sweep(file).cells
    first = cells[0].experiment
    run_experiment(first, RunProgress(first.federation.rounds, Console(file=io.StringIO())))
    store = Store.open(first.storage.runs)
    home = Path(store.child(first.id).place("result.json")).parent
    summary = RunSummary.read(store.child(first.id))
    for name in ("checkpoints", "figures", "adapter"):
        shutil.rmtree(home / name, ignore_errors=True)
    for cell in cells[1:]:
        one = cell.experiment
        other = home.with_name(one.id)
        shutil.copytree(home, other)
        same = replace(
            summary, id=one.id, name=one.name, config=one.to_dict(), identity=one.identity()
        )
        (other / "result.json").write_bytes(same.to_json())
        (other / "config.yaml").write_bytes(one.to_yaml())
    return len(cells)


def timed(command: str, file: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds of the processor, and those that passed, of a command on the sweep."""
    words = {
        "plan": ["plan", str(file)],
        "report": ["report", str(file), "--output", str(folder / "report")],
        "table": ["sweep", str(file), "--report", str(folder / "report")],
    }[command]
    began, before = os.times().elapsed, resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "trishul_ray.cli", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"trishul {' '.join(words)}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu, os.times().elapsed - began


if __name__ == "__main__":
    main()
