"""Model of a run: its newest checkpoint as a model, and its export. No data are read.

Beside an exported model are the files with which others load it and predict as the run did:
``README.md`` (a model card), the image processor or the tokenizer, ``task.json`` (how rows become
inputs), and ``backbone/`` where no name or folder holds the frozen backbone: it is a built-in, is
drawn from a seed, or was resized. The names of the classes are in the ``config.json`` of the whole
model or of ``backbone/``, and otherwise in ``config/``: transformers takes a folder with a
``config.json`` for a whole model, also if it has an adapter.
"""

import copy
import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from transformers import PretrainedConfig

from trishul_ray.adapters.export import export_merged, export_peft, merge_trained, save_module
from trishul_ray.adapters.model import Trained
from trishul_ray.data.partition import client_names
from trishul_ray.errors import CorruptFileError, InputError, RunError, StorageError, first_line
from trishul_ray.experiment import Experiment
from trishul_ray.experiment.loading import build_experiment
from trishul_ray.experiment.yaml_files import parse_yaml
from trishul_ray.federation.checkpoint import Checkpoint, open_checkpoints
from trishul_ray.federation.determinism import deterministic
from trishul_ray.federation.messages import Arrays, changed_sources
from trishul_ray.federation.server import broadcast_of
from trishul_ray.federation.workbench import ModelBench, adapt_to, build_model_bench, global_model
from trishul_ray.methods.base import build_method
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.lookup import ModelKind, quiet_transformers
from trishul_ray.models.passed import PythonBackbone
from trishul_ray.models.weights import AUTO_CLASSES
from trishul_ray.report.summary import run_ids
from trishul_ray.stages import ArrayState
from trishul_ray.storage.durable import Json, check_writable
from trishul_ray.storage.store import Store
from trishul_ray.tasks.base import Task
from trishul_ray.tasks.image_classification import ImageClassification
from trishul_ray.tasks.instruction import Instruction
from trishul_ray.version import __version__

#: Ids to name in one message.
_MAX_NEAR = 3
#: Clients to name in one.
MOST_NAMED = 10


@dataclass(frozen=True)
class TrainedRun:
    """The model of a run after a round; ``client`` is whose own it is, empty for the global one."""

    bench: ModelBench
    trained: Trained
    round: int
    client: str = ""


@dataclass(frozen=True)
class Export:
    """Exported model.

    Attributes:
        form: ``adapter`` (PEFT) or ``model`` (all weights, with the update in them).
        round: the last round.
        note: what it is, in one line.
        ranks: smallest and largest LoRA rank of an adapter's layers.
        relative_error: the largest relative error of an update that includes changes of the frozen
            weights, in the Frobenius norm; 0 where there are none.
    """

    form: str
    round: int
    note: str
    ranks: list[int] = field(default_factory=list)
    relative_error: float = 0.0


def open_run(run: str, runs: str) -> tuple[Store, Experiment]:
    """Return the folder of a run and its experiment.

    ``run`` is an id under ``runs``, the beginning of one, or the folder of a run. An InputError
    says that there is none, that several begin so, or that its config.yaml is not its own.
    """
    folder, _, name = run.rstrip("/").rpartition("/")
    store = Store.open(folder or runs)
    home = store.child(name)
    if not name or not home.exists("config.yaml"):
        name = _complete(run, name, store)
        home = store.child(name)
    try:
        fields = parse_yaml(home.read("config.yaml"))
        fields["storage"]["runs"] = folder or runs
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
        place = home.place("config.yaml")
        raise CorruptFileError(f"{place} is damaged: repeat the run, which restores it") from error
    experiment = build_experiment(fields, note=False)
    if experiment.id != name:
        raise InputError(
            f"run {run!r}: its config.yaml now describes {experiment.id}, not {name}: repeat the "
            "run, which restores it"
        )
    return home, experiment


def _complete(run: str, prefix: str, store: Store) -> str:
    """Return the one id that begins with ``prefix``, or raise an InputError with those near it."""
    ids = run_ids(store)
    found = [name for name in ids if prefix and name.startswith(prefix)]
    if len(found) == 1 and store.child(found[0]).exists("config.yaml"):
        return found[0]
    if found:
        near = f"several begin so: {', '.join(found[:_MAX_NEAR])}"
    else:
        close = difflib.get_close_matches(prefix, ids, n=_MAX_NEAR, cutoff=0.5)
        near = f"the nearest are {', '.join(close)}" if close else f"it holds {len(ids)} runs"
    missing = f"no config.yaml in {store.place(prefix)}"
    raise InputError(f"run {run!r} does not exist: {missing}; {near}")


