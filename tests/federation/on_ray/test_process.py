"""Settings of the driver that actors apply."""

import os

from trishul_ray.federation.on_ray.process import WorkerEnvironment


def test_an_actor_applies_the_environment_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRISHUL_CACHE", "here")
    environment = WorkerEnvironment.of_this_process()
    monkeypatch.setenv("TRISHUL_CACHE", "there")
    monkeypatch.chdir("/")
    environment.apply()
    assert (os.getcwd(), os.environ["TRISHUL_CACHE"]) == (str(tmp_path), "here")
    WorkerEnvironment("/no/such/folder", {}).apply()
    assert os.getcwd() == str(tmp_path)
