"""Output of commands: no truncation, no markup in names, no traceback on an interrupt."""

import io
import sys
from pathlib import Path

import pytest
import yaml
from rich.table import Column, Table

from trishul_ray.cli import output
from trishul_ray.tracking.progress import RunProgress
from trishul_ray.tracking.terminal import PlainConsole

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def printed(monkeypatch, capsys, table, width, terminal=True):
    file = io.StringIO()
    console = PlainConsole(width=width, force_terminal=terminal, color_system=None, file=file)
    monkeypatch.setattr(output, "out", console)
    output.print_table(table)
    return file.getvalue() + capsys.readouterr().out


def wide_table():
    table = Table("claim", "number", Column("verdict", justify="right"))
    text = "accuracy: TRISHUL − RAVAN: +0.0012 (−0.0034 to +0.0056); 2 of 15 seen"
    table.add_row("Accuracy is [highest] of all methods :a:", text, "seen")
    table.add_row("", "80.12345%", "undecided")
    return table


@pytest.mark.parametrize("width", [40, 80, 100])
def test_table_fits_the_terminal_and_is_complete(monkeypatch, capsys, width):
    text = printed(monkeypatch, capsys, wide_table(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("[highest]", ":a:", "(−0.0034", "80.12345%", "undecided"):
        assert word in text


def test_pipe_gets_the_full_table(monkeypatch, capsys):
    text = printed(monkeypatch, capsys, wide_table(), 40, terminal=False)
    assert "+0.0012 (−0.0034 to +0.0056); 2 of 15 seen" in text


EVIL = "\x1b]0;owned\x07\x1b[2Ja\r\x9b31m"


@pytest.mark.parametrize("terminal", [True, False])
def test_names_do_not_control_the_terminal(monkeypatch, capsys, terminal, called):
    table = Table(EVIL, Column(EVIL), title=EVIL)
    table.add_row(EVIL, EVIL)
    text = printed(monkeypatch, capsys, table, 80, terminal)
    file = io.StringIO()
    console = PlainConsole(width=80, force_terminal=terminal, color_system=None, file=file)
    with RunProgress(2, console) as progress:
        progress.phase(EVIL)
        progress.note(f"class {EVIL}")
    text += file.getvalue()
    assert r"class \x1b]0;owned\x1b[2Ja\x9b31m" in text
    for start in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "a\r"):
        assert start not in text
    code, _, error = called("run", f"dataset={EVIL}")
    assert code == 2 and "\x1b" not in error and r"\x1b[2Ja" in error


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_unknown_to_a_terminal_are_escaped(called, monkeypatch, encoding):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert called("run", "--fields") == (0, "", "")
    terminal.flush()
    assert rb"\u03bb" in terminal.buffer.getvalue()


def test_a_configuration_is_printed_unchanged(called, tmp_path):
    name = "[red]a[/] :smile: [/nothing] " + 30 * "word "
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"tracking": {"experiment": name.strip()}}))
    code, out, error = called("run", tmp_path / "a.yaml", "--show")
    assert code == 0, error
    assert yaml.safe_load(out)["tracking"]["experiment"] == name.strip()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dataset=cifar1000"], "unknown dataset 'cifar1000'"),
        (["dataset=images", "data.path=nowhere"], "'nowhere' does not exist"),
        (["dataset=images"], "data.path is not set"),
        (["dataset=table", "data.path=notes.xlsx"], "must be one of .parquet"),
        (["dataset=digits", "data.path=notes.xlsx"], "data.path requires user data"),
        (["model=vit-digit"], "did you mean 'vit-digits'?"),
        (["dataset=table", "data.path=x.csv", "data.columns={label: b}"], "data.columns.label='b'"),
        (["dataset=table", "data.path=x.csv"], "all rows have class 'yes'"),
        (["dataset=images", "data.path=photos"], "2 images cannot be read: photos/a/1.png"),
        (["budget=64"], "exceeds the width 64 of vit.layers.0.attention.q_proj (64x64)"),
        (["adapter.targets=[qerry]"], "no module is named 'qerry'; nearest: "),
    ],
)
@pytest.mark.parametrize("show", [True, False])
def test_rejected_run_has_no_id(called, monkeypatch, tmp_path, words, message, show):
    """Reject a run before Ray starts."""
    monkeypatch.setattr("trishul_ray.federation.on_ray.session.ray_session", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.xlsx").write_bytes(b"PK")
    (tmp_path / "x.csv").write_text("text,label\n" + 9 * "a,yes\n")
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.png").write_text(LFS)
    code, out, error = called("run", *words, *["--show"] * show)
    assert (code, out) == (2, "") and message in error


def test_missing_model_is_shown_unchecked(called, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, error = called("run", "model=nobody/nothing", "adapter.targets=[q]", "--show")
    assert code == 0 and out.startswith("# id: ")
    assert error.startswith("could not check that the adapters fit the model: model.name='nobody/")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["federation.clients=2000"], "requires 2000 training rows"),
        (["model=nobody/nothing"], "model.name='nobody/nothing' not found"),
        (["resources.actors=50", "resources.cpus_per_actor=50"], "exceed the cluster's"),
        (["tracking.uri=databricks", "tracking.mlflow=true"], "tracking.uri='databricks'"),
        (["devices.kind=file", "devices.path=nowhere.parquet"], "devices.path='nowhere.parquet'"),
        (
            ["storage.runs=/dev/null/runs"],
            "storage.runs: /dev/null cannot be written: Not a directory",
        ),
    ],
)
def test_wrong_input_is_rejected_before_ray_starts(called, monkeypatch, tmp_path, words, message):
    monkeypatch.setattr("trishul_ray.federation.on_ray.session.ray_session", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    code, _, error = called("run", *words)
    assert code == 2 and message in error and "starting Ray" not in error


def test_the_shell_completes_commands(start):
    words = {"COMP_WORDS": "trishul ex", "COMP_CWORD": "1", "_TRISHUL_COMPLETE": "complete_bash"}
    trishul = Path(sys.executable).with_name("trishul")
    code, out, error = start(trishul, **words).end()
    assert (code, out.split()) == (0, ["export"]), error


@pytest.mark.parametrize("module", ["typer", "trishul_ray.cli.output"])
def test_interrupted_import_ends_silently(start, module):
    code = f"""
import signal, sys
from trishul_ray.cli import main
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
main()
"""
    assert start(sys.executable, "-c", code, "--version").end() == (130, "", "")
