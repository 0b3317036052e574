import pytest

from trishul_ray.doctor import machine


def test_packages_names_missing_and_out_of_range_versions(monkeypatch):
    needs = [machine.Requirement(text) for text in ("no-such-package>=1", "numpy<1", "rich")]
    monkeypatch.setattr(machine, "_required", lambda: iter(needs))
    check = machine.check_packages()
    assert check.status == "fail"
    assert "missing: no-such-package" in check.detail
    assert "numpy" in check.detail and "(needs <1)" in check.detail and "rich" not in check.detail


def test_packages_warns_of_untested_versions(monkeypatch):
    monkeypatch.setattr(machine, "_tested_versions", lambda: {"numpy": "2.0.0"})
    monkeypatch.setattr(machine, "_required", lambda: iter([machine.Requirement("numpy")]))
    check = machine.check_packages()
    assert check.status == "warn" and "(tested 2.0.0)" in check.detail


def test_constraints_pin_every_required_package():
    pins = machine._tested_versions()
    required = list(machine._required())
    assert len(required) > 10
    for need in required:
        assert need.specifier.contains(pins[need.name.lower()]), need


@pytest.mark.parametrize("value", ["0", "many", "100000"])
def test_cpus_warns_of_thread_settings_that_do_not_fit(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    check = machine.check_cpus()
    assert check.status == "warn" and f"OMP_NUM_THREADS={value}" in check.detail
