import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.adapters.layout import Layout
from trishul_ray.errors import InputError


@st.composite
def tensors(draw):
    """Draw the shapes of a random collection of layers, in the order of a model."""
    shapes = []
    for i in range(draw(st.integers(0, 6))):
        heads, rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        kind = draw(st.sampled_from(["heads", "fixed", "lora"]))
        if kind == "lora":
            shapes += [(f"m.{i}.lora_A", (rank, 5)), (f"m.{i}.lora_B", (4, rank))]
            continue
        shapes.append((f"m.{i}.core", (heads, rank, rank)))
        if kind == "heads":
            shapes.append((f"m.{i}.scale", (heads,)))
    if draw(st.booleans()):
        shapes += [("head:classifier.weight", (3, 5)), ("head:classifier.bias", (3,))]
    return draw(st.permutations(shapes))


@settings(deadline=None)
@given(tensors())
def test_entries_cover_the_vector_in_documented_order(shapes):
    layout = Layout.of(shapes)
    assert {(e.name, e.shape) for e in layout.entries} == set(shapes)
    end = 0
    for entry in layout.entries:
        assert entry.offset == end
        end += entry.numel
    assert layout.size == end
    kinds = ["core", "scale", "adapter", "classifier"]
    found = [
        "classifier"
        if e.name.startswith("head:")
        else {"core": "core", "scale": "scale"}.get(e.name.split(".")[-1], "adapter")
        for e in layout.entries
    ]
    assert [e.kind for e in layout.entries] == found == sorted(found, key=kinds.index)


@settings(deadline=None)
@given(tensors(), st.data())
def test_units_cover_uploads_once_with_positions(shapes, data):
    layout = Layout.of(shapes)
    names = data.draw(st.permutations([e.name for e in layout.entries]))
    names = names[: data.draw(st.integers(0, len(names)))]
    vector = torch.arange(float(layout.size))
    views = layout.views(vector)
    wire = torch.cat([torch.empty(0), *(views[name].reshape(-1) for name in names)])
    units, end = list(layout.units(names)), 0
    for unit in units:
        assert unit.wire == slice(end, end + unit.size)
        end = unit.wire.stop
        assert torch.equal(vector[unit.span], wire[unit.wire])
    assert end == len(wire)
    found = [
        (u.tensor, u.rank, None if u.scalar is None else float(vector[u.scalar])) for u in units
    ]
    expected = []
    for name in names:
        if not name.endswith(".core"):
            expected.append((name, None, None))
            continue
        scales = views.get(name.replace(".core", ".scale"), [None] * len(views[name]))
        expected += [(name, views[name].shape[-1], s if s is None else float(s)) for s in scales]
    assert found == expected


@settings(deadline=None)
@given(tensors())
def test_pack_inverts_views_and_views_share_storage(shapes):
    layout = Layout.of(shapes)
    vector = torch.arange(float(layout.size))
    views = layout.views(vector)
    assert torch.equal(layout.pack(views), vector)
    for entry in layout.entries:
        part = vector[entry.offset : entry.offset + entry.numel]
        assert torch.equal(views[entry.name].reshape(-1), part)
        views[entry.name].add_(1.0)
    assert torch.equal(vector, torch.arange(float(layout.size)) + 1.0)


@settings(deadline=None)
@given(tensors())
def test_banks_view_all_cores_of_a_rank(shapes):
    layout = Layout.of(shapes)
    vector = torch.randn(layout.size)
    views, banks = layout.views(vector), layout.core_banks(vector)
    cores = [e.name for e in layout.entries if e.kind == "core"]
    assert set(cores) == {name for name, _ in shapes if name.endswith(".core")}
    ranks = list(dict.fromkeys(views[name].shape[-1] for name in cores))
    assert [bank.shape[-1] for bank in banks] == ranks
    for bank in banks:
        assert bank.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
        same_rank = [views[name] for name in cores if views[name].shape[-1] == bank.shape[-1]]
        assert torch.equal(bank, torch.cat(same_rank))
    # Banks are first in the vector, in the order of the units.
    matrices = [core for bank in banks for core in bank]
    units = list(layout.units(cores))
    assert [unit.span for unit in units] == [unit.wire for unit in units]
    for unit, core in zip(units, matrices, strict=True):
        assert torch.equal(vector[unit.span], core.reshape(-1))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "missing or unknown names: a.core"),
        ({"a.core": torch.zeros(1, 2, 2), "b": torch.zeros(1)}, "missing or unknown names: .*b"),
        ({"a.core": torch.zeros(2, 2)}, r"a.core has shape \(2, 2\), expected \(1, 2, 2\)"),
    ],
)
def test_pack_rejects_tensors_of_other_shapes(tensors, message):
    with pytest.raises(InputError, match=message):
        Layout.of([("a.core", (1, 2, 2))]).pack(tensors)


def test_a_repeated_name_is_rejected():
    with pytest.raises(InputError, match="repeated names: a"):
        Layout.of([("a", (1,)), ("a", (2,))])


@pytest.mark.parametrize("method", ["views", "core_banks"])
def test_a_vector_of_another_length_is_rejected(method):
    layout = Layout.of([("a.core", (1, 2, 2))])
    with pytest.raises(InputError, match=r"shape \(5,\), expected \(4,\)"):
        getattr(layout, method)(torch.zeros(5))
