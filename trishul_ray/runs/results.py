"""The files a run leaves under ``runs/<id>/``, except its figures and its model.

They are config.yaml, metrics.parquet, diagnostics.npz, test_rows.npz and result.json.
"""

import hashlib
import io
import json
import os
import platform
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pyarrow as pa

from trishul_ray.data.dataset import RowSet, score_name
from trishul_ray.errors import CorruptFileError, InputError, own_errors
from trishul_ray.experiment.experiment import ID_LENGTH, Experiment
from trishul_ray.files import digest
from trishul_ray.lazy import pq, torch
from trishul_ray.spectral.diagnostics import DIAGNOSTICS
from trishul_ray.storage import Store
from trishul_ray.version import NUMERICS, __version__

if TYPE_CHECKING:
    import pandas as pd

    from trishul_ray.data.prepare import Coverage
    from trishul_ray.federation.checkpoint import Checkpoint
    from trishul_ray.federation.server import RunResult

#: Of the folder of a run: why a sweep gave it up.
FAILURE = "failure.json"
#: Files of a finished run's numbers, which reports read.
NUMBERS = ("metrics.parquet", "diagnostics.npz")
#: Files of a finished run that need no backbone to be written.
TABLES = ("config.yaml", *NUMBERS, "test_rows.npz")

_ID = re.compile(f"[0-9a-f]{{{ID_LENGTH}}}")

_PACKAGES = ("torch", "ray", "transformers", "datasets", "numpy", "pyarrow", "mlflow", "peft")

#: Variables that limit the instructions which torch and its libraries may use.
_KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)


@cache
def versions() -> dict[str, str]:
    """Return the versions of the software that a run's numbers depend on."""
    return {
        "trishul_ray": __version__,
        "numerics": str(NUMERICS),
        "python": platform.python_version(),
        **_package_versions(),
    }


@cache
def _package_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _PACKAGES}


def hardware() -> dict[str, Any]:
    """Describe the machine of this process."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "kernels": kernels(),
    }


@cache
def processor() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def kernels() -> dict[str, Any]:
    """Describe what determines the kernels of this process, besides the processor.

    These are ``blas`` and ``libraries`` of torch, the ``environment`` variables that limit
    instruction sets, if set, and ``cuda`` on a GPU.
    """
    built = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=(\w+)", built)
    description: dict[str, Any] = {
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


def flat_metrics(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of one record, for MLflow and the metrics table."""
    numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "round"}
    numbers["refused_uploads"] = len(record.get("refused", {}))
    return {name: float(value) for name, value in numbers.items()}


