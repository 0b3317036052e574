"""Commands that exit before a chosen call that changes a file or MLflow's database.

An audit hook of Python reports the calls, including requests to an HTTP server, as does
SQLAlchemy's event before a commit. Python names all stored files (``files.py``), and SQLite writes
whole transactions, so readers see changes only at these times: Arrow, torch and safetensors write
files that are not read before they are renamed. For files that are cut in half under their final
names, see test_damaged_files.py.

Every run is a fork of a server that has imported everything. Its backbone is pretrained for one
epoch. The cells of a sweep run sequentially in the process of the sweep, instead of under Ray Tune,
whose processes no hook can follow; trials write the same files as runs.
"""

import io
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import alembic.command  # noqa: F401
import mlflow.store.db.utils
import mlflow.store.tracking.sqlalchemy_workspace_store
import mlflow.tracking  # noqa: F401
import pandas  # noqa: F401
import pyarrow.pandas_compat  # noqa: F401
import pyarrow.parquet as pq
import sklearn.datasets  # noqa: F401
import sqlalchemy.dialects.sqlite
import torch
import transformers.models.vit.modeling_vit  # noqa: F401
from rich.console import Console
from s3_server import KEYS
from syncs import Syncs

import trishul_ray.cli.app
import trishul_ray.federation.inline
import trishul_ray.federation.on_ray.session
import trishul_ray.models.attention
import trishul_ray.models.last_block
import trishul_ray.report.page
import trishul_ray.runs.export
import trishul_ray.storage.locks
import trishul_ray.sweeps.run
import trishul_ray.sweeps.tuner
import trishul_ray.tracking.mlflow
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.models.builtin import BUILTINS, VIT_DIGITS
from trishul_ray.report.summary import RunSummary
from trishul_ray.runs.runner import run_steps
from trishul_ray.storage.store import Store
from trishul_ray.tasks.base import task_classes
from trishul_ray.tracking.progress import RunProgress

load_experiment(None, ["uploads.codec=int4"])  # imports methods and codecs
task_classes()  # imports tasks

#: Whether tests cover all crash points; otherwise each test covers a different part.
ALL = os.environ.get("TRISHUL_TEST_CRASHES") == "all"
#: Exit code of a run that was ended before a call.
CRASHED = 88
#: Audit events of calls that change files: positions of the path and its folder in the arguments.
_CALLS = {
    "open": ((0, None),),
    "os.mkdir": ((0, 2),),
    "os.remove": ((0, 1),),
    "os.rename": ((1, 3),),
    "os.rmdir": ((0, 1),),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
}
_WRITES = os.O_CREAT | os.O_TRUNC
#: Folders with all files of commands: exports and reports are in the last one.
FOLDERS = ("runs", "cache", "tmp", "out")


#: Overrides of a run of two rounds that takes a second.
TINY = [
    "model.init=random", "federation.clients=3", "federation.clients_per_round=2",
    "federation.rounds=2", "federation.local_steps=1", "federation.batch_size=4",
    "evaluation.limit=16", "evaluation.batch_size=16", "resources.backend=inline",
]  # fmt: skip


