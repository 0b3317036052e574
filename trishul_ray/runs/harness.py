"""Score a finished run with lm-evaluation-harness, and write ``harness.json`` to its folder."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trishul_ray.adapters.export import merge_trained
from trishul_ray.errors import InputError, how_to_install
from trishul_ray.federation.determinism import deterministic
from trishul_ray.runs.export import load_trained
from trishul_ray.runs.folder import open_run
from trishul_ray.storage.durable import Json
from trishul_ray.tasks.instruction import Instruction
from trishul_ray.tasks.prompts import ChatPrompt


def run_harness(
    run: str, tasks: Sequence[str], folder: Path | None = None, *, runs: str = "runs", **how: Any
) -> Json:
    """Evaluate a run's model with lm-evaluation-harness.

    The scores replace ``harness.json`` next to the run's result.

    Args:
        run: Id of a finished run, a prefix of the id, or the run's folder.
        tasks: Names of harness tasks. Their data come from the hub unless their files specify
            another source.
        folder: A folder with files of custom tasks.
        runs: Folder or URI of runs.
        **how: Further arguments of ``lm_eval.simple_evaluate``, such as ``limit`` and
            ``num_fewshot``.

    Returns:
        The scores, keyed by task.

    Raises:
        InputError: The harness is not installed or does not know a task, or the model is not a
            decoder.
        RunError: The run has no usable checkpoint, or its backbone has changed.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        install = how_to_install("eval", "lm-eval>=0.4.13,<0.5")
        raise InputError(f"--tasks: lm-evaluation-harness is not installed; {install}") from error
    home, experiment = open_run(run, runs)
    manager = TaskManager(include_path=None if folder is None else str(folder))
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise InputError(f"--tasks {','.join(tasks)}: the harness has no task {unknown[0]!r}")
    trained = load_trained(experiment)
    task = trained.context.task
    if task.model_kind != "causal-lm" or task.tokens is None:
        raise InputError(f"run {experiment.id}: the harness supports only decoders as backbones")
    tokenizer: Any = copy.deepcopy(task.tokens.tokenizer)
    chat = isinstance(task, Instruction) and isinstance(task.prompt, ChatPrompt)
    if isinstance(task, Instruction) and chat:
        tokenizer.chat_template = task.prompt.text
    with deterministic(experiment), torch.inference_mode():
        module: Any = merge_trained(trained.context.model, trained.trained).eval()
        model = HFLM(module, tokenizer=tokenizer, batch_size=how.get("batch_size", 1))
        found = simple_evaluate(
            model, tasks=[*tasks], task_manager=manager, apply_chat_template=chat,
            bootstrap_iters=0, **how,
        )  # fmt: skip
    kept = {"id": experiment.id, "round": trained.round, "chat_template": chat, **how}
    kept |= {name: found[name] for name in ("results", "versions", "n-samples")}
    text = json.dumps(kept, indent=2, ensure_ascii=False, default=str)
    home.write("harness.json", text.encode() + b"\n")
    results: Json = json.loads(text)["results"]
    return results
