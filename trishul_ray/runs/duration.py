"""Say how long a run will take, and what would make it shorter, once its first round shows it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.data.prepare import Coverage
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.models.backbone import Backbone
from trishul_ray.tracking.progress import RunProgress, format_duration

#: Seconds up to which a run needs no remark.
UNREMARKED_SECONDS = 3600.0

#: Least seconds of a round before anything is said: the first one also starts workers.
LEAST_SECONDS = 60.0


class DurationNote:
    """Notes once, in the first round or after it, that a run will take more than an hour.

    Args:
        experiment: The run.
        info: Its dataset.
        coverage: How many rows it trains on and scores.
        progress: Where to note it.
    """

    def __init__(
        self,
        experiment: Experiment,
        info: DatasetInfo,
        coverage: Coverage,
        progress: RunProgress,
    ) -> None:
        self._experiment, self._info, self._coverage = experiment, info, coverage
        self._progress = progress
        self._noted = False

    @contextmanager
    def round(self, done: int) -> Iterator[None]:
        """Run a round inside; ``done`` rounds are over.

        A round that takes so long that all of them take more than an hour is noted while it runs.
        """
        left = self._experiment.federation.rounds - done
        if self._noted or left < 1:
            yield
            return
        enough = max(LEAST_SECONDS, UNREMARKED_SECONDS / left)
        timer = Timer(enough, self._note, (enough, left, "more than "))
        timer.daemon = True
        timer.start()
        began = time.perf_counter()
        try:
            yield
        finally:
            timer.cancel()
        seconds = time.perf_counter() - began
        if not self._noted and seconds * left > UNREMARKED_SECONDS:
            self._note(seconds, left, "about ")
        self._noted = True

    def _note(self, seconds: float, left: int, how: str) -> None:
        self._noted = True
        total = format_duration(seconds * left)
        each = f"{left} rounds of {how}{format_duration(seconds)}" if left > 1 else "its last round"
        remedies = "; ".join(shorter(self._experiment, self._info, self._coverage, seconds))
        self._progress.note(f"this run will take {how}{total}: {each}. Shorter: {remedies}")


def shorter(
    experiment: Experiment, info: DatasetInfo, coverage: Coverage, round_seconds: float
) -> list[str]:
    """Return what would make a run shorter, as settings with the values that they have now."""
    fed, rows = experiment.federation, coverage.test.used
    found = []
    fewer = int(UNREMARKED_SECONDS / round_seconds)
    if 1 <= fewer < fed.rounds:
        found.append(f"federation.rounds={fewer} takes an hour")
    if rows > fed.clients_per_round * fed.local_steps * fed.batch_size / 4:
        limit = min(1000, max(100, rows // 10))
        found.append(f"evaluation.limit={limit} or a larger evaluation.every ({rows:,} test rows)")
    if info.kind == "image":
        found += filter(None, [_smaller_images(experiment, info)])
    else:
        found.append(f"a smaller task.max_length ({experiment.task.max_length})")
    found.append("a smaller backbone (trishul models)")
    if experiment.model.precision == "fp32":
        found.append("model.precision=bf16")
    found.append("more cores or a GPU")
    return found


def _smaller_images(experiment: Experiment, info: DatasetInfo) -> str | None:
    backbone = Backbone.of(experiment.model, experiment.storage.places)
    try:
        side = backbone.preprocessing.image_size
    except InputError:
        return None
    patch = getattr(backbone.architecture, "patch_size", None)
    stored = max(info.image_shape[1:])
    if side is None or not isinstance(patch, int) or side <= stored:
        return None
    smaller = min(side, max(-(-stored // patch), 4) * patch)
    return f"model.image_size={smaller} ({side})" if smaller < side else None
