"""Drain a Ray node before its EC2 spot instance is taken away.

Run it on every spot worker, after ``ray start``::

    python cluster/spot_watcher.py --address "$RAY_HEAD_IP:6379" &

EC2 announces an interruption in the instance metadata, two minutes ahead, and sometimes earlier a
recommendation to rebalance. Ray does not read them. This program polls both, and then calls Ray's
own command ``ray drain-node`` with the reason PREEMPTION: the node takes no new work, and what dies
with it is not counted as a failure. It needs nothing but Ray, and ends when it has drained.
"""

import argparse
import logging
import time
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import ray
from ray.scripts.scripts import cli

#: Where every EC2 instance finds its metadata.
METADATA = "http://169.254.169.254"
#: Seconds in which the metadata must answer.
METADATA_SECONDS = 2.0

#: Never through a proxy: it would answer for another machine.
_opener = build_opener(ProxyHandler({}))
_NOTICES = {
    "spot/instance-action": "EC2 will interrupt this spot instance",
    "events/recommendations/rebalance": "EC2 recommends to rebalance this spot instance",
}


def has_page(url: str, page: str) -> bool:
    """Return whether there is a page of metadata, by the service's version 2, with a token.

    Raises:
        OSError: The service does not answer.
    """
    lasts = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = read(Request(f"{url}/latest/api/token", headers=lasts, method="PUT"))
    given = {"X-aws-ec2-metadata-token": token}
    try:
        read(Request(f"{url}/latest/meta-data/{page}", headers=given))
    except HTTPError as error:
        if error.code == 404:
            return False
        raise
    return True


def read(request: Request) -> str:
    """Return the text that answers a request."""
    with _opener.open(request, timeout=METADATA_SECONDS) as answer:
        return str(answer.read().decode())


def this_node(address: str) -> str:
    """Return the id of the node of a cluster that runs on this machine."""
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        return str(ray.get_runtime_context().get_node_id())
    finally:
        ray.shutdown()


def drain(address: str, node: str, message: str) -> None:
    """Call ``ray drain-node``, in this process: another one would take seconds to start.

    Without a deadline, whatever dies on the node from now on is no failure.
    """
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", message]
    words = ["drain-node", "--address", address, "--node-id", node, *reason]
    cli.main(words, standalone_mode=False)


def say(text: str) -> None:
    """Write a line of the log."""
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)


def main() -> None:
    """Wait for a notice of EC2, and drain the node once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", required=True, help="the cluster's control service, HOST:PORT")
    parser.add_argument("--node-id", help="default: the node of the cluster on this machine")
    parser.add_argument("--metadata", default=METADATA, help="URL of the instance metadata")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between looks")
    parser.add_argument(
        "--ignore-rebalance", action="store_true", help="drain for the two-minute notice alone"
    )
    words = parser.parse_args()
    pages = list(_NOTICES)[: 1 if words.ignore_rebalance else 2]
    node, problem = words.node_id, ""
    while True:
        try:
            node = node or this_node(words.address)
            for page in pages:
                if has_page(words.metadata, page):
                    message = _NOTICES[page]
                    drain(words.address, node, message)
                    say(f"{message}: draining node {node}")
                    return
            problem = ""
        except (Exception, SystemExit) as error:  # whatever it is, the next look may succeed
            if str(error) != problem:  # once, not at every look
                say(f"{error}; trying again every {words.interval:g} s")
            problem = str(error)
        time.sleep(words.interval)


if __name__ == "__main__":
    main()
