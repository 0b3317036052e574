"""Find and mask secrets in texts and field names."""

import itertools
import re

MASK = "***"
# Words in the names of secret fields. The plural "tokens" and "tokenizer" are not secret.
_SECRET_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "pwd", "credential", "credentials", "apikey"}
)

_SECRET_PAIRS = frozenset({"api_key", "access_key", "secret_key", "private_key"})
# Each pattern is linear in the length of the text, without backtracking over long words.
# Greedy up to the last @ of the host, because passwords may contain one.
_USERINFO = re.compile(r"://[^/\s]+@")

_QUERY = re.compile(
    r"([?&;](?=[\w.-]*(?:token|secret|password|signature|credential|api_?key|access_key|sig))"
    r"[\w.-]*+=)[^&;\s]+",
    re.IGNORECASE,
)

_KNOWN_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsu]_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|sk-[A-Za-z0-9_-]{20,}|dapi[0-9a-f]{32})\b"
)


def is_secret_name(key: str) -> bool:
    """Return whether a field's name contains a word such as ``token`` or ``api_key``."""
    words = [word for word in re.split(r"[^a-z0-9]+", key.lower()) if word]
    pairs = {f"{a}_{b}" for a, b in itertools.pairwise(words)}
    return not _SECRET_WORDS.isdisjoint(words) or not _SECRET_PAIRS.isdisjoint(pairs)


def redact(text: str) -> str:
    """Mask credentials in URIs, secret query values and well-known tokens."""
    text = _USERINFO.sub(f"://{MASK}@", text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    return _KNOWN_TOKENS.sub(MASK, text)
