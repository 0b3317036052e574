"""Server optimizers, which use the mean change of a round as a gradient.

Reddi et al.: "Adaptive Federated Optimization", ICLR 2021, arXiv 2003.00295, Algorithm 2, without
bias correction, as published; momentum as in Hsu et al., 2019, arXiv 1909.06335 (FedAvgM).

With D the mean change since the broadcast::

    sgd      m <- beta1 m + D                                       x <- x + eta m
    adagrad  m <- D,                          v <- v + D^2          x <- x + eta m / (sqrt v + tau)
    adam     m <- beta1 m + (1 - beta1) D,    v <- beta2 v + (1 - beta2) D^2           likewise
    yogi     m likewise,                      v <- v - (1 - beta2) D^2 sign(v - D^2)   likewise

An adaptive step changes each entry by about eta, regardless of the size of D. Cores change by about
1e-3 per round, so the published rates of 0.01 to 1 would destroy the model. The default of 1e-3 is
our choice.

Legend: W entries of the shared part.
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from trishul_ray.config.section import Section
from trishul_ray.stages import MeanChange, Stage, register_stage

#: Default server learning rates: sgd applies the mean itself; the adaptive rate is our choice.
PLAIN_RATE, ADAPTIVE_RATE = 1.0, 1e-3


class ServerConfig(Section):
    optimizer: Literal["none", "sgd", "adagrad", "adam", "yogi"] = Field(
        "none", description="server optimizer on the mean change; sgd has momentum (FedAvgM)"
    )
    lr: float | None = Field(
        None, gt=0, description="server learning rate; default: 1 for sgd, 1e-3 for all others"
    )
    momentum: float = Field(
        0.9, ge=0, lt=1, description="β1: momentum of sgd, first moment decay of adam and yogi"
    )
    beta2: float = Field(0.99, ge=0, lt=1, description="second moment decay of adam and yogi")
    tau: float = Field(
        1e-3, gt=0, description="τ: reduces steps of changes below it; v starts at τ²"
    )

    @model_validator(mode="after")
    def _check_fields_are_read(self) -> "ServerConfig":
        unread = {
            "none": ["lr", "momentum", "beta2", "tau"],
            "sgd": ["beta2", "tau"],
            "adagrad": ["momentum", "beta2"],
        }
        self.reject_unused(unread.get(self.optimizer, []), f"with optimizer={self.optimizer!r}")
        return self

    @property
    def rate(self) -> float:
        """The server learning rate η."""
        if self.lr is not None:
            return self.lr
        return PLAIN_RATE if self.optimizer == "sgd" else ADAPTIVE_RATE


@register_stage("server")
class ServerOptimizer(Stage):
    """Apply an optimizer on the server, with the mean change of a round as the gradient."""

    Config, wire, alters_mean = ServerConfig, 0, True
    example: ClassVar = {"optimizer": "yogi"}
    config: ServerConfig

    @property
    def stateful_fields(self) -> tuple[str, ...]:
        """The optimizer, if it has moments, which depend on earlier rounds."""
        name = self.config.optimizer
        plain = name == "sgd" and self.config.momentum == 0
        return () if plain else (f"server.optimizer={name!r}",)

    def mean(self, number: int, mean: MeanChange) -> MeanChange:
        """Replace the mean change by the optimizer's step."""
        trained = np.repeat(mean.trained, [unit.size for unit in self.plan.units])
        step, moments = server_step(mean.state.shared, self.memory, self.config, trained)
        self.memory.update(moments)
        return mean.with_shared(step)


def server_step(
    change: np.ndarray, moments: dict[str, np.ndarray], options: ServerConfig, trained: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Compute the optimizer's step of the shared part, and the moments after the round.

    Args:
        change: [W], the mean change D.
        moments: ``first`` and, for an adaptive optimizer, ``second`` [W] float64; empty in the
            first round.
        options: The configuration; its optimizer is not "none".
        trained: [W] bool; entries that no client trained do not change, nor do their moments.

    Returns:
        The step [W] float64, and the new moments.
    """
    mean = change.astype(np.float64)
    first = moments.get("first", np.zeros_like(mean))
    if options.optimizer == "sgd":
        first = np.where(trained, options.momentum * first + mean, first)
        return np.where(trained, options.rate * first, 0.0), {"first": first}
    second = moments.get("second", np.full_like(mean, options.tau**2))
    square, decay = mean**2, options.beta2
    if options.optimizer == "adagrad":
        new_first, new_second = mean, second + square
    else:
        new_first = options.momentum * first + (1 - options.momentum) * mean
        if options.optimizer == "adam":
            new_second = decay * second + (1 - decay) * square
        else:
            new_second = second - (1 - decay) * square * np.sign(second - square)
    first, second = np.where(trained, new_first, first), np.where(trained, new_second, second)
    step = options.rate * first / (np.sqrt(second) + options.tau)
    return np.where(trained, step, 0.0), {"first": first, "second": second}
