"""Valid inputs, changed at random: bytes, texts, values of JSON."""

import copy
import re

#: Texts that some layer might interpret as a path, a number, a pattern, a formula or a tag.
ODD_TEXTS = [
    "", " ", "a" * 300, "../../x", "~nobody/x", "a\0b", "{x}", "[x", "null", "-1", "é\u202e", "*",
    "/", "=1", "$x_$", "1e400", "0x", "2001-99-99", "!!int x", "&a [*a]", "<<: 1", "0..3", "yes",
]  # fmt: skip
ODD_VALUES = [
    None, True, 0, 1, -1, 0.5, 1e-300, 1e300, 2**31, 2**63, 10**30, float("nan"), float("inf"),
    [], {}, [[]], [None], {"a": 1}, {"": {}}, *ODD_TEXTS,
]  # fmt: skip
_WORDS = re.compile(r"[A-Za-z_.\d-]+|\s+|.", re.DOTALL)


def change_bytes(rng, data):
    """Make one to three changes, in the first hundred bytes as often as elsewhere."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:
            at = min(at, rng.randrange(100))
        size = rng.choice([1, 1, 2, 8, 64])
        new = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size), data[:size], b"\n"])
        end = at + rng.choice([0, size, len(new), len(data) // 4])
        data = data[:at] if rng.random() < 0.1 else data[:at] + new + data[end:]
    return data


def change_text(rng, text):
    """Remove, duplicate, move or replace one to three words or lines."""
    for _ in range(rng.randint(1, 3)):
        parts = text.splitlines(keepends=True) if rng.random() < 0.3 else _WORDS.findall(text)
        if not parts:
            return text
        at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        change = rng.randrange(5)
        if change == 0:
            del parts[at]
        elif change == 1:
            parts.insert(other, parts[at])
        elif change == 2:
            parts[at], parts[other] = parts[other], parts[at]
        elif change == 3:
            parts[at] = rng.choice(ODD_TEXTS)
        else:
            parts[at] = parts[at][: rng.randrange(len(parts[at]) + 1)] + rng.choice(
                "\0\t:{[\"'#\\é"
            )
        text = "".join(parts)
    return text


def change_json(rng, value, odd=ODD_VALUES):
    """Replace, remove, duplicate or rename one to three values."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        parent, key = _place(rng, value)
        if parent is None:
            return copy.deepcopy(rng.choice(odd))
        change = rng.random()
        if change < 0.6:
            parent[key] = copy.deepcopy(rng.choice(odd))
        elif change < 0.8:
            del parent[key]
        elif isinstance(parent, dict):
            parent[rng.choice([*ODD_TEXTS, *parent])] = parent.pop(key)
        else:
            parent.append(copy.deepcopy(parent[key]))
    return value


def _place(rng, value):
    """Return a container in a value, and a key or index of it, at a random depth."""
    parent = key = None
    while isinstance(value, dict | list) and value:
        parent = value
        key = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
        value = parent[key]
        if rng.random() < 0.2:
            break
    return parent, key
