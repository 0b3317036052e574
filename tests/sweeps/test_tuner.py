"""Checks of a cluster before trials start."""

import pytest

from trishul_ray.errors import InputError
from trishul_ray.sweeps import tuner
from trishul_ray.sweeps.tuner import check_stores

#: Id of a node that no cluster has.
GONE = "a" * 56

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_node_that_has_gone_meanwhile_is_not_asked(tmp_path, monkeypatch):
    nodes = {**tuner.working_nodes(), GONE: {"CPU": 1.0}}
    monkeypatch.setattr(tuner, "working_nodes", lambda: nodes)
    check_stores([str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_nodes_do_not_see_is_refused(tmp_path, monkeypatch):
    (node,) = tuner.working_nodes()
    monkeypatch.setattr(tuner, "working_nodes", lambda: {node: {}, GONE: {}})
    monkeypatch.setattr(tuner.Store, "write", lambda store, name, data: None)
    with pytest.raises(InputError, match="is not seen by 1 of 2 nodes"):
        check_stores([str(tmp_path)])
