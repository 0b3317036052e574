"""Progress of runs and sweeps on a terminal and in a file."""

import io

import pytest
from rich.console import Console

from trishul_ray.tracking import progress as module
from trishul_ray.tracking.progress import (
    SHOWN_CELLS,
    RunProgress,
    SweepProgress,
    format_count,
    format_duration,
)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that the test sets."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def plain():
    return Console(file=io.StringIO(), width=40)


def lines(console):
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (4.21, "4.2 s"), (59.96, "1 min 00 s"), (185, "3 min 05 s"),
     (7620, "2 h 07 min"), (float("nan"), "?")],
)  # fmt: skip
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (812, "812"), (12_345, "12.3 k"), (1_840_000, "1.84 M")]
)
def test_format_count(number, text):
    assert format_count(number) == text


def test_plain_line_per_round_has_time_left(clock):
    console = plain()
    with RunProgress(3, console) as progress:
        progress.phase("starting 2 actors")
        clock.now += 10
        for number in (1, 2, 3):
            clock.now += 2
            scores = {"accuracy": 0.5 + number / 10, "loss": 1.0}
            progress.advance(number, {**scores, "uploaded_bytes": 1e6, "seconds": 2})
    assert lines(console) == [
        "starting 2 actors",
        "round 1/3  accuracy 60.00%  loss 1  1 MB up  2.0 s  4.0 s left",
        "round 2/3  accuracy 70.00%  loss 1  2 MB up  2.0 s  2.0 s left",
        "round 3/3  accuracy 80.00%  loss 1  3 MB up  2.0 s  done",
    ]


def test_round_zero_is_the_untuned_backbone(clock):
    console = plain()
    with RunProgress(3, console) as progress:
        clock.now += 60  # Set-up time does not measure the duration of a round.
        progress.advance(0, {"accuracy": 0.1, "loss": 2.3})
        progress.advance(1, {"accuracy": 0.2, "seconds": 2})
    assert lines(console) == [
        "untuned model  accuracy 10.00%  loss 2.3",
        "round 1/3  accuracy 20.00%  2.0 s  4.0 s left",
    ]


def test_unscored_round_repeats_no_accuracy(clock):
    console = plain()
    with RunProgress(4, console) as progress:
        progress.advance(1, {"accuracy": 0.5, "seconds": 1})
        progress.advance(2, {"seconds": 1})
    assert "accuracy" in lines(console)[0]
    assert "accuracy" not in lines(console)[1]


def test_time_left_follows_recent_rounds(clock):
    console = plain()
    with RunProgress(100, console) as progress:
        for number in range(1, 41):
            progress.advance(number, {"seconds": 3 if number < 35 else 6})
    assert lines(console)[-1] == "round 40/100  6.0 s  4 min 48 s left"  # 60 x (4x3 + 6x6)/10


def test_terminal_gets_a_bar_with_notes_above(clock):
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None,
                      legacy_windows=False, _environ={"TERM": "xterm"})  # fmt: skip
    with RunProgress(2, console) as progress:
        progress.phase("loading [cifar100]")
        progress.task_progress("data")("decoding", 0.25)
        clock.now += 5
        progress.advance(1, {"accuracy": 0.4321, "loss": 2.5, "uploaded_bytes": 2_000_000})
        progress.note("actor 1 restarted")
        progress.advance(2, {"accuracy": 0.5432})
    shown = console.file.getvalue()
    assert "\x1b[?25l" in shown and shown.rstrip().endswith("\x1b[?25h")  # The cursor is restored.
    assert "actor 1 restarted" in shown
    last = [line for line in shown.replace("\r", "\n").splitlines() if "round" in line][-1]
    for part in ("round 2/2", "accuracy 54.32%", "loss 2.5", "2 MB up", "done"):
        assert part in last


def test_a_terminal_shows_running_cells_and_counts(clock):
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with SweepProgress(console) as progress:
        for number in range(SHOWN_CELLS + 3):
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
    assert len(shown) == 1 + SHOWN_CELLS


def test_expected_cells_are_counted_from_the_start(clock):
    console = Console(file=io.StringIO(), width=100)
    with SweepProgress(console) as progress:
        progress.expect(3)
        for name in "aab":  # Two samples may be equal.
            progress.add(name, name, 2)
            progress.start(name)
            for round_ in range(3):
                progress.round(name, round_, {"accuracy": 0.5})
                clock.now += 5
            progress.end(name, failure=f"failed {name}" if name == "b" else None)
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["1/3", "1/2", "2/2"]
    assert lines[0].endswith("about 30.0 s left") and lines[-1] == "2/2  b: failed b"


def test_repeated_note_is_printed_once(clock):
    console = plain()
    with RunProgress(1, console) as progress:
        for text in ["actor 3 [cpu] restarted"] * 3 + ["another thing"]:
            progress.note(text)
    assert lines(console) == ["actor 3 [cpu] restarted", "another thing"]


def test_preparation_is_printed_every_five_seconds(clock):
    console = plain()
    with RunProgress(1, console) as progress:
        report = progress.task_progress("digits")
        for step in range(1001):
            report("decoding", step / 1000)
            clock.now += 0.01
        for _ in range(2):
            report("decoding", 1.0)
            report("encoding", 1.0)
    assert lines(console) == [
        "digits: decoding   0%",
        "digits: decoding  50%",
        "digits: decoding 100%",
        "digits: encoding 100%",
    ]


def test_a_finished_cell_is_one_line(clock):
    console = Console(file=io.StringIO(), width=40)
    with SweepProgress(console) as progress:
        for name in "abc":
            progress.add(name, f"cell {name}", 4)
        progress.start("a")
        progress.start("b")
        for round_ in range(5):
            progress.round("a", round_, {"accuracy": round_ / 10, "loss": 1.0, "rank_energy": 3})
            clock.now += 5
        progress.end("a")
        progress.round("b", 2, {})
        progress.round("b", 3, {"accuracy": 0.7})
        progress.retry("b", "killed", 2, 3)
        progress.start("b")
        progress.round("b", 3, {})
        progress.start("c")
        progress.round("c", 0, {})
        clock.now += 100
        progress.round("c", 1, {"accuracy": 0.5})
        progress.end("b", failure="no luck")
    assert lines(console) == [
        "1/3  cell a: accuracy 40.00%  loss 1  25.0 s  about 50.0 s left",
        "cell b: killed; starting attempt 2 of 3",
        "cells 1/3 done, 2 running, their rounds 4/8, about 4 min 10 s left",
        "2/3  cell b: no luck  about 1 min 02 s left",
    ]
