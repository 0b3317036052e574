"""Verify a finished run: repeat its rounds, and compare the digests of their states."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.messages import changed_sources
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.report.summary import RunSummary, read_metrics
from trishul_ray.runs.folder import open_finished
from trishul_ray.runs.results import hardware
from trishul_ray.runtime.stack import Stack
from trishul_ray.storage.durable import scratch_folder
from trishul_ray.version import NUMERICS


@dataclass(frozen=True)
class VerifiedRound:
    """A repeated round.

    Attributes:
        round: The round number; 0 is the state before round 1.
        recorded: Digest of the state in the run's result.
        found: Digest of the repeated state.
        difference: The metric with the largest difference, and the difference relative to the
            recorded value; None if the digests are equal or no metric is in both.
    """

    round: int
    recorded: str
    found: str
    difference: tuple[str, float] | None = None

    @property
    def equal(self) -> bool:
        return self.recorded == self.found


@dataclass(frozen=True)
class Verification:
    """The repeated rounds of a run.

    Attributes:
        rounds: The rounds, ascending.
        stack: The first part of the recorded stack that differs from this machine's, as a phrase,
            or an empty string.
    """

    rounds: list[VerifiedRound]
    stack: str

    @property
    def equal(self) -> bool:
        return all(each.equal for each in self.rounds)


def verify_run(
    run: str,
    rounds: int | None = 2,
    *,
    runs: str = "runs",
    progress: Callable[[str, float], None] = lambda stage, done: None,
) -> Verification:
    """Repeat rounds of a finished run in this process, in a scratch folder.

    Args:
        run: Id of a finished run, a prefix of the id, or the run's folder, which may be a copy.
        rounds: Number of rounds. None repeats all rounds.
        runs: Folder or URI of runs.
        progress: Called with a stage and its completed fraction.

    Raises:
        InputError: The run has not finished, was computed with another version of the numerics, or
            was trained on other data or another backbone.

    Example:
        >>> verify_run("1f0c2f", rounds=None).equal  # doctest: +SKIP
        True
    """
    home, experiment, summary = open_finished(run, runs)
    if (numerics := summary.versions.get("numerics")) != str(NUMERICS):
        raise InputError(
            f"run {experiment.id} has numerics {numerics}, this version has {NUMERICS}; install "
            f"trishul-ray {summary.versions.get('trishul_ray')}"
        )
    if not summary.states:
        raise InputError(f"run {experiment.id} has no digests of its rounds; repeat it")
    last = experiment.federation.rounds if rounds is None else rounds
    if not 1 <= last <= experiment.federation.rounds:
        raise InputError(f"--rounds {last}: must be 1 to {experiment.federation.rounds}, or all")
    metrics = {int(row["round"]): row for row in read_metrics(home)}
    prepared = prepare_run(experiment, progress)
    with scratch_folder("verify") as scratch:
        driver = InlineDriver(_in_folder(experiment, scratch), prepared, "verify")
        try:
            if changed := changed_sources(summary.sources, driver.spec.sources):
                raise InputError(
                    f"run {experiment.id} was trained on other {changed}; restore the original"
                )
            # A step also scores the model after the previous round.
            while driver.checkpoint.round < last:
                progress("repeating rounds", driver.checkpoint.round / last)
                driver.step()
            found = [
                _compare(record.state_sha256, recorded, record.row(), metrics.get(record.round, {}))
                for record, recorded in zip(driver.checkpoint.records, summary.states, strict=False)
            ]
            difference = _stack_difference(summary, driver.spec.stack)
        finally:
            driver.close()
    return Verification(found, difference)


def _in_folder(experiment: Experiment, folder: str) -> Experiment:
    """Return a copy of an experiment that stores its run in ``folder`` and logs nothing."""
    storage = experiment.storage.model_copy(update={"runs": folder})
    tracking = experiment.tracking.model_copy(update={"mlflow": False})
    return experiment.model_copy(update={"storage": storage, "tracking": tracking})


def _compare(
    found: str, recorded: str, row: Mapping[str, float], metrics: Mapping[str, float]
) -> VerifiedRound:
    if found == recorded:
        return VerifiedRound(int(row["round"]), recorded, found)
    differences = {
        name: abs(row[name] - value) / (abs(value) or 1.0)
        for name, value in metrics.items()
        if name in row and not name.endswith("seconds")
    }
    worst = max(differences.items(), key=lambda pair: pair[1], default=None)
    return VerifiedRound(int(row["round"]), recorded, found, worst)


def _stack_difference(summary: RunSummary, here: Stack) -> str:
    for stack in summary.stacks:
        if difference := stack.difference(here):
            return difference
    recorded, found = asdict(summary.hardware), asdict(hardware())
    return next(
        (
            f"{name} {recorded[name]} and not {found[name]}"
            for name in ("kernels", "processor")
            if recorded[name] != found[name]
        ),
        "",
    )
