"""A night of spot machines, its time compressed: every machine lost costs at most a round."""

import json
import math
import random
import re
import threading
import time

import pytest
from chaos.audit import rounds_saved
from ray_nodes import LONG_WAIT, RayNodes

from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]

CELLS, ROUNDS = 4, 6  # both machines have a cell until the end
#: Seconds of local training in a round, on any computer: a machine of the last hour is taken
#: while there is work left for it.
ROUND_SECONDS = 2.0
#: Hours, in each of which a machine is taken away with this probability. An hour lasts until its
#: share of the rounds is saved; the last rounds are left to the morning.
HOURS, SHARE, MACHINES = 4, 0.3, 2
ROUNDS_PER_HOUR = CELLS * ROUNDS / (HOURS + 1)
#: The hour in which a machine is lost without notice.
CRASH = 1
#: The title of a trial's process while a round is in progress.
TRAINS = "Trainable.train"
#: Real seconds of the two minutes of notice, which a start-up limits.
NOTICE = 6.0


class Night(threading.Thread):
    """Takes machines away as drawn, each one replaced at once, until the night is over."""

    def __init__(self, cluster, checkpoints):
        super().__init__(daemon=True)
        self.cluster, self.checkpoints, self.draw = cluster, checkpoints, random.Random(3)
        self.taken, self.error, self.over = [], None, threading.Event()
        self.saved_before_crash = {}

    def run(self):
        try:
            for hour in range(HOURS):
                while len(self.checkpoints.names) < hour * ROUNDS_PER_HOUR:
                    if self.over.wait(0.1):
                        return
                if hour == CRASH:
                    self.crash()
                for place in range(MACHINES):
                    if self.draw.random() < SHARE and not self.over.is_set():
                        self.take(place)
        except Exception as error:
            self.error = error

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
                    self.saved_before_crash = rounds_saved(self.checkpoints.runs)
                    self.replace(place)
                    return

    def replace(self, place):
        self.cluster.nodes[1 + place].kill()
        self.cluster.nodes[1 + place] = self.cluster.add(watched=True)
        self.cluster.nodes.pop()


class Saved(threading.Thread):
    """Collects the checkpoints that appear: one that is written twice is of a repeated round."""

    def __init__(self, runs):
        super().__init__(daemon=True)
        self.runs, self.names = runs, {}
        self.start()

    def run(self):
        while True:
            for file in self.runs.glob("*/checkpoints/round-*"):
                round_ = int(file.name.split("-")[1])
                self.names.setdefault((file.parts[-3], round_), set()).add(file.name)
            time.sleep(0.2)

    def repeated(self):
        """The rounds that were trained again after they had been saved; the last is saved twice."""
        return [key for key, names in self.names.items() if len(names) > 1 and key[1] < ROUNDS]


@pytest.fixture
def cluster(start, tmp_path):
    nodes = RayNodes(start, tmp_path)
    nodes.add(cpus=0)
    for _ in range(MACHINES):
        nodes.add(watched=True)
    yield nodes
    nodes.close()


@pytest.fixture
def local_steps(small_words, inline_result):
    """As many steps as train for ``ROUND_SECONDS`` on this computer."""
    few, many = 10, 110

    def seconds(steps):
        words = [*small_words, "federation.rounds=1", f"federation.local_steps={steps}"]
        experiment = load_experiment(None, words)
        start = time.perf_counter()
        inline_result(experiment)
        return time.perf_counter() - start

    seconds(1)  # prepares the data
    step = (seconds(many) - seconds(few)) / (many - few)
    return math.ceil(ROUND_SECONDS / step)


def test_a_night_of_preemptions(
    cluster, trishul, small_words, tmp_path, inline_result, local_steps
):
    long = [f"federation.rounds={ROUNDS}", f"federation.local_steps={local_steps}"]
    words = [*small_words, *long, "evaluation.diagnostics_every=0", "storage.runs=runs"]
    axis = ["--axis", f"seed=0..{CELLS - 1}", "--retries=1"]
    # Each machine prepares its own data, in its own home; so does the driver.
    places = {"TRISHUL_CACHE": "~/cache", "HOME": str(tmp_path)}
    runs = tmp_path / "runs"
    inline = "resources.backend=inline"
    sweep = trishul("sweep", *axis, *words, inline, **cluster.environment, **places)
    sweep.wait_for("joining the Ray cluster", LONG_WAIT)
    checkpoints = Saved(runs)
    night = Night(cluster, checkpoints)
    night.start()
    code, out, errors = sweep.end(900)
    night.over.set()
    night.join(LONG_WAIT)
    assert code == 0, out + errors
    assert night.error is None and len(night.taken) >= 3
    for seed in range(CELLS):
        experiment = load_experiment(None, [*words, f"seed={seed}"])
        result = json.loads((runs / experiment.id / "result.json").read_text())
        assert result["state_sha256"] == inline_result(experiment).digest
    # With notice a cell goes on elsewhere; without, and only then, an attempt has failed.
    assert "it goes on elsewhere" in errors
    ((dead, later),) = re.findall(r"seed=(\d): .*attempt 2 of 2 follows(.*)", errors, re.DOTALL)
    assert "follows" not in later
    # The round that was in progress is lost at most: none that was saved is repeated.
    assert len(checkpoints.names) == CELLS * ROUNDS and checkpoints.repeated() == []
    killed = load_experiment(None, [*words, f"seed={dead}"]).id
    if killed in night.saved_before_crash:  # else it was in its first round
        kept = re.findall(rf"seed={dead}: continuing after round (\d+)", later)
        assert int(kept[0]) >= night.saved_before_crash[killed]
    assert sweep.left_behind() == []
    for node in cluster.nodes:
        assert node.processes("CellTrial") + node.processes("Trainable") == []
    assert len(list(tmp_path.glob("node-*/cache/data/digits-*/train.arrow"))) > MACHINES
