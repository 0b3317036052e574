"""Run steps of TRL's SFTTrainer on given rows in a given order; see instruction.py."""

import json
import resource
import sys
import threading
import time
from queue import Queue
from typing import Any

import torch
from datasets import load_dataset
from peft import PeftModel
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class SteppedTrainer(SFTTrainer):
    """Trainer that performs each step on request, in the order of the rows."""

    asked: "Queue[str]" = Queue()
    answers: "Queue[dict[str, Any]]" = Queue()

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss and gradient of a batch, before the optimizer step."""
        self.asked.get()
        self.began = time.perf_counter()
        self.loss = super().training_step(*args, **kwargs)
        return self.loss


class Answer(TrainerCallback):
    """Reply after each optimizer step."""

    def __init__(self, trainer: SteppedTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        loss = float(self.trainer.loss)
        seconds = time.perf_counter() - self.trainer.began
        self.trainer.answers.put({"seconds": seconds, "loss": loss, "peak": peak})


def as_messages(row: dict[str, str]) -> dict[str, Any]:
    """Convert a row to a user message and a response, for the chat template."""
    roles = {"prompt": "user", "completion": "assistant"}
    return {name: [{"role": role, "content": row[name]}] for name, role in roles.items()}


def main() -> None:
    """Train in a thread, and reply to requests in the main thread."""
    words, order = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr  # TRL prints
    torch.set_num_threads(words["threads"])
    rows = load_dataset("json", data_files=f"{words['rows']}/train.jsonl", split="train")
    rows = rows.select([row for batch in order for row in batch]).map(as_messages)
    model = AutoModelForCausalLM.from_pretrained(words["model"], dtype=torch.float32)
    trainer = SteppedTrainer(
        model=PeftModel.from_pretrained(model, words["start"], is_trainable=True),
        args=SFTConfig(
            output_dir=f"{words['folder']}/trl",
            **{"max_length": words["length"], "per_device_train_batch_size": words["batch"]},
            **{"max_steps": words["steps"], "optim": "sgd", "learning_rate": 0.1},
            **{"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0},
            **{"report_to": "none", "save_strategy": "no", "logging_strategy": "no"},
            **{"completion_only_loss": True, "gradient_checkpointing": False, "use_cpu": True},
            **{"bf16": False, "disable_tqdm": True, "packing": False},
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(words["model"]),
    )
    trainer.add_callback(Answer(trainer))
    training = threading.Thread(target=trainer.train)
    training.start()
    for line in sys.stdin:
        if line.strip() == "step":
            trainer.asked.put("step")
            answer = trainer.answers.get()
        else:
            training.join()
            answer = {"folder": f"{words['folder']}/trl-adapter"}
            trainer.model.save_pretrained(answer["folder"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
