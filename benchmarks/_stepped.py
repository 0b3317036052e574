"""A process that gets requests one by one, so that several processes work alternately.

A request is a line of its standard input; the reply is a line of JSON on its standard output.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self


class Stepped:
    """The parent's side: start, ask, end."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str] = os.environ,
        python: str = sys.executable,
    ) -> None:
        """Start a Python script with its arguments."""
        self._process = subprocess.Popen(
            [python, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def ask(self, what: str) -> Any:
        """Send one word, read one answer.

        Raises:
            RuntimeError: the process has ended; its own words are on standard error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args!r} has ended: see above")
        return json.loads(answer)

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *error: object) -> None:
        """End of input ends the process, with all it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def answer_all(answer: Callable[[str], Any]) -> None:
    """The child's side: answer every question until the input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)
