"""Commonsense-15K: multiple-choice questions as instructions, with eight test sets as groups.

A response has the form ``the correct answer is solution1``. The rows are on GitHub, not on the hub;
docs/field.md has the commands that copy them to a mirror. The number of training rows is
unconfirmed.

Source: Z. Hu et al., "LLM-Adapters", 2023, arXiv 2304.01933,
https://github.com/AGI-Edgerunners/LLM-Adapters, ``ft-training_set`` and ``dataset``.
"""

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import InstructionRows, PublicDataset, register_dataset

#: Number of rows of each test set, in the order of the papers' tables.
TEST_SETS = {
    "boolq": 3_270, "piqa": 1_838, "social_i_qa": 1_954, "hellaswag": 10_042,
    "winogrande": 1_267, "ARC-Easy": 2_376, "ARC-Challenge": 1_172, "openbookqa": 500,
}  # fmt: skip

COMMONSENSE = register_dataset(
    PublicDataset(
        name="commonsense-15k",
        description="multiple-choice questions, 15,119 / eight test sets, 22,419",
        repo=HubRepo("commonsense-15k", file_patterns=("{split}.json",)),
        rows=InstructionRows(
            names={"instruction": "instruction", "input": "input", "output": "output"}
        ),
        sizes={"train": 15_119} | TEST_SETS,
        test=tuple(TEST_SETS),
        groups=tuple(TEST_SETS),
    )
)
