"""Federated parameter-efficient fine-tuning with spectral multi-head adapters, on Ray.

Run an experiment, or load one that has run::

    import trishul_ray

    result = trishul_ray.run("digits", method="fedit", rounds=10)
    result.history["accuracy"].plot()
    result.predict(images)
    trishul_ray.sweep(axes={"method": ["fedit", "trishul"], "seed": range(3)}, rounds=10)
    trishul_ray.list_runs()

Importing the package loads nothing else: torch, transformers and Ray are imported with the first
of these functions.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trishul_ray.errors import CorruptFileError, InputError, RunError, StorageError
from trishul_ray.federation.determinism import set_environment
from trishul_ray.version import __version__

if TYPE_CHECKING:
    from trishul_ray.api import load, run, sweep
    from trishul_ray.plugins.loading import load_plugin
    from trishul_ray.report.summary import list_runs
    from trishul_ray.result import Result

set_environment()  # before torch is imported
# How long the hub's clients wait for an answer before they read their caches: 10 s by default.
os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
# Ray reads this when it is imported. Without it, it sends no token to a cluster with an address.
if os.environ.get("RAY_ADDRESS") and (
    os.environ.get("RAY_AUTH_TOKEN")
    or os.environ.get("RAY_AUTH_TOKEN_PATH")
    or os.path.exists(os.path.expanduser("~/.ray/auth_token"))
):
    os.environ.setdefault("RAY_AUTH_MODE", "token")
if os.path.expanduser("~") == "~":
    # A user without a home, as in a container: MLflow fails where it asks for one.
    os.environ["HOME"] = os.path.abspath(os.environ.get("TRISHUL_CACHE") or os.devnull)

__all__ = [
    "CorruptFileError",
    "InputError",
    "Result",
    "RunError",
    "StorageError",
    "__version__",
    "list_runs",
    "load",
    "load_plugin",
    "run",
    "sweep",
]

#: Modules of the names that are imported at their first use.
_LAZY = {
    "Result": "result",
    "load": "api",
    "load_plugin": "plugins.loading",
    "run": "api",
    "list_runs": "report.summary",
    "sweep": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
