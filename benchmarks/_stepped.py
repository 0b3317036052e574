"""Run a child process step by step on request, so that several processes can alternate.

A request is a line on the child's standard input. The reply is a line of JSON on its standard
output.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self


class Stepped:
    """Parent's side of a child process."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str] = os.environ,
        python: str = sys.executable,
    ) -> None:
        self._process = subprocess.Popen(
            [python, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, what: str) -> Any:
        """Send a request, and return the reply.

        Raises:
            RuntimeError: The process has ended. Its messages are on standard error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args!r} has ended: see above")
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the input, which ends the process and its children."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def answer_all(answer: Callable[[str], Any]) -> None:
    """Child's side: reply to every request until the input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)
