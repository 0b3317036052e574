"""The default learning rate of a method on a dataset, and where it comes from."""

from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def _table() -> dict[str, Any]:
    file = resources.files("trishul_ray") / "presets" / "learning_rates.yaml"
    loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def default_learning_rate(
    dataset: str, method: str, lora_rank: int, iid: bool
) -> tuple[float, str] | None:
    """The learning rate and, in words, its source.

    Args:
        dataset: its name; one of a family (``glue/rte``) without a table of its own has that of
            the family (``glue``).
        method: its name.
        lora_rank: the budget; up to 32 counts as the lower one.
        iid: whether the partition is IID.

    Returns:
        ``(rate, source)``, or None for a method that no table knows (one's own).
    """
    table = _table()
    if method in table["unpublished"]:
        return float(table["unpublished"][method]), f"no published value for {method}; our choice"
    family = dataset.partition("/")[0]
    rows = table.get(dataset) or table.get(family) or table["default"]
    stand_in = table["like"].get(method, method)
    if stand_in not in rows:
        return None
    cells = rows[stand_in]
    column = (0 if iid else 2) + (0 if lora_rank <= 32 else 1)
    rate = float(cells[column] if isinstance(cells, list) else cells)
    source = str(rows["source"])
    if stand_in != method:
        source = f"no published value for {method}; that of {stand_in} ({source})"
    return rate, source
