"""Instruction tuning of a decoder: the loss of responses after their prompts.

Labels come from stored ranges, never from a comparison with the padding id, which is the end token
in many tokenizers.

Legend: N rows, b rows of a batch, L stored tokens, W tokens of the batch, S maximum responses of a
row, M labels of a batch, d width, V vocabulary size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from trishul_ray.data.conversations import Row, read_rows
from trishul_ray.errors import InputError
from trishul_ray.runtime.lazy import torch
from trishul_ray.storage.durable import Json
from trishul_ray.tasks import prompts
from trishul_ray.tasks.base import (
    ModelInputs,
    Task,
    group_column,
    logits_of,
    register,
    to_device,
)
from trishul_ray.tasks.sums import RowScores
from trishul_ray.tasks.text import TokenizerRef, begin_ids, generate_greedily

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trishul_ray.adapters.model import AdaptedModel
    from trishul_ray.config.fields import TaskConfig
    from trishul_ray.data.dataset import DatasetInfo, Split
    from trishul_ray.models.backbone import Backbone
    from trishul_ray.tasks.label_loss import LabelScores

#: Batches are padded to a multiple of this width.
MULTIPLE = 8


@register("instruction")
@dataclass(eq=False)
class Instruction(Task):
    """Train a decoder on responses, and score the accuracy of its predicted tokens.

    Attributes:
        tokens: The backbone's tokenizer.
        template: Text of the template; see :mod:`~trishul_ray.tasks.prompts`.
        max_length: Maximum tokens of a row.
        target_length: Maximum labels of a response, and maximum tokens to generate.
        every_turn: Whether all responses of a conversation are labels.
        by_row: Whether the loss is the mean over rows of their means, instead of over all labels.
        groups: Names of groups of test rows.
    """

    reads = "instruction"
    families = ("causal-lm",)
    model_kind = "causal-lm"
    fields_read = frozenset(
        {"max_length", "target_length", "template", "turns", "loss", "answer_pattern"}
    )
    row_metrics = ("token_accuracy",)
    targets = ("positions", "labels", "counts", "start", "group", "client")

    tokens: TokenizerRef
    _: KW_ONLY
    template: str | None
    max_length: int
    target_length: int
    every_turn: bool = True
    by_row: bool = False
    groups: tuple[str, ...] = ()

    @classmethod
    def build(cls, config: TaskConfig, info: DatasetInfo, backbone: Backbone) -> Instruction:
        """Create the task with the template of the section, or of the tokenizer."""
        if config.target_length >= config.max_length:
            raise InputError(
                f"task.target_length={config.target_length} leaves no token of "
                f"task.max_length={config.max_length} for the prompt"
            )
        task = cls(
            TokenizerRef.of(backbone),
            template=config.template,
            max_length=config.max_length,
            target_length=config.target_length,
            every_turn=config.turns == "all",
            by_row=config.loss == "rows",
            groups=info.groups,
        )
        _ = task.prompt  # Validate the template now.
        return task

    @cached_property
    def prompt(self) -> prompts.Prompt:
        """The template, which loads the tokenizer."""
        lengths = (self.max_length, self.target_length)
        return prompts.build_prompt(self.template, self.tokens, lengths, every_turn=self.every_turn)

    def __getstate__(self) -> dict[str, Any]:
        # Exclude the prompt, whose tokenizer another process loads.
        return {name: value for name, value in vars(self).items() if name != "prompt"}

    def settings(self) -> Json:
        """Return the template's text, its date and the limits."""
        text = isinstance(self.prompt, prompts.TextPrompt)
        return {
            "template": self.prompt.text,
            "begin_ids": begin_ids(self.tokens) if text else [],
            "date": prompts.DATE,
            "max_length": self.max_length,
            "target_length": self.target_length,
            "end_ids": sorted(self.prompt.end_ids()),
        }

    @property
    def key(self) -> str:
        """Text that identifies everything that determines the encoded columns."""
        prompt = [self.prompt.text, prompts.DATE, self.max_length, self.target_length]
        rest = {"every_turn": self.every_turn}
        return json.dumps(["instruction", 2, self.tokens.key, *prompt, rest])

    def encode(self, split: Split, progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Encode rows with the ranges of their responses.

        Returns:
            ``input_ids`` int32 [N, L], ``length`` int32 [N], ``spans`` int32 [N, S, 2] (first
            position and the position after the last, [0, 0] for none) and ``cut`` uint8 [N] (bits).

        Raises:
            InputError: The template does not support the rows.
        """
        name, spans, cut = split.info.name, list[list[tuple[int, int]]](), list[int]()

        def rows(start: int, stop: int) -> list[list[int]]:
            found = self.prompt.encode(read_rows(split, start, stop), f"dataset {name}")
            spans.extend(each.spans for each in found)
            cut.extend(each.cut for each in found)
            return [each.ids for each in found]

        ids, length = self.tokens.padded_columns(len(split), self.max_length, rows, progress)
        most = max(map(len, spans), default=1)
        ranges = np.zeros((len(split), most, 2), dtype=np.int32)
        for number, row in enumerate(spans):
            ranges[number, : len(row)] = row
        flags = np.array(cut, dtype=np.uint8)
        return {"input_ids": ids, "length": length, "spans": ranges, "cut": flags}

    @property
    def means_rows(self) -> bool:
        """Whether the loss is the mean over rows of their means."""
        return self.by_row

    def count_labels(self, split: Split) -> np.ndarray:
        """Return the number of labels of each encoded row, int64 [N]."""
        spans = split.column("spans").astype(np.int64)
        counts: np.ndarray = (spans[..., 1] - spans[..., 0]).sum(axis=1)
        return counts

    def remarks(self, split: Split) -> list[str]:
        """Count the encoded rows of a split that were truncated, one text per kind."""
        cut = split.column("cut")
        ways = {
            prompts.PROMPT_CUT: "prompts cut",
            prompts.ANSWER_CUT: "answers cut, without an end token",
            prompts.TURNS_DROPPED: "conversations without their first turns",
            prompts.LAST_TURN_ALONE: "conversations with labels only in the last turn",
        }
        counts = {way: int(((cut & bit) > 0).sum()) for bit, way in ways.items()}
        return [f"{count:,} of {len(cut):,} {way}" for way, count in counts.items() if count]

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Convert encoded rows to the model's inputs, padded to the right; ``dtype`` is not used.

        No mask and no positions are passed: under causal attention, a label never sees the tokens
        to its right.

        Returns:
            ``input_ids`` int64 [b, W]; ``positions`` int64 [M], the labeled positions of all rows
            in the flat [b * W]; ``labels`` int64 [M]; on the CPU, ``counts`` int64 [b], the number
            of labels of each row, and ``start`` int64 [b], the start of its last response;
            ``group`` and ``client`` if the rows have them.
        """
        stored, length = batch["input_ids"].long(), batch["length"].long()
        width = -(-int(length.max()) // MULTIPLE) * MULTIPLE
        stored = torch.nn.functional.pad(stored, (0, max(0, width - stored.shape[1])))[:, :width]
        at = torch.arange(width)
        ids = stored.where(at < length[:, None], self.tokens.pad_id)
        first, after = batch["spans"].long().unbind(-1)  # [b, S] each
        inside = (at >= first[..., None]) & (at < after[..., None])  # [b, S, W]
        labeled = inside.any(dim=1)
        positions = labeled.flatten().nonzero()[:, 0]
        moved = {"input_ids": ids, "positions": positions, "labels": ids.flatten()[positions]}
        kept = {"counts": labeled.sum(dim=1), "start": first.amax(dim=1)}
        return to_device(moved, device) | kept | group_column(batch)

    def inputs(self, batch: Mapping[str, Tensor]) -> ModelInputs:
        """Return the ids; no key-value cache is kept."""
        return super().inputs(batch) | {"use_cache": False}

    def losses(self, model: AdaptedModel, batch: Mapping[str, Tensor], clients: int) -> Tensor:
        """Compute the loss of each client's rows, with logits only for labeled positions."""
        from trishul_ray.tasks.label_loss import scores_of, weighted_losses  # imports torch

        counts = batch["counts"].view(clients, -1)  # [clients, rows of each]
        weights = self._weights(counts)
        weights = to_device({"weights": weights}, batch["labels"].device)["weights"]
        hidden, head = self._before_labels(model, batch)
        if head is None:
            losses = scores_of(hidden, batch["labels"]).losses
            found = losses * weights.to(losses.dtype)
        else:
            found = weighted_losses(hidden, head, batch["labels"], weights)
        parts = found.split(counts.sum(dim=1).tolist())
        return torch.stack([part.sum() for part in parts])

    def _weights(self, counts: Tensor) -> Tensor:
        """Return the weight of each label, float64 [M], given counts per row [clients, rows]."""
        terms = counts.shape[1] * counts if self.by_row else counts.sum(dim=1, keepdim=True)
        weights = (1.0 / terms.double()).expand_as(counts)
        return weights.flatten().repeat_interleave(counts.flatten())

    def _before_labels(
        self, model: AdaptedModel, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, nn.Linear | None]:
        """Return the hidden states before the labels [M, d] and the head, or the logits [M, V]."""
        from trishul_ray.tasks.label_loss import widened  # imports torch

        inputs = self.inputs(batch)
        # A prompt has at least one token, so no index is in another row.
        before = batch["positions"] - 1
        if (found := model.hidden_states(**inputs)) is not None:
            return found[0].flatten(0, 1).index_select(0, before), found[1]
        logits = logits_of(model.forward(**inputs)).flatten(0, 1).index_select(0, before)
        return widened(logits), None

    def predict(self, model: AdaptedModel, batch: Mapping[str, Tensor]) -> LabelScores:
        """Compute the model's scores of the labels."""
        from trishul_ray.tasks.label_loss import label_scores, scores_of  # imports torch

        hidden, head = self._before_labels(model, batch)
        if head is None:
            return scores_of(hidden, batch["labels"])
        return label_scores(hidden, head, batch["labels"])

    def loss(self, outputs: LabelScores, batch: Mapping[str, Tensor]) -> Tensor:
        """Compute the mean loss of all labels of the batch, or of the rows' means."""
        return (outputs.losses * self._weights(batch["counts"][None]).to(outputs.losses)).sum()

    def score(self, outputs: LabelScores, batch: Mapping[str, Tensor]) -> RowScores:
        """Return loss, number of labels and fraction of predicted labels of every row."""
        counts = batch["counts"]
        sizes = counts.tolist()
        losses = [part.sum() for part in outputs.losses.double().split(sizes)]
        right = [part.sum() for part in outputs.right.double().split(sizes)]
        return RowScores(
            loss=torch.stack(losses),
            terms=counts,
            scores={"token_accuracy": torch.stack(right) / counts.to(right[0].device)},
        )

    def respond(
        self, model: AdaptedModel, batch: Mapping[str, Tensor], classes: Sequence[str]
    ) -> list[str]:
        """Generate the response to the last turn of every row greedily."""
        return self.tokens.tokenizer.batch_decode(
            self.generate(model, batch), skip_special_tokens=True
        )

    def generate(
        self, model: AdaptedModel, batch: Mapping[str, Tensor], limit: int | None = None
    ) -> Tensor:
        """Generate ids after the last prompt of every row, int64 [b, up to a limit].

        The default limit is ``task.target_length``.
        """
        ids, start = batch["input_ids"], batch["start"]
        longest = int(start.max())
        places = torch.arange(longest) - (longest - start)[:, None]  # negative on padding
        places = places.to(ids.device)
        left = ids.gather(1, places.clamp(min=0))
        mask = (places >= 0).long()
        found = generate_greedily(
            model.model,
            {"input_ids": left, "attention_mask": mask},
            max_new_tokens=self.target_length if limit is None else limit,
            pad_token_id=self.tokens.pad_id,
            eos_token_id=self.stop_ids(model),
        )
        return found[:, longest:]

    def log_likelihoods(
        self, model: AdaptedModel, rows: Sequence[Row], device: torch.device, dtype: torch.dtype
    ) -> np.ndarray:
        """Compute the log-likelihood [N] of the response of every row, without its end token.

        Nothing is generated: a response may be longer than ``task.target_length``.
        """
        ends = self.prompt.end_ids()
        ids, spans = [], np.zeros((len(rows), 1, 2), dtype=np.int32)
        whole = replace(self.prompt, target_length=self.max_length)
        for number, found in enumerate(whole.encode(rows, "the choices")):
            start, stop = found.spans[-1]
            stop = next((n for n in range(start, stop) if found.ids[n] in ends), stop)
            spans[number, 0] = start, stop
            ids.append(found.ids[:stop])
        stored, length = self.tokens.padded_columns(
            len(ids), self.max_length, lambda first, last: ids[first:last], lambda done: None
        )
        columns = {"input_ids": stored, "length": length, "spans": spans}
        tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
        batch = self.prepare_batch(tensors, device, dtype)
        losses: np.ndarray = self.score(self.predict(model, batch), batch).loss.cpu().numpy()
        return -losses

    def said(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return which labels of a batch precede the end of their response, bool [M], on the CPU.

        The others are the end token and the tokens that a chat template writes after it.
        """
        labels, positions = batch["labels"].cpu(), batch["positions"].cpu()
        ends = torch.isin(labels, torch.tensor(sorted(self.prompt.end_ids()))).long()
        passed = ends.cumsum(dim=0)  # Number of end tokens up to each label.
        begins = positions.diff(prepend=positions[:1] - 2) > 1  # The first label of each response.
        return passed == (passed - ends)[begins][begins.cumsum(dim=0) - 1]

    def stop_ids(self, model: AdaptedModel) -> list[int]:
        """Return the ids at which generation stops: the template's and the checkpoint's."""
        module: Any = model.model
        ends = getattr(module.generation_config, "eos_token_id", None)
        own = {ends} if isinstance(ends, int) else {*(ends or ())}
        return sorted(self.prompt.end_ids() | own)
