"""What there is, as tables for the terminal: methods, datasets and backbones.

Each table imports what it lists, and nothing else, so that it is shown at once.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table


def methods_table() -> Table:
    """List every method with its communication and reference."""
    from trishul_ray.methods.base import method_class, method_names

    table = Table("name", "what it does", "communication", "reference")
    for name in method_names():
        method = method_class(name)
        table.add_row(name, method.summary, method.communication, method.reference)
    return table


def datasets_table() -> Table:
    """List every dataset with one line of description."""
    from trishul_ray.data.prepare import describe_datasets

    table = Table("name", "what it is")
    for name, text in describe_datasets().items():
        table.add_row(name, escape(text))
    return table


def models_table() -> Table:
    """List the known backbones, without network: parameters, adapted matrices, weights' source."""
    from trishul_ray.config import SHORT_MODEL_NAMES
    from trishul_ray.models.builtin import BUILTINS
    from trishul_ray.models.lookup import KNOWN, PACKAGED, packaged_folder

    short = {name: alias for alias, name in SHORT_MODEL_NAMES.items()}
    # Names are copied from the terminal: wrap the other columns instead.
    table = Table(Column("name", no_wrap=True), "parameters", "adapted by default", "weights")
    for name in KNOWN:
        alias = f"\n{short[name]}" if name in short else ""
        table.add_row(name + alias, *_size(name), "mirror or hub")
    for name, (_, package, extra) in PACKAGED.items():
        if packaged_folder(name) is not None:
            table.add_row(name, *_size(name), f"package {package}")
        else:
            table.add_row(name, "", "", f"package {package}, extra {extra}")
    for name, builtin in BUILTINS.items():
        weights = f"built in: {builtin.description.partition(': ')[0]}, `trishul pretrain`"
        table.add_row(name, *_size(name), weights)
    return table


def heads_table(blocks: Mapping[str, tuple[float, int]]) -> Table:
    """List blocks: squared norm of the adapted matrices, and core heads on each of them."""
    mean = sum(heads for _, heads in blocks.values()) / len(blocks)
    table = Table(
        Column("block", no_wrap=True, overflow="fold"),
        Column("squared norm of its adapted matrices", justify="right"),
        Column(f"heads on each (mean {mean:g})", justify="right"),
    )
    for name, (norm, heads) in blocks.items():
        table.add_row(name, f"{norm:.4g}", str(heads))
    return table


def _size(name: str) -> tuple[str, str]:
    """Return the number of parameters without the task's classification head, and matrices."""
    from trishul_ray.adapters.targets import find_layers
    from trishul_ray.config import ModelConfig
    from trishul_ray.models.backbone import Backbone
    from trishul_ray.storage import Places
    from trishul_ray.tracking.progress import format_count

    # These architectures need neither cache nor mirror.
    model = Backbone(ModelConfig(name=name), Places(Path(), hub=None)).meta_model()
    shapes = Counter(
        f"{spec.name.rpartition('.')[2]} {spec.d_out}x{spec.d_in}" for spec in find_layers(model)
    )
    adapted = "\n".join(f"{times} x {shape}" for shape, times in shapes.items())
    return format_count(sum(p.numel() for p in model.parameters())), adapted
