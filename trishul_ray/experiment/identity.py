"""The content of your own data and model folders, which is in an experiment's id, not their paths.

An id must not change with the place of a file (contract 5), and must change with its content: two
files are two experiments. So the id has a hash of what lies at ``data.path`` or ``model.name`` in
place of the path. The hash is noted in the experiment when it is loaded, because an id that is
computed anew whenever it is asked for would change in the middle of a run with an edited file, and
could not be computed on another machine. There, a run's ``config.yaml`` still has the note. An
experiment whose path neither exists here nor has a note has the path itself in its id.

Names of public datasets, and of models on the hub or in a mirror, are in the id as they are. Their
content, the sources of a run, is compared when a result is used; see :func:`local_sources`.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trishul_ray.config.section import Noted
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


def note_content(experiment: "Experiment") -> "Experiment":
    """Return the experiment with the content of its own data and model as it is here now.

    A note is kept where the path does not exist on this machine.
    """
    data, model = experiment.data, experiment.model
    if (found := _data_content(data)) is not None:
        data = data.model_copy(update={"content": Noted(found, str(data.path))})
    if (found := _model_content(model)) is not None:
        model = model.model_copy(update={"content": Noted(found, model.name)})
    stages = dict(experiment.stages)
    for stage in Stages.of(experiment):
        notes = {
            f"{name}_content": Noted(found, path)
            for name, path in stage.files.items()
            if (found := _file_content(path)) is not None
        }
        if notes:
            stages[stage.name] = stage.config.model_copy(update=notes)
    return experiment.model_copy(update={"data": data, "model": model, "stages": stages})


def note_plugins(experiment: "Experiment") -> "Experiment":
    """Return the experiment with the plug-ins that it uses, of all that are loaded."""
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
    """Check that own data and model still are what they were when the experiment was loaded.

    Raises:
        InputError: They are not.
    """
    data, model = experiment.data, experiment.model
    for field, path, noted, now in (
        ("data.path", data.path, data.content_hash, _data_content(data)),
        ("model.name", model.name, model.content_hash, _model_content(model)),
        *(
            (f"{stage.name}.{name}", path, noted_hashes(stage).get(name), _file_content(path))
            for stage in Stages.of(experiment)
            for name, path in stage.files.items()
        ),
    ):
        if noted is not None and now is not None and noted != now:
            raise InputError(
                f"{field}={path!r} has changed: this experiment is on content {noted[:19]}, and it "
                f"now has {now[:19]}; restore it, or start again: it is another experiment"
            )


def check_found(experiment: "Experiment") -> None:
    """Check that the data and the model that an experiment names are there, without reading them.

    Neither torch nor Ray is imported.

    Raises:
        InputError: A name is unknown, or own files are missing or of another kind. Own files that
            were noted on another machine need not be here.
    """
    from trishul_ray.data.prepare import find_source
    from trishul_ray.data.user.user_data import UserData
    from trishul_ray.models.find_model import PASSED, find_model

    source = find_source(experiment.data)
    if isinstance(source, UserData) and experiment.data.content is None:
        source.content()
    if not experiment.model.name.startswith(f"{PASSED}:"):
        find_model(experiment.model.name, experiment.storage.places)


def local_sources(
    experiment: "Experiment", progress: "ProgressCallback | None" = None
) -> tuple[dict[str, str], str]:
    """Return the rows and the weights of an experiment as they are on this machine.

    They are a part of ``Blueprint.sources``: its tokens and answers follow from the rows and from
    the files of the backbone. Nothing is downloaded or pretrained, and torch is not imported.

    Returns:
        The sources that can be read here, and what cannot be, as text; empty if all can.
    """
    from trishul_ray.data.prepare import prepare
    from trishul_ray.models.find_model import local_weights_source

    sources: dict[str, str] = {}
    unknown = []
    places = experiment.storage.places
    try:
        rows = prepare(
            experiment.data, cache=places.cache, hub=places.hub, progress=progress, download=False
        )
        sources["rows"] = rows.fingerprint
    except InputError as error:
        unknown.append(f"the data ({error})")
    try:
        weights = local_weights_source(experiment.model, places)
        if weights is None:
            unknown.append(f"the weights of {experiment.model.name} (not on this machine)")
        elif weights:
            sources["backbone"] = weights
    except InputError as error:
        unknown.append(f"the weights of the backbone ({error})")
    return sources, " and ".join(unknown)


def _data_content(data: "DataConfig") -> str | None:
    """Return a hash of what ``data.path`` holds; None for hub data, or if it cannot be read."""
    if data.path is None:
        return None
    from trishul_ray.data.user.user_data import USER_DATA

    if data.name not in USER_DATA:
        return None
    try:
        return USER_DATA[data.name](data.path, data.columns, data.test_share).content()
    except (InputError, OSError):
        return None  # reading the rows will report it


def _file_content(path: str) -> str | None:
    """Return a hash of a file; None if it is not here."""
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError:
        return None  # reading it will report it
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _model_content(model: "ModelConfig") -> str | None:
    """Return a hash of the folder ``model.name``; None if it is no folder, or cannot be read."""
    if not Path(model.name).expanduser().is_dir():
        return None
    from trishul_ray.models.find_model import folder_source, local_folder

    folder = local_folder(model.name)
    try:
        return folder_source(folder, weights=model.init != "random") if folder else None
    except OSError:
        return None  # loading the model will report it
