import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.adapters.layout import Layout
from trishul_ray.errors import InputError


@st.composite
def tensors(draw):
    """Shapes of a random collection of layers, in the order a model might give them."""
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
def test_entries_cover_the_vector_once_in_the_documented_order(shapes):
    layout = Layout.of(shapes)
    assert {(e.name, e.shape) for e in layout.entries} == set(shapes)
    end = 0
    for entry in layout.entries:
        assert entry.offset == end
        assert layout.slice(entry.name) == slice(end, end + entry.numel)
        end += entry.numel
    assert layout.size == end
    kinds = [
        3 if e.name.startswith("head:") else {"core": 0, "scale": 1}.get(e.name.split(".")[-1], 2)
        for e in layout.entries
    ]
    assert kinds == sorted(kinds)


@settings(deadline=None)
@given(tensors())
def test_pack_inverts_views_and_views_share_storage(shapes):
    layout = Layout.of(shapes)
    vector = torch.arange(float(layout.size))
    views = layout.views(vector)
    assert torch.equal(layout.pack(views), vector)
    for entry in layout.entries:
        assert torch.equal(views[entry.name].reshape(-1), vector[layout.slice(entry.name)])
        views[entry.name].add_(1.0)
    assert torch.equal(vector, torch.arange(float(layout.size)) + 1.0)


@settings(deadline=None)
@given(tensors())
def test_banks_hold_every_core_of_a_rank_as_one_view(shapes):
    layout = Layout.of(shapes)
    vector = torch.randn(layout.size)
    views, banks = layout.views(vector), layout.core_banks(vector)
    seen = {}
    for bank, tensor in zip(layout.banks, banks, strict=True):
        assert tensor.shape == (bank.heads, bank.rank, bank.rank)
        assert tensor.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
        for member in bank.members:
            seen[member.name] = tensor[member.first : member.first + member.heads]
    assert set(seen) == {name for name, _ in shapes if name.endswith(".core")}
    assert all(torch.equal(views[name], core) for name, core in seen.items())
    assert len({bank.rank for bank in layout.banks}) == len(layout.banks)
    # Banks open the vector, so units of aggregation can be counted along them.
    assert [b.offset for b in layout.banks] == sorted(b.offset for b in layout.banks)
    assert sum(t.numel() for t in banks) == sum(views[name].numel() for name in seen)


@settings(deadline=None)
@given(tensors(), tensors())
def test_fingerprints_are_equal_exactly_when_layouts_are(first, second):
    a, b = Layout.of(first), Layout.of(second)
    assert (a.fingerprint() == b.fingerprint()) == (a.entries == b.entries)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "names differ from the layout's: a.core"),
        ({"a.core": torch.zeros(1, 2, 2), "b": torch.zeros(1)}, "names differ .*: b"),
        ({"a.core": torch.zeros(2, 2)}, r"a.core has shape \(2, 2\), expected \(1, 2, 2\)"),
    ],
)
def test_pack_refuses_what_does_not_fit(tensors, message):
    with pytest.raises(InputError, match=message):
        Layout.of([("a.core", (1, 2, 2))]).pack(tensors)


def test_a_name_given_twice_is_refused():
    with pytest.raises(InputError, match="stand twice: a"):
        Layout.of([("a", (1,)), ("a", (2,))])


@pytest.mark.parametrize("method", ["views", "core_banks"])
def test_a_vector_of_another_length_is_refused(method):
    layout = Layout.of([("a.core", (1, 2, 2))])
    with pytest.raises(InputError, match=r"shape \(5,\), expected \(4,\)"):
        getattr(layout, method)(torch.zeros(5))
