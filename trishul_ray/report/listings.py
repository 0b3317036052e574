"""What can be run, as tables on the terminal: methods, datasets, backbones."""

from collections import Counter
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table
from torch import nn

from trishul_ray.adapters.targets import find_layers
from trishul_ray.data.sources import describe_datasets
from trishul_ray.methods.registry import method_class, method_names
from trishul_ray.models.architectures import KNOWN
from trishul_ray.models.backbones import meta_backbone
from trishul_ray.models.registry import PACKAGED, in_package
from trishul_ray.models.tiny import BUILTINS
from trishul_ray.sections import SHORT_MODEL_NAMES, ModelConfig
from trishul_ray.tracking.progress import count


def methods_table() -> Table:
    """Every method: what it does, what it sends, where it comes from."""
    table = Table("name", "what it does", "communication", "reference")
    for name in method_names():
        method = method_class(name)
        table.add_row(name, method.summary, method.communication, method.reference)
    return table


def datasets_table() -> Table:
    """Every dataset in a line."""
    table = Table("name", "what it is")
    for name, text in describe_datasets().items():
        table.add_row(name, escape(text))
    return table


def models_table(cache: Path) -> Table:
    """Backbones known by name: their size, what is adapted, where their weights come from.

    Needs no network and no weights.

    Args:
        cache: folder of built-in backbones.
    """
    short = {name: alias for alias, name in SHORT_MODEL_NAMES.items()}
    # A name is there to be copied: it is the other columns that give way.
    name_column = Column("name", no_wrap=True)
    table = Table(name_column, "parameters", "adapted by default", "weights")
    for name in KNOWN:
        alias = f"\n{short[name]}" if name in short else ""
        table.add_row(name + alias, *_size(name, cache), "mirror or hub")
    for name, (_, package, extra) in PACKAGED.items():
        there = in_package(name) is not None
        size = _size(name, cache) if there else ("", "")
        table.add_row(name, *size, f"package {package}" + ("" if there else f", extra {extra}"))
    for name, builtin in BUILTINS.items():
        weights = f"built in: {builtin.description.partition(': ')[0]}, `trishul pretrain`"
        table.add_row(name, *_size(name, cache), weights)
    return table


def _size(name: str, cache: Path) -> tuple[str, str]:
    """Parameters without a classification head of the task's, and the matrices by shape."""
    model = meta_backbone(ModelConfig(name=name), hub=None, cache=cache)
    return count(sum(p.numel() for p in model.parameters())), _adapted(model)


def _adapted(model: nn.Module) -> str:
    found = Counter(
        (spec.name.rpartition(".")[2], spec.d_out, spec.d_in) for spec in find_layers(model)
    )
    return "\n".join(
        f"{times} x {name} {rows}x{columns}" for (name, rows, columns), times in found.items()
    )
