import io

import pytest
from rich.console import Console

from trishul_ray.tracking.sweep_progress import SHOWN, SweepProgress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_one_plain_line_for_each_finished_cell_with_the_time_left(clock):
    console = Console(file=io.StringIO(), width=40)
    with SweepProgress(console, clock) as progress:
        for name in "abc":
            progress.add(name, f"cell {name}", 4)
        progress.start("a")
        progress.start("b")
        for round_ in range(5):
            progress.round("a", round_, {"accuracy": round_ / 10, "loss": 1.0, "rank_energy": 3})
            clock.now += 5
        progress.end("a")
        # Continues after round 2 of an earlier attempt: these two rounds took no time today.
        progress.round("b", 2, {})
        progress.round("b", 3, {"accuracy": 0.7})
        progress.retry("b", "killed", 2, 3)
        progress.start("b")
        progress.round("b", 3, {})
        progress.end("b", failure="no luck")
    assert console.file.getvalue().splitlines() == [
        # 4 rounds in 25 s, 8 left
        "1/3  cell a: accuracy 40.00%  loss 1  25.0 s  about 50.0 s left",
        "cell b: killed; attempt 2 of 3 follows",
        # 5 rounds, 4 left
        "2/3  cell b: no luck  about 20.0 s left",
    ]


def test_a_terminal_shows_running_cells_and_counts(clock):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with SweepProgress(console, clock) as progress:
        for number in range(SHOWN + 3):
            progress.add(str(number), f"[cell] {number}", 2)
            progress.start(str(number))
        progress.round("0", 0, {})
        progress.round("0", 1, {"accuracy": 0.5})
        progress.end("1", failure="broken")
        progress._bar.refresh()
        shown = [task for task in progress._bar.tasks if task.visible]
    text = console.file.getvalue()
    assert "cells 1/15" in text and "14 running, 1 failed" in text
    assert "[cell] 0" in text and "round 1/2  accuracy 50.00%" in text
    assert "1/15  [cell] 1: broken" in text
    assert len(shown) == 1 + SHOWN


def test_cells_that_a_search_will_name_are_counted_from_the_start(clock):
    console = Console(file=io.StringIO(), width=100)
    with SweepProgress(console, clock) as progress:
        progress.expect(3, 2)
        for name in "aab":  # two samples may be alike
            progress.add(name, name, 2)
            progress.start(name)
            for round_ in range(3):
                progress.round(name, round_, {"accuracy": 0.5})
                clock.now += 5
            progress.end(name, stopped=f"stopped {name}" if name == "b" else None)
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["1/3", "1/2", "2/2"]
    assert lines[0].endswith("about 30.0 s left") and lines[-1] == "2/2  b: stopped b"