def metrics_parquet(records: list[dict[str, Any]]) -> bytes:
    """Return one row per round as Parquet; a metric not measured in a round is null."""
    rows = [{"round": r["round"], **flat_metrics(r)} for r in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def read_metrics(home: Store) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.parquet; a metric not measured in a round is missing."""
    rows = pq.read_table(io.BytesIO(home.read("metrics.parquet"))).to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def write_tables(experiment: Experiment, result: "RunResult | Checkpoint", folder: Path) -> None:
    """Write :data:`TABLES` into a local folder; a method without cores has no diagnostics.npz."""
    (folder / "config.yaml").write_bytes(experiment.to_yaml())
    (folder / "metrics.parquet").write_bytes(metrics_parquet(result.records))
    if result.spectra or result.matrices:
        # The arrays of all diagnosed rounds, and the last spectra.
        arrays: dict[str, Any] = dict(result.matrices)
        arrays |= {f"spectrum_{key}": value for key, value in result.spectra.items()}
        np.savez(folder / "diagnostics.npz", **dict(sorted(arrays.items())))
    if result.test_rows:
        test_rows: dict[str, Any] = dict(result.test_rows)
        np.savez_compressed(folder / "test_rows.npz", **dict(sorted(test_rows.items())))


def read_test_rows(home: Store) -> dict[str, np.ndarray]:
    """Return ``row`` and ``score`` [rows] of a run's test_rows.npz.

    Raises:
        InputError: The run has none.
    """
    try:
        content = home.read("test_rows.npz")
    except FileNotFoundError:
        raise InputError(
            f"{home.uri} has no test_rows.npz: its task scores no single rows, or an older version "
            "ran it; --fresh runs it again"
        ) from None
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return dict(file)


def file_hashes(folder: Path) -> dict[str, str | None]:
    """Return the SHA-256 of every file below a folder, by its path in it, in order.

    None for config.yaml, which the run's id checks, and whose places may change.
    """
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {n: None if n == "config.yaml" else digest(files[n]) for n in sorted(files)}


def damaged_files(
    summary: Mapping[str, Any], home: Store, among: Collection[str] | None = None
) -> dict[str, str]:
    """Return which files of a finished run are ``missing`` or ``corrupt``, by name.

    Args:
        summary: The content of its result.json.
        home: Its folder.
        among: The files to look at; None is all. They are read as a whole.
    """
    damaged: dict[str, str] = {}
    for name, expected in summary["sha256"].items():
        if among is not None and name not in among:
            continue
        if expected is None:
            if not home.exists(name):
                damaged[name] = "missing"
            continue
        parent, _, file = name.rpartition("/")
        try:
            content = (home.child(parent) if parent else home).read(file)
        except FileNotFoundError:
            damaged[name] = "missing"
        else:
            if hashlib.sha256(content).hexdigest() != expected:
                damaged[name] = "corrupt"
    return damaged


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted names."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def flat_config(experiment: Experiment) -> dict[str, str | int | float | bool | None]:
    """Return every field by its dotted name, for MLflow parameters."""
    flat = flatten(experiment.to_dict())
    return {key: str(value) if isinstance(value, list) else value for key, value in flat.items()}


def summarize(
    experiment: Experiment,
    result: "RunResult",
    coverage: "Coverage",
    wall_seconds: float,
    run_id: str | None,
) -> dict[str, Any]:
    """Return the content of result.json. The last round counts; the best is given as well.

    The best round has the largest headline metric on the validation rows, or without those on the
    test rows, as its ``chosen_on`` says. The untouched backbone is never the best.
    """
    metrics = result.blueprint.metrics
    measured = [r for r in result.records if metrics.headline in r]
    trained = [r for r in result.records if "train_loss" in r]
    scored = result.blueprint.scored
    chosen_on: RowSet = "validation" if "validation" in scored else "test"
    best = max(measured[1:], key=lambda r: r[score_name(metrics.headline, chosen_on)])
    names = tuple(score_name(name, rows) for rows in scored for name in metrics.names)
    return {
        "id": experiment.id,
        "name": experiment.name,
        "status": "finished",
        "headline": metrics.headline,
        "data": coverage.to_json(),
        "scored_rounds": [r["round"] for r in measured],
        "final": _metrics(measured[-1], ("round", *names)),
        "best": _metrics(best, ("round", *names)) | {"chosen_on": chosen_on},
        "untouched": _metrics(measured[0], names),
        "recall": _by_class(measured[-1], result.blueprint.info.classes),
        "per_client": measured[-1].get("per_client", {}),
        "personal": measured[-1].get("personal", {}),
        "parameters": result.blueprint.parameters,
        "uploaded_parameters": sum(r.get("uploaded_parameters", 0) for r in result.records),
        "downloaded_parameters": sum(r.get("downloaded_parameters", 0) for r in result.records),
        "uploaded_bytes": sum(r.get("uploaded_bytes", 0) for r in result.records),
        "downloaded_bytes": sum(r.get("downloaded_bytes", 0) for r in result.records),
        "refused_uploads": sum(len(r["refused"]) for r in trained),
        "round_seconds": [round(r["seconds"], 4) for r in trained],
        # Of the process that finished the run, and of the rounds before it was resumed.
        "wall_seconds": round(wall_seconds, 3),
        "diagnostics": _last_diagnostics(result.records),
        "heads": result.blueprint.heads,
        "block_squared_norms": result.blueprint.block_norms,
        "state_sha256": result.digest,
        "attempt": result.attempt,
        "mlflow_run_id": run_id,
        "versions": versions(),
        "hardware": hardware(),
        "config": experiment.to_dict(),
        "identity": experiment.identity(),
        "sources": result.blueprint.sources,
    }


def seconds_until(last: int, records: list[dict[str, Any]]) -> float:
    """Return how long the rounds up to ``last`` took."""
    return float(sum(r["seconds"] for r in records if 0 < r["round"] <= last))


def _by_class(record: dict[str, Any], classes: tuple[str, ...]) -> dict[str, Any]:
    """Return the recall of a round by the name of the class; empty if it was not measured."""
    return dict(zip(classes, record.get("recall", ()), strict=False))


def _last_diagnostics(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last diagnosed round's spectral metrics; empty for methods without cores."""
    names = {prefix + name for prefix in ("", "delta_") for name in DIAGNOSTICS}
    for record in reversed(records):
        metrics = {k: v for k, v in record.items() if k in names or k.startswith("svt_")}
        if metrics:
            return {"round": record["round"]} | metrics
    return {}


def _metrics(record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    # A metric of a group of test rows is missing if the evaluated subset holds none of them.
    return {name: record[name] for name in names if name in record}


def result_json(summary: dict[str, Any]) -> bytes:
    """Return the bytes of result.json: a summary and its checksum."""
    # As it will be read: keys are text, and tuples are lists.
    content = {**summary, "checksum": _checksum(json.loads(json.dumps(summary)))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def read_result(home: Store) -> dict[str, Any]:
    """Return the content of a run's result.json.

    Raises:
        FileNotFoundError: The run has not finished.
        CorruptFileError: The file is not JSON, does not match its checksum or has none, or belongs
            to another run.
    """
    place = home.place("result.json")
    content = home.read("result.json")
    try:
        summary = json.loads(content)
    except ValueError as error:
        raise CorruptFileError(f"{place} is unreadable ({error})") from error
    if not isinstance(summary, dict) or "id" not in summary:
        raise CorruptFileError(f"{place} is unreadable (not the result of a run)")
    if (checksum := summary.get("checksum")) != _checksum(summary):
        fault = "has no checksum" if checksum is None else "is corrupt (checksum differs)"
        raise CorruptFileError(f"{place} {fault}")
    if summary["id"] != home.root.rpartition("/")[2]:
        raise CorruptFileError(f"{place} belongs to run {summary['id']}")
    return summary


def unscored(experiment: Experiment, summary: dict[str, Any]) -> str:
    """Return what a finished run lacks of the scores that are asked for now; empty if nothing.

    A result with more scored rounds serves where fewer are asked for, since its numbers are equal.
    """
    # A result of an older version does not say it: all were scored, or its id is another.
    lacking = experiment.scored_rounds - {*summary.get("scored_rounds", experiment.scored_rounds)}
    if not lacking:
        return ""
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    every = experiment.evaluation.every
    return f"no score of round {min(lacking)}{more}, which evaluation.every={every} asks for"


def attempt_of(home: Store) -> str:
    """Return the name of the attempt that a run's folder belongs to; empty if it has none."""
    try:
        return str(json.loads(home.read("attempt.json"))["attempt"])
    except (FileNotFoundError, ValueError, KeyError):
        return ""


def run_ids(store: Store) -> list[str]:
    """Return the ids of the runs that have a folder in a storage, sorted.

    Other things may lie beside them, such as mlflow.db.
    """
    return [name for name in store.names() if _ID.fullmatch(name)]


def table_of_runs(store: str = "runs") -> "pd.DataFrame":
    """Return the finished runs of a folder or URI: one row per run, by id.

    The columns are what usually tells runs apart, the name of the headline metric, and its value
    after the last round and at its best. A result that cannot be read is left out.

    Raises:
        InputError: The storage cannot be opened.
        RunError: It failed.
    """
    import pandas as pd

    rows = []
    with own_errors():
        opened = Store.open(store)
        for name in run_ids(opened):
            with suppress(FileNotFoundError, CorruptFileError):
                rows.append(_row_of(read_result(opened.child(name))))
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["id"]).set_index("id")


def _row_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a finished run in :func:`table_of_runs`."""
    config, headline = summary["config"], summary["headline"]
    return {
        "id": summary["id"],
        "name": config["name"],
        "method": config["method"]["name"],
        "dataset": config["data"]["name"],
        "model": config["model"]["name"],
        "budget": config["budget"],
        "partition": config["partition"]["kind"],
        "alpha": config["partition"]["alpha"],
        "rounds": config["federation"]["rounds"],
        "seed": config["seed"],
        "headline": headline,
        "final": summary["final"][headline],
        "best": summary["best"][headline],
    }


def _checksum(summary: dict[str, Any]) -> str:
    """Return the SHA-256 of plain JSON values as canonical JSON, without the checksum itself."""
    plain = {key: value for key, value in summary.items() if key != "checksum"}
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
