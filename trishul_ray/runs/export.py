"""Load the trained model of a run from its newest checkpoint, and export it. No data are read.

An exported folder also contains the files that other tools need to load the model and to predict as
in the run: ``README.md`` (a model card), the image processor or the tokenizer, ``task.json`` (how
rows become inputs), and ``backbone/`` if the frozen backbone has no name or folder: a built-in
model, random weights, or another image size. The class names are in the ``config.json`` of the
whole model or of ``backbone/``, otherwise in ``config/``: transformers would load a folder with a
``config.json`` as a whole model.
"""

import copy
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load, try_to_load_from_cache
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from transformers import PretrainedConfig

from trishul_ray.adapters.export import export_merged, export_peft, merge_trained, save_module
from trishul_ray.adapters.model import Trained
from trishul_ray.data.partition import client_names
from trishul_ray.errors import InputError, RunError, join_limited
from trishul_ray.experiment import Experiment
from trishul_ray.federation.checkpoint import Checkpoint, open_checkpoints
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.messages import Arrays, changed_sources
from trishul_ray.federation.server import broadcast_of
from trishul_ray.federation.worker.context import (
    ModelContext,
    adapt_to,
    build_model_context,
    global_model,
)
from trishul_ray.methods.base import build_method
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.choose_backbone import backbone_of
from trishul_ray.models.find_model import (
    PACKAGED,
    PASSED,
    ModelKind,
    find_model,
    image_config,
    is_hub_name,
    quiet_transformers,
)
from trishul_ray.models.python_model import PythonBackbone
from trishul_ray.models.weights import AUTO_CLASSES
from trishul_ray.runs.folder import open_run
from trishul_ray.storage.durable import Json, check_writable
from trishul_ray.tasks.base import Task
from trishul_ray.tasks.image_classification import ImageClassification
from trishul_ray.tasks.instruction import Instruction
from trishul_ray.tasks.prompts import TextPrompt
from trishul_ray.tasks.text2text import Text2Text
from trishul_ray.version import __version__

#: Folders of an exported adapter: a copy of the backbone, or its configuration with the classes.
COPY, CONFIG = "backbone", "config"
#: The transformers pipeline for each kind of model.
_PIPELINES: dict[ModelKind, str] = {
    "image-classification": "image-classification",
    "sequence-classification": "text-classification",
    "seq2seq-lm": "text2text-generation",
    "causal-lm": "text-generation",
}
#: Keys of the license in a model card.
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class TrainedRun:
    """The model of a run after a round; ``client`` is its owner, or empty for the global model."""

    context: ModelContext
    trained: Trained
    round: int
    client: str = ""


@dataclass(frozen=True)
class Export:
    """Description of an exported model.

    Attributes:
        form: ``adapter`` (PEFT) or ``model`` (all weights, with the update merged into them).
        round: The last round.
        note: A one-line description.
        ranks: Smallest and largest LoRA rank of an adapter's layers.
        relative_error: Largest relative error, in the Frobenius norm, of an update that is
            truncated or includes changes of the frozen weights; otherwise 0.
    """

    form: str
    round: int
    note: str
    ranks: list[int] = field(default_factory=list)
    relative_error: float = 0.0


def load_trained(experiment: Experiment, client: int | str | None = None) -> TrainedRun:
    """Load the model of the newest checkpoint of an experiment's run.

    Args:
        experiment: The experiment.
        client: Client whose personalized model to load, by number or name. None loads the global
            model.

    Raises:
        InputError: The backbone is not on this machine, or the client has no personalized model.
        RunError: The run has no usable checkpoint, or its backbone has changed.
    """
    checkpoints = open_checkpoints(experiment)
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        why = "; ".join(checkpoints.skipped) or "none was written"
        raise RunError(f"run {experiment.id} has no usable checkpoint: {why}")
    method = build_method(experiment.method, experiment.adapter)
    assert checkpoint.info is not None  # every run stores it
    name, kept = ("", None) if client is None else _kept_by(client, experiment, checkpoint)
    with deterministic(experiment):
        broadcast = broadcast_of(method, checkpoint.state)
        context = build_model_context(experiment, checkpoint.info)
        if changed := changed_sources(checkpoint.sources, context.sources):
            raise RunError(f"the {changed} of run {experiment.id} have changed since the run")
        adapt_to(context, broadcast.survey)
        trained = global_model(context, broadcast, checkpoint.round, kept)
        return TrainedRun(context, trained, checkpoint.round, name)


