"""Evaluate a finished run on generated responses, and write ``eval.json`` next to its result.

Rounds generate nothing: 500 responses of 256 tokens cost more than a round. Scores of a response
are means over rows, each with the best of the row's references:

- ``exact_match`` with SQuAD's normalization,
- ``rouge_l`` without stemming (Lin 2004),
- ``ended``: whether an end token stopped the response,
- ``answer_tokens``: its length,
- ``repeated``: its fraction of repeated n-grams.

The other scores evaluate the reference under the model, as in a round: ``loss``, its exponential
``perplexity``, ``token_accuracy`` and, for rows with choices, ``acc`` and ``acc_norm``.
``bits_per_byte`` excludes the end token and compares models with different tokenizers.

Legend: N evaluated rows.
"""

import hashlib
import json
import math
import re
import string
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from trishul_ray.adapters.model import Trained
from trishul_ray.data.conversations import Row, read_rows
from trishul_ray.data.dataset import RowSet, Split
from trishul_ray.errors import CorruptFileError, InputError, RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import changed_sources
from trishul_ray.federation.prepare import prepare_dataset, prepare_rows
from trishul_ray.federation.worker.context import ModelContext
from trishul_ray.report.summary import EVALUATION, RunSummary
from trishul_ray.runs.export import load_trained
from trishul_ray.runs.folder import open_finished
from trishul_ray.runs.mlflow_log import log_finished
from trishul_ray.runs.prediction import computing
from trishul_ray.runtime.random_streams import numpy_rng
from trishul_ray.storage.durable import Json
from trishul_ray.storage.integrity import from_checked_json, to_checked_json
from trishul_ray.storage.store import Store
from trishul_ray.tasks.instruction import Instruction
from trishul_ray.version import versions

#: File in a run's folder with one JSON line per evaluated row.
ANSWERS = "answers.jsonl"
#: Increment when the meaning of a score changes: existing runs are then evaluated again.
SCORES_VERSION = 2
#: The command reports a smaller fraction of responses that end.
FEW_END = 0.5


