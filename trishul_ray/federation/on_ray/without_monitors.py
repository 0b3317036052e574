"""The only use of Ray's private interface: start a local Ray without its monitors.

Ray starts the server of the dashboard (even with ``include_dashboard=False``), the monitor of the
autoscaler and the monitor of logs. A local run uses none of them, and without them ``trishul run``
reaches its first round 1.4 s earlier on two cores (benchmarks/starting.py). There is no public
switch. If a release renames these methods, Ray starts with its monitors.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from ray._private.node import Node

_MONITORS = ("start_api_server", "start_log_monitor", "start_monitor")


@contextmanager
def without_monitors() -> Iterator[None]:
    """Start no monitors with a Ray that starts in the block."""
    with ExitStack() as stack:
        for name in _MONITORS:
            if hasattr(Node, name):
                stack.enter_context(patch.object(Node, name, lambda self, **_: None))
        yield
