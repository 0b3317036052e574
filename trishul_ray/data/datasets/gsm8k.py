"""GSM8K: grade-school math word problems with solutions, 7,473 train and 1,319 test.

A solution ends with ``####`` and the number. Annotations such as ``<<48/2=24>>`` are for a
calculator. License: MIT.

Source: K. Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021, arXiv 2110.14168.
"""

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import InstructionRows, PublicDataset, register_dataset

GSM8K = register_dataset(
    PublicDataset(
        name="gsm8k",
        description="math word problems with solutions, 7,473 / 1,319",
        repo=HubRepo(
            "openai/gsm8k",
            config="main",
            revision="e53f048856ff4f594e959d75785d2c2d37b678ee",
            file_patterns=("main/{split}-*.parquet",),
        ),
        rows=InstructionRows(names={"instruction": "question", "output": "answer"}),
        sizes={"train": 7_473, "test": 1_319},
    )
)
