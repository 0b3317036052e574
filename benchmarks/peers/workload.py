"""Define the work that every simulator performs, as typical user code with PyTorch and PEFT.

The model is a vision transformer with random weights, LoRA on q, k, v and o of every block, and a
trained head. Clients have equal shards of noise, and train a few local steps with Adam per round.
The server averages. This module does not import trishul-ray or a simulator, so that it runs in the
environment of each system.
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
class Workload:
    """Model, clients and size of a round.

    Attributes:
        width: Width of the transformer, whose attention heads have width 64.
        blocks: Number of transformer blocks.
        rank: Rank and α of LoRA.
        clients: Number of registered clients.
        cohort: Number of clients per round.
        steps: Number of local steps per client.
        batch: Number of images per step.
        lr: Learning rate of Adam.
        threads: Number of PyTorch threads.
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


def read() -> Workload:
    """Parse the work from JSON on the command line, and set the number of PyTorch threads."""
    work = Workload(**json.loads(sys.argv[1]))
    torch.set_num_threads(work.threads)
    return work


@functools.cache  # build the model once per process, also for several clients
def adapted(work: Workload) -> nn.Module:
    """Build the model with adapters; only the adapters and the head are trained."""
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
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def load(model: nn.Module, state: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.copy_(state[name])


@functools.cache
def shard(work: Workload, client: int) -> tuple[Tensor, Tensor]:
    """Generate a client's normalized images [steps x batch, 3, 32, 32] and labels."""
    generator = torch.Generator().manual_seed(1 + client)
    rows = work.steps * work.batch
    images = torch.randn(rows, 3, 32, 32, generator=generator)
    return images, torch.randint(CLASSES, (rows,), generator=generator)


def train(model: nn.Module, work: Workload, client: int) -> int:
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
    """Synchronize a framework with its own training loop: wait for a request before each round."""

    def __init__(self) -> None:
        """Reserve standard output for replies, and redirect other output to standard error."""
        self._answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = 0.0

    def wait(self) -> None:
        """Wait for the next request, and end the process at the end of input."""
        if not sys.stdin.readline():
            os._exit(0)
        self._began = time.perf_counter()

    def answer(self, steps: int) -> None:
        """Reply with the seconds since the request, and the number of local steps."""
        seconds = time.perf_counter() - self._began
        print(json.dumps({"seconds": seconds, "steps": steps}), file=self._answers, flush=True)