def _kept_by(
    client: int | str, experiment: Experiment, checkpoint: Checkpoint
) -> tuple[str, Arrays]:
    """Return the name of a client and the state of its personalized model."""
    if not build_method(experiment.method).personal:
        raise InputError(
            f"client={client}: method={experiment.method.name} has no personalized models; omit "
            "client to use the global model"
        )
    assert checkpoint.info is not None
    clients, name = experiment.federation.clients, str(client)
    names = client_names(checkpoint.info, experiment.partition, clients)
    names = names or tuple(map(str, range(clients)))
    kept = {names[number]: state for number, state in checkpoint.client_states.items()}
    if name in kept:
        return name, kept[name]
    why = f"is not one of the run's {clients:,} clients"
    if name in names:
        why = "has not taken part yet, so it has no personalized model"
    known = join_limited(sorted(kept, key=names.index), 10)
    raise InputError(f"client={client} {why}; allowed: {known or 'none yet'}")


def _whose_model(run: TrainedRun) -> str:
    """Describe the owner of a personalized method's model, or return an empty string."""
    context = run.context
    if not context.method.personal:
        return ""
    if run.client:
        return f"the personalized model of client {run.client}"
    layout = context.model.layout
    sent = sum(layout.entry(name).numel for name in context.method.wire(layout))
    return (
        f"the global model, in which the {layout.size - sent:,} of {layout.size:,} trained "
        "parameters that stay with each client have their initial values; "
        f"`trishul export {context.settings.id} DIR --client N` writes a personalized model"
    )


def fits_adapter(context: ModelContext) -> bool:
    """Return whether the method adapts layers. Full fine-tuning changes all weights instead."""
    return any(True for _ in context.model.iter_layers(context.initial))


def export_run(
    run: str, directory: Path, *, merged: bool, runs: str, client: str | None = None,
    rank: int | None = None,
) -> Export:  # fmt: skip
    """Write the adapter or the merged model of a run's newest checkpoint into a new folder.

    Full fine-tuning has no adapter, so its whole model is written instead.

    Args:
        run: Id of a run, a prefix of the id, or the run's folder.
        directory: The folder to write, which must be empty or not exist.
        merged: Whether to write the whole model instead of the adapter.
        runs: Folder or URI of runs.
        client: Name or number of the client whose personalized model to write. None writes the
            global model.
        rank: Maximum rank of an update. Updates of higher rank are truncated, and the note reports
            the error.

    Raises:
        InputError: The run does not exist, ``directory`` is not empty, or the client has no
            personalized model.
        RunError: The run has no usable checkpoint, or its backbone has changed.
    """
    check_writable(directory.absolute().parent, str(directory))
    _, experiment = open_run(run, runs)
    trained = load_trained(experiment, client)
    if rank is not None and (merged or not fits_adapter(trained.context)):
        raise InputError("--rank applies only to adapters, and this export writes the whole model")
    return write_model(trained, directory, merged=merged, notes={}, rank=rank)