def load_trained(experiment: Experiment, client: int | str | None = None) -> TrainedRun:
    """Return the model of the newest checkpoint of an experiment's run.

    Args:
        experiment: The experiment.
        client: Client whose own model to return, by number or name; None is the global model.

    Raises:
        InputError: The backbone is not on this machine, or the client has no model of its own.
        RunError: The run has no usable checkpoint, or its backbone has changed.
    """
    checkpoints = open_checkpoints(experiment)
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        why = "; ".join(checkpoints.skipped) or "none was written"
        raise RunError(f"run {experiment.id} has no usable checkpoint: {why}")
    method = build_method(experiment.method, experiment.adapter)
    assert checkpoint.info is not None  # as every run writes it
    name, kept = ("", None) if client is None else _kept_by(client, experiment, checkpoint)
    with deterministic(experiment):
        broadcast = broadcast_of(method, checkpoint.state)
        bench = build_model_bench(experiment, checkpoint.info)
        if changed := changed_sources(checkpoint.sources, bench.sources):
            raise RunError(f"the {changed} of run {experiment.id} have changed since it was made")
        return trained_by(bench, broadcast, checkpoint.round, name, kept)


def _kept_by(
    client: int | str, experiment: Experiment, checkpoint: Checkpoint
) -> tuple[str, Arrays]:
    """Return the name of a client, and what it has kept of its own model."""
    if not build_method(experiment.method).personal:
        raise InputError(
            f"client={client}: method={experiment.method.name} leaves no part of the model with "
            "its clients, who all have the global one; leave client out"
        )
    assert checkpoint.info is not None
    clients = experiment.federation.clients
    names = client_names(checkpoint.info, experiment.partition, clients)
    names = names or tuple(map(str, range(clients)))
    kept = {names[number]: state for number, state in checkpoint.client_states.items()}
    if (name := str(client)) in kept:
        return name, kept[name]
    if name in names:
        why = "has not taken part so far, so that its model is the global one"
    else:
        why = f"is none of the run's {clients:,} clients"
    known = sorted(kept, key=names.index)
    few = ", ".join(known[:MOST_NAMED]) + ", ..." * (len(known) > MOST_NAMED)
    raise InputError(f"client={client} {why}; allowed: {few or 'none yet'}")


def trained_by(
    bench: ModelBench,
    broadcast: ArrayState,
    round_number: int,
    client: str = "",
    kept: Arrays | None = None,
) -> TrainedRun:
    """Return the model that the broadcast after a round describes.

    It is the global one, or that of a client of this name that has kept these arrays.
    """
    adapt_to(bench, broadcast.survey)
    trained = global_model(bench, broadcast, round_number, kept)
    return TrainedRun(bench, trained, round_number, client)


def whose_model(run: TrainedRun) -> str:
    """Return whose model it is where clients have their own; otherwise an empty text."""
    bench = run.bench
    if not bench.method.personal:
        return ""
    if run.client:
        return f"of client {run.client} alone, with what only it keeps"
    layout = bench.model.layout
    sent = sum(layout.entry(name).numel for name in bench.method.wire(layout))
    return (
        f"global, without the {layout.size - sent:,} of {layout.size:,} trained parameters that "
        "each client keeps: they are as before the first round; "
        f"`trishul export {bench.settings.id} DIR --client N` writes the model of a client"
    )


def fits_adapter(bench: ModelBench) -> bool:
    """Return whether the method adapts layers; full fine-tuning changes all weights instead."""
    return any(True for _ in bench.model.iter_layers(bench.initial))


def export_run(
    run: str, directory: Path, *, merged: bool, runs: str, client: str | None = None
) -> Export:
    """Write the adapter, or the merged model, of a run's newest checkpoint into a new folder.

    Full fine-tuning has no adapter: its model is written instead. ``client`` is the name or the
    number of the client whose own model to write; None is the global model.

    Raises:
        InputError: The run does not exist, ``directory`` is not empty, or the client has no model
            of its own.
        RunError: The run has no usable checkpoint, or its backbone has changed.
    """
    check_writable(directory.absolute().parent, str(directory))
    _, experiment = open_run(run, runs)
    return write_model(load_trained(experiment, client), directory, merged=merged, notes={})


@contextmanager
def _written(directory: Path) -> Iterator[None]:
    """Raise what safetensors raises on a full disk, which is no OSError, as a StorageError."""
    try:
        yield
    except SafetensorError as error:
        message = f"cannot write the model in {directory}: {first_line(error)}"
        raise StorageError(message) from error


