"""STS-B (GLUE): the similarity of two sentences, from 0 to 5, for ``task.kind=regression``.

The test rows are the development set, because the labels of the official test set are not public.

Source: D. Cer et al., "SemEval-2017 Task 1: Semantic Textual Similarity", 2017, arXiv 1708.00055.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from trishul_ray.data.columns import at_row, get_column, read_texts
from trishul_ray.data.dataset import Columns, Splits
from trishul_ray.data.datasets.glue import MRPC
from trishul_ray.data.public import RowFormat, register_dataset
from trishul_ray.errors import CorruptFileError


@dataclass(frozen=True)
class ScoredTextRows(RowFormat):
    """Rows of one or two texts and a number.

    The dataset's ``label``, int64 [N], is the index of the number among the distinct numbers.

    Attributes:
        fields: Text columns in reading order.
        label: Column of the numbers.
        lowest: Minimum valid number.
        highest: Maximum valid number.
    """

    fields: tuple[str, ...]
    label: str
    lowest: float
    highest: float
    kind = "text"

    def decode(self, table: pa.Table, where: str, progress: Callable[[float], None]) -> Columns:
        """Read the texts, and the numbers as ``label``, float64 [N]."""
        columns: Columns = {field: read_texts(table, field, where) for field in self.fields}
        numbers = get_column(table, self.label, where).cast(pa.float64()).to_numpy()
        invalid = np.flatnonzero(~((numbers >= self.lowest) & (numbers <= self.highest)))
        if len(invalid):
            row = int(invalid[0])
            raise CorruptFileError(
                f"{at_row(where, row)}: {self.label} is {numbers[row]:g}, not a number in "
                f"{self.lowest:g}..{self.highest:g}"
            )
        return columns | {"label": numbers}

    def finish(self, splits: Splits, tables: Sequence[pa.Table]) -> tuple[dict[str, Any], Splits]:
        """Convert the distinct numbers of all splits, ascending, to class names of six digits."""
        texts = {
            split: [f"{number:g}" for number in np.asarray(columns["label"])]
            for split, columns in splits.items()
        }
        classes = tuple(sorted({*chain(*texts.values())}, key=float))
        index = {text: place for place, text in enumerate(classes)}
        stored = {
            split: columns | {"label": np.array([index[each] for each in texts[split]], np.int64)}
            for split, columns in splits.items()
        }
        doubt = "the labels are numbers, not classes: set task.kind=regression"
        return {"classes": classes, "fields": self.fields, "doubt": doubt}, stored


STSB = register_dataset(
    replace(
        MRPC,
        name="glue/stsb",
        description="similarity of two sentences, 0 to 5, 5,749 / 1,500",
        repo=replace(MRPC.repo, config="stsb", file_patterns=("stsb/{split}-*.parquet",)),
        rows=ScoredTextRows(("sentence1", "sentence2"), "label", lowest=0.0, highest=5.0),
        sizes={"train": 5_749, "validation": 1_500},
    )
)