def write_model(
    run: TrainedRun, directory: Path, *, merged: bool, notes: dict[str, str],
    place: str | None = None, rank: int | None = None,
) -> Export:  # fmt: skip
    """Write a trained model, with all files needed to use it, into an empty folder.

    ``notes`` are further lines of the model card, keyed by title. ``place`` is the final path of a
    folder that is copied later.
    """
    context, settings = run.context, run.context.settings
    owner, quantize = _whose_model(run), settings.model.quantize
    notes = {"rounds": str(run.round)} | notes
    if owner:
        notes["model"] = owner
    if quantize != "none":
        notes["quantized"] = quantize
    configure_answers(context)
    write_files = partial(_write_files, context, notes=notes)
    with deterministic(settings), quiet_transformers():
        if merged or not fits_adapter(context):
            remarks = ["the whole model", "with the update merged into its weights"]
            if not merged:
                remarks.append(f"since {settings.method.name} trains all weights")
            if quantize != "none":
                remarks.append(f"dequantized from {quantize} as in training")
            notes["weights"] = ", ".join(remarks)
            export_merged(context.model, run.trained, directory, beside=write_files)
            return Export("model", run.round, "; ".join(filter(None, [notes["weights"], owner])))
        backbone = _name_backbone(context, place or str(directory.absolute()))
        if quantize != "none":
            notes["weights"] = f"trained with backbone weights in {quantize}; " + (
                f"{COPY}/ contains the same weights, dequantized"
                if backbone.copied
                else f"{backbone.name} is not quantized, so predictions with it differ; "
                "`trishul export --merged` writes the trained weights"
            )
        adapter = export_peft(
            context.model, run.trained, directory, backbone.name, revision=backbone.revision,
            rank=rank, beside=partial(write_files, backbone=backbone),
        )  # fmt: skip
    low, high = ranks = [min(adapter.ranks.values()), max(adapter.ranks.values())]
    remarks = [f"PEFT LoRA adapter of rank {low}" + (f" to {high}" if low != high else "")]
    if "weights" in notes:
        remarks.append(notes["weights"])
    if rank is not None:
        remarks.append(f"relative error of an update at most {adapter.error:.1%}")
    if adapter.folded:
        error = f"(relative error {adapter.error:.1g})"
        remarks.append(f"including the changes of the frozen weights {error}")
    return Export(
        "adapter", run.round, "; ".join(filter(None, [", ".join(remarks), owner])), ranks,
        adapter.error,
    )  # fmt: skip


@dataclass(frozen=True)
class _BackboneName:
    """Name of the backbone in an adapter's configuration: a hub name and its commit, or a folder.

    ``copied`` means that the folder is a copy inside the exported one.
    """

    name: str
    revision: str | None = None
    copied: bool = False


def _name_backbone(context: ModelContext, place: str) -> _BackboneName:
    """Return the name or path with which ``from_pretrained`` finds the backbone of an adapter."""
    config = context.settings.model
    backbone = backbone_of(config, context.settings.storage.paths)
    if isinstance(backbone, PythonBackbone):
        return _BackboneName(backbone.name.partition(":")[2])
    native = getattr(image_config(backbone.architecture), "image_size", None)
    resized = config.image_size not in (None, native)
    if backbone.name in BUILTINS or config.init == "random" or resized:
        return _BackboneName(f"{place}/{COPY}", copied=True)
    if isinstance(backbone.location, Path):
        return _BackboneName(str(backbone.location.resolve()))
    name, _, commit = context.sources.get("backbone", "").partition("@")
    return _BackboneName(backbone.location, commit if name == backbone.location else None)


def _write_files(
    context: ModelContext, folder: Path, *, notes: dict[str, str],
    backbone: _BackboneName | None = None,
) -> None:  # fmt: skip
    """Write the files next to a model; ``backbone`` is set only for an adapter."""
    task, config, info = context.task, getattr(context.model.model, "config", None), context.info
    _write_preparation(task, folder)
    if backbone is not None and backbone.copied:
        (folder / COPY).mkdir()
        save_module(merge_trained(context.model, Trained(context.initial)), folder / COPY)
        # A transformers pipeline searches for these files in the folder of the backbone.
        _write_preparation(task, folder / COPY)
    elif backbone is not None and isinstance(config, PretrainedConfig):
        config.save_pretrained(str(folder / CONFIG))
    about = {"task": type(task).__name__, "dataset": info.name, "classes": list(info.classes)}
    _write_json(folder / "task.json", about | task.settings())
    (folder / "README.md").write_text(_model_card(context, backbone, notes), encoding="utf-8")


