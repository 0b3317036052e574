"""Ask whether something outside this process answers, within a short time; mirrors of the hub."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session

from trishul_ray.errors import InputError
from trishul_ray.storage.redaction import redact

#: Seconds in which the Hugging Face hub must answer; otherwise its clients read their caches alone.
HUB_SECONDS = 5.0

#: Seconds for which the answer is remembered.
_REMEMBERED_SECONDS = 60.0

#: When the hub was asked, and why it could not be reached, by address.
_asked: dict[str, tuple[float, str]] = {}


def try_within(seconds: float, action: Callable[[], object]) -> str:
    """Call ``action``; return why it failed or timed out in one line, or ``""`` on success.

    The call runs in a daemon thread, because a name lookup has no timeout and would block the exit.
    """
    faults: list[str] = [f"no answer within {seconds:g} s"]

    def attempt() -> None:
        try:
            action()
        except (OSError, InputError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            faults[0] = redact(str(reason)).splitlines()[0] or type(error).__name__
        else:
            faults[0] = ""

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return faults[0]


def hub_fault() -> str:
    """Return why the Hugging Face hub cannot be reached, in one line; ``""`` if it can be.

    It is asked once, and again after a minute. In the hub's offline mode it is not asked.
    """
    asked, fault = _asked.get(constants.ENDPOINT, (-_REMEMBERED_SECONDS, ""))
    if time.monotonic() - asked >= _REMEMBERED_SECONDS:
        if constants.HF_HUB_OFFLINE:
            return ""
        fault = try_within(HUB_SECONDS, _ask_hub)
        _asked[constants.ENDPOINT] = time.monotonic(), fault
    return f"{redact(constants.ENDPOINT)} does not answer: {fault}" if fault else ""


def _ask_hub() -> None:
    """Send one request with the hub's own client, whose proxies and certificates count."""
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # its HTTP library, and so its errors, change with the version
        raise OSError(str(error)) from error


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Let the hub's clients read their caches alone in this context if the hub does not answer.

    Left to themselves, they try for half a minute before they say so.
    """
    if not hub_fault():
        yield
        return
    # The library `datasets` has a copy of the setting.
    settings: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [module.HF_HUB_OFFLINE for module in settings]
    try:
        for module in settings:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def check_depth(hub: Path, repo: str) -> None:
    """Raise an InputError if ``hub`` is a folder inside a mirror, that of ``repo`` or its owner."""
    if (hub / repo).is_dir():
        return
    owner, _, name = repo.partition("/")
    here = hub.expanduser().resolve()
    if here.name == owner and (here / name).is_dir():
        mirror = here.parent
    elif (here.parent.name, here.name) == (owner, name):
        mirror = here.parent.parent
    else:
        return
    raise InputError(
        f"mirror {hub} (storage.hub or TRISHUL_HUB) is too deep: {repo} must be below it; "
        f"use {mirror}"
    )
