"""Damage to a file by a power cut, a full disk or a worn one."""


def _page(data: bytes) -> bytes:
    """Zeros in place of a page in the middle, or of a shorter file's middle half."""
    size = min(4096, len(data) // 2)
    at = (len(data) - size) // 2
    return data[:at] + bytes(size) + data[at + size :]


def _bit(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


#: The damaged bytes of a file, given those that it had.
DAMAGE = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "page": _page,
    "bit": _bit,
}
