"""The cluster file, the tunnel, and what Ray's autoscaler keeps to itself."""

import sys
import textwrap
import time
from pathlib import Path

import pytest
from ray.autoscaler.v2.schema import ClusterStatus, LaunchRequest
from ray.autoscaler.v2.utils import ClusterStatusFormatter

from trishul_ray.errors import InputError, RunError
from trishul_ray.jobs import ray_up
from trishul_ray.jobs.ray_up import open_tunnel, read_shortages, results_of

CLUSTER = Path(__file__).parents[2] / "cluster"


@pytest.mark.parametrize("name", ["aws.yaml", "onprem.yaml"])
def test_the_place_of_runs_is_that_of_the_nodes(name, tmp_path):
    text = (CLUSTER / name).read_text(encoding="utf-8")
    place = "s3://mine" if name == "aws.yaml" else "/shared"
    file = tmp_path / name
    file.write_text(text.replace("s3://CHANGE-ME", place).replace("/mnt/CHANGE-ME", place))
    assert results_of(file) == f"{place}/runs"


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("a: [", "while parsing"), ("- a", "it has no cluster_name")],
)
def test_a_wrong_file_is_one_line(tmp_path, text, message):
    file = tmp_path / "cluster.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        results_of(file)
    assert "\n" not in str(caught.value)


def test_what_could_not_be_started_is_said():
    launch = LaunchRequest(
        instance_type_name="g6.2xlarge",
        ray_node_type_name="spot-g6-2xlarge",
        count=2,
        state=LaunchRequest.Status.FAILED,
        request_ts_s=int(time.time()),
        failed_ts_s=int(time.time()),
        details="InsufficientInstanceCapacity: no spot capacity in us-east-1a",
    )
    pending = LaunchRequest(
        instance_type_name="m7i.large",
        ray_node_type_name="driver",
        count=1,
        state=LaunchRequest.Status.PENDING,
        request_ts_s=int(time.time()),
    )
    status = ClusterStatus(failed_launches=[launch], pending_launches=[pending])
    lines = read_shortages(ClusterStatusFormatter.format(status, verbose=True))
    assert len(lines) == 2
    assert lines[0].startswith("pending: driver")
    assert lines[1].startswith("recent failures: spot-g6-2xlarge")
    assert "InsufficientInstanceCapacity" in lines[1]
    assert read_shortages(ClusterStatusFormatter.format(ClusterStatus(), verbose=True)) == []


def fake_ray(monkeypatch, tmp_path, body):
    script = tmp_path / "ray.py"
    script.write_text(textwrap.dedent(body))
    monkeypatch.setattr(ray_up, "_ray", lambda: [sys.executable, str(script)])


def test_a_tunnel_is_open_as_long_as_it_is_used(monkeypatch, tmp_path):
    fake_ray(
        monkeypatch,
        tmp_path,
        """
        import socket, sys, time
        assert sys.argv[1:3] == ["dashboard", "a.yaml"]
        port = int(sys.argv[sys.argv.index("--port") + 1])
        server = socket.create_server(("127.0.0.1", port))
        time.sleep(60)
        """,
    )
    with open_tunnel(Path("a.yaml")) as address:
        port = int(address.rpartition(":")[2])
        assert ray_up._answers(port)
    assert not ray_up._answers(port)


def test_a_head_that_is_not_there_is_one_line(monkeypatch, tmp_path):
    fake_ray(monkeypatch, tmp_path, "import sys; sys.exit('Head node of cluster (x) not found!')")
    message = r"no tunnel to the cluster of a.yaml: Head node .* not found"
    with pytest.raises(RunError, match=message), open_tunnel(Path("a.yaml")):
        pass