def write_model(
    run: TrainedRun,
    directory: Path,
    *,
    merged: bool,
    notes: dict[str, str],
    place: str | None = None,
) -> Export:
    """Write a trained model with all that others need to use it, into an empty folder.

    ``notes`` are further lines of the model card, by title; ``place`` is where the folder will lie
    in the end, if not where it is written.
    """
    bench, trained = run.bench, run.trained
    notes = {"rounds": str(run.round)} | notes
    if whose := whose_model(run):
        notes = {"model": whose} | notes
    if (quantize := bench.settings.model.quantize) != "none":
        notes["quantized"] = quantize
    configure_answers(bench)
    with deterministic(bench.settings), quiet_transformers(), _written(directory):
        if merged or not fits_adapter(bench):
            why = "" if merged else f", since {bench.settings.method.name} trains every weight"
            if quantize != "none":
                why += f", which are those of {quantize}, dequantized, as in training"
            note = f"the whole model, with the update in its weights{why}"
            notes |= {"weights": note}
            note += f"; {whose}" * bool(whose)
            export_merged(
                bench.model,
                trained,
                directory,
                beside=lambda folder: write_model_files(bench, folder, backbone=None, notes=notes),
            )
            return Export("model", run.round, note)
        backbone = name_backbone(bench, place or str(directory.absolute()))
        if quantize != "none":
            notes["weights"] = _describe_quantized(bench, copied=backbone.copied)
        adapter = export_peft(
            bench.model,
            trained,
            directory,
            backbone.name,
            revision=backbone.revision,
            beside=lambda folder: write_model_files(bench, folder, backbone=backbone, notes=notes),
        )
    low, high = ranks = [min(adapter.ranks.values()), max(adapter.ranks.values())]
    note = f"PEFT LoRA adapter of rank {low}" + (f" to {high}" if low != high else "")
    if quantize != "none":
        note += f", {notes['weights']}"
    if adapter.folded:
        note += ", which holds the changes of the frozen weights, too "
        note += f"(relative error {adapter.error:.1g})"
    note += f"; {whose}" * bool(whose)
    return Export("adapter", run.round, note, ranks, adapter.error)


def _describe_quantized(bench: ModelBench, *, copied: bool) -> str:
    """Return the model card's line on an adapter that was trained beside quantized weights."""
    model = bench.settings.model
    return f"trained beside backbone weights in {model.quantize}; " + (
        f"those in {COPY}/ are the same, dequantized"
        if copied
        else f"those of {model.name} are not quantized, and with them the model differs: "
        "`trishul export --merged` writes the trained one"
    )


#: Folder of a copy of the backbone, in an exported adapter.
COPY = "backbone"
#: Folder of the configuration of the backbone with the run's classes, where there is no copy.
CONFIG = "config"
#: Versions that load an export: older ones of transformers name the modules of ViT in another way,
#: and do not know the class of fast tokenizers.
NEEDS = ("transformers >= 5", "peft >= 0.21.2")

#: The pipeline of transformers that each kind of model is for.
_PIPELINES: dict[ModelKind, str] = {
    "image-classification": "image-classification",
    "sequence-classification": "text-classification",
    "seq2seq-lm": "text2text-generation",
    "causal-lm": "text-generation",
}


@dataclass(frozen=True)
class BackboneName:
    """Name of the backbone in an adapter's configuration.

    Attributes:
        name: a hub name, or a folder.
        revision: commit of a hub name, where it is known.
        copied: whether the folder is a copy that is written beside the adapter.
    """

    name: str
    revision: str | None = None
    copied: bool = False


def name_backbone(bench: ModelBench, place: str) -> BackboneName:
    """Return how ``from_pretrained`` finds the backbone of an adapter that will be at ``place``."""
    backbone = Backbone.of(bench.settings.model, bench.settings.storage.places)
    if isinstance(backbone, PythonBackbone):
        return BackboneName(backbone.name.partition(":")[2])
    config = bench.settings.model
    resized = config.image_size not in (None, getattr(backbone.architecture, "image_size", None))
    if backbone.name in BUILTINS or config.init == "random" or resized:
        return BackboneName(f"{place}/{COPY}", copied=True)
    if isinstance(backbone.location, Path):
        return BackboneName(str(backbone.location.resolve()))
    name, _, commit = bench.sources.get("backbone", "").partition("@")
    return BackboneName(backbone.location, commit if name == backbone.location else None)


def write_model_files(
    bench: ModelBench, folder: Path, *, backbone: BackboneName | None, notes: dict[str, str]
) -> None:
    """Write what belongs beside a model; ``backbone`` is that of an adapter."""
    task, config = bench.task, getattr(bench.model.model, "config", None)
    _write_preparation(task, folder)
    if backbone is not None and backbone.copied:
        (folder / COPY).mkdir()
        save_module(merge_trained(bench.model, Trained(bench.initial)), folder / COPY)
        # A pipeline of transformers looks for them beside the backbone.
        _write_preparation(task, folder / COPY)
    elif backbone is not None and isinstance(config, PretrainedConfig):
        config.save_pretrained(str(folder / CONFIG))
    info = bench.info
    about = {"task": type(task).__name__, "dataset": info.name, "classes": list(info.classes)}
    _write_json(folder / "task.json", about | task.settings())
    (folder / "README.md").write_text(model_card(bench, backbone, notes), encoding="utf-8")


