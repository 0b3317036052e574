"""Classification by a decoder: a prompt, and one word for each class (a verbalizer) after it.

A class is scored by the first token in which its verbalizer differs from those of the others, at
the one position after the prompt; tokens that all verbalizers begin with belong to the prompt.
Rows are stored padded to the right and become batches padded to the left, so that the last
position of every row is its answer's and only that one's logits need be computed.

Legend of shapes: N rows, b rows of a batch, L and W tokens stored and in the batch, V vocabulary.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trishul_ray.errors import InputError
from trishul_ray.tasks.base import Task, class_sums, group_of, logits_of, merge_classes
from trishul_ray.tasks.text import PromptRows, Template, TokenizerRef, field_rows, to_device

if TYPE_CHECKING:
    from trishul_ray.data.prepare import Encoder
    from trishul_ray.data.prepared import Split


class Verbalizer(Task):
    """A prompt in, one token of the vocabulary out.

    Args:
        tokens: the backbone's tokenizer; it is loaded here.
        template: the prompt.
        verbalizers: a word or phrase for each class, in order. One that begins with no white
            space is set off from the prompt by a space, unless the prompt ends with some.
        max_length: tokens of a row.
        groups: names of parts of the test rows.

    Attributes:
        answers: the token that stands for each class.
        bridge: tokens that all verbalizers begin with: the end of every prompt.

    Raises:
        InputError: two classes have the same token, or the template's end merges with what
            follows it.
    """

    architecture = "causal-lm"
    targets = ("labels", "group")

    def __init__(
        self,
        tokens: TokenizerRef,
        *,
        template: Template,
        verbalizers: Sequence[str],
        max_length: int,
        groups: Sequence[str] = (),
    ) -> None:
        """Find the token of each class."""
        self.tokens, self.template = tokens, template
        self.bridge, self.answers = answer_tokens(tokens, template, verbalizers)
        self.max_length = max_length
        self.groups = tuple(groups)

    @property
    def encoder(self) -> "Encoder":
        """Prompts to ``input_ids`` and ``length``."""
        return PromptEncoder(self.tokens, self.template, self.bridge, self.max_length)

    def prepare_batch(
        self, batch: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Rows as encoded to the model's input, padded to the left; ``dtype`` has no part.

        Returns:
            ``input_ids``, ``attention_mask`` (one on tokens) and ``position_ids`` (from zero at
            the first token), int64 [b, W]; ``labels`` int64 [b]; ``group`` where there is one.
        """
        stored, length = batch["input_ids"], batch["length"].long()
        width = int(length.max())
        places = torch.arange(width) - (width - length)[:, None]  # [b, W], negative on padding
        mask = (places >= 0).long()
        places = places.clamp(min=0)
        # Padding holds the row's first token: masked, and surely one that the model knows.
        ids = stored.long().gather(1, places)
        prepared = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
        return to_device(prepared | {"labels": batch["label"]}, device) | group_of(batch)

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The prompt; logits are asked for at the last position only, and no cache is kept."""
        return super().inputs(batch) | {"logits_to_keep": 1, "use_cache": False}

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy over the whole vocabulary at the answer's position, in float32."""
        logits = self._answer_logits(outputs)
        return F.cross_entropy(logits.float(), self._answers(logits)[batch["labels"]])

    def evaluate(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """``loss_sum`` over the vocabulary; ``correct`` by the likeliest verbalizer; ``count``."""
        logits = self._answer_logits(outputs)
        return class_sums(logits, batch, self.groups, self._answers(logits))

    def merge(self, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """``loss``, ``accuracy`` and ``accuracy`` by group.

        Raises:
            ValueError: nothing was counted.
        """
        return merge_classes(sums, self.groups)

    def _answers(self, logits: Tensor) -> Tensor:
        return torch.tensor(self.answers, device=logits.device)

    @staticmethod
    def _answer_logits(outputs: Any) -> Tensor:
        """Logits [b, V] of the last position, of a model's [b, 1 or more, V]."""
        logits = logits_of(outputs)
        return logits[:, -1] if logits.dim() == 3 else logits


def answer_tokens(
    tokens: TokenizerRef, template: Template, verbalizers: Sequence[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What all verbalizers begin with after the prompt, and the token by which each is scored.

    Raises:
        InputError: see :class:`Verbalizer`.
    """
    probe = template.fill(["x"] * len(template.fields))
    alone = tokens.plain(probe)
    after = []
    for word in verbalizers:
        gap = "" if not word or word[0].isspace() or probe[-1].isspace() else " "
        after.append(tokens.plain(probe + gap + word))
    together = zip(*after, strict=False)  # up to the end of the shortest
    shared = [column[0] for column in takewhile(lambda c: len(set(c)) == 1, together)]
    if shared[: len(alone)] != alone:
        raise InputError(
            f"task.template ends in {template.text[-12:]!r}, which the tokenizer joins with the "
            "answer after it: end it with a letter or a colon, without white space"
        )
    answers: dict[int, str] = {}
    for word, ids in zip(verbalizers, after, strict=True):
        token = ids[len(shared)] if len(ids) > len(shared) else None
        if token is None or token in answers:
            other = answers.get(token) if token is not None else "the others"
            raise InputError(
                f"task.verbalizers: {word!r} and {other!r} begin with the same token, by which a "
                "class is scored: choose words with different beginnings"
            )
        answers[token] = word
    return tuple(shared[len(alone) :]), tuple(answers)


class PromptEncoder:
    """Rows of text to token ids of prompts that end where the answer begins.

    Args:
        tokens: the tokenizer.
        template: the prompt.
        bridge: tokens after it.
        max_length: tokens of a row; a field is cut where a prompt would be longer.

    Raises:
        InputError: the template leaves no room for the fields.
    """

    def __init__(
        self, tokens: TokenizerRef, template: Template, bridge: Sequence[int], max_length: int
    ) -> None:
        """Keep what decides the numbers."""
        self._tokens, self._template = tokens, template
        self._bridge, self._max_length = list(bridge), max_length

    @property
    def key(self) -> str:
        """See :class:`~trishul_ray.data.prepare.Encoder`."""
        numbers = [self._bridge, self._max_length]
        return json.dumps(["prompt", 1, self._tokens.key, self._template.text, *numbers])

    def encode(self, split: "Split", progress: Callable[[float], None]) -> dict[str, np.ndarray]:
        """``input_ids`` int32 [N, L] and ``length`` int32 [N]."""
        begin = self._begin()
        limit = self._max_length - len(begin) - len(self._bridge)
        prompts = PromptRows(self._tokens, self._template, limit, marks=False)

        def rows(start: int, stop: int) -> list[list[int]]:
            found = prompts.ids(field_rows(split, self._template, start, stop))
            return [begin + ids + self._bridge for ids in found]

        ids, length = self._tokens.padded(len(split), self._max_length, rows, progress)
        return {"input_ids": ids, "length": length}

    def _begin(self) -> list[int]:
        """The begin token, where the tokenizer sets one. An end token would end the prompt."""
        begin = self._tokens.tokenizer.bos_token_id
        marks = self._tokens.ids([""])["input_ids"][0]
        return [begin] if begin is not None and marks[:1] == [begin] else []
