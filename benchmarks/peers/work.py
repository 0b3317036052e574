"""The work that every simulator does here, written as its users write it: PyTorch and PEFT.

A vision transformer with random weights, LoRA on q, k, v and o of every block and a trained head;
clients with equal shards of noise; a few local steps of Adam a round; plain averaging. Imports
neither trishul-ray nor any simulator, and runs in the environment of each.
"""

import functools
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import TextIO

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification


@dataclass(frozen=True)
class Work:
    """Model, clients and size of a round.

    Attributes:
        width: Width of the transformer, whose heads are 64 wide.
        blocks: Number of its blocks.
        rank: LoRA's rank (and α).
        clients: Registered clients.
        cohort: Clients of a round.
        steps: Local steps of each.
        batch: Images of a step.
        lr: Adam's learning rate.
        threads: Threads of PyTorch.
    """

    width: int = 192
    blocks: int = 6
    rank: int = 16
    clients: int = 20
    cohort: int = 3
    steps: int = 20
    batch: int = 32
    lr: float = 1e-3
    threads: int = 2


CLASSES = 100
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def read() -> Work:
    """Return the work that the command line describes in JSON, and set PyTorch's threads."""
    work = Work(**json.loads(sys.argv[1]))
    torch.set_num_threads(work.threads)
    return work


@functools.cache  # a process that trains several clients builds its model once
def adapted(work: Work) -> nn.Module:
    """Return the model with its adapters; only these and the head are trained."""
    torch.manual_seed(0)
    config = ViTConfig(  # type: ignore[call-arg]  # num_labels is its base class's
        hidden_size=work.width,
        num_hidden_layers=work.blocks,
        num_attention_heads=work.width // 64,
        intermediate_size=4 * work.width,
        image_size=32,
        patch_size=4,  # 65 tokens
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    model = ViTForImageClassification(config)
    lora = LoraConfig(
        r=work.rank,
        lora_alpha=work.rank,
        target_modules=list(TARGETS),
        modules_to_save=["classifier"],
    )
    return get_peft_model(model, lora)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of what is trained."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Set what is trained."""
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.copy_(state[name])


@functools.cache
def shard(work: Work, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's normalized images [steps x batch, 3, 32, 32] and labels."""
    generator = torch.Generator().manual_seed(1 + client)
    rows = work.steps * work.batch
    images = torch.randn(rows, 3, 32, 32, generator=generator)
    return images, torch.randint(CLASSES, (rows,), generator=generator)


def train(model: nn.Module, work: Work, client: int) -> int:
    """Train one client in place and return the number of its steps."""
    images, labels = shard(work, client)
    model.train()
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=work.lr)
    order = torch.randperm(len(labels))
    steps = 0
    for rows in order.split(work.batch):
        optimizer.zero_grad()
        model(pixel_values=images[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
        steps += 1
    return steps


class Turns:
    """Lets a framework that drives its own rounds wait for its turn before each of them."""

    def __init__(self) -> None:
        """Keep the standard output for answers; whatever else is printed goes to the errors."""
        self._answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = 0.0

    def wait(self) -> None:
        """Wait for the next round to be asked for; end the process if none will be."""
        if not sys.stdin.readline():
            os._exit(0)
        self._began = time.perf_counter()

    def answer(self, steps: int) -> None:
        """Answer with the seconds since the round was asked for, and its local steps."""
        seconds = time.perf_counter() - self._began
        print(json.dumps({"seconds": seconds, "steps": steps}), file=self._answers, flush=True)
