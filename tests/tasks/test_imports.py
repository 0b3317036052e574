import subprocess
import sys
from pathlib import Path


def test_server_and_task_choice_import_no_transformers():
    code = (
        "import sys\n"
        "import trishul_ray.federation.server, trishul_ray.tasks.build\n"
        "print(sorted({'ray', 'mlflow', 'datasets', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
