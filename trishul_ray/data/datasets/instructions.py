"""Instructions of OpenFedLLM and of FlowerTune's leaderboard: general, medical, finance, code.

None was published with test rows, so 2% of the rows become test rows. Rows with a blank answer are
skipped and listed in the result.

Sources: the cards of the repositories below; B. Peng et al., "Instruction Tuning with GPT-4", 2023,
arXiv 2304.03277; T. Han et al., "MedAlpaca", 2023, arXiv 2304.08247; H. Yang et al., "FinGPT",
2023, arXiv 2306.06031; S. Chaudhary, "Code Alpaca", https://github.com/sahil280114/codealpaca.
"""

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import InstructionRows, PublicDataset, register_dataset

_ROWS = InstructionRows(names={"instruction": "instruction", "input": "input", "output": "output"})
_TEST_SHARE = 0.02

# CC BY-NC 4.0. The number of rows is from the card of a copy,
# https://huggingface.co/datasets/flwrlabs/alpaca-gpt4. Commit and file:
# https://huggingface.co/datasets/vicgalle/alpaca-gpt4/tree/48bb1405118c738817748474e889f72c0dd77ffb
ALPACA_GPT4 = register_dataset(
    PublicDataset(
        name="alpaca-gpt4",
        description="instructions of Alpaca, answered by GPT-4, 52,002 in total",
        repo=HubRepo("vicgalle/alpaca-gpt4", revision="48bb1405118c738817748474e889f72c0dd77ffb"),
        rows=_ROWS,
        sizes={"train": 52_002},
        test_share=_TEST_SHARE,
    )
)

# A copy in Parquet, since we know no commit of medalpaca/medical_meadow_medical_flashcards.
# https://huggingface.co/datasets/lavita/medical-qa-datasets/tree/35c9fb395872b25b15de96f676939702880cf659
_FLASHCARDS = "medical_meadow_medical_flashcards/{split}-*.parquet"
MEDICAL = register_dataset(
    PublicDataset(
        name="medical",
        description="medical flashcards of MedAlpaca, 33,955 in total",
        repo=HubRepo(
            "lavita/medical-qa-datasets",
            revision="35c9fb395872b25b15de96f676939702880cf659",
            file_patterns=(_FLASHCARDS,),
            fetch=_FLASHCARDS,
        ),
        rows=_ROWS,
        sizes={"train": 33_955},
        test_share=_TEST_SHARE,
    )
)

# Rows: https://huggingface.co/datasets/FinGPT/fingpt-sentiment-train
FINANCE = register_dataset(
    PublicDataset(
        name="finance",
        description="sentiment of financial news (FinGPT), 76,772 in total",
        repo=HubRepo(
            "FinGPT/fingpt-sentiment-train", revision="a2701f2155c1371ba38b92a2c41e8b0c0fca7614"
        ),
        rows=_ROWS,
        sizes={"train": 76_772},
        test_share=_TEST_SHARE,
    )
)

# Apache-2.0. https://huggingface.co/datasets/flwrlabs/code-alpaca-20k. The number of rows is from
# the card of
# https://huggingface.co/datasets/eagle0504/augmented_codealpaca-20k-using-together-ai-deepseek-v1,
# which is derived from the same rows. It is not confirmed for this file.
CODE = register_dataset(
    PublicDataset(
        name="code",
        description="code from instructions (CodeAlpaca), 20,022, unconfirmed",
        repo=HubRepo(
            "flwrlabs/code-alpaca-20k",
            revision="993cf40c2e806a2641f388fb4026f30c4c73dc97",
            file_patterns=("code_alpaca_20k.json",),
            fetch="code_alpaca_20k.json",
        ),
        rows=_ROWS,
        sizes={"train": 20_022},
        test_share=_TEST_SHARE,
    )
)
