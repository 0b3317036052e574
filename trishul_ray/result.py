"""The result of a run in Python: its scores, history, adapter and model."""

from functools import cached_property
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from trishul_ray.adapters.export import merge_trained
from trishul_ray.errors import InputError, own_errors
from trishul_ray.experiment import Experiment
from trishul_ray.models.python_model import as_passed
from trishul_ray.report.statistics import ScoreComparison, compare_scores
from trishul_ray.report.summary import RunSummary, read_metrics, read_test_rows
from trishul_ray.runs import prediction
from trishul_ray.runs.export import TrainedRun, configure_answers, load_trained
from trishul_ray.storage.store import Store
from trishul_ray.tracking.progress import format_bytes


class Result:
    """A finished run.

    :func:`trishul_ray.run` and :func:`trishul_ray.load` return it. Metrics are fractions in [0, 1],
    except losses.

    Attributes:
        id: Id of the run.
        path: Folder of the run, or its URI on another filesystem.
        repeated: Whether the run had already finished, so that nothing was run.
        summary: Content of ``result.json``.
        config: All fields of the experiment, by section.
        final: Metrics after the last round, and its number as ``round``.
        best: Metrics of the round with the best primary metric, and its number. ``chosen_on`` is
            the split that selects the round: ``validation``, or ``test`` if the run has no
            validation rows (``data.validation_share``), which biases the score.
        untuned: Metrics of the untuned model.
        recall: Recall of every class after the last round, or None for a class without test rows.
        per_client: Headline metric of the global model for every client after the last round; empty
            without ``evaluation.per_client``.
        personal: Headline metric of every client's personalized model; empty unless the method
            personalizes models.
        participation: Number of rounds to which each client has contributed; excludes held-out
            clients.

    Example:
        >>> import trishul_ray
        >>> result = trishul_ray.run("digits", rounds=10)  # doctest: +SKIP
        >>> result.history["accuracy"].plot()  # doctest: +SKIP
        >>> result.predict(images)  # doctest: +SKIP
        ['3', '7', '1']
    """

    def __init__(
        self, experiment: Experiment, home: Store, summary: RunSummary, *, repeated: bool
    ) -> None:
        self._experiment, self._home = experiment, home
        self._own: TrainedRun | None = None
        self.summary = summary.to_dict()
        self.repeated = repeated
        self.id, self.path = summary.id, home.uri
        self.config, self.final, self.best = summary.config, summary.final, summary.best
        self.untuned, self.recall = summary.untouched, summary.recall
        self.per_client, self.personal = summary.per_client, summary.personal
        self.participation = summary.participation

    def __repr__(self) -> str:
        final, metric = self.final, self.summary["headline"]
        return (
            f"<Result {self.id}: {self.config['method']['name']} on {self.config['data']['name']}, "
            f"{metric} {final[metric]:.2%} after round {final['round']}>"
        )

    def _repr_html_(self) -> str:
        """Return an HTML table for notebooks."""
        config, final, metric = self.config, self.final, self.summary["headline"]
        federation = config["federation"]
        cells = {
            "id": self.id,
            "method": config["method"]["name"],
            "dataset": config["data"]["name"],
            "model": config["model"]["name"],
            "rounds": f"{final['round']} of {federation['clients_per_round']} of "
            f"{federation['clients']} clients",
            metric: f"{final[metric]:.2%} (untuned model {self.untuned[metric]:.2%}, "
            f"best {self.best[metric]:.2%} in round {self.best['round']})",
            "loss": f"{final['loss']:.4g}",
            "trained parameters": f"{sum(self.summary['parameters'].values()):,}",
            "traffic of all clients": f"{format_bytes(self.summary['uploaded_bytes'])} up, "
            f"{format_bytes(self.summary['downloaded_bytes'])} down",
            "seconds": f"{sum(self.summary['round_seconds']):.1f}",
            "folder": self.path,
        }
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in cells.items()
        )
        return f"<table>{rows}</table>"

    @cached_property
    def history(self) -> pd.DataFrame:
        """Metrics, traffic and seconds as one row per round; missing measurements are NaN.

        The index is the round. Round 0 is the untuned model.
        """
        table = pd.DataFrame(read_metrics(self._home)).astype({"round": int})
        return table.set_index("round")

    @cached_property
    def row_scores(self) -> "pd.Series[float]":
        """The score of every test row after the last round, indexed by position in the test split.

        The score of a class is 1 if it is right, otherwise 0. The score of an answer is its F1. The
        mean is the primary metric.

        Raises:
            InputError: The task does not score single rows, or the run is from an older version.
        """
        arrays = read_test_rows(self._home)
        return pd.Series(arrays["score"], index=pd.Index(arrays["row"], name="row"), name="score")

    def compare(self, other: "Result") -> ScoreComparison:
        """Compare this run with another on the same test rows.

        Args:
            other: A run that scored the same test rows.

        Returns:
            The difference of the mean scores, its 95% interval over test rows and its p-value. The
            interval does not include the variance across seeds.

        Raises:
            InputError: The runs scored different rows, or one has no scores of rows.

        Example:
            >>> import trishul_ray
            >>> first = trishul_ray.run(method="trishul")  # doctest: +SKIP
            >>> second = trishul_ray.run(method="fedit")  # doctest: +SKIP
            >>> first.compare(second).p_value < 0.05  # doctest: +SKIP
            True
        """
        first, second = self.row_scores, other.row_scores
        data = [run.summary.get("sources", {}).get("rows") for run in (self, other)]
        if data[0] != data[1] or not first.index.equals(second.index):
            raise InputError(
                f"runs {self.id} and {other.id} scored different test rows; use the same dataset "
                "and evaluation.limit"
            )
        return compare_scores(first.to_numpy(), second.to_numpy())

    @property
    def adapter_path(self) -> str | None:
        """The folder of the PEFT adapter, or None for full fine-tuning."""
        return self._home.place("adapter") if self._home.exists("adapter") else None

    @property
    def model_path(self) -> str | None:
        """The folder of the whole model if the method has no adapter, otherwise None."""
        return self._home.place("model") if self._home.exists("model") else None

    @cached_property
    def _trained(self) -> TrainedRun:
        return load_trained(self._experiment)

    def _trained_by(self, client: int | str | None) -> TrainedRun:
        """Return the global model, or a client's personalized model; the last one is cached."""
        if client is None:
            return self._trained
        if self._own is None or self._own.client != str(client):
            self._own = load_trained(self._experiment, client)
        return self._own

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, in the order of the columns of :meth:`predict_probabilities`."""
        return self._trained.context.info.classes

    @own_errors()
    def model(self, client: int | str | None = None) -> nn.Module:
        """Return the trained model in evaluation mode, with the update merged into its weights.

        The model is a plain transformers model, or an instance of the class that was passed to
        :func:`trishul_ray.run`, on the run's device or the CPU. Every call returns a new model.

        Args:
            client: The number or name, as in :attr:`personal`, of the client whose personalized
                model to return. None returns the global model.

        Returns:
            The model.

        Raises:
            InputError: The client has not taken part, or the method has no personalized models.
            RunError: The last checkpoint is missing, or the backbone has changed.

        Example:
            >>> import trishul_ray
            >>> model = trishul_ray.load("1f0c2f").model()  # doctest: +SKIP
            >>> model.save_pretrained("my-model")  # doctest: +SKIP
        """
        run = self._trained_by(client)
        configure_answers(run.context)
        return as_passed(merge_trained(run.context.model, run.trained)).eval()

    @own_errors()
    def predict(
        self, rows: Any, *, batch_size: int = 64, client: int | str | None = None
    ) -> list[str]:
        """Predict the class name of every row, or generate its answer.

        Args:
            rows: Only texts; only images (paths, Pillow images, arrays uint8 [H, W] or [H, W, 3],
                or a batch of images as an array or tensor uint8 [N, H, W] or [N, H, W, C]); or rows
                with the columns of the run's dataset, in any form that :func:`trishul_ray.run`
                accepts.
            batch_size: Number of rows per forward pass.
            client: The client whose personalized model predicts; see :meth:`model`. None uses the
                global model.

        Returns:
            One class name or answer per row.

        Raises:
            InputError: The rows do not fit the run's dataset, or the client has no personalized
                model.
            RunError: The last checkpoint is missing, or the backbone has changed.

        Example:
            >>> import trishul_ray
            >>> result = trishul_ray.load("1f0c2f")  # doctest: +SKIP
            >>> result.predict(["three.png", "seven.png"])  # doctest: +SKIP
            ['3', '7']
        """
        return prediction.predict(self._trained_by(client), rows, batch_size=batch_size)

    @own_errors()
    def predict_probabilities(
        self, rows: Any, *, batch_size: int = 64, client: int | str | None = None
    ) -> np.ndarray:
        """Predict the probability of every class for every row.

        Args:
            rows: Rows as in :meth:`predict`.
            batch_size: Number of rows per forward pass.
            client: The client whose personalized model predicts; see :meth:`model`. None uses the
                global model.

        Returns:
            Probabilities, float32 [N, K], with columns in the order of :attr:`classes`.

        Raises:
            InputError: The rows do not fit the run's dataset, the client has no personalized model,
                or the task generates text.
            RunError: The last checkpoint is missing, or the backbone has changed.

        Example:
            >>> import trishul_ray
            >>> result = trishul_ray.load("1f0c2f")  # doctest: +SKIP
            >>> result.predict_probabilities(images).argmax(axis=1)  # doctest: +SKIP
            array([3, 7, 1])
        """
        return prediction.predict_probabilities(
            self._trained_by(client), rows, batch_size=batch_size
        )
