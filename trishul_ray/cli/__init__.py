"""The ``trishul`` command."""

import os
import signal


def main() -> None:
    """Run the command line and exit. An interrupt during the imports exits without a traceback."""
    # unless SIGINT is ignored
    if handled := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from trishul_ray.cli.app import run_command_line

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command_line()
