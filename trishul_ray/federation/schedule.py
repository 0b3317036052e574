"""Learning-rate schedules: the rate of every local step of a round, a pure function of its number.

Nothing is carried from one call to the next, so a round has the same rates on any actor and after
a resume.

Legend: T steps of the schedule's span, W of them warm-up, t = 0 .. T - 1 the step.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trishul_ray.config import OptimizerConfig


def learning_rates(
    settings: "OptimizerConfig", round_number: int, rounds: int, steps: int
) -> tuple[float, ...]:
    """Return η of each local step of a round.

    With ``schedule_over="run"`` the span is the whole run, T = rounds x steps, and every client of
    a round has the same rates; with ``"round"`` it is one round, T = steps, begun anew in each.
    During the first W = ceil(warmup T) steps, η_t = η (t + 1) / W. After them, with
    p = (t - W) / (T - W) in [0, 1): ``constant`` is η, ``linear`` η (1 - p), and ``cosine``
    η (1 + cos πp) / 2 (Loshchilov and Hutter, arXiv 1608.03983, without restarts within the span).
    No step has the rate zero.

    Args:
        settings: the experiment's optimizer section.
        round_number: from 1.
        rounds: of the run.
        steps: local steps of a round.
    """
    whole = settings.schedule_over == "run"
    total = rounds * steps if whole else steps
    first = (round_number - 1) * steps if whole else 0
    return tuple(settings.lr * _factor(settings, first + step, total) for step in range(steps))


def _factor(settings: "OptimizerConfig", step: int, total: int) -> float:
    warmup = math.ceil(settings.warmup * total)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    done = (step - warmup) / (total - warmup)
    return 1.0 - done if settings.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