def evaluate_run(
    run: str,
    *,
    runs: str = "runs",
    rows: int = 500,
    batch_size: int = 16,
    untuned: bool = False,
    split: RowSet = "test",
    new_tokens: int | None = None,
    progress: Callable[[str, float], None] = lambda stage, done: None,
) -> Json:
    """Evaluate a run, and write ``eval.json`` unless it already has these scores.

    Args:
        run: Id of a finished run, a prefix of the id, or the run's folder.
        runs: Folder or URI of runs.
        rows: Maximum number of rows. The rows are the same for every seed, method and backbone.
        batch_size: Number of rows per batch.
        untuned: Whether to also evaluate the untuned model.
        split: The split to evaluate.
        new_tokens: Maximum number of tokens per response, by default ``task.target_length``.
        progress: Called with a stage and its completed fraction.

    Returns:
        The content of ``eval.json``.

    Raises:
        InputError: The run has not finished, its task does not generate text, or a prompt with its
            response may exceed the backbone's positions.
        RunError: The data or the backbone have changed since the run.
    """
    home, experiment, summary = open_finished(run, runs)
    dataset, task, sources = prepare_dataset(experiment, progress)
    if not isinstance(task, Instruction):
        raise InputError(
            f"run {experiment.id} has the task {type(task).__name__}, which rounds score "
            "completely; only task.kind=instruction supports generated responses"
        )
    if changed := changed_sources(summary.sources, sources):
        raise RunError(f"run {experiment.id} was trained on other {changed}; restore the original")
    encoded = dataset.split(split)
    chosen = draw_rows(encoded, rows)
    about: Json = {  # identifies this evaluation, so that no other one is reused
        "id": experiment.id,
        "state_sha256": summary.state_sha256,
        "round": summary.final["round"],
        "rows": len(chosen),
        "rows_sha256": hashlib.sha256(chosen.tobytes()).hexdigest(),
        "task": task.settings(),
        "versions": versions(),
        "scores": SCORES_VERSION,
        "answer_pattern": experiment.task.answer_pattern,
        "split": split,
        "of": len(encoded),
        "sources": sources,
        "new_tokens": new_tokens or task.target_length,
    }
    known = _read(home, about)
    if "tuned" in known and (not untuned or "untuned" in known):
        _log(experiment, summary, home, known)
        return known
    raw = prepare_rows(experiment).dataset.split(split)
    asked = [row for n, row in enumerate(read_rows(raw, 0, len(raw))) if n in {*chosen.tolist()}]
    lines: list[Json] = [
        {"row": number, "messages": row.messages[:-1], "reference": row.output}
        for number, row in zip(chosen.tolist(), asked, strict=True)
    ]
    if "references" in raw.columns:
        further = raw.texts("references").to_pylist()
        for line in lines:
            line["references"] = json.loads(further[line["row"]])
    right = [[line["reference"], *line.get("references", ())] for line in lines]
    match = partial(exact_match, pattern=experiment.task.answer_pattern)
    trained = load_trained(experiment)
    context, models = trained.context, {"tuned": trained.trained}
    if untuned or "untuned" in known:
        models["untuned"] = Trained(context.initial)
    for name, model in models.items():
        report = partial(progress, f"generating with the {name} model")
        with computing(context, model):
            answering = (context, task, encoded, chosen, batch_size, new_tokens, report)
            texts, columns = _answer(*answering)
            if "choices" in raw.columns:
                columns |= _choose(context, task, raw, asked, chosen)
        for score_name, score in (("exact_match", match), ("rouge_l", rouge_l)):
            columns[score_name] = np.array(list(map(partial(best, score), texts, right)))
        for line, text in zip(lines, texts, strict=True):
            line["answer" if name == "tuned" else name] = text
        about[name] = _scores_by_group(columns, encoded, chosen, experiment)
    answers = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    home.write(ANSWERS, answers)
    about["answers_sha256"] = hashlib.sha256(answers).hexdigest()
    home.write(EVALUATION, to_checked_json(about))
    _log(experiment, summary, home, about)
    return about


def _log(experiment: Experiment, summary: RunSummary, home: Store, about: Json) -> None:
    """Log the scores over all rows with the run's metrics, such as ``eval/rouge_l``."""
    scores = {
        f"{prefix}/{name}": value
        for model, prefix in (("tuned", "eval"), ("untuned", "eval_untuned"))
        for name, value in about.get(model, {}).items()
        if isinstance(value, float)
    }
    if rejected := log_finished(experiment, summary, home, {}, scores):
        raise InputError(f"not logged to MLflow: {'; '.join(rejected)}")


def _read(home: Store, about: Json) -> Json:
    """Return the stored evaluation of the same rows with the same settings, or an empty one."""
    with suppress(FileNotFoundError, CorruptFileError):
        found = from_checked_json(home.read(EVALUATION), EVALUATION)
        del found["checksum"]
        same = {name: found.get(name) for name in about} == json.loads(json.dumps(about))
        if same and found["answers_sha256"] == hashlib.sha256(home.read(ANSWERS)).hexdigest():
            return found
    return {}


def draw_rows(split: Split, count: int) -> np.ndarray:
    """Sample at most ``count`` rows of a split, with equal fractions of every group.

    The sample depends only on the groups, so it is the same for every seed, method and backbone.

    Returns:
        Ascending row indices, int64 [N].
    """
    groups = split.column("group") if "group" in split.columns else np.zeros(len(split), int)
    drawn = numpy_rng(0, "eval").permutation(len(split))
    order = np.lexsort((drawn, groups))
    sizes = np.bincount(groups)[groups[order]]
    first = np.searchsorted(groups[order], groups[order])
    place = np.empty(len(split))
    # position within its group, in (0, 1)
    place[order] = (np.arange(len(split)) - first + 0.5) / sizes
    return np.sort(np.lexsort((drawn, place))[:count])


