"""What is sent: the codec of uploads, with error feedback, and that of broadcasts.

With error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019, arXiv
1901.09847) a client adds to its change what the codec left out of earlier ones: it sends
``C(delta + e)`` and keeps ``e <- delta + e - C(delta + e)``. Over all rounds it has then sent the
sum of its changes minus the last e.

A broadcast is coded afresh from the server's whole state in every round, so that its error does not
accumulate. Clients train from the decoded broadcast, and their changes are relative to it.

Legend: W entries of the shared part, U units of aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.lab.codecs.base import CODECS, NONE, Codec, CodecFields, Units, build_codec
from trishul_ray.methods.base import method_class
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.stages import ArrayState, Change, Sender, Sent, Stage, norm_of, register_stage


class UploadsConfig(CodecFields):
    """What clients send: a codec of their changes; the bytes counted are those of its encoding."""

    error_feedback: bool = Field(
        False,
        description="add what the codec left out to a client's next change; checkpoints then hold "
        "as many numbers for each client as it sends",
    )

    @model_validator(mode="after")
    def _check_feedback(self) -> UploadsConfig:
        if self.error_feedback and self.codec == NONE:
            raise ValueError("error_feedback=true needs a codec, such as codec='topk'")
        return self


class DownloadsConfig(CodecFields):
    """What the server sends: a codec of its state; scores are those of the state as it is."""


@register_stage("uploads")
class Uploads(Stage):
    """Clients send their changes encoded by a codec, with or without error feedback."""

    Config, wire = UploadsConfig, 3
    example: ClassVar = {"codec": "topk", "error_feedback": True}
    config: UploadsConfig
    registries: ClassVar = {"codec": CODECS}

    @property
    def remembered(self) -> tuple[str, ...]:
        """Error feedback adds what earlier rounds left out."""
        return ("uploads.error_feedback=true",) if self.config.error_feedback else ()

    def send(self, change: Change, sender: Sender) -> Change:
        """Return the change as the server decodes it."""
        mirrored = method_class(self.settings.method.name).mirrored
        return UploadCodec(self.config, mirrored)(change, sender)


@register_stage("downloads")
class Downloads(Stage):
    """Clients read the broadcast as a codec decodes it; the server keeps its state."""

    Config, wire, moves_beyond_mean = DownloadsConfig, 2, True
    example: ClassVar = {"codec": "int8"}
    config: DownloadsConfig
    registries: ClassVar = {"codec": CODECS}

    def broadcast(self, number: int, sent: Sent) -> Sent:
        """Return what clients decode of the broadcast."""
        codec = build_codec(self.config)
        rng = numpy_rng(self.settings.seed, "codec-down", number)
        read, size = coded_state(codec, sent.read, Units.of(self.plan.units), rng)
        return replace(sent, read=read, size=size)


@dataclass(frozen=True)
class UploadCodec:
    """The upload filter that encodes and decodes a change, and counts its bytes."""

    fields: UploadsConfig
    mirrored: frozenset[str] = frozenset()  # see Method.mirrored: these need no error feedback

    @cached_property
    def codec(self) -> Codec:
        """The codec of the section, which names one."""
        return build_codec(self.fields)

    def __call__(self, change: Change, sender: Sender) -> Change:
        """Return what the server decodes; a change that is not finite stays, to be refused."""
        vectors = {"shared": change.shared, **dict(sorted(change.extra.items()))}
        if not all(np.isfinite(vector).all() for vector in vectors.values()):
            return replace(change, uploaded_bytes=4 * sum(map(len, vectors.values())))
        rng, units = sender.rng("codec"), Units.of(sender.units)
        kept, read, metrics = dict(change.kept), {}, dict(change.metrics)
        # The server must also know which units were trained: one bit each.
        size = 0 if sender.active is None else -(-len(units.sizes) // 8)
        for name, vector in vectors.items():
            if not _is_coded(vector, units):
                read[name], size = vector, size + 4 * len(vector)
                continue
            shared, left = name == "shared", None
            if self.fields.error_feedback and name not in self.mirrored:
                left = sender.kept.get(f"left/{name}", np.zeros(units.length, dtype=np.float32))
            trained = None
            if shared and sender.active is not None:
                trained = units.entries(sender.active)
            target = vector if left is None else vector + left
            if trained is not None:
                target = target * trained
            payload = self.codec.encode(target, units, rng)
            read[name] = self.codec.decode(payload, units)
            size += len(payload)
            error = target - read[name]
            if shared:
                metrics["codec_error"] = norm_of([error]) / (norm_of([target]) or 1.0)
            if left is not None:
                kept[f"left/{name}"] = error if trained is None else np.where(trained, error, left)
        shared_read = read.pop("shared")
        return replace(
            change, shared=shared_read, extra=read, uploaded_bytes=size, kept=kept, metrics=metrics
        )


def coded_state(
    codec: Codec, state: ArrayState, units: Units, rng: np.random.Generator
) -> tuple[ArrayState, int]:
    """Return what clients decode of a broadcast, and the bytes of its encoding.

    The shared part and what the method adds to it are coded; frozen tensors, which a deployment
    sends once, are not.
    """
    read, size = {}, 0
    for name, vector in {"shared": state.shared, **dict(sorted(state.extra.items()))}.items():
        if not _is_coded(vector, units):
            read[name], size = vector, size + 4 * len(vector)
            continue
        payload = codec.encode(vector, units, rng)
        read[name] = codec.decode(payload, units)
        size += len(payload)
    return replace(state, shared=read.pop("shared"), extra=read), size


def _is_coded(vector: np.ndarray, units: Units) -> bool:
    """Return whether a vector has an entry for each of the shared part.

    Others, such as a number for each core head, are few and no changes: a codec would blur what
    they say. They are sent as they are, four bytes a number.
    """
    return len(vector) == units.length