def _write_preparation(task: Task, folder: Path) -> None:
    if isinstance(task, ImageClassification):
        _write_json(folder / "preprocessor_config.json", _image_processor(task))
    elif task.tokens is not None:
        tokenizer = copy.deepcopy(task.tokens.tokenizer)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.save_pretrained(str(folder))


def configure_answers(context: ModelContext) -> None:
    """Store class names, and the end tokens of generated responses, in the model's configuration.

    A chat template may end responses with another token than the checkpoint.
    """
    model: Any = context.model.model
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig) and context.task.num_classes is not None:
        config.id2label = dict(enumerate(context.info.classes))
        config.label2id = {name: index for index, name in enumerate(context.info.classes)}
    if isinstance(context.task, Instruction):
        model.generation_config.eos_token_id = context.task.stop_ids(context.model)


def _image_processor(task: ImageClassification) -> Json:
    """Return the configuration of a transformers image processor equivalent to the task's."""
    side = task.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": task.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(task.mean),
        "image_std": list(task.std),
    }


def _model_card(
    context: ModelContext, backbone: _BackboneName | None, notes: dict[str, str]
) -> str:
    """Render the model card, which describes the model and contains the code that loads it."""
    settings, task = context.settings, context.task
    kind, images = task.model_kind, isinstance(task, ImageClassification)
    made_in_python = isinstance(backbone_of(settings.model, settings.storage.paths), PythonBackbone)
    templates = Environment(
        loader=PackageLoader("trishul_ray.runs", "."),
        undefined=StrictUndefined,
        autoescape=select_autoescape(),  # does not escape a card, which is Markdown
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template("model_card.md").render(
        backbone=backbone,
        base=_base_model(settings),
        python=settings.model.name.partition(":")[2] if made_in_python else "",
        pipeline=_PIPELINES[kind],
        method=settings.method.name,
        dataset=context.info.name,
        id=settings.id,
        version=__version__,
        model=settings.model.name,
        notes=notes,
        auto=AUTO_CLASSES[kind].__name__,
        reader="AutoImageProcessor" if images else "AutoTokenizer",
        images=images,
        generates=isinstance(task, Instruction | Text2Text),
        instructions=isinstance(task, Instruction),
        chat=isinstance(task, Instruction) and not isinstance(task.prompt, TextPrompt),
        prompt=_example_prompt(task),
    )


def _base_model(settings: Experiment) -> dict[str, str]:
    """Return the hub name of the pretrained backbone, and the license in its model card.

    The card is read from the backbone's folder or the cache of the hub, without the network.
    """
    name = settings.model.name
    if settings.model.init == "random" or name.startswith(f"{PASSED}:"):
        return {}
    files, found = find_model(name, settings.storage.paths), dict[str, str]()
    if name in PACKAGED:
        found["base_model"] = f"sentence-transformers/{name}"
    elif is_hub_name(name):
        found["base_model"] = name
    if isinstance(files.location, Path):
        card: Any = files.location / "README.md"
    else:
        card = try_to_load_from_cache(files.location, "README.md")
    with suppress(OSError, TypeError, ValueError, yaml.YAMLError):
        known = metadata_load(card) or {}
        found |= {key: known[key] for key in _LICENSE if isinstance(known.get(key), str)}
    return found


def _example_prompt(task: Task) -> str:
    """Return Python code of a prompt for a task with a text template, or an empty string."""
    if isinstance(task, Instruction) and isinstance(task.prompt, TextPrompt):
        template, values = task.prompt.short, {"instruction": "Name three rivers.", "input": ""}
    elif isinstance(task, Text2Text):
        template, values = task.template, dict.fromkeys(task.template.fields, "...")
    else:
        return ""
    words = ", ".join(f"{field}={values[field]!r}" for field in template.fields)
    return f"{template.text!r}.format({words})"


def _write_json(file: Path, content: Json) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
