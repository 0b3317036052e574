"""Drain a Ray node before its EC2 spot instance is taken away.

Run it on every spot worker, after ``ray start``::

    python -m trishul_ray.cluster.spot_watcher --address "$RAY_HEAD_IP:6379" &

EC2 announces an interruption in the instance metadata, two minutes ahead, and sometimes earlier a
recommendation to rebalance. Ray does not read them. The watcher polls both and asks Ray to drain
the node with the reason PREEMPTION: the node takes no new work, and what dies with it after the
deadline is not counted as a failure. It ends with its node.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

#: Where every EC2 instance finds its metadata.
METADATA_URL = "http://169.254.169.254"
#: Seconds between two looks; EC2 recommends five.
INTERVAL = 5.0
#: Seconds in which the metadata must answer.
TIMEOUT = 2.0
#: Seconds for which a metadata token is valid, the most that EC2 allows.
TOKEN_SECONDS = 21600
#: Seconds from the notice to the interruption, if the notice does not say.
NOTICE_SECONDS = 120.0
#: The deadline is this many seconds before the interruption: Ray takes a death before the deadline
#: for a failure.
MARGIN_SECONDS = 5.0

_INTERRUPTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

_logger = logging.getLogger("trishul_ray.spot_watcher")


class InstanceMetadata:
    """The metadata of this EC2 instance, by version 2 of the service, which requires a token.

    Args:
        url: Where the service is.
    """

    def __init__(self, url: str = METADATA_URL) -> None:
        self.url = url.rstrip("/")
        self._token: str | None = None
        # Never through a proxy: it would answer for another machine.
        self._opener: OpenerDirector = build_opener(ProxyHandler({}))

    def get(self, path: str) -> str | None:
        """Return the text at a path, or None if there is none.

        Raises:
            OSError: The service does not answer.
        """
        for token in (self._token, None):  # with a new token if the old one has expired
            if token is None:
                seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
                token = self._token = self._send("PUT", "/latest/api/token", seconds)
            try:
                return self._send("GET", path, {"X-aws-ec2-metadata-token": token})
            except HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401:
                    raise
        raise OSError(f"{self.url} refuses its own token")

    def _send(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = Request(self.url + path, headers=headers, method=method)
        with self._opener.open(request, timeout=TIMEOUT) as response:
            return str(response.read().decode(errors="replace"))


@dataclass(frozen=True)
class Notice:
    """What EC2 announces: ``message``, and when (seconds since the epoch; None: not said)."""

    message: str
    when: float | None


def read_notice(metadata: InstanceMetadata, *, rebalance: bool = True) -> Notice | None:
    """Return the interruption that EC2 announces, or else its recommendation to rebalance, if any.

    Raises:
        OSError: The metadata service does not answer.
    """
    if (text := metadata.get(_INTERRUPTION)) is not None:
        fields = _json(text)
        when = _seconds(fields.get("time"))
        action = fields.get("action", "interrupt")
        return Notice(f"EC2 will {action} this spot instance", when or time.time() + NOTICE_SECONDS)
    if rebalance and metadata.get(_REBALANCE) is not None:
        return Notice("EC2 recommends to rebalance this spot instance", None)
    return None


def _json(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        return {}  # its presence is the notice
    return fields if isinstance(fields, dict) else {}


def _seconds(stamp: object) -> float | None:
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        return None


class Cluster(Protocol):
    """What the watcher needs of Ray's control service; see :class:`RayCluster`."""

    def find_node(self, metadata: InstanceMetadata) -> str | None:
        """Return the id of the node on this instance, or None if there is none yet."""

    def is_alive(self, node: str) -> bool:
        """Return whether a node is alive."""

    def drain(self, node: str, notice: Notice) -> None:
        """Ask Ray to drain a node."""


