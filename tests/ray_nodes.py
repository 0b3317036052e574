"""Several real Ray nodes on this machine, each with a separate address, home and processes."""

import json
import shutil
import sys
import time
from pathlib import Path

from ports import free_port
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

#: Ray notices within seconds that a node is gone.
QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",
}
#: A head whose autoscaler, version 2, starts workers on this machine.
AUTOSCALER = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
}
RAY = Path(sys.executable).with_name("ray")
#: Seconds for a node to start on a loaded machine.
LONG_WAIT = 120


class RayNode:
    """A node: its address, its home folder, and the command that runs it."""

    def __init__(self, address, home, command):
        self.address, self.home, self.command = address, home, command

    def kill(self):
        """Kill all processes of the node at once."""
        self.command.sweep()


class RayNodes:
    """A cluster of nodes with the addresses 127.0.0.2, 127.0.0.3...; the first one is the head.

    Args:
        start: The fixture that starts commands.
        folder: A folder of this test.
    """

    def __init__(self, start, folder):
        self._start, self._folder = start, folder
        self.port, self.metrics_port = free_port(), free_port()
        self.temporary = Path("/tmp") / f"trishul-{self.port}"  # sockets need a short path
        self.nodes = []
        self._count = 1

    @property
    def environment(self):
        """Return the variables to join, even if a token of another cluster exists."""
        mode = {"RAY_AUTH_TOKEN": "f" * 64, "RAY_AUTH_MODE": "disabled"}
        return {"RAY_ADDRESS": f"127.0.0.2:{self.port}", **mode}

    def add(self, cpus=1, autoscaling=None, **variables):
        """Start a node, the head first; with Ray's autoscaler if it is configured."""
        environment = QUICK | variables
        self._count += 1
        address = f"127.0.0.{self._count}"
        home = self._folder / f"node-{self._count}"
        home.mkdir()
        if self._count == 2:
            role = ["--head", f"--port={self.port}", "--include-dashboard=false"]
            role += [f"--temp-dir={self.temporary}", "--disable-usage-stats"]
            role.append(f"--metrics-export-port={self.metrics_port}")
        else:
            role = [f"--address=127.0.0.2:{self.port}"]
        if autoscaling is not None:
            file = home / "ray_bootstrap_config.yaml"  # the location that `ray up` uses
            file.write_text(json.dumps(autoscaling))
            role.append(f"--autoscaling-config={file}")
            environment |= AUTOSCALER
        sizes = [f"--num-cpus={cpus}", f"--object-store-memory={100 * 2**20}"]
        ports = ["--min-worker-port=0", "--max-worker-port=0"]
        with (home / "ray.log").open("w") as log:
            command = self._start(
                RAY, "start", *role, f"--node-ip-address={address}", *sizes, *ports, "--block",
                cwd=home, options={"stdout": log, "stderr": log}, HOME=str(home),
                **environment,
            )  # fmt: skip
        node = RayNode(address, home, command)
        self._wait_for(node)
        self.nodes.append(node)
        return node

    def alive(self):
        """Return the addresses of the nodes that are alive."""
        return {node.node_manager_address for node in self._alive()}

    def _alive(self):
        from ray._raylet import GcsClient

        nodes = GcsClient(address=f"127.0.0.2:{self.port}").get_all_node_info(timeout=5).values()
        return [node for node in nodes if node.state == 0]

    def workers(self):
        """Return the types of the nodes that are alive, without the head, keyed by id."""
        nodes = [node for node in self._alive() if not node.is_head_node]
        return {node.node_id.hex(): node.node_type_name for node in nodes}

    def _wait_for(self, node):
        end = time.monotonic() + LONG_WAIT
        while True:
            said = (node.home / "ray.log").read_text()
            assert node.command.process.poll() is None, said
            try:
                if node.address in self.alive():
                    return
            except Exception as error:  # The head is starting.
                said = str(error)
            assert time.monotonic() < end, said
            time.sleep(0.5)

    def close(self):
        """Stop all nodes."""
        for node in reversed(self.nodes):
            node.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)
