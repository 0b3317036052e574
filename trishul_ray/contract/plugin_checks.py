"""Contract checks of everything that a plug-in registers, run in sequence."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from trishul_ray.contract import datasets, methods, stages, tasks
from trishul_ray.contract.checks import BrokenPromiseError, Check
from trishul_ray.errors import InputError
from trishul_ray.plugins.loading import Plugin, fault_of
from trishul_ray.plugins.registry import load_extensions, provided_by
from trishul_ray.storage.durable import scratch_folder

#: Functions that create the checks of an item, keyed by the field of its registry. Extensions add
#: the functions for their registries.
CHECKS: dict[str, Callable[[str], list[Check]]] = {
    "method": methods.checks_of,
    "stage": stages.checks_of,
    "task.kind": tasks.checks_of,
    "data.name": datasets.checks_of,
}


@dataclass(frozen=True)
class Outcome:
    """Result of a check.

    Attributes:
        subject: The checked item, such as ``method=mine``.
        name: Name of the check.
        result: The result.
        reason: Reason of a failed or skipped check, in one line.
    """

    subject: str
    name: str
    result: Literal["ok", "failed", "skipped"]
    reason: str = ""


def check_plugin(plugin: Plugin) -> Iterator[Outcome]:
    """Run the checks of everything that a plug-in registers.

    Yields:
        The outcome of each check. A reason is reported only once per item.

    Raises:
        InputError: The plug-in registers nothing that has checks.
    """
    found = subjects_of(plugin)
    if not found:
        raise InputError(
            f"plug-in {plugin.name} registers nothing that has checks: {', '.join(CHECKS)}"
        )
    for subject, checks in found:
        reasons: set[str] = set()
        for check in checks:
            outcome = run_check(subject, check)
            again = outcome.result == "failed" and outcome.reason in reasons
            reasons.add(outcome.reason)
            yield replace(outcome, reason="for the same reason") if again else outcome


def run_check(subject: str, check: Check) -> Outcome:
    """Run a check in an empty folder; any exception that it raises is a failure."""
    if check.skipped:
        return Outcome(subject, check.name, "skipped", check.skipped)
    threads = torch.get_num_threads()
    with scratch_folder("check") as folder:
        try:
            check.run(Path(folder))
        except BrokenPromiseError as error:
            return Outcome(subject, check.name, "failed", str(error))
        except Exception as error:  # A plug-in may raise anything.
            return Outcome(subject, check.name, "failed", fault_of(error))
        finally:
            torch.set_num_threads(threads)
    return Outcome(subject, check.name, "ok")


def subjects_of(plugin: Plugin) -> list[tuple[str, list[Check]]]:
    """Return the items that a plug-in registers, such as ``method=mine``, with their checks."""
    load_extensions("check")
    found = []
    for registry, name in provided_by(plugin):
        # The registered name of a task includes the kind of rows that it reads.
        name = name.partition(":")[0] if registry.field == "task.kind" else name
        if registry.field in CHECKS:
            found.append((f"{registry.field}={name}", CHECKS[registry.field](name)))
    return found
