"""Dolly: 15,011 instructions in eight categories, written by employees of Databricks.

The test rows are ten per category, as in Shepherd (FedIT). ``dolly-shards`` partitions the same
rows as Shepherd does: each of ten clients has two shards of the rows sorted by category. License:
CC BY-SA 3.0.

Source: https://huggingface.co/datasets/databricks/databricks-dolly-15k; the shards follow
https://github.com/JayZhang42/FederatedGPT-Shepherd, ``client_data_allocation.py``.
"""

from dataclasses import replace

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import InstructionRows, PublicDataset, register_dataset

#: Categories, in the order of their group numbers.
CATEGORIES = (
    *("brainstorming", "classification", "closed_qa", "creative_writing", "general_qa"),
    *("information_extraction", "open_qa", "summarization"),
)

_ROWS = InstructionRows(
    names={
        "instruction": "instruction",
        "input": "context",
        "output": "response",
        "group": "category",
    },
    groups=CATEGORIES,
)

DOLLY = register_dataset(
    PublicDataset(
        name="dolly",
        description="instructions in eight categories, 14,931 train / 80 test",
        repo=HubRepo(
            "databricks/databricks-dolly-15k",
            revision="bdd27f4d94b9c1f951818a7da7fd7aeea5dbff1a",
            file_patterns=("data/{split}-*.parquet", "databricks-dolly-15k.jsonl"),
        ),
        rows=_ROWS,
        sizes={"train": 15_011},
        test_each=10,
    )
)

SHARDS = register_dataset(
    replace(
        DOLLY,
        name="dolly-shards",
        description="Dolly, ten clients with two category shards, 14,931 / 80",
        rows=replace(_ROWS, shards=10),
    )
)