@dataclass
class Ended:
    """End of a run: its exit code, its output, its calls in order, and unsynced files."""

    code: int
    said: str
    calls: list[str] = field(default_factory=list)
    unsynced: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """A folder with the runs, the cache and the temporary files of runs.

    ``bucket`` is the URI of the runs if they are in an object store.
    """

    root: Path
    bucket: str = ""

    def run(
        self, words: list[str], *, crash: int | None = None, fresh: bool = False,
        extras: bool = False, started: Callable[[int], None] = lambda pid: None,
    ) -> Ended:  # fmt: skip
        """Run in a fork, which exits before its call number ``crash``.

        ``started`` receives the id of its process.
        """
        stored = [f"storage.runs={self.bucket or 'runs'}"]
        stored += ["tracking.uri=runs/mlflow.db"] if self.bucket else []
        return self._fork(_run, ([*words, *stored], fresh, extras), crash, started)

    def call(self, *words: str, crash: int | None = None) -> Ended:
        """Call ``trishul`` with these words in such a fork."""
        return self._fork(_call, words, crash)

    def _fork(
        self, work: Callable[..., None], words: Iterable[Any], crash: int | None,
        started: Callable[[int], None] = lambda pid: None,
    ) -> Ended:  # fmt: skip
        report = self.root / "report.json"
        report.unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["crashes"])
        process = context.Process(
            target=_watched, args=(str(self.root), work, tuple(words), crash, str(report))
        )
        process.start()
        assert process.pid is not None
        started(process.pid)
        process.join()
        ended = json.loads(report.read_text()) if report.exists() else [""]
        assert process.exitcode is not None
        return Ended(process.exitcode, *ended)

    def restore(self, template: Path) -> None:
        """Replace everything by a copy of another place; files except MLflow's are hard links."""
        for name in FOLDERS:
            shutil.rmtree(self.root / name, ignore_errors=True)
            if (template / name).exists():
                shutil.copytree(template / name, self.root / name, copy_function=_link)
        for name in ("tmp", "out"):
            (self.root / name).mkdir(exist_ok=True)

    def home(self, id: str) -> Store:
        """Return the folder of a run."""
        return Store.open(self.bucket or str(self.root / "runs")).child(id)

    def observe(self, id: str) -> dict[str, Any]:
        """Return the results and files of a finished run that are the same after any crash."""
        home = self.home(id)
        summary = RunSummary.read(home)
        rows = pq.read_table(io.BytesIO(home.read("metrics.parquet"))).to_pydict()
        found: dict[str, Any] = {
            "state": summary.state_sha256,
            "rounds": {name: values for name, values in rows.items() if "second" not in name},
            "scores": [summary.final, summary.best, summary.untouched],
            "sources": summary.sources,
            "hashes": {k: v for k, v in summary.sha256.items() if k != "metrics.parquet"},
            "damaged": summary.damaged_files(home),
            "files": self.files(),
        }
        with closing(sqlite3.connect(self.root / "runs/mlflow.db")) as base:
            runs = base.execute(
                "select run_uuid, status, artifact_uri from runs join tags using (run_uuid) where"
                " tags.key = 'trishul.id' and tags.value = ? and lifecycle_stage = 'active'",
                (id,),
            ).fetchall()
            found["statuses"] = [status for _, status, _ in runs]
            for uuid, _, uri in runs:
                points = base.execute(
                    "select key, step, value from metrics where run_uuid = ?"
                    " and key not like '%second%'",
                    (uuid,),
                )
                found["points"] = sorted(points.fetchall())
                for table in ("params", "tags"):
                    names = base.execute(f"select key from {table} where run_uuid = ?", (uuid,))
                    found[table] = sorted(names.fetchall())
                artifacts = Path(uri.removeprefix("file://"))
                found["artifacts"] = sorted(
                    path.relative_to(artifacts).as_posix() for path in artifacts.rglob("*")
                )
                tags = dict(base.execute("select key, value from tags where run_uuid = ?", (uuid,)))
                found["logged"] = tags.get("trishul.result") == summary.checksum
                found["logged result"] = (artifacts / "result.json").read_bytes() == home.read(
                    "result.json"
                )
        return found

    def files(self) -> list[str]:
        """Return all files, without hashes of timed content.

        MLflow's artifacts, locks of runs and temporary files are excluded.
        """
        names = []
        for path in sorted(self.root.rglob("*")):
            parts = path.relative_to(self.root).parts
            lock = parts[0] == "runs" and parts[-1].endswith(".lock")
            temporary = any(part.endswith(".tmp") for part in parts)
            if parts[0] in FOLDERS and not (lock or temporary or "mlartifacts" in parts):
                if parts[:2] == ("cache", "weights") and len(parts) > 2:
                    # Its name depends on the backbone's files and their link times.
                    kind = ".lock" if parts[2].endswith(".lock") else ""
                    parts = (*parts[:2], f"key{kind}", *parts[3:])
                timed = parts[-1].startswith(("round-", "clients-"))
                names.append("/".join((*parts[:-1], parts[-1][:12] if timed else parts[-1])))
        return sorted(names)


def crash_everywhere(
    place: Place,
    template: Place,
    act: Callable[[int | None], Ended],
    observe: Callable[[], dict[str, Any]],
    *,
    first: int = 1,
    stride: int = 1,
    again: Callable[[], Ended] | None = None,
    look: Callable[[], Iterable[str]] = tuple,
) -> dict[str, list[str]]:
    """Crash a command before calls ``first``, ``first + stride``, ..., and repeat it each time.

    Args:
        place: Working folder; each time, it starts as a copy of ``template``.
        template: A copy of the place.
        act: Run the command, which exits before the call of this number.
        observe: Return results and files that are the same after any crash.
        first: The first call.
        stride: Number of calls per crash point, unless all calls are tested.
        again: Repeat the command, if the repetition differs.
        look: Return the faults right after a crash.

    Returns:
        The differences from a run without a crash, keyed by call.
    """
    undisturbed = act(None)
    assert undisturbed.code == 0, undisturbed.said
    assert undisturbed.unsynced == []
    want, wrong = observe(), {}
    stride = 1 if ALL else stride
    for number in range((first - 1) % stride + 1, len(undisturbed.calls) + 1, stride):
        place.restore(template.root)
        crashed = act(number)
        assert crashed.code in (CRASHED, -signal.SIGKILL), crashed.said
        faults = [*look()]
        ended = again() if again else act(None)
        if ended.code:
            faults.append(ended.said[-1000:])
        else:
            got = observe()
            faults += [_difference(got, want)] if got != want else []
        if faults:
            wrong[f"{number} {undisturbed.calls[number - 1]}"] = faults
    return wrong


