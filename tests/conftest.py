"""Shared by all tests: places, small real experiments, commands that leave nothing behind."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

# Before anything imports the hub's client, which reads it once: tests need no network, and what
# they look for in vain is not looked for again and again.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import psutil
import pytest
from ports import free_port
from tiny_run import SMALL, write_numbers

from trishul_ray.contract.methods import untimed

# A loaded machine is no failure; timing belongs into benchmarks.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

#: Marks every process that a test's command starts, children of children too.
MARK = "TRISHUL_TEST_MARK"
#: Seconds for which two agents of Ray may outlive a driver that was killed; see
#: docs/how-a-run-recovers.md.
AGENTS_WAIT = 150


#: The files that take longest, the longest first: one that comes last leaves a worker idle.
LONGEST = [
    *("chaos/test_driver.py", "sweeps/test_reproduce.py", "chaos/test_crash_points.py"),
    *("chaos/test_damaged_files.py", "cluster/test_mlflow_server.py", "cluster/test_ray_up.py"),
    *("chaos/test_nodes.py", "chaos/test_sweeps.py", "chaos/test_spot_night.py"),
    *("federation/on_ray/test_every_shape.py", "jobs/test_submit.py", "contract/test_digests.py"),
    *("methods/test_battery.py", "gpu/test_synchronization.py", "gpu/test_rehearsal.py"),
    *("e2e/test_guides.py", "e2e/test_storage_faults.py", "runs/test_runner.py", "test_api.py"),
    *("tracking/test_mlflow.py", "report/test_figures_of_sweeps.py", "federation/test_stacked.py"),
    *("federation/on_ray/test_driver.py", "lab/stages/test_traffic.py", "chaos/test_actors.py"),
]


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(items):
    """Put the longest files first; skip the tests marked gpu on a machine without a GPU."""
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    chosen = [item for item in items if item.get_closest_marker("gpu")]
    if chosen:
        import torch

        if not torch.cuda.is_available():
            for item in chosen:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Prepared data: the caller's cache if there is one, so that repeated test runs share it.

    Otherwise all workers share one, in which each backbone is pretrained once.
    """
    if given := os.environ.get("TRISHUL_CACHE"):
        return Path(given)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    (folder / "cache").mkdir(exist_ok=True)
    return folder / "cache"


@pytest.fixture(scope="session")
def vit_folder(tmp_path_factory):
    """``vit_folder(width=768)`` -> a folder to name as ``model.name`` for digits; no weights."""
    from transformers import ViTConfig

    @functools.cache
    def make(width=32, layers=2, dropout=0.0):
        folder = tmp_path_factory.mktemp("vit")
        ViTConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        ).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def dropout_backbone(vit_folder):
    """The folder of a small ViT whose dropout is not zero."""
    return vit_folder(dropout=0.2)


@pytest.fixture(scope="session")
def small_vit(vit_folder):
    """The folder of a ViT of the width of vit-digits with half of its blocks."""
    return vit_folder(width=64)


@pytest.fixture(scope="session")
def small_backbone():
    """Overrides of :func:`small`; a folder whose tests start no commands has its own."""
    return []


@pytest.fixture
def small(cache, tmp_path, small_backbone):
    """``small("method=ravan", ...)`` -> an experiment whose runs lie in this test's folder."""
    from trishul_ray.experiment.loading import load_experiment

    def make(*overrides):
        places = [f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}"]
        return load_experiment(None, [*SMALL, *small_backbone, *places, *overrides])

    return make


@pytest.fixture(scope="session")
def executor(cache, small_vit):
    """``executor("method=ravan", ...)`` -> an inline executor with its experiment, without Ray."""
    from trishul_ray.experiment.loading import load_experiment
    from trishul_ray.federation.inline import InlineExecutor
    from trishul_ray.federation.prepare import prepare_run

    @functools.cache
    def make(*overrides):
        here = ["federation.rounds=2", "resources.backend=inline", f"storage.cache={cache}"]
        here.append(f"model.name={small_vit}")
        experiment = load_experiment(None, [*SMALL, *here, *overrides])
        return InlineExecutor(experiment, prepare_run(experiment))

    return make


@pytest.fixture(scope="session")
def inline_result(cache, tmp_path_factory):
    """``inline_result(experiment)`` -> what the same run gives in one process, computed once."""
    from trishul_ray.experiment.loading import build_experiment
    from trishul_ray.federation.inline import InlineDriver
    from trishul_ray.federation.prepare import prepare_run

    results = {}

    def run(experiment):
        # Rounds that are scored are no part of the id.
        key = experiment.id, *sorted(experiment.scored_rounds)
        if key not in results:
            fields = experiment.to_dict()
            fields["storage"]["runs"] = str(tmp_path_factory.mktemp("inline"))
            own = build_experiment(fields)
            assert own.id == experiment.id
            results[key] = finish(InlineDriver(own, prepare_run(own), "inline"))
        return results[key]

    return run


