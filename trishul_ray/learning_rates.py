"""The default learning rate of a method on a dataset, and where it comes from."""

from functools import cache
from importlib import resources
from typing import Any

import yaml

#: Sources of a rate that was not looked up.
HAND = "set by hand"
GENERAL = (
    "general default: no rate is known for this method, and it names no other whose rates it takes "
    "(rates_like)"
)


@cache
def _table() -> dict[str, Any]:
    file = resources.files("trishul_ray") / "presets" / "learning_rates.yaml"
    loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def default_learning_rate(
    dataset: str,
    method: str,
    lora_rank: int,
    iid: bool,
    *,
    rates_like: str | None = None,
    partition: str | None = None,
    optimizer: str = "adam",
    model: str | None = None,
) -> tuple[float, str] | None:
    """Return the learning rate and, in words, its source and everything that is borrowed.

    Args:
        dataset: its name; one of a family (``glue/rte``) without a table of its own has that of
            the family (``glue``).
        method: its name.
        lora_rank: the budget; up to 32 counts as the lower one.
        iid: whether the partition is IID.
        rates_like: the method whose rates stand in where ``method`` has none of its own.
        partition: ``partition.kind``, for the source; default: by ``iid``.
        optimizer: ``optimizer.name``, for the source.
        model: the backbone, for the source; None if it is the table's.

    Returns:
        ``(rate, source)``, or None if the tables know neither the method nor its stand-in.
    """
    table = _table()
    rows = table.get(dataset) or table.get(dataset.partition("/")[0]) or table["default"]
    known = next((m for m in (method, rates_like) if m in rows or m in table["unpublished"]), None)
    if known is None:
        return None
    borrowed = [] if known == method else [f"from {known}, for {method}"]
    if known in table["unpublished"]:
        source = f"our choice: no source names a rate for {known}"
        return float(table["unpublished"][known]), _with_borrowed(source, borrowed)
    cells = rows[known]
    column = (0 if iid else 2) + (0 if lora_rank <= 32 else 1)
    rate = float(cells[column] if isinstance(cells, list) else cells)
    if optimizer != "adam":
        borrowed.append(f"from Adam, for {optimizer.upper()}")
    if "model" in rows:  # published
        source = str(rows["source"])
        if lora_rank not in (32, 64):
            borrowed.append(f"from the budgets of LoRA rank 32 and 64, for {lora_rank}")
        kind = partition or ("iid" if iid else "dirichlet")
        printed = "iid" if iid or "partition" in rows else "dirichlet"
        if kind != printed:
            borrowed.append(f"from {_PRINTED[printed]} partition, for {_ASKED[kind]}")
        if model not in (None, rows["model"]):
            borrowed.append(f"from {rows['model']}, for {model}")
    else:
        source = f"{rows['source']} {dataset}"
    return rate, _with_borrowed(source, borrowed)


_PRINTED = {"iid": "an IID", "dirichlet": "a Dirichlet"}
_ASKED = {"iid": "IID", "dirichlet": "Dirichlet", "natural": "natural clients"}


def _with_borrowed(source: str, borrowed: list[str]) -> str:
    return f"{source}; borrowed {'; '.join(borrowed)}" if borrowed else source
