"""Start a local Ray without its monitors, the only use of Ray's private interface.

Ray starts the server of the dashboard (even with ``include_dashboard=False``), the monitor of the
autoscaler, the monitor of logs, and the dashboard's part of the agent. A local run uses none of
them, and without them ``trishul run`` reaches its first round 1.4 s earlier on two cores
(benchmarks/starting.py). Ray has no public option for this. If a release renames these functions,
Ray starts with its monitors.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from ray._private import utils
from ray._private.node import Node

_REPLACED: list[tuple[Any, str, Any]] = [
    *((Node, f"start_{name}", lambda *_, **__: None) for name in ("log_monitor", "monitor")),
    (Node, "start_api_server", lambda *_, **__: None),
    (utils, "get_dashboard_dependency_error", lambda: ImportError("the dashboard is not used")),
]


@contextmanager
def without_monitors() -> Iterator[None]:
    """Prevent a Ray that starts in this context from starting monitors."""
    with ExitStack() as stack:
        for owner, name, function in _REPLACED:
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, function))
        yield
