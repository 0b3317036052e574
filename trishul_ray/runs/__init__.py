"""One run from configuration to results.

The package may be called: ``trishul_ray.runs()`` lists finished runs.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


class _CallablePackage(ModuleType):
    def __call__(self, store: "str | Path" = "runs") -> "pd.DataFrame":
        """Return finished runs; see :func:`trishul_ray.report.summary.table_of_runs`."""
        from trishul_ray.report.summary import table_of_runs

        return table_of_runs(store)


sys.modules[__name__].__class__ = _CallablePackage
