"""The description of the machine in a result."""

import json
import os
import subprocess
import sys

import torch

from trishul_ray.run.results import hardware, kernels


def test_the_kernels_in_use_are_recorded():
    """In a process of its own: limits of the instruction set are read when torch loads."""
    code = "import json; from trishul_ray.run.results import hardware;print(json.dumps(hardware()))"
    limits = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | limits,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["cpu_capability"] == "DEFAULT"
    assert limits.items() <= found["kernels"]["environment"].items()


def test_libraries_and_processor_are_recorded():
    found, told = kernels(), torch.__config__.show()
    assert found["blas"] != "unknown" and f"BLAS_INFO={found['blas']}" in told
    assert found["libraries"] and all(line in told for line in found["libraries"])
    assert ("cuda" in found) == torch.cuda.is_available()
    assert hardware()["processor"].strip()
