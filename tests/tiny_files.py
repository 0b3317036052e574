"""A tiny table and a tiny backbone as files, for tests of changes to files."""

from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.tokenizers import byte_tokenizer
from trishul_ray.models.weights import seeded

#: The overrides of a run on texts that takes seconds, in this process.
TINY_TEXT = [
    "task.max_length=16",
    "method=fedit",
    "budget=2",
    "optimizer.lr=0.01",
    "federation.clients=2",
    "federation.clients_per_round=2",
    "federation.rounds=2",
    "federation.local_steps=2",
    "federation.batch_size=2",
    "resources.backend=inline",
    "tracking.mlflow=false",
]


def write_notes(file, first="left"):
    """Write 40 rows of text and label."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{first if n % 2 else 'right'} {n},{n % 2}" for n in range(40)]
    file.write_text("\n".join(["text,label", *rows]))


def save_bert(folder):
    """Write a BERT with its tokenizer."""
    with seeded(0):
        model = AutoModelForMaskedLM.from_config(BUILTINS["bert-tiny"].config())
    model.save_pretrained(folder)
    byte_tokenizer("bert").save_pretrained(folder)


def change_weights(folder):
    """Change one weight."""
    file = folder / "model.safetensors"
    state = load_file(file)
    state["bert.encoder.layer.0.output.dense.bias"][0] += 1.0
    save_file(state, file, metadata={"format": "pt"})


def change_config(folder):
    """Change the computation of the model, but no weight."""
    file = folder / "config.json"
    text = file.read_text()
    assert '"gelu"' in text
    file.write_text(text.replace('"gelu"', '"relu"'))
