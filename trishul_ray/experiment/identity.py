"""Content hashes that replace the paths of user data and model folders in an experiment's id.

An id must not change when a file moves, but must change with its content. The id therefore contains
a hash of the content of ``data.path``, ``model.name`` or a stage's file. Loading stores the hash in
the experiment: otherwise an edited file would change the id during a run, and another machine could
not compute it. If the path does not exist here and no hash is stored, the id contains the path.

Names of public datasets, and of models on the hub or in a mirror, are in the id unchanged. Their
content, the sources of a run, is compared when a result is used; see :func:`local_sources`.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trishul_ray.data.public import DATASETS
from trishul_ray.errors import InputError
from trishul_ray.methods.base import METHODS
from trishul_ray.plugins.registry import Registry
from trishul_ray.stages import STAGES, Stages, noted_hashes
from trishul_ray.tasks.base import TASKS

if TYPE_CHECKING:
    from trishul_ray.config.fields import DataConfig, ModelConfig
    from trishul_ray.data.dataset import ProgressCallback
    from trishul_ray.experiment.experiment import Experiment


def _contents(
    experiment: "Experiment",
) -> Iterator[tuple[str, str, str, str | None, str | None]]:
    """Yield the section, field, path, stored hash and current hash of each file."""
    data, model = experiment.data, experiment.model
    yield "data", "path", str(data.path), data.content_hash, _data_content(data)
    yield "model", "name", model.name, model.content_hash, _model_content(model)
    for stage in Stages.of(experiment):
        stored = noted_hashes(stage)
        for name, path in stage.files.items():
            yield stage.name, name, path, stored.get(name), _file_content(path)


def note_content(experiment: "Experiment") -> "Experiment":
    """Store the hashes of the files that an experiment names.

    If the path does not exist on this machine, a hash from another machine is kept.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for section, field, path, _, now in _contents(experiment):
        if now is not None:
            name = "content" if section in ("data", "model") else f"{field}_content"
            found[section][name] = f"{now} {path}"
    stages = {
        name: config.model_copy(update=found[name]) for name, config in experiment.stages.items()
    }
    data = experiment.data.model_copy(update=found["data"])
    model = experiment.model.model_copy(update=found["model"])
    return experiment.model_copy(update={"data": data, "model": model, "stages": stages})


def note_plugins(experiment: "Experiment") -> "Experiment":
    """Record the loaded plug-ins that an experiment uses."""
    kind = f"{experiment.task.kind}:"
    named: list[tuple[Registry[Any], str]] = [
        (METHODS, experiment.method.name),
        (DATASETS, experiment.data.name),
        *((TASKS, name) for name in TASKS.items if name.startswith(kind)),
        *((STAGES, name) for name in experiment.stages),
        *(
            (registry, getattr(section, field))
            for name, section in experiment.stages.items()
            for field, registry in STAGES[name].registries.items()
        ),
    ]
    found = {plugin for registry, name in named for plugin in registry.plugins_of(name)}
    used = tuple(sorted(found, key=lambda plugin: plugin.name))
    return experiment.model_copy(update={"plugins": used})


def check_content(experiment: "Experiment") -> None:
    """Check that the files of an experiment have not changed since it was loaded.

    Raises:
        InputError: A file has changed.
    """
    for section, field, path, stored, now in _contents(experiment):
        if stored is not None and now is not None and stored != now:
            raise InputError(
                f"{section}.{field}={path!r} has changed: expected content {stored[:19]}, found "
                f"{now[:19]}; restore it, or run the new content as another experiment"
            )


def check_found(experiment: "Experiment") -> None:
    """Check that the data and the model of an experiment exist, without reading them.

    This imports neither torch nor Ray. User data with a stored hash may be missing on this machine.

    Raises:
        InputError: A name is unknown, or user data are missing or of another kind.
    """
    from trishul_ray.data.prepare import find_source
    from trishul_ray.data.user.user_data import UserData
    from trishul_ray.models.find_model import PASSED, find_model

    source = find_source(experiment.data)
    if isinstance(source, UserData) and experiment.data.content is None:
        source.content()
    if not experiment.model.name.startswith(f"{PASSED}:"):
        find_model(experiment.model.name, experiment.storage.paths)


def local_sources(
    experiment: "Experiment", progress: "ProgressCallback | None" = None
) -> tuple[dict[str, str], str]:
    """Hash an experiment's rows and weights on this machine.

    Nothing is downloaded or pretrained, and torch is not imported.

    Returns:
        The hashes of readable sources, and the reason that other sources cannot be read, or an
        empty string.
    """
    from trishul_ray.data.prepare import prepare
    from trishul_ray.models.find_model import local_weights_source

    sources: dict[str, str] = {}
    unknown = []
    paths = experiment.storage.paths
    try:
        rows = prepare(
            experiment.data, cache=paths.cache, hub=paths.hub, progress=progress, download=False
        )
        sources["rows"] = rows.fingerprint
    except InputError as error:
        unknown.append(f"the data ({error})")
    try:
        weights = local_weights_source(experiment.model, paths)
        if weights is None:
            unknown.append(f"the weights of {experiment.model.name} (not on this machine)")
        elif weights:
            sources["backbone"] = weights
    except InputError as error:
        unknown.append(f"the weights of the backbone ({error})")
    return sources, " and ".join(unknown)


def _data_content(data: "DataConfig") -> str | None:
    """Hash the content of ``data.path``, or return None for hub data and unreadable files."""
    if data.path is None:
        return None
    from trishul_ray.data.user.user_data import USER_DATA

    if data.name not in USER_DATA:
        return None
    try:
        return USER_DATA[data.name](data.path, data.columns, data.test_share).content()
    except (InputError, OSError):
        return None  # reading the rows reports the error


def _file_content(path: str) -> str | None:
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError:
        return None  # reading the file reports the error
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _model_content(model: "ModelConfig") -> str | None:
    """Hash the folder ``model.name``, or return None if it is not a readable folder."""
    if not Path(model.name).expanduser().is_dir():
        return None
    from trishul_ray.models.find_model import folder_source, local_folder

    folder = local_folder(model.name)
    try:
        return folder_source(folder, weights=model.init != "random") if folder else None
    except OSError:
        return None  # loading the model reports the error
