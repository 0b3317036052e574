"""Kill the processes of runs at random moments, and audit the results.

::

    make chaos MINUTES=60     # runs of random integers for an hour
    make chaos SEED=17        # the run of this integer

An integer determines a configuration (of ``contract/digests.py``, often with additional stages),
the storage paths of the run, a victim, and the moments of its deaths. Consecutive integers cover
all configurations and all victims. If its victim ends a command, the command is repeated as its
message advises; all other commands must continue by themselves. At the end, the results must equal
those of an undisturbed run.
"""

import argparse
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import psutil
from chaos.audit import audit
from commands import AGENTS_WAIT, describe, marked, start_command
from contract.digests import BASE, CONFIGURATIONS, outcome, run_inline, usable
from mlflow_server import PASSWORD, MlflowServer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from s3_server import KEYS, S3Server

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.tracking.store import open_client

#: Titles or names of the processes of a run that are victims.
TITLES = {
    "coordinator": "ray::Coordinator",
    "client": "ray::ClientActor",
}
VICTIMS = ("driver", *TITLES, "tracking server", "object store")
#: Configurations with only stages, which are combined with many methods.
STAGES = ("", "", "codecs", "topk", "clock", "clock, selected", "async", "privacy", "attacked")
#: Kinds of findings, as in the last table.
KINDS = ("different", "lost", "left", "silent")
#: Maximum seconds until a run prints a line, and until it ends.
SILENT, LONGEST = 120, 400
#: Processes of Ray that remain for up to two minutes after a killed driver.
AGENTS = re.compile(r"dashboard.agent|runtime_env.agent")
TRACE = re.compile(r"Traceback|\*\*\* SIG|Fatal Python")


@dataclass(frozen=True)
class Plan:
    """The test case of an integer.

    A moment is a text to wait for, or a number of lines of rounds, and seconds after it.
    """

    number: int
    victim: str
    name: str
    words: tuple[str, ...]
    stages: tuple[str, ...]
    backend: str
    tracking: str
    storage: str
    moments: tuple[tuple[str | int, float], ...]


