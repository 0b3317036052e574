"""Damage to a file by a power cut, a full disk or a worn disk, for every kind of stored file."""

from pathlib import Path


def _page(data: bytes) -> bytes:
    """Replace a page in the middle, or a shorter file's middle half, by zeros."""
    size = min(4096, len(data) // 2)
    at = (len(data) - size) // 2
    return data[:at] + bytes(size) + data[at + size :]


def _bit(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


#: Functions that damage the content of a file.
DAMAGE = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "page": _page,
    "bit": _bit,
}

#: Time at which test_damaged_files.py damages a file, keyed by pattern; it damages the newest
#: match.
RUN_AGAIN = [
    ("runs/*/attempt.json", "broken off"),
    ("runs/*/config.yaml", "broken off"),
    ("runs/*/checkpoints/round-*", "broken off"),
    ("runs/*/checkpoints/clients-*", "broken off"),
    ("runs/*/result.json", "finished"),
    ("runs/*/config.yaml", "finished"),
    ("runs/*/metrics.parquet", "finished"),
    ("runs/*/diagnostics.npz", "finished"),
    ("runs/*/test_rows.npz", "finished"),
    ("runs/*/adapter/*.safetensors", "finished"),
    ("runs/*/adapter/*.json", "finished"),
    ("runs/*/adapter/README.md", "finished"),
    ("runs/*/adapter/backbone/*", "finished"),
    ("cache/data/*/*/*.arrow", "cached"),
    ("cache/data/*/*/.xxh128", "cached"),
    ("cache/weights/*/weights.pt", "cached"),
    ("cache/weights/*/.xxh128", "cached"),
    ("cache/models/*/model.safetensors", "cached"),
    ("cache/models/*/config.json", "cached"),
    ("cache/models/*/preprocessor_config.json", "cached"),
    ("cache/models/*/.xxh128", "cached"),
]
#: Files that other tests damage in each of these ways.
ELSEWHERE = {
    "runs/*/failure.json": "sweeps/test_status.py",
    "runs/*/eval.json": "runs/test_evaluate.py",
    "runs/*/answers.jsonl": "runs/test_evaluate.py",
    "cache/layers/*": "experiment/test_experiment.py",
}
#: Files without effect on results: SQLite or MLflow report a damaged database.
NOT_CHECKED = [
    *("runs/mlflow.db", "runs/mlartifacts/**/*", "runs/*/harness.json"),
    *("cache/CACHEDIR.TAG", "**/*lock"),
]


def unlisted(root: Path) -> list[str]:
    """Return the files of ``runs`` and ``cache`` that are not in these lists."""
    patterns = [*(pattern for pattern, _ in RUN_AGAIN), *ELSEWHERE, *NOT_CHECKED]
    listed = {path for pattern in patterns for path in root.glob(pattern)}
    kept = [path for place in ("runs", "cache") for path in (root / place).rglob("*")]
    return sorted(str(p.relative_to(root)) for p in kept if p.is_file() and p not in listed)
