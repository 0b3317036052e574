"""The checks of all that a plug-in defines, run one after the other."""

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

#: The checks of an item by the field of its registry. Extensions add those of their registries.
CHECKS: dict[str, Callable[[str], list[Check]]] = {
    "method": methods.checks_of,
    "stage": stages.checks_of,
    "task.kind": tasks.checks_of,
    "data.name": datasets.checks_of,
}


@dataclass(frozen=True)
class Outcome:
    """The result of a check: its subject, such as ``method=mine``, and the reason in one line."""

    subject: str
    name: str
    result: Literal["ok", "failed", "skipped"]
    reason: str = ""


def check_plugin(plugin: Plugin) -> Iterator[Outcome]:
    """Run the checks of all that a plug-in defines.

    Raises:
        InputError: It defines nothing that can be checked.
    """
    found = subjects_of(plugin)
    if not found:
        raise InputError(
            f"plug-in {plugin.name} registers nothing that has checks: {', '.join(CHECKS)}"
        )
    for subject, checks in found:
        told: set[str] = set()
        for check in checks:
            outcome = run_check(subject, check)
            again = outcome.result == "failed" and outcome.reason in told
            told.add(outcome.reason)
            yield replace(outcome, reason="for the same reason") if again else outcome


def run_check(subject: str, check: Check) -> Outcome:
    """Run a check in an empty folder; whatever it raises is its failure."""
    if check.skipped:
        return Outcome(subject, check.name, "skipped", check.skipped)
    threads = torch.get_num_threads()
    with scratch_folder("check") as folder:
        try:
            check.run(Path(folder))
        except BrokenPromiseError as error:
            return Outcome(subject, check.name, "failed", str(error))
        except Exception as error:  # whatever a plug-in raises
            return Outcome(subject, check.name, "failed", fault_of(error))
        finally:
            torch.set_num_threads(threads)
    return Outcome(subject, check.name, "ok")


def subjects_of(plugin: Plugin) -> list[tuple[str, list[Check]]]:
    """Return what a plug-in defines, such as ``method=mine``, and the checks of each."""
    load_extensions("check")
    found = []
    for registry, name in provided_by(plugin):
        # The name of a task also has the rows that it reads.
        name = name.partition(":")[0] if registry.field == "task.kind" else name
        if registry.field in CHECKS:
            found.append((f"{registry.field}={name}", CHECKS[registry.field](name)))
    return found
