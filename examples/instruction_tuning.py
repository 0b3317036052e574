"""Tune a decoder on instructions and responses that are split among four clients.

Run it with ``python examples/instruction_tuning.py``; it takes less than a minute.
"""

import trishul_ray

CAPITALS = {"France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Greece": "Athens"}


def build_rows(copies: int = 6) -> list[dict[str, str]]:
    """Build rows with the columns `instruction` and `output`."""
    questions = ("Name the capital of {}.", "What is the capital of {}?")
    return [
        {"instruction": f"{question.format(country)} ({number})", "output": city}
        for number in range(copies)
        for country, city in CAPITALS.items()
        for question in questions
    ]


if __name__ == "__main__":
    result = trishul_ray.run(
        build_rows(),
        config={"model": {"name": "llama-tiny", "init": "random"}},  # or llama-3.2-1b, pretrained
        method="fedit",
        budget=4,
        task={"kind": "instruction", "template": "plain", "target_length": 32},
        partition={"kind": "iid"},
        federation={
            "clients": 4, "clients_per_round": 2, "rounds": 2, "local_steps": 5, "batch_size": 4,
            "weighting": "tokens",
        },
        backend="inline",  # one process, without Ray
        mlflow=False,
        progress="plain",
    )  # fmt: skip
    print("loss by round:", result.history["loss"].round(3).tolist())
    print("A PEFT adapter:", result.adapter_path)