def finish(driver):
    """Drive to the end; the result, with everything told on the way as ``events``."""
    standing = driver.begin()
    told, events = list(standing.records), list(standing.events)
    while not standing.finished:
        standing = driver.step()
        told += standing.records
        events += standing.events
    final = driver.final()
    # Each record is told once, in order, whatever happened.
    assert [record.round for record in told] == [
        record.round for record in final.checkpoint.records
    ]
    final.__dict__["events"] = events
    return final


@pytest.fixture(scope="session")
def drive_to_end():
    """See :func:`finish`."""
    return finish


@pytest.fixture(scope="session")
def assert_same():
    """``assert_same(result, reference)``: same bytes of the state, same metrics."""

    def check(result, reference):
        assert result.digest == reference.digest
        assert untimed(result.checkpoint.records) == untimed(reference.checkpoint.records)

    return check


@pytest.fixture(scope="session")
def fork_server():
    """Fork server of the workers of every local Ray of these tests."""
    from trishul_ray.federation.on_ray.fork_server import ForkServer

    with ForkServer() as server:
        yield server


@pytest.fixture(scope="module")
def local_ray(fork_server):
    """A local Ray with two CPUs, started as a run starts it."""
    from trishul_ray.federation.on_ray.session import ray_session

    with ray_session(2, fork_server) as free:
        yield free


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


def hear_signals():
    """Undo what a child inherits of tests in the background (no SIGINT) or of nohup (no SIGHUP)."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


class Command:
    """A command under way, with all the processes it has started."""

    def __init__(self, words, env, cwd, **options):
        self.mark = uuid.uuid4().hex
        self.errors: list[str] = []
        plain = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options = plain | {"preexec_fn": hear_signals} | options
        self.process = subprocess.Popen(
            words, env={**env, MARK: self.mark}, cwd=cwd, start_new_session=True, **options
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

    def processes(self):
        """Its processes that live now."""
        return marked(self.mark)

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


@pytest.fixture
def start(cache, tmp_path):
    """``start(words, **environment)`` -> a :class:`Command`; nothing of it outlives the test."""
    commands = []
    repository = str(Path(__file__).parents[1])

    def begin(*words, cwd=tmp_path, options=(), **environment):
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TRISHUL_"))}
        paths = [repository, *filter(None, [inherited.get("PYTHONPATH")])]
        fixed = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        env = {**inherited, **fixed, "TRISHUL_CACHE": str(cache), **environment}
        command = Command([str(word) for word in words], env, cwd, **dict(options))
        commands.append(command)
        return command

    yield begin
    for command in commands:
        command.sweep()


@pytest.fixture
def ray_head(start):
    """``ray_head(home, *words, token=...)`` -> the command and the port of a head with two CPUs."""
    started = []

    def begin(home, *words, token=None, cwd=None, **environment):
        home.mkdir()
        if token is not None:
            (home / ".ray").mkdir()
            (home / ".ray" / "auth_token").write_text(token)
        port = free_port()
        # Ray's sockets need a short path.
        folder = Path("/tmp") / f"trishul-{os.getpid()}-{port}"
        command = start(
            Path(sys.executable).with_name("ray"), "start", "--head", "--block",
            f"--port={port}", "--num-cpus=2", f"--temp-dir={folder}", "--disable-usage-stats",
            *words, cwd=cwd or home, options={"stdout": -3, "stderr": -3}, HOME=str(home),
            **environment,
        )  # fmt: skip
        started.append((command, folder))
        return command, port

    yield begin
    for command, folder in started:
        command.process.send_signal(signal.SIGTERM)
        command.left_behind(10)
        command.sweep()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def plain_figures():
    """Figures of the runs of a module are their numbers; see :func:`write_numbers`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trishul_ray.runs.artifacts.save_png", write_numbers)
        yield


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A database with MLflow's schema and nothing else, created once: it takes seconds."""
    from trishul_ray.tracking.mlflow_store import open_client

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_client(f"sqlite:///{file}")
    return file


@pytest.fixture
def mlflow_store(tmp_path, empty_store):
    """MLflow's database, empty, in this test's folder ``runs``."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    return shutil.copy(empty_store, tmp_path / "runs" / "mlflow.db")


@pytest.fixture
def called(monkeypatch, capsys):
    """``called("run", ...)`` -> exit code, stdout, stderr of the command, in this process."""
    from trishul_ray import cli

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["trishul", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def trishul(start):
    """``trishul("run", "seed=1", ...)`` -> the command line under way, with a small experiment."""
    return functools.partial(start, sys.executable, "-u", "-m", "trishul_ray.cli")


@pytest.fixture(scope="session")
def small_words():
    """The overrides of :func:`small`, for a command line."""
    return SMALL


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server on localhost, with all its data in memory."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_bucket(s3_server, monkeypatch):
    """``s3_bucket(path)`` -> the URI of a path in a bucket of this test's own."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    host, port = s3_server.get_host_and_port()
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket=name)

    def uri(path, bucket=name):
        options = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        return f"s3://{bucket}/{path}?{options}"

    return uri