def _write_preparation(task: Task, folder: Path) -> None:
    """Write the image processor or the tokenizer."""
    if isinstance(task, ImageClassification):
        _write_json(folder / "preprocessor_config.json", image_processor(task))
    elif task.tokens is not None:
        tokenizer = copy.deepcopy(task.tokens.tokenizer)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.save_pretrained(str(folder))


def configure_answers(bench: ModelBench) -> None:
    """Write names of classes, and ends of generated answers, into the configuration of a model.

    A chat template may end answers with another token than the checkpoint.
    """
    model: Any = bench.model.model
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig) and bench.task.num_classes is not None:
        config.id2label = dict(enumerate(bench.info.classes))
        config.label2id = {name: index for index, name in enumerate(bench.info.classes)}
    if isinstance(bench.task, Instruction):
        model.generation_config.eos_token_id = bench.task.stop_ids(bench.model)


def image_processor(task: ImageClassification) -> Json:
    """Return the image processor of transformers that prepares images as the task does."""
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


def model_card(bench: ModelBench, backbone: BackboneName | None, notes: dict[str, str]) -> str:
    """Return a model card in Markdown: what it is, how to load it, how to predict with it."""
    settings, kind = bench.settings, bench.task.model_kind
    python = isinstance(Backbone.of(settings.model, settings.storage.places), PythonBackbone)
    head = ["---", "library_name: " + ("transformers" if backbone is None else "peft")]
    if backbone is not None and not backbone.copied and not python:
        head.append(f"base_model: {backbone.name}")
    if not python:
        head.append(f"pipeline_tag: {_PIPELINES[kind]}")
    what = "Merged model" if backbone is None else "PEFT LoRA adapter"
    lines = [
        *head,
        "---",
        "",
        f"# {settings.method.name} on {bench.info.name}",
        "",
        f"{what} of the run `{settings.id}` of trishul-ray {__version__}.",
        "",
        f"- backbone: {settings.model.name}",
        f"- needs: {' and '.join(NEEDS[: 1 if backbone is None else None])}",
        *(f"- {title}: {text}" for title, text in notes.items()),
        "",
        "## Use",
        "",
        "```python",
        *_use(bench, backbone, python),
        "```",
    ]
    if not isinstance(bench.task, ImageClassification):
        lines += ["", "`task.json` says how a row becomes the model's input."]
        if isinstance(bench.task, Instruction):
            lines[-1] += " Answers end at its `end_ids`: pass them to `generate` as `eos_token_id`."
    elif not python:
        lines += [
            "",
            "The run turned photos upright, which the processor does not: pass it "
            "`PIL.ImageOps.exif_transpose(image)`. It scaled gray images of 16 bits to 8 (value / "
            "257), which the processor would clip to white.",
        ]
    return "\n".join(lines) + "\n"


def _use(bench: ModelBench, backbone: BackboneName | None, python: bool) -> list[str]:
    """Return the lines that load the model."""
    if python:
        source = "safetensors.torch import load_model"
        load = "load_model(model, f'{folder}/model.safetensors')"
        if backbone is not None:
            source = "peft import PeftModel"
            load = "model = PeftModel.from_pretrained(model, folder).eval()"
        name = bench.settings.model.name.partition(":")[2]
        return [f"from {source}", "", f"model = {name}(...)", load]
    auto = AUTO_CLASSES[bench.task.model_kind].__name__
    reader, what = "AutoTokenizer", "tokenizer"
    if isinstance(bench.task, ImageClassification):
        reader, what = "AutoImageProcessor", "processor"
    here, prepare = 'folder = "."  # of this file', f"{what} = {reader}.from_pretrained(folder)"
    if backbone is None:
        loaded = f"model = {auto}.from_pretrained(folder).eval()"
        names = ", ".join(sorted((auto, reader)))
        return [f"from transformers import {names}", "", here, loaded, prepare]
    if backbone.copied:
        imported, base = [auto, reader], [f'base = {auto}.from_pretrained(f"{{folder}}/{COPY}")']
    else:
        imported = ["AutoConfig", auto, reader]
        base = [
            f'config = AutoConfig.from_pretrained(f"{{folder}}/{CONFIG}")',
            f"base = {auto}.from_pretrained(",
            f"    {backbone.name!r}, config=config, ignore_mismatched_sizes=True",
            ")",
        ]
    return [
        "from peft import PeftModel",
        f"from transformers import {', '.join(sorted(imported))}",
        "",
        here,
        *base,
        "model = PeftModel.from_pretrained(base, folder).eval()",
        prepare,
    ]


def _write_json(file: Path, content: Json) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
