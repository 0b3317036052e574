import subprocess
import sys
from pathlib import Path


def test_tasks_import_neither_ray_nor_mlflow_nor_datasets():
    code = (
        "import sys, trishul_ray.tasks\n"
        "print(sorted({'ray', 'mlflow', 'datasets', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
