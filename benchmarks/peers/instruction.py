"""Compare a local step of instruction tuning with TRL, on the same rows and weights.

    python benchmarks/peers/instruction.py --model FOLDER [options]

Both train LoRA on q and v of a decoder with plain SGD and the loss of the response tokens, and
alternate their steps. TRL's ``SFTTrainer`` starts from our exported adapter, and reads our rows in
our order. After the steps, the adapters are compared. TRL runs in a separate environment, which the
first call installs.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import pyarrow.parquet as pq
from _results import Goal, Report, Section, Times, argument_parser, paired
from _stepped import Stepped, answer_all
from compare import HERE, environment
from safetensors.numpy import load_file

TRL = "trl==1.16.0"
#: Goals: a step relative to TRL, and the distance of the adapters relative to their change.
STEP, DISTANCE = 0.8, 1e-3


def write_rows(folder: Path, hub: Path, count: int, length: int) -> None:
    """Write rows of Dolly that fit without truncation, with the columns that TRL expects."""
    (source,) = (hub / "databricks").rglob("*.parquet")
    lines: list[dict[str, str]] = []
    for row in pq.read_table(source).to_pylist():
        asked = "\n\n".join(filter(None, (row["instruction"], row["context"])))
        whole = length < len(asked) + len(row["response"]) < 2.5 * length
        if whole and len(row["response"]) < length and len(lines) < count:
            lines.append({"prompt": asked, "completion": row["response"].strip()})
    folder.mkdir()
    for split, part in (("train", lines), ("test", lines[:1])):
        text = "".join(json.dumps(line) + "\n" for line in part)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


def ours(words: dict[str, Any]) -> None:
    """Reply to ``step`` with seconds and loss, and to ``start`` and ``save`` with an adapter."""
    from trishul_ray.adapters.export import export_peft
    from trishul_ray.adapters.model import Trained
    from trishul_ray.experiment.loading import load_experiment
    from trishul_ray.federation.determinism import deterministic
    from trishul_ray.federation.messages import TrainJob, to_array
    from trishul_ray.federation.prepare import prepare_run
    from trishul_ray.federation.worker.context import build_context
    from trishul_ray.federation.worker.local import LocalSteps

    experiment = load_experiment(
        None,
        [
            *("dataset=table", "method=fedit", "task.kind=instruction", "task.template=chat"),
            *(f"data.path={words['rows']}", f"model={words['model']}", "partition.kind=iid"),
            *("adapter.targets=['q_proj', 'v_proj']", "adapter.rank=8", "adapter.alpha=8"),
            *("federation.clients=1", "federation.clients_per_round=1"),
            f"federation.local_steps={words['steps']}",
            f"federation.batch_size={words['batch']}",
            f"task.max_length={words['length']}",
            f"task.target_length={words['length'] // 2}",
            *("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.schedule=constant"),
            *("evaluation.every=0", "resources.backend=inline", "tracking.mlflow=false"),
            f"resources.threads={words['threads']}",
            f"storage.runs={words['folder']}/runs",
        ],
    )
    with deterministic(experiment), ExitStack() as stack:
        bench = build_context(experiment, prepare_run(experiment))
        start = bench.method.initial_state(bench.model.layout, bench.initial, {}).map(to_array)
        steps, numbers = LocalSteps(bench, start, [TrainJob(1, 0)]), iter(range(1, 10**6))
        (client,) = steps.clients
        stack.enter_context(steps.bound())

        def answer(what: str) -> dict[str, Any]:
            if what in ("start", "save"):
                folder = f"{words['folder']}/{what}"
                export_peft(
                    bench.model, Trained(client.run.vector.detach()), folder, words["model"]
                )
                order = [rows.tolist() for rows in client.order]
                return {"folder": folder, "order": order, "rows": len(bench.train)}
            began, number = time.perf_counter(), next(numbers)
            loss = steps.compute(number, steps.batch(number)).item()
            return {"seconds": time.perf_counter() - began, "loss": loss, "peak": peak()}

        answer_all(answer)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare(words: dict[str, Any], python: str) -> Section:
    """Run the steps alternately, and compare the adapters after the last step."""
    seconds: dict[str, list[float]] = {"trishul-ray": [], "TRL": []}
    with Stepped([str(Path(__file__)), "ours", json.dumps(words)]) as here:
        start = here.ask("start")
        if start["rows"] != words["count"]:
            raise SystemExit(f"{start['rows']} of {words['count']} rows are used")
        command = [str(HERE / "with_trl.py"), json.dumps(words | {"start": start["folder"]})]
        with Stepped([*command, json.dumps(start["order"])], python=python) as there:
            systems, differences = {"trishul-ray": here, "TRL": there}, []
            for step in range(words["steps"]):
                names = list(systems)[:: 1 if step % 2 else -1]
                answers = {name: systems[name].ask("step") for name in names}
                differences.append(abs(answers["TRL"]["loss"] - answers["trishul-ray"]["loss"]))
                for name, answer in answers.items():
                    seconds[name].append(answer["seconds"])
                print(f"step {step + 1} of {words['steps']}", flush=True)
            peaks = {name: answer["peak"] for name, answer in answers.items()}
            one, other = (system.ask("save")["folder"] for system in systems.values())
    first, last, theirs = (
        load_file(f"{folder}/adapter_model.safetensors") for folder in (start["folder"], one, other)
    )
    moved = max(abs(last[name] - first[name]).max() for name in last)
    apart = max(abs(last[name] - theirs[name]).max() for name in last)
    times = {name: Times.of(values[1:]) for name, values in seconds.items()}  # the first warms up
    ratio = paired(times["trishul-ray"], times["TRL"])
    rows = [[name, times[name].show(), f"{peaks[name]:.0f}"] for name in times]
    notes = [
        f"LoRA of rank 8 on q and v of {Path(words['model']).name}, batches of {words['batch']} "
        f"rows of at most {words['length']} tokens of Dolly, SGD, fp32, {words['threads']} "
        f"threads; {len(times['TRL'].values)} alternating steps",
        f"trishul-ray / TRL: {ratio.show()}; losses differ by {max(differences):.1e}; adapters "
        f"move by {moved:.1e} and differ by {apart:.1e}",
    ]
    goals = [
        Goal("a step / TRL's", ratio.median, STEP),
        Goal("distance of adapters / what they move", float(apart / moved), DISTANCE),
    ]
    columns = ["system", "step s", "peak MiB"]
    title = "A step of instruction tuning"
    return Section(title, columns, rows, notes, goals, {"seconds": seconds})


def main() -> None:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder of a decoder with a chat template")
    add("--hub", type=Path, required=True, help="a mirror with Dolly")
    add("--steps", type=int, default=8, help="measured steps; one before them warms up")
    add("--batch", type=int, default=4)
    add("--length", type=int, default=256, help="largest number of tokens of a row")
    add("--threads", type=int, default=2)
    add("--environments", type=Path, default=HERE.parents[1] / "build" / "peers")
    options: argparse.Namespace = parser.parse_args()
    python = environment(TRL, options.environments)
    with tempfile.TemporaryDirectory() as scratch:
        folder, count = Path(scratch), 4 * options.batch * (options.steps + 1)
        write_rows(folder / "rows", options.hub, count, options.length)
        words = {
            **{"model": options.model, "rows": str(folder / "rows"), "folder": scratch},
            **{"steps": options.steps + 1, "batch": options.batch, "length": options.length},
            **{"threads": options.threads, "count": count},
        }
        found = compare(words, python)
        options.model = Path(options.model).name
        Report("instruction", options, "environments").add(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        ours(json.loads(sys.argv[2]))
    else:
        main()
