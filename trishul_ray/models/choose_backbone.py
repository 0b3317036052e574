"""Select the backbone of a configuration: a checkpoint, or a model passed from Python."""

from functools import lru_cache
from pathlib import Path

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.paths import StoragePaths
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.find_model import PASSED, source_files
from trishul_ray.models.python_model import PythonBackbone
from trishul_ray.storage.integrity import stamp


def backbone_of(config: ModelConfig, paths: StoragePaths) -> Backbone:
    """Return the backbone of a configuration.

    As long as the files of a local model do not change, it is the same object with cached content:
    the runs of a sweep mostly share one.
    """
    if config.name.startswith(f"{PASSED}:"):
        return PythonBackbone(config, paths)
    backbone = Backbone(config, paths)
    try:
        location = backbone.location
    except InputError:
        return backbone  # The error is raised again when the model is used.
    if isinstance(location, str):  # on the hub
        return backbone
    files = source_files(location) if location.is_dir() else []
    return _recent(config, paths, tuple((file, stamp(file)) for file in files))


@lru_cache(maxsize=8)
def _recent(
    config: ModelConfig, paths: StoragePaths, files: tuple[tuple[Path, tuple[int, ...]], ...]
) -> Backbone:
    return Backbone(config, paths)
