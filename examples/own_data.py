"""Fine-tune a text encoder on user data, with two shops as clients.

Run it with ``python examples/own_data.py``; it takes less than a minute.
"""

import trishul_ray

SENTENCES = {
    "refund": ["I want my money back", "please refund the order", "the charge is wrong"],
    "delivery": ["the parcel is late", "where is my package", "it arrived at the wrong door"],
}


def build_rows(copies: int = 20) -> list[dict[str, str]]:
    """Build rows with the columns `text`, `label` and `client`."""
    return [
        {"text": f"{sentence}, case {number}", "label": label, "client": f"shop {number % 2}"}
        for number in range(copies)
        for label, sentences in SENTENCES.items()
        for sentence in sentences
    ]


if __name__ == "__main__":
    result = trishul_ray.run(
        build_rows(),
        model="bert-tiny",  # random weights; use all-MiniLM-L6-v2 for a pretrained encoder
        method="fedit",
        budget=4,
        partition={"kind": "natural"},  # by the column `client`
        federation={"clients": 2, "clients_per_round": 2, "rounds": 3, "local_steps": 10},
        lr=5e-3,
        backend="inline",  # one process, without Ray
        mlflow=False,
        progress="plain",
    )
    print("accuracy by round:", result.history["accuracy"].round(3).tolist())
    print(result.predict(["please refund my parcel"]), result.adapter_path)