class RayCluster:
    """The control service of a Ray cluster at ``address``.

    The client is the one of Ray's own command ``ray drain-node``. As there, a token is read from
    ``RAY_AUTH_TOKEN`` or ``~/.ray/auth_token`` if ``RAY_AUTH_MODE=token``.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    @cached_property
    def _client(self) -> Any:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

        return GcsClient(address=self.address)

    def find_node(self, metadata: InstanceMetadata) -> str | None:
        """Return the id of the alive node with this instance's id, or else its address.

        Raises:
            OSError: The metadata service does not answer.
        """
        nodes = self._alive()
        instance = metadata.get("/latest/meta-data/instance-id")
        address = metadata.get("/latest/meta-data/local-ipv4")
        found = [node for node in nodes if node.instance_id and node.instance_id == instance]
        found = found or [node for node in nodes if node.node_manager_address == address]
        return str(found[0].node_id.hex()) if len(found) == 1 else None

    def is_alive(self, node: str) -> bool:
        """Return whether a node is alive."""
        return any(known.node_id.hex() == node for known in self._alive())

    def _alive(self) -> list[Any]:
        from ray.core.generated import gcs_pb2

        alive = gcs_pb2.GcsNodeInfo.ALIVE  # type: ignore[attr-defined]  # generated
        nodes = self._client.get_all_node_info(timeout=TIMEOUT).values()
        return [node for node in nodes if node.state == alive]

    def drain(self, node: str, notice: Notice) -> None:
        """Ask Ray to drain a node.

        Raises:
            RuntimeError: Ray refuses.
        """
        from ray.core.generated import autoscaler_pb2

        deadline = 0 if notice.when is None else int(1000 * (notice.when - MARGIN_SECONDS))
        reason = autoscaler_pb2.DrainNodeReason.Value(  # type: ignore[attr-defined]  # generated
            "DRAIN_NODE_REASON_PREEMPTION"
        )
        accepted, why = self._client.drain_node(node, reason, notice.message, deadline)
        if not accepted:
            raise RuntimeError(f"Ray refuses to drain node {node}: {why}")


def watch(
    metadata: InstanceMetadata,
    cluster: Cluster,
    *,
    node: str | None = None,
    rebalance: bool = True,
    interval: float = INTERVAL,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Drain a node when EC2 announces the end of its instance; return when the node has ended.

    A notice is passed on once; a later one with a deadline follows a recommendation. What fails is
    tried again at the next look: the metadata service, the cluster, or a node that is not there
    yet.

    Args:
        metadata: Where notices appear.
        cluster: Where the node is drained.
        node: Hexadecimal id of the node; found by the instance's id or address if not given.
        rebalance: Whether a recommendation to rebalance drains the node, too.
        interval: Seconds between two looks.
        pause: Sleeps for a number of seconds.
    """
    drained: Notice | None = None
    problem = ""
    while True:
        try:
            if node is None:
                node = cluster.find_node(metadata)
                if node is not None:
                    _logger.info("watching node %s", node)
            elif not cluster.is_alive(node):
                _logger.info("node %s has ended", node)
                return
            notice = read_notice(metadata, rebalance=rebalance) if node is not None else None
            if node is not None and notice is not None and _is_news(notice, drained):
                cluster.drain(node, notice)
                drained = notice
                _logger.warning("%s: draining node %s", notice.message, node)
            problem = ""
        except Exception as error:  # whatever it is, the next look may succeed
            text = _first_line(error)
            if text != problem:  # once, not at every look
                _logger.warning("%s; trying again every %g s", text, interval)
            problem = text
        pause(interval)


def _is_news(notice: Notice, drained: Notice | None) -> bool:
    return drained is None or (drained.when is None and notice.when is not None)


def _first_line(error: BaseException) -> str:
    if isinstance(error, URLError) and not isinstance(error, HTTPError):
        return f"the instance metadata cannot be reached: {error.reason}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def main() -> None:
    """Watch this instance until its node ends."""
    parser = argparse.ArgumentParser(prog="python -m trishul_ray.cluster.spot_watcher")
    parser.add_argument("--address", required=True, help="the cluster's control service, HOST:PORT")
    parser.add_argument("--node-id", help="default: the node with this instance's id or address")
    parser.add_argument("--metadata", default=METADATA_URL, help="URL of the instance metadata")
    parser.add_argument("--interval", type=float, default=INTERVAL, help="seconds between looks")
    parser.add_argument(
        "--ignore-rebalance", action="store_true", help="drain for the two-minute notice alone"
    )
    words = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s spot watcher: %(message)s")
    watch(
        InstanceMetadata(words.metadata),
        RayCluster(words.address),
        node=words.node_id,
        rebalance=not words.ignore_rebalance,
        interval=words.interval,
    )


if __name__ == "__main__":
    main()
