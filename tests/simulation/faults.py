"""Faults that are planted into the code which decides about a run; the audit must find each."""

import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from trishul_ray.federation.checkpoint import CheckpointStore
from trishul_ray.federation.on_ray.driver import RayDriver
from trishul_ray.federation.on_ray.pool import ActorPool
from trishul_ray.federation.on_ray.work import RoundWork
from trishul_ray.federation.server import Server


@dataclass(frozen=True)
class Fault:
    """A method in which a text, which is there once, is replaced by another one."""

    owner: Any
    method: str
    text: str
    other: str
    kind: str = "plain"  # of the runs in which it shows

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        function = getattr(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.text) == 1, (self.method, self.text)
        names: dict[str, Any] = {}
        exec(source.replace(self.text, self.other), function.__globals__, names)
        made = names[self.method]
        patch.setattr(self.owner, self.method, made)


FAULTS = {
    "a dead actor's job is lost": Fault(
        ActorPool, "_run_each", "waiting.appendleft(number)", "pass"
    ),
    "an unseen death is waited for": Fault(
        ActorPool, "_run_each", "waiting.extendleft(self._take_back(running))", "pass"
    ),
    "work that was taken back is waited for": Fault(
        ActorPool, "_take_back", "running.pop(call)[0]", "running[call][0]"
    ),
    "kept uploads are given up": Fault(
        RoundWork, "end", "if index not in self._kept:", "if True:", "many uploads"
    ),
    "a group is summed before its uploads are there": Fault(
        ActorPool, "_run_each", "if not blocked[later]:", "if True:", "many uploads"
    ),
    "uploads of a first attempt count": Fault(
        RoundWork, "_submit", "self._uploads.update(zip(unit, sent, strict=True))",
        "[self._uploads.setdefault(i, each) for i, each in zip(unit, sent)]",
    ),
    "lost uploads are waited for": Fault(
        ActorPool, "_check_nodes", "if lost := self._made_on - alive:", "if lost := set():",
        "many uploads",
    ),
    "actors of a draining node do not move": Fault(
        ActorPool, "_leave_draining_nodes", "no_restart=False", "no_restart=True"
    ),
    "an actor that starts joins twice": Fault(
        ActorPool, "_add_started", "self.actors.append(actor)", "self.actors += [actor, actor]"
    ),
    "records are told again": Fault(
        RayDriver, "_without_repeats", "record.round > self._last_round", "True"
    ),
    "a lost coordinator ends the run": Fault(
        RayDriver, "_go_on_after", "is_gone(self.actor)", "True"
    ),
    "a successor skips a record": Fault(
        RayDriver, "begin", "replace(report, events",
        "replace(report, records=[] if events else report.records, events",
    ),
    "a node that is lost in a survey ends the run": Fault(
        RayDriver, "_ask", "self._go_on_after(error)", "raise RunError(str(error)) from error",
        "survey",
    ),
    "a checkpoint is not continued": Fault(
        Server, "__init__", "restored = checkpoints.newest()", "restored = None"
    ),
    "every second round is saved": Fault(
        Server, "step", "self.checkpoints.save(now)", "number % 2 or self.checkpoints.save(now)"
    ),
    "the newest checkpoint is removed": Fault(
        CheckpointStore, "_remove_others", "for old in stale + older",
        "for old in stale + [name] + older",
    ),
    "clients lose what they keep": Fault(
        CheckpointStore, "_read_clients", "for key, (_, arrays) in self._clients.items()",
        "for key, (_, arrays) in []", "client state",
    ),
}  # fmt: skip