def draw(number):
    """Draw the plan of an integer."""
    rng = random.Random(number)
    names = [name for name in CONFIGURATIONS if usable(name)]
    name, victim = names[number % len(names)], VICTIMS[number % len(VICTIMS)]
    stage = rng.choice(STAGES)
    words, more = (CONFIGURATIONS[each].split() if each else [] for each in (name, stage))
    rounds = rng.choice((12, 16, 24))
    backend = "ray" if victim in TITLES else rng.choice(("ray", "inline"))
    tracking = rng.choice(("none", "database", "server"))
    storage = rng.choice(("folder", "folder", "S3"))
    count = rng.choice((2, 3, 4))
    moments = [rng.randint(1, rounds // (count + 1)) for _ in range(count)]
    if rng.random() < 0.15:
        moments[0] = "starting clients"
    if rng.random() < 0.15:
        moments[-1] = "writing results"
    if victim == "tracking server":
        tracking = "server"
    if victim == "object store":
        storage = "S3"
    words, more = ((*each, f"federation.rounds={rounds}") for each in (words, more))
    moments = tuple((moment, rng.uniform(0.0, 0.6)) for moment in moments)
    title = f"{name} + {stage}" if stage else name
    return Plan(number, victim, title, words, more, backend, tracking, storage, moments)


class Place:
    """Folders and servers of the runs of a session, as a context manager."""

    def __init__(self):
        self._stack, self._references = ExitStack(), {}
        self.late = []  # (seconds, played, mark): the time after which no process may remain

    def __enter__(self):
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        self.cache, self.mlflow, self.s3 = self.folder / "cache", None, None
        # Sockets of Ray need a short path.
        for n in range(100):
            with suppress(FileExistsError):
                self.temporary = Path(f"/tmp/k{n:02d}")
                self.temporary.mkdir(mode=0o700)
                break
        self._stack.callback(shutil.rmtree, self.temporary, ignore_errors=True)
        here = KEYS | {"TRISHUL_CACHE": str(self.cache)}
        self._stack.enter_context(patch.dict(os.environ, here))
        open_client(f"sqlite:///{self.folder}/empty.db")
        return self

    def __exit__(self, *_):
        self._stack.close()

    def reference(self, plan):
        """Return the overrides of a plan, and the outcome of its undisturbed run."""
        for more in (plan.stages, ()):
            words = (*BASE, *plan.words, *more, "evaluation.every=4")
            if words in self._references:
                return words, self._references[words]
            # These stages are not compatible with each other, or with the method.
            with suppress(InputError):
                paths = [f"storage.runs={self.folder}/inline", "resources.backend=inline"]
                found = outcome(run_inline(load_experiment(None, [*words, *paths])))
                shutil.rmtree(self.folder / "inline")
                self._references[words] = found
                return words, found
        raise AssertionError(f"{plan.name}: rejected")

    def paths(self, plan):
        """Create the storage of a run, and return the overrides with its paths."""
        if self.mlflow is None and plan.tracking == "server":
            self.mlflow = MlflowServer(self.folder / "server")
            self.mlflow.start()
            self._stack.callback(self.mlflow.end)
        if self.mlflow is not None:
            self.mlflow.wait()
        if self.s3 is None and plan.storage == "S3":
            self.s3 = S3Server()
            self.s3.start()
            self.bucket = self.s3.new_bucket()
            self._stack.callback(self.s3.end)
        home = self.folder / str(plan.number)
        (home / "runs").mkdir(parents=True)
        on_s3 = plan.storage == "S3"
        runs = self.s3.uri(self.bucket, str(plan.number)) if on_s3 else f"{home}/runs"
        words = [f"storage.runs={runs}", f"resources.backend={plan.backend}"]
        words += ["resources.max_restarts=5", f"tracking.mlflow={plan.tracking != 'none'}".lower()]
        if plan.tracking == "database":
            shutil.copy(self.folder / "empty.db", home / "runs" / "mlflow.db")
            words += [f"tracking.uri=sqlite:///{home}/runs/mlflow.db"] if on_s3 else []
        elif plan.tracking == "server":
            words += [f"tracking.uri={self.mlflow.address}"]
        return [*words, f"tracking.experiment=run-{plan.number}"]

    def files(self, plan):
        """Return the paths of all files in the storage of a run and in the cache."""
        paths = [*self.cache.rglob("*"), *(self.folder / str(plan.number)).rglob("*")]
        if plan.storage == "S3":
            paths += map(Path, self.s3.keys(self.bucket, f"{plan.number}/"))
        return paths

    def database(self, plan):
        """Return the MLflow database of a run, or None."""
        files = {
            "none": None,
            "database": self.folder / str(plan.number) / "runs" / "mlflow.db",
            "server": self.mlflow and self.mlflow.home / "mlflow" / "mlflow.db",
        }
        return files[plan.tracking]

    def start(self, words):
        """Start a command with temporary files and a cache of this session."""
        login = {"MLFLOW_TRACKING_USERNAME": "trishul", "MLFLOW_TRACKING_PASSWORD": PASSWORD}
        short = {"TMPDIR": str(self.temporary), "RAY_TMPDIR": str(self.temporary)}
        return start_command(
            *(sys.executable, "-u", "-m", "trishul_ray.cli", *words),
            cwd=self.folder, TRISHUL_CACHE=str(self.cache), **login, **short,
        )  # fmt: skip


@dataclass
class Played:
    """Outcome of a plan: counts of the last table, and findings as (kind, text)."""

    plan: Plan
    counts: Counter = field(default_factory=Counter)
    findings: list[tuple[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    _shown: int = -1

    def find(self, kind, text):
        self.findings.append((kind, text))

    def read(self, text):
        """Parse the rounds and events in the output of the next command."""
        self.said.append(text)
        if TRACE.search(text):
            self.find("silent", f"a traceback: {text[TRACE.search(text).start() :][:300]}")
        last = -1
        for line in text.splitlines():
            kept = re.search(r"continuing after round (\d+)", line)
            shown = re.match(r"round (\d+)/", line)
            if kept and int(kept[1]) < self._shown:
                self.find("lost", f"round {self._shown} was finished, but: {line}")
            elif shown and (int(shown[1]) <= last or int(shown[1]) < self._shown):
                self.find("lost", f"after round {self._shown}: {line}")
            if shown:
                last = self._shown = int(shown[1])


def kill(place, command, victim, rng):
    """Kill a victim of a command and return whether it existed; restart a server."""
    if victim == "driver":
        command.process.kill()
    elif victim in TITLES:
        named = [p for p in command.processes() if describe(p).startswith(TITLES[victim])]
        named += command.processes(TITLES[victim])
        if not named:
            return False
        with suppress(psutil.NoSuchProcess):
            rng.choice(named).kill()
    else:
        server = place.mlflow if victim == "tracking server" else place.s3
        server.end()
        time.sleep(rng.uniform(0.2, 4.0))
        server.start()
    return True


def reached(command, moment):
    """Wait for a moment of a command; return whether it came before the end."""
    try:
        for _ in range(moment if isinstance(moment, int) else 1):
            command.wait_for("round " if isinstance(moment, int) else moment, SILENT)
    except AssertionError:
        return False
    return True


def ended(command, seconds):
    """Return the exit code and the output of a command, or None if it does not end."""
    try:
        code, out, errors = command.end(seconds)
        return code, out + errors
    except subprocess.TimeoutExpired as late:  # or its remaining processes keep its streams open
        rest = [part.decode() for part in (late.stdout, late.stderr) if part]
        return command.process.poll(), "".join([*command.errors, *rest])


def play(number, place):
    """Run the plan of an integer, and return its outcome."""
    plan = draw(number)
    played, rng = Played(plan), random.Random(-number - 1)
    words, reference = place.reference(plan)
    command_words = ["run", *words, *place.paths(plan)]
    before = set(place.temporary.iterdir())
    moments, experiment = list(plan.moments), load_experiment(None, command_words[1:])
    while True:
        command = place.start(command_words)
        killed, limit = 0, LONGEST
        while moments and not (killed and plan.victim == "driver"):
            moment, delay = moments[0]
            if not reached(command, moment):
                break
            moments.pop(0)
            time.sleep(delay)
            if command.process.poll() is None and kill(place, command, plan.victim, rng):
                played.counts["kills"] += 1
                killed += 1
        if killed and plan.victim == "driver":
            limit = 5
        code, said = ended(command, limit)
        played.read(said)
        if code is None:
            played.find("lost", f"no end {limit} s after {played.counts['kills']} kills")
            command.sweep()
            break
        _look_for_processes(place, played, command)
        if code == 0:
            played.counts["continued"] += killed
            break
        if not killed or plan.victim != "driver" or code != -9:
            played.find("silent" if killed else "lost", f"exit code {code}: {said[-500:]}")
            break
        played.counts["ended"] += 1
    new = [p for p in place.temporary.iterdir() if p not in before]
    logs = [p for p in new if p.name.startswith(".trishul-ray.")]
    if len(logs) > played.counts["ended"]:
        played.find("left", f"{len(logs)} folders of Ray after {played.counts['ended']} ends")
    for path in new:
        # A later command removes the scratch folders of killed drivers.
        if not path.name.startswith(".trishul-") and path.exists():
            played.find("left", f"{path}")
    if not any(kind == "lost" for kind, _ in played.findings):
        played.findings += audit(experiment, reference, place.files(plan), place.database(plan))
    shutil.rmtree(place.folder / str(number))
    return played


def _look_for_processes(place, played, command):
    """Record the processes that a command leaves behind; check Ray's agents minutes later.

    The agents outlive a killed driver and, on a loaded machine, every driver.
    """
    if left := command.left_behind():
        place.late.append((time.monotonic() + AGENTS_WAIT, played, command.mark))
        left = [words for words in left if not AGENTS.search(words)]
    if left:
        played.find("left", f"processes: {'; '.join(left)}")


def look_again(place, now):
    """Check the processes of drivers that ended more than ``AGENTS_WAIT`` seconds ago."""
    for late in [each for each in place.late if each[0] <= now]:
        place.late.remove(late)
        _, played, mark = late
        if left := [describe(process) for process in marked(mark)]:
            played.find("left", f"processes after {AGENTS_WAIT} s: {'; '.join(left)}")


def table(all_played):
    """Return the outcomes per victim."""
    shown = Table("victim", "kills", "ended", "continued", *KINDS, title="Killed for real")
    for victim in VICTIMS:
        mine = [played for played in all_played if played.plan.victim == victim]
        counts = sum((played.counts for played in mine), Counter())
        counts += Counter(kind for played in mine for kind in {k for k, _ in played.findings})
        columns = ("kills", "ended", "continued", *KINDS)
        shown.add_row(victim, *(str(counts[name]) for name in columns))
    return shown


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no run after as many")
    parser.add_argument("--seed", type=int, help="run this integer alone")
    parser.add_argument("--first", type=int, help="begin with this integer; drawn by default")
    given = parser.parse_args()
    one, first = given.seed is not None, given.first or random.SystemRandom().randrange(10**6)
    numbers = [given.seed] if one else itertools.count(first)
    console, all_played, began = Console(stderr=True), [], time.monotonic()
    with Place() as place, Progress(console=console) as bar:
        task = bar.add_task("starting", total=1 if one else 60 * given.minutes)
        for number in numbers:
            spent = time.monotonic() - began
            if not one and spent > 60 * given.minutes:
                break
            look_again(place, time.monotonic())
            plan = draw(number)
            bar.update(task, completed=0 if one else spent, description=f"{number}: {plan.name}")
            all_played.append(played := play(number, place))
            left = "" if one else f", {max(0, given.minutes - spent / 60):.0f} min left"
            where = f"{plan.backend}, {plan.storage}, MLflow {plan.tracking}"
            found = "; ".join(text for _, text in played.findings)
            line = f"{number}: {plan.victim} x{played.counts['kills']}, {plan.name}, {where}: "
            line += f"{found or 'as undisturbed'} ({time.monotonic() - began - spent:.0f} s{left})"
            said = played.said if found else []
            console.out(line, *said, sep="\n", highlight=False)
        if place.late:
            bar.update(task, description="looking for processes of killed drivers")
            time.sleep(max(0.0, place.late[-1][0] - time.monotonic()))
            look_again(place, time.monotonic())
    Console().print(table(all_played))
    found = [(p.plan.number, *finding) for p in all_played for finding in p.findings]
    for number, kind, text in found:
        print(f"{kind}: {text.splitlines()[0]}; to replay: make chaos SEED={number}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
