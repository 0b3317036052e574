"""Checks of a sweep file against its cells: what it samples, stops early, tabulates and draws."""

import itertools
from collections.abc import Sequence

from trishul_ray.data.dataset import ScoredSplit, score_name
from trishul_ray.errors import InputError
from trishul_ray.report.figures.kind import check_figure
from trishul_ray.report.outcomes import SEED, FigureLayout, TableLayout
from trishul_ray.report.references import figure_keys, table_keys
from trishul_ray.sweeps.cells import RATE, Cell, is_chosen, vary
from trishul_ray.sweeps.placed_yaml import fail
from trishul_ray.sweeps.search import EarlyStopping, Search
from trishul_ray.sweeps.sweep_file import Fields, SweepFile, hint, unknown_field


def checked_search(file: SweepFile, cells: Sequence[Cell], overrides: Fields) -> Search | None:
    """Return the search of a file; None is the grid of the axes.

    The ends of every range that it samples must be valid in each cell.
    """
    search = file.search
    if search is None:
        return None
    varied = {name for axis in file.axes.values() for v in axis.values() for name in v.fields}
    varied |= {name for adjustment in file.adjust for name in adjustment.fields}
    for name, domain in search.space.items():
        loc = "search", "space", name
        if wrong := unknown_field(name):
            file.fail(f"search: {wrong}", *loc)
        if name in varied:
            file.fail(f"search: an axis or `adjust` sets {name}, too; remove one of the two", *loc)
        for cell, corner in itertools.product(cells, domain.values):
            try:
                vary(cell, {name: corner})
            except InputError as error:
                file.fail(f"search: {error}", *loc)
    if search.kind == "grid":
        if search.model_fields_set - {"kind"}:
            file.fail(
                "search: a grid is made by `axes`; remove the other keys, or set kind to random",
                "search",
            )
        return None
    if not search.space:
        example = "{optimizer.lr: {log: [1e-4, 1e-1]}}"
        file.fail(f"search: {search.kind} needs a space: {example}", "search")
    _check_rows(file, "search", search.on, cells)
    for name in overrides.keys() & search.space.keys():
        fail(overrides[name], f"`search` samples {name}, so it reaches no run; leave it out")
    return search


def check_metrics(file: SweepFile) -> None:
    """Check that the metrics that labels and a search name are some task's."""
    named = [(v.metric, v.place) for axis in file.axes.values() for v in axis.values() if v.metric]
    if file.search is not None and file.search.metric is not None:
        named.append((file.search.metric, file.place("search", "metric")))
    if not named:
        return
    from trishul_ray.tasks.base import is_metric, metric_names  # they compute with tensors

    for name, place in named:
        if not is_metric(name.removeprefix(score_name("", "validation"))):
            raise InputError(
                f"{place}: metric={name}: no task has it; {hint(name, metric_names())}"
            )


def check_varied_rates(file: SweepFile, search: Search | None, cells: Sequence[Cell]) -> None:
    """Refuse tuned learning rates where an axis or the search varies them."""
    varies = RATE in file.axes or (search is not None and RATE in search.space)
    if varies and any(cell.fields.get("optimizer.rates") for cell in cells):
        file.fail(
            f"optimizer.rates replaces the learning rates that {RATE} varies; remove one of them",
            "axes",
        )


def _check_rows(file: SweepFile, section: str, on: ScoredSplit, cells: Sequence[Cell]) -> None:
    """Check that the rows exist that a section chooses on."""
    if on == "validation" and any(not cell.experiment.data.validation_share for cell in cells):
        file.fail(
            f"{section}: without data.validation_share it would choose on the test rows, whose "
            f"scores then say too much: set data.validation_share, such as 0.1, or `on: test` in "
            f"`{section}`, which every table then says",
            section,
        )


def checked_stopping(
    file: SweepFile, search: Search | None, cells: Sequence[Cell]
) -> EarlyStopping | None:
    """Return how runs are stopped early, which compares by the search if there is one."""
    stopping = file.early_stopping
    if stopping is None:
        return None
    if not all(cell.experiment.evaluation.every for cell in cells):
        file.fail(
            "early_stopping: it compares scores between the first round and the last, and "
            "evaluation.every=0 makes none; set evaluation.every, such as 1",
            "early_stopping",
        )
    if any(table.paper for table in file.tables or ()):
        file.fail(
            "early_stopping: a table with `paper` shows finished runs only; remove one of them",
            "early_stopping",
        )
    if search is None:
        _check_rows(file, "early_stopping", stopping.on, cells)
        return stopping
    if "on" in stopping.model_fields_set:
        why = "early_stopping: it compares by the search; write `on` there"
        file.fail(why, "early_stopping", "on")
    return stopping.model_copy(update={"on": search.on})


