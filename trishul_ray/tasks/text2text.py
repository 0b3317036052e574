"""Text in, text out, by an encoder-decoder: classification by generating the name of the class.

Training is teacher-forced cross-entropy; an answer is generated greedily and compared as text.

Legend of shapes: N rows, b rows of a batch, W tokens of the input, T tokens of the target with its
end token, V vocabulary.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trishul_ray.errors import InputError
from trishul_ray.tasks.base import Task, counted, group_of, group_shares, logits_of, sum_rows, total
from trishul_ray.tasks.text import PromptRows, Template, TokenizerRef, field_rows, to_device, trim

if TYPE_CHECKING:
    from trishul_ray.adapters.model import AdaptedModel
    from trishul_ray.data.prepare import Encoder
    from trishul_ray.data.prepared import Split

#: Label of a position that the loss leaves out.
IGNORED = -100


@dataclass(frozen=True)
class Generated:
    """What is judged: the logits of the right answer, and the answer that was generated.

    Attributes:
        logits: [b, T, V], teacher-forced.
        texts: one for each row.
    """

    logits: Tensor
    texts: Sequence[str]


class Text2Text(Task):
    """What classification and question answering have in common.

    Args:
        tokens: the backbone's tokenizer.
        template: the input text.
        max_length: tokens of the input.
        target_length: tokens of the target with its end token, in training and generation.
        start_id: the token that a decoder begins with.
        groups: names of parts of the test rows.
    """

    architecture = "seq2seq-lm"
    targets = ("labels", "classes", "references", "group")
    #: Per row and in [0, 1], by metric; the headline is the first. (Named in subclasses.)
    shares: tuple[str, ...] = ()

    def __init__(
        self,
        tokens: TokenizerRef,
        *,
        template: Template,
        max_length: int,
        target_length: int,
        start_id: int,
        groups: Sequence[str] = (),
    ) -> None:
        """Keep everything."""
        self.tokens, self.template = tokens, template
        self.max_length, self.target_length = max_length, target_length
        self.start_id = start_id
        self.groups = tuple(groups)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The headline, the loss, what else is shared out over rows, the headline by group."""
        headline, loss, *by_group = super().metrics
        return (headline, loss, *self.shares[1:], *by_group)

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Rows as encoded to the model's input and the tokens it should give.

        Returns:
            ``input_ids`` and ``attention_mask`` int64 [b, W]; ``decoder_input_ids`` int64 [b, T],
            the target one place later; ``labels`` int64 [b, T], -100 on padding. ``classes`` [b]
            (the stored label), ``references`` and ``group`` where the rows have them, as stored.
            ``dtype`` has no part.
        """
        ids, mask = trim(batch["input_ids"], batch["length"])
        target, known = trim(batch["target_ids"], batch["target_length"])
        start = target.new_full((len(target), 1), self.start_id)
        prepared = {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": torch.cat([start, target[:, :-1]], dim=1),
            "labels": target.masked_fill(known == 0, IGNORED),
        }
        kept = {"classes": "label", "references": "references"}
        rest = {name: batch[stored] for name, stored in kept.items() if stored in batch}
        return to_device(prepared, device) | rest | group_of(batch)

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Both inputs; no cache of keys and values is kept."""
        return super().inputs(batch) | {"use_cache": False}

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy over all target tokens of the batch, in float32."""
        logits = logits_of(outputs).float()
        return F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED
        )

    def predict(self, model: "AdaptedModel", batch: Mapping[str, Tensor]) -> Generated:
        """One pass of the encoder, the logits of the right answer, and the greedy answer."""
        from transformers import GenerationConfig

        inputs = self.inputs(batch)
        ids, mask = inputs.pop("input_ids"), inputs["attention_mask"]
        module: Any = model.model
        encoded = module.get_encoder()(input_ids=ids, attention_mask=mask)
        logits = logits_of(model.forward(encoder_outputs=encoded, **inputs))
        greedy = GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=self.target_length,
            decoder_start_token_id=self.start_id,
            pad_token_id=self.tokens.pad_id,
            eos_token_id=self.tokens.eos_id,
        )
        # What a checkpoint's generation_config.json sets would fill in what is not named here.
        own, module.generation_config = module.generation_config, greedy
        try:
            answers = module.generate(encoder_outputs=encoded, attention_mask=mask)
        finally:
            module.generation_config = own
        decode = self.tokens.tokenizer.batch_decode
        return Generated(logits, decode(answers.cpu(), skip_special_tokens=True))

    def evaluate(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss_sum`` over ``tokens``; each of :attr:`shares` over ``count`` rows."""
        labels = batch["labels"]
        losses = F.cross_entropy(
            outputs.logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
        )
        scores = self.judge(outputs.texts, batch)
        tokens = (labels != IGNORED).sum(dim=1)
        scores |= {"loss_sum": losses.sum(dim=1, dtype=torch.float64), "tokens": tokens}
        return sum_rows(scores, batch, self.groups, by=self.shares[0])

    @abstractmethod
    def judge(self, texts: Sequence[str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Each of :attr:`shares` for every answer, [b] in [0, 1]."""

    def merge(self, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """``loss`` by token; each of :attr:`shares` by row; the headline by group.

        Raises:
            ValueError: nothing was counted.
        """
        count = counted(sums)
        return {
            "loss": total(sums, "loss_sum") / total(sums, "tokens"),
            **{name: total(sums, name) / count for name in self.shares},
            **group_shares(sums, self.groups, self.shares[0], self.headline),
        }


class TextToClass(Text2Text):
    """Classification by generating a text for the class.

    Args:
        tokens: see :class:`Text2Text`, as for all that is not named here.
        class_texts: for each class, in order.
        **rest: see :class:`Text2Text`.

    Raises:
        InputError: two classes have the same text, but for case and white space, or one has none.
    """

    shares = ("accuracy",)

    def __init__(self, tokens: TokenizerRef, *, class_texts: Sequence[str], **rest: Any) -> None:
        """Check the texts of the classes."""
        super().__init__(tokens, **rest)
        self.class_texts = tuple(class_texts)
        seen: dict[str, str] = {}
        for text in class_texts:
            plain = normalized(text)
            if not plain or plain in seen:
                why = f"is the same as {seen[plain]!r}" if plain else "is empty"
                raise InputError(
                    f"task.verbalizers: {text!r} {why}; every class needs its own text"
                )
            seen[plain] = text

    @property
    def encoder(self) -> "Encoder":
        """Inputs and the texts of classes to token ids."""
        return ClassTextEncoder(self)

    def judge(self, texts: Sequence[str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``accuracy``: the text is that of the class, but for case and white space."""
        wanted = [normalized(self.class_texts[label]) for label in batch["classes"].tolist()]
        right = [normalized(text) == want for text, want in zip(texts, wanted, strict=True)]
        return {"accuracy": torch.tensor(right, dtype=torch.float64)}


def normalized(text: str) -> str:
    """Lower case, and one space between words."""
    return " ".join(text.lower().split())


class Text2TextEncoder:
    """Rows of text to token ids of inputs; subclasses give the targets.

    Args:
        task: what decides the numbers.
    """

    def __init__(self, task: Text2Text) -> None:
        """Remember the task."""
        self.task = task

    @property
    def key(self) -> str:
        """See :class:`~trishul_ray.data.prepare.Encoder`."""
        task = self.task
        lengths = [task.max_length, task.target_length]
        return json.dumps([type(self).__name__, 1, task.tokens.key, task.template.text, *lengths])

    def encode(self, split: "Split", progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """``input_ids`` int32 [N, W] and ``length`` int32 [N]."""
        task = self.task
        prompts = PromptRows(task.tokens, task.template, task.max_length, marks=True)

        def rows(start: int, stop: int) -> list[list[int]]:
            return prompts.ids(field_rows(split, task.template, start, stop))

        ids, length = task.tokens.padded(len(split), task.max_length, rows, progress)
        return {"input_ids": ids, "length": length}


class ClassTextEncoder(Text2TextEncoder):
    """Targets are the texts of classes.

    Args:
        task: what decides the numbers.
    """

    task: TextToClass

    @property
    def key(self) -> str:
        """See :class:`~trishul_ray.data.prepare.Encoder`."""
        return json.dumps([super().key, self.task.class_texts])

    def encode(self, split: "Split", progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """Inputs, ``target_ids`` int32 [N, T] and ``target_length`` int32 [N].

        Raises:
            InputError: the text of a class is longer than a target may be.
        """
        task, tokens = self.task, self.task.tokens
        targets = [[*tokens.plain(text), tokens.eos_id] for text in task.class_texts]
        longest = max(range(len(targets)), key=lambda i: len(targets[i]))
        if len(targets[longest]) > task.target_length:
            raise InputError(
                f"task.target_length={task.target_length} is too short for class text "
                f"{task.class_texts[longest]!r}, which takes {len(targets[longest])} tokens"
            )
        table, lengths = tokens.padded(
            len(targets), task.target_length, lambda a, z: targets[a:z], lambda done: None
        )
        labels = split.labels
        columns = super().encode(split, progress)
        return columns | {"target_ids": table[labels], "target_length": lengths[labels]}
