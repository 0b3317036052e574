"""The files a run leaves under ``runs/<id>/``: config.yaml, result.json, metrics.parquet."""

import io
import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from trishul_ray.data.coverage import Coverage
from trishul_ray.experiment import Experiment
from trishul_ray.federation.server import RunResult
from trishul_ray.spectral.diagnostics import DIAGNOSTICS
from trishul_ray.version import NUMERICS, __version__

_PACKAGES = ("torch", "ray", "transformers", "datasets", "numpy", "pyarrow", "mlflow", "peft")


#: Variables by which a user limits the instructions that torch and its libraries may use.
_KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "trishul_ray": __version__,
        "numerics": str(NUMERICS),
        "python": platform.python_version(),
    } | found


def hardware() -> dict[str, Any]:
    """What this process runs on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "kernels": kernels(),
    }


def processor() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def kernels() -> dict[str, Any]:
    """What decides, beside the processor, which kernels this process computes with.

    Returns:
        ``blas`` and ``libraries`` as torch was built with them; ``environment``: the variables
        that limit instruction sets, where they are set; ``cuda`` where there is a GPU: version of
        CUDA and of cuDNN, compute capability, cuBLAS workspace.
    """
    built = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", built)
    found: dict[str, Any] = {
        "blas": blas.group(1) if blas else "unknown",
        "libraries": re.findall(r"(?m)^ *- (.*(?:Math Kernel Library|MKL-DNN).*?)$", built),
        "environment": {name: os.environ[name] for name in _KERNEL_VARIABLES if name in os.environ},
    }
    if torch.cuda.is_available():
        found["cuda"] = {
            "version": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
    return found


def config_yaml(experiment: Experiment) -> bytes:
    """The whole resolved configuration; `trishul run` reads it back."""
    return yaml.safe_dump(experiment.to_dict(), sort_keys=False, allow_unicode=True).encode()


def flat_metrics(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of one record, for MLflow and the metrics table."""
    numbers = {
        k: float(v) for k, v in record.items() if isinstance(v, int | float) and k != "round"
    }
    numbers["refused_uploads"] = float(len(record.get("refused", {})))
    return numbers


def metrics_parquet(records: list[dict[str, Any]]) -> bytes:
    """One row per round; a metric not measured in a round is null."""
    rows = [{"round": r["round"], **flat_metrics(r)} for r in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def flat_config(experiment: Experiment) -> dict[str, str | int | float | bool | None]:
    """Every field by its dotted name, for MLflow parameters."""
    flat = flatten(experiment.to_dict())
    return {key: str(value) if isinstance(value, list) else value for key, value in flat.items()}


def summarize(
    experiment: Experiment,
    final: RunResult,
    coverage: Coverage,
    *,
    wall_seconds: float,
    run_id: str | None,
) -> dict[str, Any]:
    """The content of result.json. The last round is the headline; the best stands beside it."""
    task = final.blueprint.task
    measured = [r for r in final.records if task.headline in r]
    trained = [r for r in final.records if "train_loss" in r]
    best = max(measured, key=lambda r: r[task.headline])
    return {
        "id": experiment.id,
        "name": experiment.name,
        "status": "finished",
        "headline": task.headline,
        "data": coverage.to_json(),
        "final": _metrics(measured[-1], ("round", *task.metrics)),
        "best": _metrics(best, ("round", *task.metrics)),
        "untouched": _metrics(measured[0], task.metrics),
        "parameters": final.blueprint.parameters,
        "uploaded_parameters": sum(r.get("uploaded_parameters", 0) for r in final.records),
        "downloaded_parameters": sum(r.get("downloaded_parameters", 0) for r in final.records),
        "uploaded_bytes": sum(r.get("uploaded_bytes", 0) for r in final.records),
        "downloaded_bytes": sum(r.get("downloaded_bytes", 0) for r in final.records),
        "refused_uploads": sum(len(r["refused"]) for r in trained),
        "round_seconds": [round(r["seconds"], 4) for r in trained],
        # Of the process that finished it; rounds before a resume count in round_seconds.
        "wall_seconds": round(wall_seconds, 3),
        "diagnostics": _last_diagnostics(final.records),
        "heads": final.blueprint.heads,
        "block_squared_norms": final.blueprint.block_norms,
        "state_sha256": final.digest,
        "attempt": final.attempt,
        "mlflow_run_id": run_id,
        "versions": versions(),
        "hardware": hardware(),
        "config": experiment.to_dict(),
        "identity": experiment.identity(),
        "sources": final.blueprint.sources,
    }


def _last_diagnostics(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the spectral metrics of the last diagnosed round; empty for methods without cores."""
    names = {prefix + name for prefix in ("", "delta_") for name in DIAGNOSTICS}
    for record in reversed(records):
        found = {k: v for k, v in record.items() if k in names or k.startswith("svt_")}
        if found:
            return {"round": record["round"]} | found
    return {}


def _metrics(record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    # A group of test rows of which the evaluated subset holds none has no metric.
    return {name: record[name] for name in names if name in record}


def result_json(summary: dict[str, Any]) -> bytes:
    """result.json, for people and programs."""
    return (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode()
