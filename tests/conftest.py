"""Shared fixtures: storage, small real experiments, and commands that leave nothing behind."""

import functools
import os
import shutil
import signal
import sys
from pathlib import Path

# Set before anything imports the hub's client, which reads it once: tests need no network, and
# failing lookups are not repeated.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
from commands import start_command
from ports import free_port
from s3_server import KEYS, S3Server
from tiny_run import SMALL

from trishul_ray.contract.methods import without_timings

# A busy machine must not fail a test; benchmarks measure time.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


#: The slowest files, the longest first: a slow file at the end would leave a worker idle.
LONGEST = [
    *("chaos/test_driver.py", "sweeps/test_reproduce.py", "chaos/test_crash_points.py"),
    *("chaos/test_damaged_files.py", "cluster/test_mlflow_server.py", "cluster/test_ray_up.py"),
    *("chaos/test_sweeps.py"),
    *("federation/on_ray/test_every_shape.py", "cli/test_submit.py", "contract/test_digests.py"),
    *("chaos/test_crashed_commands.py", "chaos/test_crashed_object_store.py"),
    *("methods/test_battery.py", "gpu/test_synchronization.py", "gpu/test_rehearsal.py"),
    *("e2e/test_guides.py", "e2e/test_storage_faults.py", "runs/test_runner.py", "test_api.py"),
    *("tracking/test_mlflow.py", "report/test_figures.py", "federation/test_stacked.py"),
    *("federation/on_ray/test_driver.py", "lab/stages/test_traffic.py", "chaos/test_actors.py"),
]


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(items):
    """Run the longest files first; skip the tests marked gpu on a machine without a GPU."""
    tests = Path(__file__).parent
    order = {tests / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    chosen = [item for item in items if item.get_closest_marker("gpu")]
    if chosen:
        import torch

        if not torch.cuda.is_available():
            for item in chosen:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Return the cache of this machine: the caller's, if any, so that repeated test runs share it.

    Otherwise all workers share one cache, in which each backbone is pretrained once.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    found = Path(os.environ.setdefault("TRISHUL_CACHE", str(folder / "cache")))
    found.mkdir(exist_ok=True)
    return found


@pytest.fixture(scope="session")
def vit_folder(tmp_path_factory):
    """``vit_folder(width=768)`` returns a folder for ``model.name`` on digits, without weights."""
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
    """Return the folder of a small ViT with dropout."""
    return vit_folder(dropout=0.2)


@pytest.fixture(scope="session")
def small_vit(vit_folder):
    """Return the folder of a ViT of the width of vit-digits with half of its blocks."""
    return vit_folder(width=64)


@pytest.fixture(scope="session")
def small_backbone():
    """Return overrides of :func:`small`; folders whose tests start no commands override it."""
    return []


@pytest.fixture
def small(cache, tmp_path, small_backbone):
    """``small("method=ravan", ...)`` returns an experiment whose runs are in this test's folder."""
    from trishul_ray.experiment.loading import load_experiment

    def make(*overrides):
        paths = [f"storage.cache={cache}", f"storage.runs={tmp_path / 'runs'}"]
        return load_experiment(None, [*SMALL, *small_backbone, *paths, *overrides])

    return make


@pytest.fixture(scope="session")
def executor(cache, small_vit):
    """``executor("method=ravan", ...)`` returns an inline executor with its experiment."""
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
    """``inline_result(experiment)`` returns the cached result of the same run in one process."""
    from trishul_ray.experiment.loading import build_experiment
    from trishul_ray.federation.inline import InlineDriver
    from trishul_ray.federation.prepare import prepare_run

    results = {}

    def run(experiment):
        # The id does not depend on the scored rounds.
        key = experiment.id, *sorted(experiment.scored_rounds)
        if key not in results:
            fields = experiment.to_dict(sources=True)
            fields["storage"]["runs"] = str(tmp_path_factory.mktemp("inline"))
            own = build_experiment(fields)
            assert own.id == experiment.id
            results[key] = finish(InlineDriver(own, prepare_run(own), "inline"))
        return results[key]

    return run


def finish(driver):
    """Return the result of a run, with all its reports as ``events``."""
    standing = driver.begin()
    records, events = list(standing.records), list(standing.events)
    while not standing.finished:
        standing = driver.step()
        records += standing.records
        events += standing.events
    final = driver.final()
    # Each record is reported once and in order after any fault.
    assert [record.round for record in records] == [
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
    """``assert_same(result, reference)`` compares the bytes of the state and the metrics."""

    def check(result, reference):
        assert result.digest == reference.digest
        assert without_timings(result.checkpoint.records) == without_timings(
            reference.checkpoint.records
        )

    return check


@pytest.fixture(scope="session")
def fork_server():
    """Start the fork server of the workers of every local Ray of these tests."""
    from trishul_ray.federation.on_ray.fork_server import ForkServer

    with ForkServer() as server:
        yield server


@pytest.fixture(scope="module")
def local_ray(fork_server):
    """Start a local Ray with two CPUs, as a run starts it."""
    from trishul_ray.federation.on_ray.session import ray_session

    with ray_session(2, fork_server) as free:
        yield free


@pytest.fixture
def start(cache, tmp_path):
    """``start(words, **environment)`` returns a :class:`Command`, which ends with the test."""
    commands = []

    def begin(*words, cwd=tmp_path, options=(), **environment):
        environment = {"TRISHUL_CACHE": str(cache), **environment}
        command = start_command(*words, cwd=cwd, options=options, **environment)
        commands.append(command)
        return command

    yield begin
    for command in commands:
        command.sweep()


@pytest.fixture
def ray_head(start):
    """``ray_head(home, *words, token=...)`` returns the command and the port of a Ray head."""
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


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """Create a database with only MLflow's schema, once, because it takes seconds."""
    from trishul_ray.tracking.store import open_client

    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    open_client(f"sqlite:///{file}")
    return file


@pytest.fixture
def mlflow_store(tmp_path, empty_store):
    """Return MLflow's empty database in this test's folder ``runs``."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    return shutil.copy(empty_store, tmp_path / "runs" / "mlflow.db")


@pytest.fixture
def called(monkeypatch, capsys):
    """``called("run", ...)`` returns exit code, stdout, stderr of the command, in this process."""
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
    """``trishul("run", "seed=1", ...)`` starts a command with a small experiment."""
    return functools.partial(start, sys.executable, "-u", "-m", "trishul_ray.cli")


@pytest.fixture(scope="session")
def small_words():
    """Return the overrides of :func:`small`, for a command line."""
    return SMALL


@pytest.fixture(scope="session")
def s3_server():
    """Start an S3 server on localhost, with all its data in memory."""
    server = S3Server()
    server.start()
    yield server
    server.end()


@pytest.fixture
def s3_bucket(s3_server, monkeypatch):
    """``s3_bucket(path)`` returns the URI of a path in a separate bucket of this test."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    own = s3_server.new_bucket()

    def uri(path, bucket=own):
        return s3_server.uri(bucket, path)

    return uri
