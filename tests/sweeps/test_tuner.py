"""Resources that trials request."""

import logging
import os
import signal

import pytest

from trishul_ray.errors import InputError
from trishul_ray.sweeps import tuner
from trishul_ray.sweeps.tuner import request

TWO_CORES = [{"CPU": 2.0}]


@pytest.mark.parametrize(
    ("words", "nodes", "runs", "bundles"),
    [
        ([], TWO_CORES, 4, [{"CPU": 1.0}]),
        ([], TWO_CORES, 1, [{"CPU": 1.0}] * 2),
        ([], [{"CPU": 16.0}], 1, [{"CPU": 1.0}] * 3),  # clients of a cohort
        (["resources.actors=2"], TWO_CORES, 4, [{"CPU": 1.0}] * 2),
        (["federation.clients_per_actor=2"], TWO_CORES, 4, [{"CPU": 1.0}] * 2),
        (
            ["resources.gpus_per_actor=0.25"],
            [{"CPU": 8.0, "GPU": 1.0}],
            4,
            [{"CPU": 1.0, "GPU": 0.25}],
        ),
    ],
)
def test_trial_requests_its_share_of_the_nodes(small, words, nodes, runs, bundles):
    assert request(small(*words), nodes, runs)[1] == ({}, *bundles)


def test_inline_trial_computes_in_its_own_bundle(small):
    assert request(small("resources.backend=inline"), TWO_CORES, 1)[1] == ({"CPU": 1.0},)


def test_slices_must_fit_on_nodes(small):
    with pytest.raises(InputError, match=r"resources: 1 x \(4 CPU\) exceed the nodes"):
        request(small("resources.threads=4"), [{"CPU": 3.0}, {"CPU": 3.0}], 1)


def test_request_waits_for_nodes_that_an_autoscaler_adds(small):
    none = [{"CPU": 0.0}]
    assert request(small(), none, 4, may_grow=True)[1] == ({}, {"CPU": 1.0})
    gpu = small("resources.device=cuda")
    assert request(gpu, none, 4, may_grow=True)[1] == ({}, {"CPU": 1.0, "GPU": 1.0})
    with pytest.raises(InputError, match="exceed the cluster's 0 CPU"):
        request(small(), none, 4)


def test_settings_for_tune_end_with_an_error():
    def settings():
        level = logging.getLogger("ray.tune").level
        return level, signal.getsignal(signal.SIGUSR1), dict(os.environ)

    before = settings()
    with pytest.raises(RuntimeError), tuner._quiet_tune():
        signal.signal(signal.SIGUSR1, lambda *_: None)  # as Tune does
        raise RuntimeError
    assert settings() == before
