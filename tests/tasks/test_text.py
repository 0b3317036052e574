"""Truncate a prompt to a limit: from the longest field, to the token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trishul_ray.tasks.text import PromptTokenizer, Template, shorten_longest


@pytest.mark.parametrize(
    ("lengths", "excess", "kept"),
    [
        ([10, 3], 4, [6, 3]),
        ([10, 9], 5, [7, 7]),
        ([10, 10], 3, [8, 9]),
        ([5, 9, 9], 10, [4, 4, 5]),
        ([2, 1], 9, [0, 0]),
        ([], 3, []),
    ],
)
def test_whichever_is_longest_gives(lengths, excess, kept):
    assert shorten_longest(lengths, excess) == kept


@given(lengths=st.lists(st.integers(0, 50), max_size=4), excess=st.integers(0, 120))
def test_levelling_is_one_by_one(lengths, excess):
    kept = shorten_longest(lengths, excess)
    assert sum(kept) == max(0, sum(lengths) - excess)
    cut = [i for i in range(len(kept)) if kept[i] < lengths[i]]
    assert all(kept[i] <= lengths[i] for i in range(len(kept)))
    if cut:  # No field was truncated below another field that is longer by more than one token.
        assert max(kept) - min(kept[i] for i in cut) <= 1


WORDS = st.text(st.sampled_from("ab \n.,é€😀"), max_size=60)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), room=st.integers(1, 40))
def test_prompts_fit_and_keep_template_text(byte_tokens, rows, room):
    template = Template("A: {one}\nB: {two}\nWell?", ("one", "two"), "toy")
    tokens = byte_tokens("t5")
    bare = len(tokens.ids(template.fill(["", ""]))) + 1  # and the end token
    found = PromptTokenizer(tokens, template, bare + room, add_special_tokens=True).ids(rows)
    for (one, two), ids in zip(rows, found, strict=True):
        assert len(ids) <= bare + room and ids[-1] == tokens.eos_id
        text = tokens.tokenizer.decode(ids, skip_special_tokens=True)
        assert text.startswith("A: ") and text.endswith("\nWell?")
        if len(tokens.ids(template.fill([one, two]))) < bare + room:
            assert text == template.fill([one, two])
        else:  # truncated, and never within a character
            first, _, second = text[3 : -len("\nWell?")].partition("\nB: ")
            assert "\ufffd" not in text
            assert "\nB: " in one + two or (one.startswith(first) and two.startswith(second))


def test_braces_may_be_literal():
    template = Template("{{x}} {a}", ("a", "b"), "toy")
    assert template.fields == ("a",) and template.fill(["1"]) == "{x} 1"