def _answer(
    context: ModelContext,
    task: Instruction,
    split: Split,
    rows: np.ndarray,
    batch_size: int,
    new_tokens: int | None,
    report: Callable[[float], None],
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Generate the bound model's responses to encoded rows [N].

    Returns:
        The responses, and one array [N] per measured value, keyed by name.
    """
    texts = [""] * len(rows)
    columns: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(rows)))
    decode = partial(task.tokens.tokenizer.batch_decode, skip_special_tokens=True)
    starts = split.column("spans")[rows, :, 0].max(axis=1)
    order = np.argsort(-starts, kind="stable")  # batch rows of similar length, longest first
    stops = torch.tensor(task.stop_ids(context.model))
    report(0.0)
    positions = task.tokens.backbone.positions
    if len(rows) and int(starts.max()) + (new_tokens or task.target_length) > positions:
        raise InputError(
            f"prompts of up to {int(starts.max())} tokens with answers of up to "
            f"{new_tokens or task.target_length} exceed the backbone's {positions} positions"
        )
    for begin in range(0, len(order), batch_size):
        at = order[begin : begin + batch_size]
        batch = task.prepare_batch(split.batch(rows[at]), context.device, context.dtype)
        outputs = task.predict(context.model, batch)
        scored, sizes = task.score(outputs, batch), batch["counts"].tolist()
        said = task.said(batch)  # like lm-evaluation-harness, exclude end tokens from bits
        bits = outputs.losses.double().cpu() * said / math.log(2)
        both = zip(batch["labels"].cpu().split(sizes), said.split(sizes), strict=True)
        labels = decode([ids[kept] for ids, kept in both])
        ids = task.generate(context.model, batch, new_tokens).cpu()
        stopped = torch.isin(ids, stops)
        ended = stopped.any(dim=1)
        lengths = (stopped.cumsum(dim=1) == 0).sum(dim=1) + ended.long()
        found = {
            "loss": scored.loss,
            "terms": batch["counts"],
            "bits": [part.sum() for part in bits.split(sizes)],
            "bytes": [len(text.encode()) for text in labels],
            "token_accuracy": scored.scores["token_accuracy"],
            "ended": ended,
            "answer_tokens": lengths,
            "repeated": [
                repeated_share(answer[:length])
                for answer, length in zip(ids.tolist(), lengths.tolist(), strict=True)
            ],
        }
        for name, values in found.items():
            columns[name][at] = torch.as_tensor(values).double().cpu().numpy()
        for place, text in zip(at, decode(ids), strict=True):
            texts[place] = text.strip()
        report((begin + len(at)) / len(order))
    return texts, dict(columns)


def _choose(
    context: ModelContext, task: Instruction, split: Split, asked: Sequence[Row], rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Score whether the most likely choice of each row is right, [N], or NaN without choices.

    As in lm-evaluation-harness, ``acc`` selects the largest log-likelihood, the first in case of
    ties, and ``acc_norm`` divides each log-likelihood by the number of characters.
    """
    found = {name: np.full(len(rows), np.nan) for name in ("acc", "acc_norm")}
    texts, right = split.texts("choices").to_pylist(), split.column("choice")
    for place, (number, row) in enumerate(zip(rows.tolist(), asked, strict=True)):
        if not (choices := json.loads(texts[number])):
            continue
        answers = [row.answered(choice) for choice in choices]
        likely = task.log_likelihoods(context.model, answers, context.device, context.dtype)
        characters = [len(answer.output) for answer in answers]
        for name, values in {"acc": likely, "acc_norm": likely / characters}.items():
            found[name][place] = values.argmax() == right[number]
    return found


def best(score: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """Return the best score of a response over all references, ignoring NaN unless all are NaN."""
    found = (score(answer, reference) for reference in references)
    return max((value for value in found if not math.isnan(value)), default=math.nan)


def exact_match(answer: str, reference: str, pattern: str | None = None) -> float:
    """Compare two texts without case, punctuation and articles; 1.0 if they match, otherwise 0.0.

    Two texts that consist only of articles and punctuation, such as the letter A or a sign, are
    compared with their articles or, without any word, with their punctuation. With ``pattern``, the
    last matches are compared, without commas. The score is NaN if the pattern does not match the
    reference.
    """
    if pattern is not None:
        found, right = ([*re.finditer(pattern, text)] for text in (answer, reference))
        if not right:
            return math.nan
        return float(bool(found) and found[-1][0].replace(",", "") == right[-1][0].replace(",", ""))
    first, second = _normalized(answer), _normalized(reference)
    if first or second:
        return float(first == second)
    first, second = (re.findall(r"\w+", text.lower()) for text in (answer, reference))
    return float(first == second and bool(first or answer.strip() == reference.strip()))


def _normalized(text: str) -> list[str]:
    """Return the words of a text in SQuAD's normalization."""
    without_signs = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", without_signs).split()


def rouge_l(answer: str, reference: str) -> float:
    """Compute ROUGE-L of two texts like ``rouge_score`` without its stemmer.

    Words are runs of a-z and digits, in lower case. Given a longest common subsequence of c words,
    precision is c/a, recall is c/r, and F is 2c / (a + r).

    Returns:
        The F score, or NaN if the reference contains no words.
    """
    first, second = (re.findall("[a-z0-9]+", text.lower()) for text in (answer, reference))
    if not second:
        return math.nan
    longest = [0] * (len(second) + 1)
    for word in first:
        before = 0
        for place, other in enumerate(second, 1):
            same = before + 1 if word == other else max(longest[place], longest[place - 1])
            before, longest[place] = longest[place], same
    return 2 * longest[-1] / (len(first) + len(second))


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """Compute the fraction of n-grams that occur earlier in the same text, or 0 without n-grams.

    This is seq-rep-n of Welleck et al. (arXiv 1908.04319).
    """
    grams = [tuple(tokens[first : first + n]) for first in range(len(tokens) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _scores_by_group(
    columns: dict[str, np.ndarray], split: Split, rows: np.ndarray, experiment: Experiment
) -> Json:
    """Compute the scores of all rows, of each group, and of seen and unseen groups.

    Unseen groups are the groups in ``data.test_groups``.
    """
    found: Json = _scores(columns)
    if "group" not in split.columns:
        return found
    groups, names = split.column("group")[rows], split.info.groups
    unseen = np.isin(groups, [names.index(name) for name in experiment.data.test_groups])

    def scores_of(where: np.ndarray) -> Json:
        return _scores({key: values[where] for key, values in columns.items()})

    if unseen.any():
        found |= {"seen": scores_of(~unseen), "unseen": scores_of(unseen)}
    parts = {name: groups == number for number, name in enumerate(names)}
    found["groups"] = {name: scores_of(where) for name, where in parts.items() if where.any()}
    return found


def _scores(columns: dict[str, np.ndarray]) -> Json:
    """Average the scores over rows, skipping NaN."""
    if not len(columns["loss"]):
        return {"rows": 0}
    sums = {name: math.fsum(columns[name]) for name in ("loss", "terms", "bits", "bytes")}
    loss = sums["loss"] / sums["terms"]
    means = {name: values for name, values in columns.items() if name not in sums}
    found: Json = {"rows": len(columns["loss"]), "loss": loss}
    if loss < 700:  # larger losses overflow
        found["perplexity"] = math.exp(loss)
    if sums["bytes"]:
        found["bits_per_byte"] = sums["bits"] / sums["bytes"]
    for name, values in means.items():
        known = values[~np.isnan(values)]
        if len(known):
            found[name] = math.fsum(known) / len(known)
        if len(known) < len(values):
            found[f"{name}_rows"] = len(known)
    return found
