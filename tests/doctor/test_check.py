import io

from rich.console import Console

from trishul_ray.doctor import diagnose
from trishul_ray.doctor.check import Check, exit_code, render


def test_diagnose_makes_every_check_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path / "cache"))
    checks = diagnose(runs=str(tmp_path / "runs"))
    assert [check.name for check in checks] == [
        "python", "packages", "devices", "cpus", "memory", "ray", "ray cluster", "ray token",
        "runs folder", "cache folder", "mlflow store", "mirror", "hub",
    ]  # fmt: skip
    assert {check.name for check in checks if check.status == "fail"} <= {"ray token"}
    assert all(check.hint for check in checks if check.status != "ok")
    assert not any("\n" in check.detail + check.hint for check in checks)
    assert list(tmp_path.iterdir()) == []


def test_the_command_exits_with_1_if_a_check_fails(called, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, error = called("doctor", "--runs", tmp_path / "file" / "runs")
    assert code == 1 and error == ""
    assert "cannot be written" in out and "a run would fail here" in out


def test_exit_code():
    ok, warn, fail = (Check("a", status, "b") for status in ("ok", "warn", "fail"))
    assert exit_code([ok, warn]) == 0
    assert exit_code([ok, fail, warn]) == 1


def test_render_shows_detail_and_hint():
    console = Console(file=io.StringIO(), width=60)
    render([Check("disk", "ok", "x [red] y"), Check("ray", "fail", "gone", "do this")], console)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "ok    disk  x [red] y"
    assert lines[1] == "fail  ray   gone"
    assert lines[2].strip() == "do this"
    assert lines[3].startswith("1 of 2 checks failed")
