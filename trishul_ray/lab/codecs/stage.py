"""Stages ``uploads`` and ``downloads``: codecs of uploads, with error feedback, and of broadcasts.

With error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv
1901.09847), a client adds the coding errors of earlier rounds to its change. It sends ``C(delta +
e)`` and stores ``e <- delta + e - C(delta + e)``. Over all rounds, it has sent the sum of its
changes minus the last e.

The server encodes its exact state in every round, so the errors of broadcasts do not accumulate.
Clients train from the decoded broadcast, and their changes are relative to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.adapters.layout import Unit
from trishul_ray.lab.codecs.base import CODECS, NONE, Codec, CodecFields, build_codec
from trishul_ray.methods.base import method_class
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import (
    BroadcastMessage,
    Change,
    ClientRoundInfo,
    Stage,
    norm_of,
    register_stage,
)


class UploadsConfig(CodecFields):
    """The codec of uploads; the record counts the encoded bytes."""

    error_feedback: bool = Field(
        False,
        description="add the coding error to a client's next change; checkpoints then store the "
        "errors of every client, one per uploaded number",
    )

    @model_validator(mode="after")
    def _check_feedback(self) -> UploadsConfig:
        if self.error_feedback and self.codec == NONE:
            raise ValueError("error_feedback=true needs a codec, such as codec='topk'")
        return self


class DownloadsConfig(CodecFields):
    """The codec of broadcasts; the server evaluates its exact state."""


@register_stage("uploads")
class Uploads(Stage):
    """Encode the changes of clients, with or without error feedback."""

    Config, wire = UploadsConfig, 3
    example: ClassVar = {"codec": "topk", "error_feedback": True}
    config: UploadsConfig
    registries: ClassVar = {"codec": CODECS}

    @property
    def stateful_fields(self) -> tuple[str, ...]:
        """Error feedback, which adds the errors of earlier rounds."""
        return ("uploads.error_feedback=true",) if self.config.error_feedback else ()

    def send(self, change: Change, sender: ClientRoundInfo) -> Change:
        """Encode the change, unless it is not finite; return it as the server decodes it."""
        vectors = {"shared": change.shared, **dict(sorted(change.extra.items()))}
        if not all(np.isfinite(vector).all() for vector in vectors.values()):
            return replace(change, uploaded_bytes=4 * sum(map(len, vectors.values())))
        sizes, left = unit_sizes(sender.units), {}
        trained = None if sender.active is None else np.repeat(sender.active, sizes)
        if self.config.error_feedback:
            exact = method_class(self.settings.method.name).mirrored
            left = {
                name: sender.kept.get(f"left/{name}", np.float32(0))
                for name, vector in vectors.items()
                if len(vector) == sizes.sum() and name not in exact
            }
        targets = {n: v + left[n] if n in left else v for n, v in vectors.items()}
        if trained is not None:
            targets["shared"] = targets["shared"] * trained
        read, size = coded(build_codec(self.config), targets, sizes, sender.rng("codec"))
        errors = {name: target - read[name] for name, target in targets.items()}
        ratio = norm_of([errors["shared"]]) / (norm_of([targets["shared"]]) or 1.0)
        if trained is not None:
            size += -(-len(sizes) // 8)  # one bit per unit marks the trained units
            if "shared" in left:
                errors["shared"] = np.where(trained, errors["shared"], left["shared"])
        return replace(
            change,
            shared=read.pop("shared"),
            extra=read,
            uploaded_bytes=size,
            kept=change.kept | {f"left/{name}": errors[name] for name in left},
            metrics=change.metrics | {"codec_error": ratio},
        )


@register_stage("downloads")
class Downloads(Stage):
    """Encode broadcasts; the server stores its exact state.

    Frozen tensors, which a deployment sends once, are not encoded.
    """

    Config, wire, alters_mean = DownloadsConfig, 2, True
    example: ClassVar = {"codec": "int8"}
    config: DownloadsConfig
    registries: ClassVar = {"codec": CODECS}

    def broadcast(self, number: int, sent: BroadcastMessage) -> BroadcastMessage:
        """Return the broadcast as clients decode it."""
        rng, state = numpy_rng(self.settings.seed, "codec-down", number), sent.read
        vectors = {"shared": state.shared, **dict(sorted(state.extra.items()))}
        read, size = coded(build_codec(self.config), vectors, unit_sizes(self.plan.units), rng)
        return replace(sent, read=replace(state, shared=read.pop("shared"), extra=read), size=size)


def unit_sizes(units: Iterable[Unit]) -> np.ndarray:
    """Return the number of entries of each unit, int64 [U]."""
    return np.array([unit.size for unit in units], dtype=np.int64)


def coded(
    codec: Codec, vectors: Mapping[str, np.ndarray], sizes: np.ndarray, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], int]:
    """Encode vectors; return the decoded vectors, and the size of the encoding in bytes.

    A vector whose length differs from the shared part, such as one number per core head, is short
    and is not a change. A codec would distort it, so it is sent unchanged, with four bytes per
    number.
    """
    read, size = dict(vectors), 0
    for name, vector in vectors.items():
        if len(vector) == sizes.sum():
            payload = codec.encode(vector, sizes, rng)
            read[name] = codec.decode(payload, sizes)
            size += len(payload)
        else:
            size += 4 * len(vector)
    return read, size
