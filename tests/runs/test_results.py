"""Processor, kernels and libraries recorded in a result."""

import json
import os
import subprocess
import sys

import torch

from trishul_ray.runs.results import hardware, kernels


def test_the_kernels_in_use_are_recorded():
    """In another process: limits of the instruction set are read when torch is loaded."""
    code = (
        "import json; from trishul_ray.runs.results import hardware;print(json.dumps(hardware()))"
    )
    limits = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | limits,
        capture_output=True,
        text=True,
        check=True,
    )
    recorded = json.loads(done.stdout)
    assert recorded["cpu_capability"] == "DEFAULT"
    assert limits.items() <= recorded["kernels"]["environment"].items()


def test_libraries_and_processor_are_recorded():
    recorded, config = kernels(), torch.__config__.show()
    assert recorded["blas"] != "unknown" and f"BLAS_INFO={recorded['blas']}" in config
    assert recorded["libraries"] and all(line in config for line in recorded["libraries"])
    assert ("cuda" in recorded) == torch.cuda.is_available()
    assert hardware()["processor"].strip()
