"""Write result.json and the tables of a finished run.

The tables are config.yaml, metrics.parquet, diagnostics.npz and test_rows.npz.
"""

import os
import platform
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from trishul_ray.data.coverage import Coverage
from trishul_ray.data.dataset import ScoredSplit, score_name
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint
from trishul_ray.federation.records import RoundRecord
from trishul_ray.federation.server import RunResult
from trishul_ray.report.summary import Hardware, RunSummary
from trishul_ray.runtime.device import usable_cores
from trishul_ray.runtime.lazy import pq, torch
from trishul_ray.spectral.diagnostics import DIAGNOSTICS
from trishul_ray.storage.durable import Json
from trishul_ray.storage.integrity import digest
from trishul_ray.version import versions

#: Variables that limit the instruction sets of torch and its libraries.
_KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)


def hardware() -> Hardware:
    return Hardware(
        machine=platform.machine(),
        system=platform.system(),
        cpus=usable_cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        processor=processor(),
        kernels=kernels(),
    )


@cache
def processor() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"(?m)^model name\s*: (.*)$", info.read_text()) if info.is_file() else None
    return found.group(1) if found else platform.processor() or platform.machine()


def kernels() -> Json:
    """Describe the libraries and settings that determine the compute kernels of this process."""
    built = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", built)
    description: Json = {
        "blas": blas.group(1) if blas else "unknown",
        "libraries": re.findall(r"(?m)^ *- (.*(?:Math Kernel Library|MKL-DNN).*?)$", built),
        "environment": {name: os.environ[name] for name in _KERNEL_VARIABLES if name in os.environ},
    }
    if torch.cuda.is_available():
        description["cuda"] = {
            "version": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        }
    return description


def summarize(
    experiment: Experiment, result: RunResult, coverage: Coverage, wall_seconds: float,
    run_id: str | None,
) -> RunSummary:  # fmt: skip
    """Build the summary of a result, without the fields that depend on its files."""
    records, spec = result.checkpoint.records, result.spec
    metric = spec.metrics.primary_metric
    rows = [record.row() for record in records]
    measured = [record for record in records if record.scored]
    chosen_on: ScoredSplit = "validation" if "validation" in spec.scored else "test"
    best = max(measured[1:], key=lambda r: r.scores[score_name(metric, chosen_on)])
    names = [score_name(n, rows) for rows in spec.scored for n in spec.metrics.names]
    last = measured[-1]

    def total(name: str) -> int:
        return int(sum(row.get(name, 0) for row in rows))

    return RunSummary(
        id=experiment.id,
        name=experiment.name,
        status="finished",
        headline=metric,
        data=coverage,
        scored_rounds=[record.round for record in measured],
        final={"round": last.round} | _scores(last, names),
        best={"round": best.round} | _scores(best, names) | {"chosen_on": chosen_on},
        untouched=_scores(measured[0], names),
        recall=dict(zip(spec.info.classes, last.recall, strict=False)),
        per_client=last.per_client,
        personal=last.personal,
        participation=last.participation,
        parameters=spec.parameters,
        uploaded_parameters=total("uploaded_parameters"),
        downloaded_parameters=total("downloaded_parameters"),
        uploaded_bytes=total("uploaded_bytes"),
        downloaded_bytes=total("downloaded_bytes"),
        refused_uploads=total("refused_uploads"),
        round_seconds=[round(r.seconds, 4) for r in records if r.seconds is not None],
        wall_seconds=round(wall_seconds, 3),
        peak_memory=result.memory,
        diagnostics=_last_diagnostics(records),
        heads=spec.heads,
        ranks=spec.ranks,
        block_squared_norms=spec.block_norms,
        state_sha256=result.digest,
        states=[record.state_sha256 for record in records],
        stacks=result.checkpoint.stacks,
        attempt=result.checkpoint.attempt,
        mlflow_run_id=run_id,
        versions=versions(),
        hardware=hardware(),
        config=experiment.to_dict(),
        identity=experiment.identity(),
        sources=spec.sources,
    )


def _last_diagnostics(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Return the spectral metrics of the last diagnosed round, if the method has cores."""
    names = {prefix + name for prefix in ("", "delta_") for name in DIAGNOSTICS}
    for record in reversed(records):
        found = record.diagnostics.items()
        if metrics := {k: v for k, v in found if k in names or k.startswith("svt_")}:
            return {"round": record.round} | metrics
    return {}


def _scores(record: RoundRecord, names: Sequence[str]) -> dict[str, float]:
    # A metric of a group of test rows is missing if the evaluated subset contains none of its rows.
    return {name: record.scores[name] for name in names if name in record.scores}


def write_tables(experiment: Experiment, last: Checkpoint, folder: Path) -> None:
    """Write :data:`TABLES` into a local folder. Methods without cores have no diagnostics.npz."""
    (folder / "config.yaml").write_bytes(experiment.to_yaml())
    rows = [record.row() for record in last.records]
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    pq.write_table(table, folder / "metrics.parquet")
    arrays: dict[str, Any] = dict(last.matrices)
    arrays |= {f"spectrum_{key}": value for key, value in last.spectra.items()}
    test_rows: dict[str, Any] = dict(last.test_rows)
    if arrays:
        np.savez(folder / "diagnostics.npz", **dict(sorted(arrays.items())))
    if test_rows:
        np.savez_compressed(folder / "test_rows.npz", **dict(sorted(test_rows.items())))


def file_hashes(folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of every file in a folder and below, keyed by relative path, in order."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: digest(files[name]) for name in sorted(files)}
