"""Run one part of gpu.py, and keep what it finds in one page and one JSON file of the day."""

import datetime
import json
import os
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _gpu_backbones
import _gpu_prox
import _gpu_right
import _gpu_run
import _gpu_slices
import _gpu_step
import torch
from _gpu import Place
from _results import Goal, Section, hardware_slug, versions

from trishul_ray.runs.summary import hardware

PARTS = {
    "right": _gpu_right.measure,
    "prox": _gpu_prox.measure,
    "step": _gpu_step.measure,
    "run": _gpu_run.measure,
    "backbones": _gpu_backbones.measure,
    "slices": _gpu_slices.measure,
}


class Results:
    """The results of a machine and a day, part by part; written after every change."""

    def __init__(self, folder: Path, rehearsal: bool) -> None:
        """Continue the files of the day, if there are any."""
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.datetime.now(datetime.UTC)
        what = "gpu-rehearsal" if rehearsal else "gpu"
        self.file = folder / f"{what}_{hardware_slug()}_{now.date().isoformat()}.json"
        self.content: dict[str, Any] = {
            "what": what,
            "date": now.isoformat(timespec="seconds"),
            "hardware": hardware(),
            "versions": versions(),
            "parts": {},
        }
        if self.file.is_file():
            self.content["parts"] = json.loads(self.file.read_text(encoding="utf-8"))["parts"]

    def begin(self, part: str) -> None:
        """Forget what an earlier measurement of a part has found."""
        self.content["parts"][part] = {"state": "running", "sections": {}}
        self.write()

    def add(self, part: str, section: Section) -> None:
        """Keep a section, in the place of one with the same title, and show it."""
        goals = [asdict(goal) | {"met": goal.met} for goal in section.goals]
        found = self.content["parts"][part]["sections"]
        found[section.title] = asdict(section) | {"goals": goals}
        self.write()
        print(section.markdown(), flush=True)

    def end(self, part: str, state: str) -> None:
        """Note how a part ended."""
        self.content["parts"].setdefault(part, {"sections": {}})["state"] = state
        self.write()
        print(f"{part}: {state}", flush=True)

    def write(self) -> None:
        """Write both files; a reader never sees half of one."""
        text = json.dumps(self.content, indent=1, ensure_ascii=False, default=str) + "\n"
        for file, content in ((self.file, text), (self.file.with_suffix(".md"), self.page())):
            temporary = file.with_name(file.name + ".tmp")
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(file)

    def page(self) -> str:
        """Return the results as Markdown."""
        machine, software = self.content["hardware"], self.content["versions"]
        where = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cpus']} CPUs"
        numbers = ", ".join(f"{name} {software[name]}" for name in ("torch", "transformers"))
        lines = [
            f"# {self.content['what']}, {self.content['date'][:10]}",
            "",
            f"{where}; {numbers}.",
        ]
        if "rehearsal" in self.content["what"]:
            lines += ["", "**A rehearsal on the CPU with tiny shapes: its numbers mean nothing.**"]
        for part, found in self.content["parts"].items():
            lines += ["", f"# {part}: {found['state']}", ""]
            for fields in found["sections"].values():
                goals = [Goal(g["what"], g["measured"], g["bound"]) for g in fields["goals"]]
                lines.append(Section(**fields | {"goals": goals}).markdown())
        return "\n".join(lines) + "\n"


def run_part(part: str, rehearsal: bool, out: Path, scratch: str) -> None:
    """Measure one part in this process; its exit code is 1 if it failed."""
    os.setsid()  # so that it can be stopped with all its processes
    began = time.perf_counter()
    results = Results(out, rehearsal)
    results.begin(part)
    device = torch.device("cpu" if rehearsal else "cuda")
    try:
        if not rehearsal and not torch.cuda.is_available():
            raise RuntimeError("no CUDA device; --rehearse runs on the CPU")
        folder = Path(scratch) / part
        folder.mkdir()
        PARTS[part](Place(device, folder, lambda section: results.add(part, section)))
    except Exception as error:
        traceback.print_exc()
        results.end(part, f"failed: {type(error).__name__}: {str(error)[:300]}")
        raise SystemExit(1) from error
    results.end(part, f"done in {time.perf_counter() - began:.0f} s")


def note_stopped(part: str, rehearsal: bool, out: Path, scratch: str, seconds: int) -> None:
    """Note that the process of a part was killed, if it did not end by itself."""
    results = Results(out, rehearsal)
    if results.content["parts"].get(part, {}).get("state", "running") == "running":
        results.end(part, f"stopped after {seconds} s")
