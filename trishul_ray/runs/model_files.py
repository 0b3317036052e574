"""The files beside an exported model, with which others load it and predict as the run did.

They are ``README.md`` (a model card), ``config.json`` with the names of the classes, the image
processor or the tokenizer, ``task.json`` (how rows become inputs), and ``backbone/`` where no name
or folder holds the frozen backbone: it is a built-in, is drawn from a seed, or was resized.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from trishul_ray.adapters.export import merge_trained, save_module
from trishul_ray.adapters.model import Trained
from trishul_ray.federation.workbench import ModelBench
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.models.lookup import ModelKind
from trishul_ray.models.passed import PythonBackbone
from trishul_ray.tasks.image_classification import ImageClassification
from trishul_ray.version import __version__

#: Folder of a copy of the backbone, in an exported adapter.
COPY = "backbone"

#: The class of transformers that loads each kind of model.
AUTO_CLASSES: dict[ModelKind, str] = {
    "image-classification": "AutoModelForImageClassification",
    "sequence-classification": "AutoModelForSequenceClassification",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "causal-lm": "AutoModelForCausalLM",
}

#: The pipeline of transformers that each kind of model is for.
_PIPELINES: dict[ModelKind, str] = {
    "image-classification": "image-classification",
    "sequence-classification": "text-classification",
    "seq2seq-lm": "text2text-generation",
    "causal-lm": "text-generation",
}


@dataclass(frozen=True)
class BackboneName:
    """How an adapter's configuration names its backbone.

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
    """Write what belongs beside a model.

    Args:
        bench: The workbench of the run.
        folder: Where the adapter or the merged model has been written.
        backbone: Where the backbone of an adapter is; None for a merged model.
        notes: Further lines of the model card, by title.
    """
    task, config = bench.task, getattr(bench.model.model, "config", None)
    if backbone is not None and isinstance(config, PretrainedConfig):
        config.save_pretrained(str(folder))
    if backbone is not None and backbone.copied:
        (folder / COPY).mkdir()
        save_module(merge_trained(bench.model, Trained(bench.initial)), folder / COPY)
    if isinstance(task, ImageClassification):
        _write_json(folder / "preprocessor_config.json", image_processor(task))
    elif task.tokens is not None:
        tokenizer = copy.deepcopy(task.tokens.tokenizer)
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.save_pretrained(str(folder))
    _write_json(folder / "task.json", task_fields(bench))
    (folder / "README.md").write_text(model_card(bench, backbone, notes), encoding="utf-8")


def name_classes(model: nn.Module, bench: ModelBench) -> None:
    """Write the names of the classes into the configuration of a model with a head for them."""
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig) and bench.task.num_classes is not None:
        config.id2label = dict(enumerate(bench.info.classes))
        config.label2id = {name: index for index, name in enumerate(bench.info.classes)}


def image_processor(task: ImageClassification) -> dict[str, Any]:
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


def task_fields(bench: ModelBench) -> dict[str, Any]:
    """Return how the run makes inputs of rows and answers of outputs, as plain JSON values."""
    task, info = bench.task, bench.info
    return {
        "task": type(task).__name__,
        "dataset": info.name,
        "classes": list(info.classes),
        **task.settings(),
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
    elif not python:
        lines += [
            "",
            "The run turned photos upright, which the processor does not: pass it "
            "`PIL.ImageOps.exif_transpose(image)`.",
        ]
    return "\n".join(lines) + "\n"


def _use(bench: ModelBench, backbone: BackboneName | None, python: bool) -> list[str]:
    """Return the lines that load the model."""
    if python:
        load = "load_model(model, f'{folder}/model.safetensors')"
        if backbone is not None:
            load = "model = PeftModel.from_pretrained(model, folder).eval()"
        source = (
            "peft import PeftModel"
            if backbone is not None
            else "safetensors.torch import load_model"
        )
        return [
            f"from {source}",
            "",
            f"model = {bench.settings.model.name.partition(':')[2]}(...)",
            load,
        ]
    auto = AUTO_CLASSES[bench.task.model_kind]
    images = isinstance(bench.task, ImageClassification)
    reader = "AutoImageProcessor" if images else "AutoTokenizer"
    prepare = f"{'processor' if images else 'tokenizer'} = {reader}.from_pretrained(folder)"
    if backbone is None:
        return [
            f"from transformers import {', '.join(sorted((auto, reader)))}",
            "",
            'folder = "."  # of this file',
            f"model = {auto}.from_pretrained(folder).eval()",
            prepare,
        ]
    base = f'f"{{folder}}/{COPY}"' if backbone.copied else repr(backbone.name)
    return [
        "from peft import PeftModel",
        f"from transformers import {', '.join(sorted(('AutoConfig', auto, reader)))}",
        "",
        'folder = "."  # of this file',
        f"base = {auto}.from_pretrained(",
        f"    {base}, config=AutoConfig.from_pretrained(folder), ignore_mismatched_sizes=True",
        ")",
        "model = PeftModel.from_pretrained(base, folder).eval()",
        prepare,
    ]


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