def _difference(got: Any, want: Any) -> str:
    if isinstance(want, dict) and isinstance(got, dict):
        unlike = [name for name in {**want, **got} if got.get(name) != want.get(name)]
        return "; ".join(f"{n}: {_difference(got.get(n), want.get(n))}" for n in unlike)
    if isinstance(want, str) and isinstance(got, str):
        got, want = got.splitlines(), want.splitlines()
    if isinstance(want, list) and isinstance(got, list):
        return f"more {[e for e in got if e not in want]}, less {[e for e in want if e not in got]}"
    return f"{got!r} for {want!r}"


def _link(source: str, target: str) -> None:
    # MLflow writes its database and its artifacts in place; all other files are renamed.
    in_place = ".db" in Path(source).name or "/mlartifacts/" in source
    (shutil.copy2 if in_place else os.link)(source, target)


def _run(words: list[str], fresh: bool, extras: bool) -> None:
    experiment = load_experiment(None, words)
    progress = RunProgress(9, Console(width=300))
    for _ in run_steps(experiment, progress, fresh=fresh, extras=extras):
        pass


def _call(*words: str) -> None:
    sys.argv = ["trishul", *words]
    trishul_ray.sweeps.run._run = _run_cells
    trishul_ray.cli.main()


def _run_cells(sweeps: Any, missing: Any, states: Any, options: Any, progress: Any) -> Any:
    """Run the missing cells of a sweep, as its trials do, in this process."""
    runs = trishul_ray.sweeps.run.cell_runs(sweeps, missing, states)
    trishul_ray.sweeps.tuner.prepare_inputs([run.experiment for run in runs.values()], progress)
    for run in runs.values():
        for _ in run_steps(run.experiment, RunProgress(9), extras=False, tags=run.tags):
            pass
    return sweeps, {}


def _watched(
    root: str, work: Callable[..., None], words: tuple[Any, ...], crash: int | None, report: str
) -> None:
    os.chdir(root)
    os.environ["TRISHUL_CACHE"] = f"{root}/cache"
    os.environ |= KEYS
    tempfile.tempdir = f"{root}/tmp"
    torch.set_num_threads(1)
    # Send the same number of requests on any machine, so that a call has the same number in each
    # run.
    trishul_ray.tracking.mlflow.ROUNDS_SECONDS = 0.0
    locks = trishul_ray.storage.locks
    locks.RENEW_SECONDS, locks.EXPIRED_SECONDS = 900.0, 1.0
    BUILTINS[VIT_DIGITS.name] = replace(VIT_DIGITS, recipe=replace(VIT_DIGITS.recipe, epochs=1))
    out, calls, code = io.StringIO(), list[str](), 0
    unsynced: list[str] = []
    sys.stdout = sys.stderr = out

    def count(call: str) -> None:
        if not call.startswith("commit") and call in calls[-1:]:
            return  # a file that is created, and then opened
        calls.append(call)
        if len(calls) == crash:
            os._exit(CRASHED)

    watched = tuple(f"{root}/{name}/" for name in FOLDERS)
    skipped = f"{root}/tmp/."  # files in a folder for temporary files are interchangeable

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "http.client.send":
            count(f"send {bytes(args[1][:20])!r}" if isinstance(args[1], bytes) else "send")
        for place, folder in _CALLS.get(event, ()):
            if event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES):
                continue
            if not isinstance(args[place], str | bytes | os.PathLike):
                continue  # an open file
            path = os.fsdecode(args[place])
            if not path.startswith("/"):
                base = args[folder] if folder is not None else -1
                start = os.readlink(f"/proc/self/fd/{base}") if base >= 0 else os.getcwd()
                path = f"{start}/{path}"
            inside = path.startswith(skipped) and not path.endswith(".tmp")
            # A lock has no content.
            if path.startswith(watched) and not path.endswith("lock") and not inside:
                count(f"{event} {path.removeprefix(root)}")

    changes: list[str] = []  # changes of the transaction

    def note(_: Any, __: Any, statement: str, *more: Any) -> None:
        if not statement.startswith(("SELECT", "PRAGMA")):
            changes.append(statement)

    def commit(_: Any) -> None:
        if changes:
            count(f"commit {changes[-1].split(' (')[0]}")
            changes.clear()

    try:
        sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", note)
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", commit)
        syncs = Syncs(root, ("runs", "cache", "out"))
        sys.addaudithook(hook)
        try:
            work(*words)
        except SystemExit as end:
            code = end.code or 0
        crash = None
        unsynced = syncs.end()
    except BaseException:
        code = 1
        traceback.print_exc(file=out)
    made = list(calls)
    with open(report, "w") as file:
        json.dump([out.getvalue(), made, unsynced], file)
    os._exit(code)
