"""The learning rate of every local step."""

import math

from trishul_ray.config.fields import OptimizerConfig
from trishul_ray.runtime.proportions import exact_fraction


def depends_on_rounds(settings: OptimizerConfig) -> bool:
    """Return whether the rates of a round depend on the number of rounds of the run."""
    changes = settings.schedule != "constant" or settings.warmup > 0
    return changes and settings.schedule_over == "run"


def learning_rates(
    settings: OptimizerConfig, round_number: int, rounds: int, steps: int
) -> tuple[float, ...]:
    """Compute η of each local step of a round.

    With ``schedule_over="run"`` the span is the whole run, T = rounds x steps, and every client of
    a round has the same rates. With ``"round"`` each round is a span, T = steps. During the first W
    = ceil(warmup T) steps, η_t = η (t + 1) / W. After them, with p = (t - W) / (T - W) in [0, 1):
    ``constant`` is η, ``linear`` η (1 - p), and ``cosine`` η (1 + cos πp) / 2 (Loshchilov and
    Hutter, arXiv 1608.03983, without restarts within the span). No step has rate zero.

    Rounds are counted from 1. No state is kept between calls, so a round has the same rates on any
    actor and after a resume.
    """
    over_run = settings.schedule_over == "run"
    total = rounds * steps if over_run else steps
    first = (round_number - 1) * steps if over_run else 0
    return tuple(settings.lr * _factor(settings, first + step, total) for step in range(steps))


def _factor(settings: OptimizerConfig, step: int, total: int) -> float:
    warmup = math.ceil(exact_fraction(total, settings.warmup))
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    progress = (step - warmup) / (total - warmup)
    if settings.schedule == "linear":
        return 1.0 - progress
    return (1.0 + math.cos(math.pi * progress)) / 2