def check_tables(file: SweepFile, cells: Sequence[Cell]) -> None:
    """Check that tables show axes, labels and cells that there are."""
    axes = tuple(file.axes)
    for number, table in enumerate(file.tables or ()):
        what, loc = f"table {table.name}", ("tables", number)
        for key, names in (("rows", table.rows), ("columns", table.columns)):
            for item, axis in enumerate(names):
                if axis not in axes:
                    why = f"{what}: {key}: unknown axis {axis!r}; {hint(axis, axes)}"
                    file.fail(why, *loc, key, item)
                if axis in names[:item]:
                    why = f"{what}: {key}: {axis!r} appears twice; remove one"
                    file.fail(why, *loc, key, item)
        if both := set(table.rows) & set(table.columns):
            file.fail(f"{what}: {min(both)!r} is in rows and in columns; remove one", *loc)
        if not table.rows and not table.columns:
            example = f"`rows: [{next(iter(axes), '')}]`"
            file.fail(f"{what} needs rows or columns, such as {example}", *loc)
        if table.average and not table.columns:
            file.fail(f"{what}: average needs columns", *loc, "average")
        _check_shown(file, "table", number, table, table_keys(), cells)
        _check_averages(file, number, table, cells)
        if table.column is not None:
            key = table.column.key
            file.check_labels(table.column.needs, f"{what}: {key}", *loc, key)
            for axis, labels in table.column.needs.items():
                if left_out := set(labels) - {*table.where.get(axis, labels)}:
                    why = f"where leaves out {min(left_out)!r}, which {key} needs"
                    file.fail(f"{what}: {why}", *loc, key)


def _check_averages(
    file: SweepFile, number: int, table: TableLayout, cells: Sequence[Cell]
) -> None:
    """Check that rows that are compared average over the same labels of the other axes.

    A row may have one label each, as where its runs have a model or a rate of their own.
    """
    hidden = [axis for axis in file.axes if axis not in (*table.rows, *table.columns, SEED)]
    found: dict[tuple[str, ...], dict[str, set[tuple[str, ...]]]] = {}
    for labels in (cell.labels for cell in cells if is_chosen(cell.labels, table.where)):
        row = labels[table.rows[-1]] if table.rows else ""
        place = tuple(labels[axis] for axis in (*table.rows[:-1], *table.columns))
        over = tuple(labels[axis] for axis in hidden)
        found.setdefault(place, {}).setdefault(row, set()).add(over)
    for rows in found.values():
        (first, most), *others = sorted(rows.items(), key=lambda each: -len(each[1]))
        other = next((row for row, over in others if over != most), None)
        if len(most) > 1 and other is not None:
            file.fail(
                f"table {table.name}: {first!r} and {other!r} would be means over different labels "
                f"of {' and '.join(hidden)}, of which some are left out; show the axis as rows or "
                "columns, or choose its labels by `where`",
                *("tables", number),
            )


def check_figures(file: SweepFile, cells: Sequence[Cell]) -> None:
    """Check that figures show cells that there are, and that their kinds take them."""
    for number, figure in enumerate(file.figures):
        _check_shown(file, "figure", number, figure, figure_keys(), cells)
        try:
            check_figure(figure, tuple(file.axes))
        except InputError as error:
            key = "options" if "options" in figure.model_fields_set else "kind"
            file.fail(str(error), "figures", number, key)


def _check_shown(
    file: SweepFile,
    kind: str,
    number: int,
    shown: TableLayout | FigureLayout,
    paper: Sequence[str],
    cells: Sequence[Cell],
) -> None:
    """Check what tables and figures have in common: name, cells, and their key in the paper."""
    what, loc = f"{kind} {shown.name}", (f"{kind}s", number)
    others = (file.tables if kind == "table" else file.figures) or ()
    if any(other.name == shown.name for other in others[:number]):
        file.fail(f"two {kind}s with one name, {shown.name!r}; rename one", *loc, "name")
    if shown.paper is not None and shown.paper not in paper:
        near = hint(shown.paper, paper)
        file.fail(f"{what}: paper has no {shown.paper!r}; {near}", *loc, "paper")
    file.check_labels(shown.where, f"{what}: where", *loc, "where")
    if not any(is_chosen(cell.labels, shown.where) for cell in cells):
        why = f"{what}: where leaves no cell; add labels, or shorten `except`"
        file.fail(why, *loc, "where")
