"""The memory and the open files of a driver do not grow with its rounds."""

import subprocess
import sys
import textwrap

import pytest
from tiny_run import SMALL

#: Rounds after which everything is imported and allocated, and further rounds.
WARM, MORE = 20, 100
#: Maximum bytes that a diagnosed round may leave: its record, which the last checkpoint contains.
ROUND_BYTES = 64 * 1024
CODE = """
    import gc, io, sys
    import psutil
    from rich.console import Console
    from trishul_ray.experiment.loading import load_experiment
    from trishul_ray.runs.runner import run_steps
    from trishul_ray.tracking.progress import RunProgress

    warm, more = int(sys.argv[1]), int(sys.argv[2])
    me, sizes = psutil.Process(), []
    progress = RunProgress(warm + more, Console(file=io.StringIO()))
    steps = run_steps(load_experiment(None, sys.argv[3:]), progress, extras=False)
    for number, _ in enumerate(steps):
        if number in (warm, warm + more):
            gc.collect()
            sizes.append((me.memory_info().rss, me.num_fds()))
    (before, opened), (after, still) = sizes
    print(after - before, still - opened)
"""


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
def test_rounds_leave_only_their_records(every, cache, tmp_path):
    words = [*SMALL, f"federation.rounds={WARM + MORE}", f"evaluation.diagnostics_every={every}"]
    words += [f"storage.cache={cache}", f"storage.runs={tmp_path}", "resources.backend=inline"]
    command = [sys.executable, "-c", textwrap.dedent(CODE), str(WARM), str(MORE), *words]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bytes_, files = map(int, said.split())
    assert files == 0 and bytes_ < MORE * ROUND_BYTES
