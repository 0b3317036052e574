"""Runs from other machines refer to no paths and files of this machine."""

import io
import shutil

import pytest
import yaml
from rich.console import Console
from tiny_run import TINY

from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.checkpoint import run_folder
from trishul_ray.report.summary import RunSummary
from trishul_ray.runs.folder import open_run
from trishul_ray.runs.runner import run_steps
from trishul_ray.storage.integrity import to_checked_json
from trishul_ray.tracking.progress import RunProgress


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    """Return the folder of runs with a finished run."""
    runs = tmp_path_factory.mktemp("sender")
    experiment = load_experiment(None, [*TINY, f"storage.cache={cache}", f"storage.runs={runs}"])
    for _ in run_steps(experiment, RunProgress(2, Console(file=io.StringIO())), extras=False):
        pass
    return experiment


@pytest.fixture
def received(finished, tmp_path):
    """Copy the run's folder."""
    folder = tmp_path / "runs" / finished.id
    shutil.copytree(run_folder(finished).root, folder)
    return folder


def test_places_come_from_this_machine(received, cache):
    file = received / "config.yaml"
    fields = yaml.safe_load(file.read_text())
    paths = {"runs": "theirs", "cache": "/home/me", "hub": "/home/me"}
    assert not paths.keys() & fields["storage"].keys() and "uri" not in fields["tracking"]
    fields["storage"] |= paths
    fields["tracking"]["uri"] = "http://collects.passwords"
    file.write_text(yaml.safe_dump(fields))
    _, experiment = open_run(str(received), "elsewhere")
    assert experiment.storage.runs == str(received.parent)
    assert (experiment.storage.cache, experiment.storage.hub) == (None, None)
    assert experiment.storage.paths.cache == cache
    assert experiment.tracking.uri is None


@pytest.mark.parametrize("name", ["/etc/passwd", "../b", "a/../../b", "a\0b", "a//b", ""])
def test_listed_files_outside_the_folder_are_rejected(received, finished, name):
    home = run_folder(finished)
    summary = RunSummary.read(home).to_dict()
    for changed in (
        {"files": [*summary["files"], name]},
        {"sha256": summary["sha256"] | {name: "0" * 64}},
    ):
        (received / "result.json").write_bytes(to_checked_json(summary | changed))
        _, experiment = open_run(str(received), "runs")
        with pytest.raises(CorruptFileError, match="is not the name of a file in a folder"):
            RunSummary.read(run_folder(experiment))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("seed", ["59" + ":59" * 2**18, "0x" + "f" * 10**5, "[" * 10**4])
def test_odd_numbers_of_a_configuration_are_rejected(received, seed):
    file = received / "config.yaml"
    file.write_text(file.read_text().replace("seed: 0\n", f"seed: {seed}\n"))
    with pytest.raises(InputError) as rejected:
        open_run(str(received), "runs")
    assert len(str(rejected.value)) < 1000
