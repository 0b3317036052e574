"""The sections of a sweep file that say how its cells form tables and figures."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trishul_ray.errors import InputError
from trishul_ray.report.outcomes import FigureLayout, TableLayout
from trishul_ray.report.paper import figure_numbers, paper_keys
from trishul_ray.sweeps.cells import Cell
from trishul_ray.sweeps.located_yaml import Node, hint

#: Labels by axis.
Labels = Mapping[str, tuple[str, ...]]

_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)


def read_tables(node: Node, axes: Labels, cells: Sequence[Cell]) -> tuple[TableLayout, ...]:
    """Read the section ``tables``.

    Raises:
        InputError: an unknown key, axis, label or key of the paper, two tables with one name, or a
            table without cells.
    """
    tables: dict[str, TableLayout] = {}
    known = ("name", "title", "paper", "rows", "columns", "where", "average")
    for item in node.items("tables"):
        keys = item.mapping("a table", known)
        name = _new_name(item, keys, "table", tables)
        rows, columns = (_axis_names(keys, key, name, axes) for key in ("rows", "columns"))
        if both := set(rows) & set(columns):
            item.fail(f"table {name}: {min(both)!r} is in rows and in columns; remove one")
        if not rows and not columns:
            item.fail(
                f"table {name} needs rows or columns, such as `rows: [{next(iter(axes), '')}]`"
            )
        average = keys["average"].value if "average" in keys else False
        if not isinstance(average, bool) or (average and not columns):
            keys["average"].fail(f"table {name}: average must be true or false, and needs columns")
        paper = keys["paper"].scalar("paper") if "paper" in keys else None
        if paper is not None and paper not in paper_keys():
            keys["paper"].fail(f"table {name}: paper has no {paper!r}; {hint(paper, paper_keys())}")
        tables[name] = TableLayout(
            name=name,
            title=keys["title"].scalar("title") if "title" in keys else name,
            rows=rows,
            columns=columns,
            paper=paper,
            where=_read_where(keys, f"table {name}", axes, cells),
            average=average,
        )
    return tuple(tables.values())


def default_table(name: str, title: str, axes: Sequence[str]) -> TableLayout:
    """Return a table of all axes; ``seed`` is averaged over if there is another axis."""
    shown = [axis for axis in axes if axis != "seed"] or list(axes)
    rows, columns = (shown, []) if len(shown) == 1 else (shown[:-1], shown[-1:])
    return TableLayout(name, title, tuple(rows), tuple(columns))


def read_figures(node: Node, axes: Labels, cells: Sequence[Cell]) -> tuple[FigureLayout, ...]:
    """Read the section ``figures``; raises an InputError as :func:`read_tables`."""
    from trishul_ray.report.paper_figures import check_figure

    figures: dict[str, FigureLayout] = {}
    for item in node.items("figures"):
        keys = item.mapping("a figure", ("name", "title", "paper", "kind", "where", "options"))
        name = _new_name(item, keys, "figure", figures)
        if "kind" not in keys:
            item.fail(f"figure {name} needs a kind: the name of a drawing function")
        options = keys["options"].mapping("options") if "options" in keys else {}
        paper = keys["paper"].scalar("paper") if "paper" in keys else None
        if paper is not None and paper not in (known := figure_numbers()):
            keys["paper"].fail(f"figure {name}: paper has no {paper!r}; {hint(paper, known)}")
        figure = FigureLayout(
            name=name,
            title=keys["title"].scalar("title") if "title" in keys else name,
            kind=keys["kind"].scalar("kind"),
            where=_read_where(keys, f"figure {name}", axes, cells),
            options={key: value.plain() for key, value in options.items()},
            paper=paper,
        )
        try:
            check_figure(figure, tuple(axes))
        except InputError as error:
            keys.get("options", keys["kind"]).fail(str(error))
        figures[name] = figure
    return tuple(figures.values())


def read_labels(node: Node, what: str, axes: Labels) -> dict[str, tuple[str, ...]]:
    """Read labels by axis, where one label may stand for a list of one.

    Raises:
        InputError: an axis or a label does not exist.
    """
    found = {}
    for axis, value in node.mapping(what).items():
        if axis not in axes:
            value.fail(f"{what}: unknown axis {axis!r}; {hint(axis, axes)}")
        labels = [value] if value.is_scalar else value.items(what)
        for label in labels:
            if label.scalar(f"{what}: a label") not in axes[axis]:
                label.fail(
                    f"{what}: axis {axis!r} has no label {label.text!r}; "
                    f"{hint(label.text, axes[axis])}"
                )
        found[axis] = tuple(label.text for label in labels)
    return found


def read_name(node: Node, what: str) -> str:
    """Read a name that can be the name of a file."""
    name = node.scalar(what)
    if not _FILE_NAME.fullmatch(name):
        node.fail(f"{what} {name!r} must be letters, digits, '.', '_' and '-', as in a file's name")
    return name


def _new_name(item: Node, keys: Mapping[str, Node], what: str, known: Mapping[str, Any]) -> str:
    if "name" not in keys:
        item.fail(f"a {what} needs a name")
    name = read_name(keys["name"], f"name of a {what}")
    if name in known:
        keys["name"].fail(f"two {what}s with one name, {name!r}; rename one")
    return name


def _axis_names(keys: Mapping[str, Node], key: str, table: str, axes: Labels) -> tuple[str, ...]:
    names: list[str] = []
    for item in keys[key].items(f"table {table}: {key}") if key in keys else ():
        name = item.scalar(f"table {table}: {key}")
        if name not in axes:
            item.fail(f"table {table}: {key}: unknown axis {name!r}; {hint(name, axes)}")
        if name in names:
            item.fail(f"table {table}: {key}: {name!r} appears twice; remove one")
        names.append(name)
    return tuple(names)


def _read_where(
    keys: Mapping[str, Node], what: str, axes: Labels, cells: Sequence[Cell]
) -> dict[str, tuple[str, ...]]:
    if "where" not in keys:
        return {}
    where = read_labels(keys["where"], f"{what}: where", axes)
    if not any(all(cell.labels[a] in labels for a, labels in where.items()) for cell in cells):
        keys["where"].fail(f"{what}: where leaves no cell; add labels, or shorten `except`")
    return where
