"""A fixture of the tests of reports."""

import pytest
from invented_outcomes import square

from trishul_ray.report.page import write_report


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """``written(sweep, ...)`` writes a report whose figures are squares, and returns the folder."""

    def write(*sweeps):
        folder = tmp_path_factory.mktemp("report")
        write_report(sweeps, folder, figures=square)
        return folder

    return write
