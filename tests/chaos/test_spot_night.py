"""A night of spot machines, its time compressed: every machine lost costs at most a round."""

import json
import random
import re
import threading
import time
from collections import Counter

import pytest
from chaos.audit import rounds_saved
from newcomers import unloaded_after
from ray_nodes import LONG_WAIT, RayNodes

from trishul_ray import load_plugin
from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]

#: More rounds than a night has: both machines have a cell until its end.
CELLS, ROUNDS = 4, 60
#: A round lasts this long at night and no time by day, on any computer, and notes that it began.
SECONDS = 1.5
PACED = f"""
import time
from pathlib import Path

from trishul_ray.config.section import Section
from trishul_ray.stages import Stage, register_stage


class PacedConfig(Section):
    folder: str = ""


@register_stage("paced")
class Paced(Stage):
    Config = PacedConfig

    def broadcast(self, number, sent):
        with (Path(self.config.folder) / "rounds").open("a") as file:
            file.write(f"{{self.settings.seed}} {{number}}\\n")
        if not (Path(self.config.folder) / "morning").exists():
            time.sleep({SECONDS})
        return sent
"""
#: Hours, in each of which a machine is taken away with this probability. An hour lasts until its
#: rounds are saved.
HOURS, SHARE, MACHINES = 4, 0.3, 2
ROUNDS_PER_HOUR = 5
#: The hour in which a machine is lost without notice.
CRASH = 1
#: The title of a trial's process while a round is in progress.
TRAINS = "Trainable.train"
#: Real seconds of the two minutes of notice, which a start-up limits.
NOTICE = 6.0


class Night(threading.Thread):
    """Takes machines away as drawn, each one replaced at once, until the night is over."""

    def __init__(self, cluster, runs, morning):
        super().__init__(daemon=True)
        self.cluster, self.runs, self.morning = cluster, runs, morning
        self.draw = random.Random(3)
        self.taken, self.error, self.over = [], None, threading.Event()
        self.saved_before_crash = {}

    def run(self):
        try:
            for hour in range(HOURS):
                while sum(rounds_saved(self.runs).values()) < hour * ROUNDS_PER_HOUR:
                    if self.over.wait(0.1):
                        return
                if hour == CRASH:
                    self.crash()
                for place in range(MACHINES):
                    if self.draw.random() < SHARE and not self.over.is_set():
                        self.take(place)
        except Exception as error:
            self.error = error
        finally:
            self.morning.touch()

    def take(self, place):
        """Take a machine away that trains."""
        node = self.cluster.nodes[1 + place]
        while not node.processes(TRAINS):
            if self.over.wait(0.02):
                return
        node.metadata.interrupt(NOTICE)
        time.sleep(NOTICE)
        self.taken.append(node.address)
        self.replace(place)

    def crash(self):
        """Kill a machine in the middle of a round."""
        while not self.over.wait(0.02):
            for place in range(MACHINES):
                if self.cluster.nodes[1 + place].processes(TRAINS):
                    self.saved_before_crash = rounds_saved(self.runs)
                    self.replace(place)
                    return

    def replace(self, place):
        self.cluster.nodes[1 + place].kill()
        self.cluster.nodes[1 + place] = self.cluster.add(watched=True)
        self.cluster.nodes.pop()


@pytest.fixture
def cluster(start, tmp_path):
    nodes = RayNodes(start, tmp_path)
    nodes.add(cpus=0)
    for _ in range(MACHINES):
        nodes.add(watched=True)
    yield nodes
    nodes.close()


@pytest.fixture
def paced(tmp_path):
    """The file of the stage that paces rounds, loaded."""
    file = tmp_path / "paced.py"
    file.write_text(PACED)
    with unloaded_after():
        load_plugin(file)
        yield file


def test_a_night_of_preemptions(cluster, trishul, small_words, tmp_path, inline_result, paced):
    long = [f"federation.rounds={ROUNDS}", f"paced.folder={tmp_path}"]
    words = [*small_words, *long, "evaluation.diagnostics_every=0", "storage.runs=runs"]
    axis = ["--axis", f"seed=0..{CELLS - 1}", "--retries=1"]
    # Each machine prepares its own data, in its own home; so does the driver.
    places = {"TRISHUL_CACHE": "~/cache", "HOME": str(tmp_path)}
    runs = tmp_path / "runs"
    inline = "resources.backend=inline"
    sweep = trishul(
        "sweep", "--plugin", paced, *axis, *words, inline, **cluster.environment, **places
    )
    sweep.wait_for("joining the Ray cluster", LONG_WAIT)
    night = Night(cluster, runs, tmp_path / "morning")
    night.start()
    code, out, errors = sweep.end(900)
    night.over.set()
    night.join(LONG_WAIT)
    assert code == 0, out + errors
    assert night.error is None and len(night.taken) >= 3
    begun = Counter((tmp_path / "rounds").read_text().splitlines())
    for seed in range(CELLS):
        experiment = load_experiment(None, [*words, f"seed={seed}"])
        result = json.loads((runs / experiment.id / "result.json").read_text())
        assert result["state_sha256"] == inline_result(experiment).digest
    # With notice a cell goes on elsewhere; without, and only then, an attempt has failed.
    assert "it goes on elsewhere" in errors
    ((dead, later),) = re.findall(r"seed=(\d): .*attempt 2 of 2 follows((?s:.*))", errors)
    assert "follows" not in later, errors
    # The round that was in progress is lost at most; a machine with notice ends its round.
    assert len(begun) == CELLS * ROUNDS
    repeated = begun - Counter(begun.keys())
    assert repeated.total() <= 1 and all(line.startswith(f"{dead} ") for line in repeated), (
        repeated,
        dead,
    )
    killed = load_experiment(None, [*words, f"seed={dead}"]).id
    if killed in night.saved_before_crash:  # else it was in its first round
        kept = re.findall(rf"seed={dead}: continuing after round (\d+)", later)
        assert int(kept[0]) >= night.saved_before_crash[killed]
    assert sweep.left_behind() == []
    for node in cluster.nodes:
        assert node.processes("CellTrial") + node.processes("Trainable") == []
    assert len(list(tmp_path.glob("node-*/cache/data/digits-*/train.arrow"))) > MACHINES
