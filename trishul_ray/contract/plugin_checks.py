"""The checks of all that a plug-in defines, run one after the other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from trishul_ray.contract import datasets, methods, stages, tasks
from trishul_ray.contract.checks import BrokenPromiseError, Check
from trishul_ray.data.prepare import dataset_names
from trishul_ray.errors import InputError
from trishul_ray.methods.base import method_names
from trishul_ray.plugins import installed as entry_points
from trishul_ray.plugins import registry as plugins
from trishul_ray.plugins.registry import Plugin, fault_of
from trishul_ray.stages import stage_names
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.tasks.base import task_kinds

#: The checks of what a field names.
_CHECKS: dict[str, Callable[[str], list[Check]]] = {
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
        more = (f"{kind}s" for kind in entry_points.objects("check"))
        kinds = ", ".join(["methods", "stages", "adapters", "datasets", "tasks", *more])
        raise InputError(
            f"plug-in {plugin.name} defines nothing that has checks ({kinds}): register a class, "
            "or name a PublicDataset at its top level"
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
    method_names(), stage_names(), task_kinds(), dataset_names()  # all are registered
    checks = _CHECKS | entry_points.objects("check")
    found = []
    for field in plugins.provided_by(plugin):
        kind, _, name = field.partition("=")
        if kind in checks:
            found.append((field, checks[kind](name)))
    return found
