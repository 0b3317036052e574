"""What must not change when only the code changes: digests of runs, ids of cells, a page.

    python benchmarks/proof.py before.json        # on the code as it was
    python benchmarks/proof.py after.json         # on the code as it is, same machine
    python benchmarks/proof.py --compare before.json after.json

Parts (``--parts``): ``inline`` runs every method and one task of each kind in one process, ``ray``
every method with one and with two actors, ``killed`` one method with an actor killed in
mid-round, ``ids`` the ids of all cells of the shipped sweeps in every profile, ``page`` the page of
a smoke sweep. Everything goes through the command line, so that the code may move.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
METHODS = (
    *("fedavg", "fedex", "fedit", "fedprox", "fedsb", "ffalora", "flexlora", "flora"),
    *("fullft", "hetlora", "ravan", "scaffold", "trishul"),
    *("fedplora", "fedrot", "fedrpca", "fedsa", "fedsvd", "frlora", "local", "rolora"),
)
#: One run for each kind of task and of text backbone.
TASKS = {
    "questions": ("dataset=synthetic/questions",),
    "topics": ("dataset=synthetic/topics",),
    "entailment": ("dataset=synthetic/rte",),
    "shapes": ("dataset=synthetic/shapes",),
}
SHORT = (
    *("federation.rounds=3", "federation.clients=4", "federation.clients_per_round=2"),
    *("federation.local_steps=3", "evaluation.limit=64", "tracking.mlflow=false"),
)
#: Long enough for a kill in mid-round.
LONG = ("federation.rounds=3", "federation.local_steps=100", "tracking.mlflow=false")


def trishul(*words: str) -> subprocess.Popen[str]:
    """Start a command of the checked-out code."""
    return subprocess.Popen(
        [sys.executable, "-m", "trishul_ray.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        cwd=ROOT,
    )


def finish(command: subprocess.Popen[str]) -> str:
    """Wait for a command and return what it printed."""
    output, _ = command.communicate()
    if command.returncode:
        raise SystemExit(f"{' '.join(command.args[2:])}\n{output}")  # type: ignore[arg-type,index]
    return output


def facts(folder: Path) -> dict[str, Any]:
    """Return the id of the one run in a folder, and what its numbers and files are."""
    (home,) = (path.parent for path in folder.glob("*/result.json"))
    summary = json.loads((home / "result.json").read_text())
    metrics = pq.read_table(home / "metrics.parquet").to_pylist()
    untimed = [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in metrics]
    return {
        "id": home.name,
        "state": summary["state_sha256"],
        "metrics": untimed,
        "traffic": {k: v for k, v in summary.items() if "byte" in k or "parameters" in k},
        "adapter": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((home / "adapter").glob("*.safetensors"))
        },
    }


def run(*words: str, kill: bool = False) -> dict[str, Any]:
    """Run an experiment in a folder of its own and return its facts."""
    with tempfile.TemporaryDirectory() as folder:
        command = trishul("run", *words, f"storage.runs={folder}")
        if kill:
            kill_a_client(command, Path(folder))
        output = finish(command)
        if kill and "restart" not in output:
            raise SystemExit(f"no actor was restarted:\n{output}")
        return facts(Path(folder))


def kill_a_client(command: subprocess.Popen[str], folder: Path) -> None:
    """Kill a client actor of a running command after its first round."""
    while len(list(folder.glob("*/checkpoints/round-*"))) < 2:
        if command.poll() is not None:
            raise SystemExit(f"it ended before an actor was killed:\n{finish(command)}")
        time.sleep(0.05)
    for process in psutil.Process(command.pid).children(recursive=True):
        if "ClientActor" in " ".join(process.cmdline()):
            process.kill()
            return
    raise SystemExit("no client actor found")


def inline() -> dict[str, Any]:
    """Every method, and every kind of task, in one process."""
    here = (*SHORT, "resources.backend=inline")
    found = {method: run(f"method={method}", *here) for method in METHODS}
    return found | {name: run(*words, *here) for name, words in TASKS.items()}


def ray() -> dict[str, Any]:
    """Every method on Ray, with one and with two actors."""
    return {
        f"{method}, {actors} actors": run(f"method={method}", *SHORT, f"resources.actors={actors}")
        for method in METHODS
        for actors in (1, 2)
    }


def killed() -> dict[str, Any]:
    """A run whose actor is killed, and the same run undisturbed."""
    return {
        name: run(*LONG, "resources.actors=2", kill=name == "killed")
        for name in ("killed", "undisturbed")
    }


def ids() -> dict[str, Any]:
    """The ids of the cells of all shipped sweeps, in order, by profile and sweep."""
    from trishul_ray.sweeps.cells import find_sweeps

    return {
        profile: {
            sweep.name: [cell.experiment.id for cell in sweep.cells]
            for sweep in find_sweeps(["all"], profile)
        }
        for profile in ("paper", "small", "smoke")
    }


def page() -> dict[str, Any]:
    """The page of a smoke sweep without what a clock or a path says, line by line."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"storage.runs={folder}/runs"
        finish(
            trishul("table", "nuclear", "--profile", "smoke", place, "--report", f"{folder}/out")
        )
        text = next(Path(folder, "out").rglob("report.html")).read_text()
    text = text.replace(folder, "")
    text = re.sub(r"data:[a-z/+;0-9-]+,[^\"']+", "data", text)
    text = re.sub(r"( data-time>)[\d.]+<", r"\1TIME<", text)
    timeless = re.sub(r"(\d[\d.,]* ?(s|min|h|seconds|minutes|hours|CPU-hours)\b ?)+", "TIME", text)
    return {"lines": timeless.splitlines()}


PARTS = {each.__name__: each for each in (inline, ray, killed, ids, page)}


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Return where two proofs differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted(before.keys() | after.keys())
            for line in differences(before.get(key), after.get(key), f"{place}/{key}")
        ]
    return [] if before == after else [f"{place}: {str(before)[:300]} != {str(after)[:300]}"]


def main() -> None:
    """Write a proof, or compare two."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(path.read_text()) for path in options.files)
        both = before.keys() & after.keys()
        found = differences({k: before[k] for k in both}, {k: after[k] for k in both})
        print("\n".join(found) or f"equal: {', '.join(sorted(both))}")
        sys.exit(bool(found))
    proof = {}
    for name in options.parts:
        began = time.monotonic()
        proof[name] = PARTS[name]()
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        options.files[0].write_text(json.dumps(proof, indent=1))
    if "killed" in proof and proof["killed"]["killed"] != proof["killed"]["undisturbed"]:
        sys.exit("a killed actor changed a result")


if __name__ == "__main__":
    main()
