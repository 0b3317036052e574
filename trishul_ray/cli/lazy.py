"""Modules of the package that commands use, imported when they are: ``lazy.cells.load_sweep``.

They take seconds to import, and ``trishul --help`` or a mistyped field needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import trishul_ray.cli.listing
    import trishul_ray.federation.prepare
    from trishul_ray import api as api
    from trishul_ray import config as config
    from trishul_ray import doctor as doctor
    from trishul_ray import jobs as jobs
    from trishul_ray import storage as storage
    from trishul_ray.contract import plugin_checks as plugin_checks
    from trishul_ray.data import partition as partition
    from trishul_ray.data import prepare as prepare
    from trishul_ray.experiment import experiment as experiment
    from trishul_ray.experiment import fit as fit
    from trishul_ray.experiment import identity as identity
    from trishul_ray.experiment import loading as loading
    from trishul_ray.federation.on_ray import driver as driver
    from trishul_ray.federation.on_ray import session as session
    from trishul_ray.models import pretraining as pretraining
    from trishul_ray.report import claims as claims
    from trishul_ray.report import formats as formats
    from trishul_ray.report import outcomes as outcomes
    from trishul_ray.report import page as page
    from trishul_ray.report import tables as tables
    from trishul_ray.report.figures import clients as clients
    from trishul_ray.report.figures import drawing as drawing
    from trishul_ray.runs import artifacts as artifacts
    from trishul_ray.runs import export as export
    from trishul_ray.runs import folder as folder
    from trishul_ray.runs import mlflow_log as mlflow_log
    from trishul_ray.runs import runner as runner
    from trishul_ray.sweeps import cells as cells
    from trishul_ray.sweeps import plan as plan
    from trishul_ray.sweeps import rates as rates
    from trishul_ray.sweeps import reproduce as reproduce
    from trishul_ray.sweeps import status as status
    from trishul_ray.theory import checks as checks
    from trishul_ray.tracking import mlflow_store as mlflow_store
    from trishul_ray.tracking import mlflow_ui as mlflow_ui
    from trishul_ray.tracking import progress as progress

    listing = trishul_ray.cli.listing
    rows = trishul_ray.federation.prepare
else:
    _FOLDERS = {
        "": ("api", "config", "doctor", "jobs", "storage"),
        ".contract": ("plugin_checks",),
        ".cli": ("listing",),
        ".data": ("partition", "prepare"),
        ".experiment": ("fit", "identity", "loading"),
        ".federation.on_ray": ("driver", "session"),
        ".models": ("pretraining",),
        ".report": ("claims", "formats", "page", "tables"),
        ".report.figures": ("clients", "drawing"),
        ".runs": ("artifacts", "export", "folder", "mlflow_log", "runner"),
        ".sweeps": ("cells", "plan", "rates", "reproduce", "status"),
        ".theory": ("checks",),
        ".tracking": ("mlflow_store", "mlflow_ui", "progress"),
    }
    _MODULES = {
        name: f"trishul_ray{folder}.{name}" for folder, names in _FOLDERS.items() for name in names
    } | {"rows": "trishul_ray.federation.prepare"}

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(name)
        return import_module(_MODULES[name])
