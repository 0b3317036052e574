"""MRQA 2019: extractive question answering, 516,819 train and 58,221 test questions.

Only the six in-domain sub-datasets are read. The test rows are their development sets.

Source: A. Fisch et al., "MRQA 2019 Shared Task", https://github.com/mrqa/MRQA-Shared-Task-2019.
"""

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import PublicDataset, QuestionRows, register_dataset

#: The sub-datasets, in the order of their group numbers.
SUBSETS = ("SQuAD", "NewsQA", "TriviaQA-web", "SearchQA", "HotpotQA", "NaturalQuestionsShort")

MRQA = register_dataset(
    PublicDataset(
        name="mrqa",
        description="extractive QA, six sub-datasets, 516,819 / 58,221",
        repo=HubRepo(
            "mrqa-workshop/mrqa",
            config="plain_text",
            revision="f3178d9888471dfb2b67c93de14f0ddf499a8d9f",
            file_patterns=("data/{split}-*.parquet", "plain_text/{split}-*.parquet"),
        ),
        rows=QuestionRows(subsets=SUBSETS),
        sizes={"train": 516_819, "validation": 58_221},
        test=("validation",),
    )
)
