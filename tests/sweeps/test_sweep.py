"""Sweep files: their cells, and the message for each mistake, with file, path and remedy."""

import re
import textwrap
from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.layouts import FigureLayout, TableLayout
from trishul_ray.sweeps import sweep_file
from trishul_ray.sweeps.cells import distinct
from trishul_ray.sweeps.loading import find_sweeps, load_sweep, sweep_from_axes

FILE = """\
# What it does.
#
# What it costs.
title: Two methods
base: {dataset: digits, federation: {rounds: 2}, federation.clients: 8}
axes:
  method:
    TRISHUL: trishul
    RAVAN: {method: ravan, adapter.init: gram_schmidt, title: RAVAN (Gram-Schmidt)}
    Full-FT: {method: fullft, metric: loss}
  budget: {lower: 4, higher: 8}
  seed: 0..2
except:
  - {method: Full-FT, budget: [higher]}
tables:
  - name: both
    rows: [budget, method]
    where: {method: [TRISHUL, RAVAN]}
  - {name: wide, title: Wide, paper: "tab:vision", rows: [method], columns: [budget], average: true}
figures:
  - {name: curves, kind: convergence, where: {budget: lower}, series: method}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="s.yaml"):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write_file


def reject(path, *parts, overrides=()):
    with pytest.raises(InputError) as caught:
        load_sweep(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_a_whole_file(write):
    sweep = load_sweep(write(FILE))
    assert (sweep.name, sweep.title, sweep.profile) == ("s", "Two methods", "custom")
    assert sweep.description == "What it does.\n\nWhat it costs."
    assert sweep.axes == {
        "method": ("TRISHUL", "RAVAN", "Full-FT"),
        "budget": ("lower", "higher"),
        "seed": ("0", "1", "2"),
    }
    assert sweep.titles == {"method": {"RAVAN": "RAVAN (Gram-Schmidt)"}, "budget": {}, "seed": {}}
    where = {"method": ("TRISHUL", "RAVAN")}
    both = TableLayout(name="both", rows=("budget", "method"), where=where)
    assert both.title == "both"
    shown = {"title": "Wide", "paper": "tab:vision", "average": True}
    wide = TableLayout(name="wide", rows=("method",), columns=("budget",), **shown)
    assert sweep.tables == (both, wide)
    chosen = {"where": {"budget": ("lower",)}, "series": ("method",)}
    assert sweep.figures == (FigureLayout(name="curves", kind="convergence", **chosen),)
    assert sweep.search is None
    assert len(sweep.cells) == len(distinct([sweep, sweep])) == (3 * 2 - 1) * 3
    first, last = sweep.cells[0], sweep.cells[-1]
    assert first.labels == {"method": "TRISHUL", "budget": "lower", "seed": "0"}
    assert (first.metric, last.metric) == (None, "loss")
    assert last.labels == {"method": "Full-FT", "budget": "lower", "seed": "2"}


def test_cell_equals_the_run_with_its_fields(write):
    cell = load_sweep(write(FILE), ["federation.clients=7"]).cells[10]
    assert cell.labels == {"method": "RAVAN", "budget": "higher", "seed": "1"}
    same = "dataset=digits method=ravan adapter.init=gram_schmidt budget=8 seed=1"
    fed = "federation.rounds=2 federation.clients=7"
    assert cell.experiment == load_experiment(None, [*same.split(), *fed.split()])


def test_override_reaches_every_cell_or_is_rejected(write):
    path = write("base: {dataset: digits, seed: 5}\naxes: {budget: {a: 8, b: {seed: 9}}}\n")
    cells = load_sweep(path, ["federation.rounds=7"]).cells
    assert [c.experiment.federation.rounds for c in cells] == [7, 7]
    reject(path, "override seed=7", "sets seed in 1 of 2 cells", overrides=["seed=7"])
    assert [c.experiment.seed for c in load_sweep(path, ["seed=9"]).cells] == [9, 9]
    adjusted = path.read_text() + "adjust: [{where: {budget: a}, fields: {federation.rounds: 2}}]\n"
    reject(write(adjusted), "1 of 2 cells", overrides=["federation.rounds=7"])
    searched = "search: {kind: random, rows: test, space: {federation.rounds: {int: [1, 9]}}}\n"
    path = write("base: {dataset: digits}\n" + searched)
    reject(path, "an override also sets this field", overrides=["federation.rounds=7"])


def test_unique_last_part_of_a_name_suffices(write):
    write("base: {rounds: 2}\naxes: {lam: [0, 0.1], x: {a: {lr: 0.5}}}\n")
    sweep = load_sweep(Path("s.yaml"), ["local_steps=3"])
    for cell in sweep.cells:
        federation, optimizer = cell.experiment.federation, cell.experiment.optimizer
        assert (federation.rounds, federation.local_steps, optimizer.lr) == (2, 3, 0.5)
    assert [cell.experiment.method.lam for cell in sweep.cells] == [0, 0.1]


def test_range_of_seeds_replaces_the_axis(write):
    path = write("axes: {method: [trishul, ravan], seed: 0..2}\n")
    three, five = load_sweep(path), load_sweep(path, ["seed=0..4"])
    assert five.axes["seed"] == ("0", "1", "2", "3", "4")
    assert len(five.cells) == 10
    # The first three are the same runs, and more seeds do not deviate from the protocol.
    assert {c.experiment.id for c in three.cells} < {c.experiment.id for c in five.cells}
    assert five.overrides == ()
    assert load_sweep(path, ["seed=[3, 7]"]).axes["seed"] == ("3", "7")
    reject(path, "'1' appears twice", overrides=["seed=[1, 1]"])


def test_overrides_that_can_change_a_number_are_known(write):
    words = ["federation.rounds=7", "optimizer.lr=0.1", "storage.runs=here"]
    words += ["resources.backend=inline", "evaluation.every=1"]
    sweep = load_sweep(write("axes: {seed: 0..1}\n"), words)
    assert sweep.overrides == ("federation.rounds=7", "optimizer.lr=0.1")
    assert load_sweep(write("axes: {seed: 0..1}\n")).overrides == ()


def test_without_axes_there_is_one_cell(write):
    (cell,) = load_sweep(write("base: {dataset: digits}\n")).cells
    assert cell.labels == {}
    assert cell.experiment == load_experiment()


def test_labels_are_the_values_as_text(write):
    path = write("axes:\n  method.lam: [1.0, 1e-3, 0.1]\n  x: {20: {}, 'no': {seed: 3}}\n")
    sweep = load_sweep(path)
    assert sweep.axes == {"method.lam": ("1.0", "1e-3", "0.1"), "x": ("20", "no")}
    assert {cell.experiment.method.lam for cell in sweep.cells} == {1.0, 0.001, 0.1}


def test_files_extend_others(write):
    write(FILE, "sweeps/paper/two.yaml")
    write("base: {federation.rounds: 3, seed: 4}\naxes: {budget: {lower: 2}}\n", "_base.yaml")
    path = write(
        """\
        extends: [sweeps/paper/two.yaml, _base.yaml]
        base: {federation: {clients: 9}}
        axes:
          seed: null
          method: [ravan]
          partition.alpha: [0.1]
        except: []
        tables: []
        """,
        "smoke/mine.yaml",
    )
    path.write_text(path.read_text().replace("[sweeps/paper/two", "[../sweeps/paper/two"))
    path.write_text(path.read_text().replace("_base", "../_base"))
    sweep = load_sweep(path)
    assert (sweep.name, sweep.title, sweep.profile) == ("mine", "Two methods", "smoke")
    assert sweep.description == ""
    assert sweep.axes == {"method": ("ravan",), "budget": ("lower",), "partition.alpha": ("0.1",)}
    (cell,) = sweep.cells
    fed = cell.experiment.federation
    assert (fed.rounds, fed.clients, cell.experiment.seed) == (3, 9, 4)
    assert sweep.tables == () and [figure.name for figure in sweep.figures] == ["curves"]


def test_default_table_has_all_axes(write):
    path = write("axes: {budget: [4, 8], method: [ravan, fedit], seed: 0..1}\n")
    (table,) = load_sweep(path).tables
    assert (table.rows, table.columns) == (("budget",), ("method",))
    (table,) = load_sweep(write("axes: {seed: 0..1}\n")).tables
    assert (table.rows, table.columns) == (("seed",), ())


#: Beginnings of the files below.
SEED = "axes: {seed: [0]}\n"
TABLE = SEED + "tables: [{name: a"
ROWS = SEED + "tables: [{name: a, rows: [seed]"
TWO = "axes: {budget: [4, 8], rounds: [1, 2], seed: [0, 1]}\nexcept: [{budget: 8, rounds: 1}]\n"
SPACED = "search: {kind: random, rows: test, space: "
#: Content, the path in the message, and the fault.
MISTAKES = [
    # The file and its keys.
    ("a: [1\nb: 2\n", "s.yaml", "not YAML"),
    ("- 1\n", "s.yaml", "input should be a valid dictionary"),
    ("base: {}\nbsae: {}\n", "bsae", "unknown key; did you mean 'base'?"),
    ("base: {seed: 1}\nbase: {seed: 2}\n", "s.yaml", "'base' appears twice (first on line 1)"),
    ("name: a/b\n", "name", "'a/b' must consist of letters"),
    ("profile: big\n", "profile", "should be 'paper', 'small', 'smoke' or 'custom', got 'big'"),
    ("extends: nowhere.yaml\n", "extends", "nowhere.yaml does not exist; set its path"),
    ("extends: s.yaml\n", "extends", "s.yaml also extends this file; remove one"),
    # Fields.
    ("base: {federation: {cilents: 3}}\n", "s.yaml", "did you mean 'federation.clients'?"),
    ("axes: {a: {x: {sede: 3}}}\n", "axes -> a -> x -> fields", "did you mean 'seed'?"),
    ("base: {method: fedit, method.name: ravan}\n", "base", "method.name is set twice"),
    ("base: {dataset: digts}\n", "s.yaml", "did you mean 'digits'?"),
    ("base: {federation.clients: 2}\n", "s.yaml", "clients_per_round=4 exceeds"),
    # Axes.
    ("axes: {seed: []}\n", "axes", "axis 'seed' is empty"),
    ("axes: {seed: 4..0}\n", "axes", "range 4..0 must ascend"),
    ("axes: {seed: 0..999, method.lam: 0..99}\n", "axes", "1000 seed x 100 method.lam"),
    ("axes: {seed: [0..2, 1]}\n", "axes", "axis 'seed': '1' appears twice; remove one"),
    ("axes: {sede: [0]}\n", "axes -> sede -> 0 -> fields", "did you mean 'seed'?"),
    ("axes: {adapter.targets: [[q]]}\n", "axes", "must be names or numbers"),
    (
        "axes: {partition.alpha: [0.3, -1], seed: [5]}\n",
        "-1, seed=5", "input should be greater than 0",
    ),
    ("axes: {method: [fedit], method.lam: [0]}\n", "fedit, method.lam=0", "unknown field"),
    (
        "axes: {a: {x: {seed: 1}}, seed: [1, 2]}\n",
        "axes -> seed -> 2 -> seed", "2, but another axis sets 1",
    ),
    ("axes: {a: {x: {metric: acuracy}}}\n", "axes -> a -> x -> metric", "did you mean 'accuracy'?"),
    # Exceptions and adjustments.
    (SEED + "except: [{sede: 0}]\n", "except -> 0", "did you mean 'seed'?"),
    (SEED + "except: [{seed: [0, 1]}]\n", "except -> 0 -> seed", "has no label '1'; known: 0"),
    (SEED + "except: [{seed: 0}]\n", "except", "excludes all cells"),
    (SEED + "adjust: [{where: {seed: 0}}]\n", "adjust -> 0 -> fields", "field required"),
    (
        SEED + "adjust: [{where: {seed: 0}, fields: {budgt: 8}}]\n",
        "adjust -> 0 -> fields", "unknown field 'budgt'",
    ),
    # Tables and figures.
    (SEED + "tables: [{rows: [seed]}]\n", "tables -> 0 -> name", "field required"),
    (TABLE + ", rwos: []}]\n", "tables -> 0 -> rwos", "did you mean 'rows'?"),
    (TABLE + ", rows: [sed]}]\n", "tables -> 0", "unknown axis 'sed'; did you mean 'seed'?"),
    (ROWS + ", columns: [seed]}]\n", "tables -> 0", "must have rows or columns"),
    (ROWS + ", where: {seed: 1}}]\n", "tables -> 0 -> where -> seed", "no label '1'; known: 0"),
    (
        TWO + "tables: [{name: a, rows: [seed], where: {budget: 8, rounds: 1}}]\n",
        "tables -> 0 -> where", "selects no cell",
    ),
    (TWO + "tables: [{name: a, rows: [budget]}]\n", "tables -> 0", "different labels of rounds"),
    (ROWS + "}, {name: a, rows: [seed]}]\n", "tables -> 1 -> name", "'a' appears twice"),
    (ROWS + ", paper: tab:vison}]\n", "tables -> 0 -> paper", "did you mean 'tab:vision'?"),
    (ROWS + ", average: true}]\n", "tables -> 0 -> average", "requires columns"),
    ("figures: [{name: a}]\n", "figures -> 0 -> kind", "field required"),
    ("figures: [{name: a, kind: overheat}]\n", "figures -> 0 -> kind", "'overhead'"),
    (SEED + "figures: [{name: a, kind: overhead, series: x}]\n", "figures -> 0", "axis 'x'"),
    # Search.
    (
        "search: {kind: grid, space: {seed: {int: [1, 2]}}}\n",
        "search -> kind", "'random' or 'optuna'",
    ),
    ("search: {kind: random}\n", "search -> space", "field required"),
    (
        SPACED + "{optimizer.rl: {log: [1, 2]}}}\n",
        "search -> space -> optimizer.rl", "'optimizer.lr'?",
    ),
    (SPACED + "{seed: {int: [1, 2], log: [1, 2]}}}\n", "search -> space -> seed", "must set one"),
    (SPACED + "{seed: {int: [1.5, 2]}}}\n", "search -> space -> seed -> int -> 0", "valid integer"),
    (SPACED + "{optimizer.lr: {log: [0, 1]}}}\n", "search -> space -> optimizer.lr", "above 0"),
    (
        SPACED + "{optimizer.lr: {uniform: [2, 1]}}}\n",
        "search -> space -> optimizer.lr", "must be [low",
    ),
    (SPACED + "{adapter.heads: {int: [0, 8]}}}\n", "search -> space -> adapter.heads", "greater"),
    (
        SEED + SPACED + "{seed: {int: [1, 2]}}}\n",
        "search -> space -> seed", "an axis, `adjust` or an override also sets this field",
    ),
    (
        "search: {kind: random, space: {seed: {int: [1, 2]}}}\n",
        "search", "set data.validation_share",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "place", "fault"), MISTAKES)
def test_mistake_names_file_path_and_fault(write, text, place, fault):
    reject(write(text), "s.yaml", f"{place}: " if " " in place else place, fault)


def test_mistake_in_extended_file_names_the_file(write):
    write("bsae: {}\n", "base.yaml")
    reject(write("extends: base.yaml\n"), "base.yaml: bsae: unknown key")
    write("\naxes:\n  seed: [0]\nexcept:\n  - seed: 1\n", "base.yaml")
    reject(
        write("extends: base.yaml\naxes: {budget: [4]}\n"),
        "s.yaml: except -> 0 -> seed: axis 'seed'",
    )


def test_a_file_that_is_missing_or_no_text(write):
    reject(Path("none.yaml"), "sweep file none.yaml cannot be read: ", "No such file")
    path = write("")
    path.write_bytes(b"\xff\xfe\x00")
    reject(path, "sweep file s.yaml cannot be read")
    path.write_bytes(b"base: {}\na: \x01")
    reject(path, "s.yaml: not YAML: unacceptable character")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("seed", ["override 'seed' is not of the form key=value"]),
        ("budget=9", ["override budget=9: an axis or `adjust` sets budget in 2 of 2 cells"]),
        ("sede=9", ["unknown field 'sede'; did you mean 'seed'?"]),
        ("federation=9", ["federation=9: federation is a section"]),
        ("dataset=[1", ["override 'dataset=[1'", "not YAML"]),
    ],
)
def test_a_mistake_in_an_override(write, override, parts):
    path = write("base: {federation.rounds: 2}\naxes: {budget: [4, 8]}\n")
    reject(path, *parts, overrides=[override])


def test_axes_of_the_command_line():
    sweep = sweep_from_axes(
        ["method.lam=0,0.01, 1e-3", "seed=0..4"], ["dataset=digits", "federation.rounds=3"]
    )
    assert sweep.axes == {"method.lam": ("0", "0.01", "1e-3"), "seed": ("0", "1", "2", "3", "4")}
    assert (sweep.profile, sweep.file, len(sweep.cells)) == ("custom", None, 15)
    assert {cell.experiment.federation.rounds for cell in sweep.cells} == {3}
    assert sweep.tables[0].rows == ("method.lam",)


@pytest.mark.parametrize(
    ("axes", "part"),
    [
        (["seed"], "--axis 'seed' must be of the form field=value,value or field=0..4"),
        (["seed="], "--axis: axes: axis 'seed' is empty"),
        (["seed=1", "seed=2"], "--axis 'seed=2': the axis appears twice"),
        (["seed=1,1"], "axis 'seed': '1' appears twice"),
        (["sede=1"], "unknown field 'sede'; did you mean 'seed'?"),
        (["seed=1]"], "--axis 'seed=1]': not YAML"),
        (["seed=-1"], "--axis: -1: seed=-1: input should be greater"),
        (["resources.actors=1,2"], "resources.actors -> 2: has the same runs as '1'"),
        (["seed=0,1", "storage.runs=x,y"], "storage.runs -> y: has the same runs as 'x'"),
        (["evaluation.every=0,1"], "evaluation.every -> 1: has the same runs as '0'"),
        (["method.lam=0.001,1e-3"], "method.lam -> 1e-3: has the same runs as '0.001'"),
    ],
)
def test_mistake_in_axis_option(axes, part):
    with pytest.raises(InputError) as caught:
        sweep_from_axes(axes)
    assert part in str(caught.value)


def test_a_search_is_read_with_its_space(write):
    path = write(
        """\
        base: {data.validation_share: 0.1}
        axes: {method: [trishul, ravan]}
        search:
          kind: optuna
          samples: 7
          metric: accuracy
          seed: 3
          space:
            optimizer.lr: {log: [1e-4, 1e-1]}
            adapter.heads: {int: [1, 8]}
            adapter.init: {choice: [gram_schmidt, random_normal]}
        """
    )
    search = load_sweep(path).search
    values = {
        "optimizer.lr": (1e-4, 0.1),
        "adapter.heads": (1, 8),
        "adapter.init": ("gram_schmidt", "random_normal"),
    }
    assert {name: space.values for name, space in search.space.items()} == values
    assert (search.samples, search.mode, search.seed) == (7, "max", 3)


SPACE = "space: {optimizer.lr: {log: [1e-4, 1e-1]}}"


@pytest.mark.parametrize(
    ("keys", "mode", "compared"),
    [
        ("", "max", "validation_primary_metric"),
        ("metric: loss, ", "min", "validation_loss"),
        ("metric: loss, mode: max, ", "max", "validation_loss"),
        ("metric: macro_f1, rows: test, ", "max", "macro_f1"),
    ],
)
def test_search_minimizes_loss_and_compares_validation_rows(write, keys, mode, compared):
    text = f"base: {{data.validation_share: {0 if 'test' in keys else 0.1}}}\n"
    sweep = load_sweep(write(text + f"search: {{kind: optuna, {keys}{SPACE}}}\n"))
    assert (sweep.search.mode, sweep.search.compared) == (mode, compared)


def test_random_samples_are_cells_of_one_table(write):
    search = f"search: {{kind: random, samples: 3, {SPACE}}}\n"
    sweep = load_sweep(write("base: {data.validation_share: 0.1}\naxes: {seed: 0..1}\n" + search))
    assert sweep.search is None
    assert {(each.metric, each.rows) for each in sweep.cells} == {(None, "validation")}
    (table,) = sweep.tables
    assert table.rows == ("sample",) and "by their validation rows" in table.title
    first, second = sweep.cells[:3], sweep.cells[3:]
    rates = [cell.experiment.optimizer.lr for cell in first]
    assert [cell.experiment.optimizer.lr for cell in second] == rates
    assert sweep.axes["sample"] == tuple(f"optimizer.lr={rate:.6g}" for rate in rates)


def test_varied_cell_has_the_rate_of_its_fields():
    (cell,) = sweep_from_axes(["dataset=cifar100"], ["federation.rounds=3"]).cells
    other = cell.varied({"method": "fedit", "budget": "higher"})
    assert other.experiment == load_experiment(
        None, ["dataset=cifar100", "federation.rounds=3", "method=fedit", "budget=higher"]
    )
    assert other.experiment.optimizer.lr == 5e-3 != cell.experiment.optimizer.lr


def test_sweeps_are_found_by_name(write, monkeypatch, tmp_path):
    installed = tmp_path / "prefix" / "share" / "trishul-ray" / "sweeps"
    monkeypatch.setattr(sweep_file.sys, "prefix", str(tmp_path / "prefix"))
    write("extends: _b.yaml\ntitle: mine\n", "sweeps/smoke/vision.yaml")
    write("base: {seed: 4}\n", "sweeps/smoke/_b.yaml")
    write("title: installed\n", f"{installed}/custom/extra.yaml")
    (vision,) = find_sweeps(["vision"], "smoke")
    assert (vision.title, vision.cells[0].experiment.seed) == ("mine", 4)  # not the package's
    assert [sweep.title for sweep in find_sweeps(["all"], "custom")] == ["installed"]
    # A user's file may extend a file of the package.
    extended = write("extends: paper/overhead.yaml\naxes: {seed: [0]}\n", "mine.yaml")
    assert load_sweep(extended).axes["method"] == ("RAVAN", "TRISHUL")
    with pytest.raises(InputError, match="has no sweep 'visoin'; did you mean 'vision'"):
        find_sweeps(["visoin"], "paper")
    with pytest.raises(InputError, match=r"profile 'big' has no sweeps in .* profiles: paper, sm"):
        find_sweeps(["all"], "big")


def test_fields_of_chosen_cells(write):
    write(
        "axes: {method: [fedit, fedex, trishul], seed: 0..1}\n"
        "adjust:\n"
        "  - {where: {method: [fedit, fedex]}, fields: {optimizer.lr: 0.1, budget: 8}}\n"
        "  - {where: {method: fedex, seed: 1}, fields: {optimizer: {lr: 0.2}, seed: 5}}\n",
        "base.yaml",
    )
    extended = load_sweep(write("extends: base.yaml\nbase: {optimizer.lr: 0.3}\n"))
    made, lower = {}, 4
    for cell in extended.cells:
        fields = cell.experiment.optimizer.lr, cell.experiment.budget, cell.experiment.seed
        made.setdefault(cell.labels["method"], []).append(fields)
    assert made == {
        "fedit": [(0.1, 8, 0), (0.1, 8, 1)],
        # The later adjustment takes precedence, also over the axis.
        "fedex": [(0.1, 8, 0), (0.2, 8, 5)],
        "trishul": [(0.3, lower, 0), (0.3, lower, 1)],
    }
    # A child's section replaces its parent's, like `except`.
    without = load_sweep(write("extends: base.yaml\nadjust: []\n"))
    assert {cell.experiment.budget for cell in without.cells} == {lower}


LABELS = st.text("abcxyz", min_size=1, max_size=3)


@given(
    st.dictionaries(LABELS, st.lists(LABELS, min_size=1, max_size=4, unique=True), max_size=3),
    st.data(),
)
def test_cells_are_all_combinations_but_the_exceptions(tmp_path_factory, axes, data):
    """Draw any axes, with any exceptions that leave a cell."""
    labels = {axis: st.sampled_from(labels) for axis, labels in axes.items()}
    some = st.fixed_dictionaries({}, optional=labels).filter(bool)
    excluded = data.draw(st.lists(some, max_size=3) if axes else st.just([]))
    fields = zip(axes.items(), ("seed", "budget", "federation.rounds"), strict=False)
    content = {
        "base": {"dataset": "digits"},
        "axes": {
            axis: {label: {field: value} for value, label in enumerate(labels, 1)}
            for (axis, labels), field in fields
        },
        "except": excluded,
    }
    cells = [dict(zip(axes, labels, strict=True)) for labels in product(*axes.values())]
    expected = [e for e in cells if not any(each.items() <= e.items() for each in excluded)]
    path = tmp_path_factory.mktemp("sweep") / "s.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    if expected:
        assert [dict(cell.labels) for cell in load_sweep(path).cells] == expected
    else:
        with pytest.raises(InputError, match="excludes all cells"):
            load_sweep(path)


@given(st.text(max_size=60) | st.text("ab:-[]{}&*'\"#,.0123 \n", max_size=60))
def test_any_text_is_a_sweep_or_one_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        load_sweep(path)
    except InputError as error:
        assert "any.yaml" in str(error) and "\n" not in str(error)


def test_shared_run_has_the_scores_of_all_sweeps():
    def asking(*every):
        return [sweep_from_axes(["seed=0..1"], [f"evaluation.every={n}"]) for n in every]

    for every, rounds in [((0, 0), {0, 25}), ((0, 1), {*range(26)}), ((5, 0), {*range(0, 26, 5)})]:
        for sweeps in (asking(*every), asking(*reversed(every))):
            runs = distinct(sweeps).values()
            assert [set(run.scored_rounds) for run in runs] == [rounds] * 2
    run, _ = distinct(asking(4, 6)).values()
    assert run.scored_rounds >= {*range(0, 25, 4), *range(0, 25, 6)}


def test_the_guides_examples_are_loaded(tmp_path):
    """Every block of YAML in docs/sweep-files.md is a file, named in its first line."""
    guide = (Path(__file__).parents[2] / "docs" / "sweep-files.md").read_text()
    blocks = re.findall(r"```yaml\n# (\S+)\n(.*?)```", guide, flags=re.DOTALL)
    assert len(blocks) == guide.count("```yaml") == 4
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    sweeps = {name: load_sweep(tmp_path / name) for name, _ in blocks}
    counts = {"mine.yaml": 9, "more.yaml": 15, "random.yaml": 12, "tune.yaml": 2}
    assert {name: len(sweep.cells) for name, sweep in sweeps.items()} == counts
    mine = sweeps["mine.yaml"]
    rates = {c.experiment.optimizer.lr for c in mine.cells if c.labels["method"] == "fedit"}
    assert rates == {0.005}
    assert {c.experiment.federation.rounds for c in sweeps["more.yaml"].cells} == {20}
    assert sweeps["tune.yaml"].search.kind == "optuna"
