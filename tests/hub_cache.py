"""A cache of the Hugging Face hub's client, as it is after a download."""

import hashlib
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_hash(data: bytes, *, large: bool) -> str:
    """Return how the hub calls a file: its SHA-256 if it is large, and otherwise git's hash."""
    if large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def write_hub_cache(cache: Path, repo: str, files: dict[str, bytes]) -> Path:
    """Write ``models--owner--name`` or ``datasets--owner--name``; return the folder of files.

    Files of weights and rows are large.
    """
    (cache / repo / "refs").mkdir(parents=True)
    (cache / repo / "refs/main").write_text(COMMIT)
    folder = cache / repo / "snapshots" / COMMIT
    (cache / repo / "blobs").mkdir()
    for name, data in files.items():
        large = name.endswith((".safetensors", ".parquet"))
        blob = cache / repo / "blobs" / hub_hash(data, large=large)
        blob.write_bytes(data)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(blob)
    return folder


def flip_a_bit(file: Path, before: bytes = b"") -> None:
    """Flip one bit: the lowest of the byte before ``before``, or of the last one."""
    data = bytearray(file.read_bytes())
    data[data.index(before) - 1 if before else -1] ^= 1
    stored = file.resolve()
    stored.write_bytes(data)
