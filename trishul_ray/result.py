"""The result of a run, for Python: its history, its scores, its adapter, its model."""

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

    Attributes:
        id: Its id.
        path: The folder of the run, or its address on another filesystem.
        repeated: Whether it had finished before, so that nothing was run.
        summary: The content of its ``result.json``.
        config: Every field of the experiment, by section.
        final: The metrics after the last round, and its number.
        best: The metrics of the round with the best headline metric, and its number. ``chosen_on``
            names the rows whose headline metric is the best: ``validation``, or ``test`` if the run
            has no validation rows (``data.validation_share``); then it is not a fair score.
        untouched: The metrics of the backbone before the first round.
        recall: The recall of every class after the last round; None for one without test rows.
        per_client: The global model's headline metric of every client after the last round. Empty
            without ``evaluation.per_client``.
        personal: The same of every client's own model; empty for a method whose clients have none.
        participation: In how many rounds each client has counted; without those held out.
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
        self.untouched, self.recall = summary.untouched, summary.recall
        self.per_client, self.personal = summary.per_client, summary.personal
        self.participation = summary.participation

    def __repr__(self) -> str:
        final, headline = self.final, self.summary["headline"]
        return (
            f"<Result {self.id}: {self.config['method']['name']} on {self.config['data']['name']}, "
            f"{headline} {final[headline]:.2%} after round {final['round']}>"
        )

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        config, final, headline = self.config, self.final, self.summary["headline"]
        federation = config["federation"]
        cells = {
            "id": self.id,
            "method": config["method"]["name"],
            "dataset": config["data"]["name"],
            "model": config["model"]["name"],
            "rounds": f"{final['round']} of {federation['clients_per_round']} of "
            f"{federation['clients']} clients",
            headline: f"{final[headline]:.2%} (untouched backbone {self.untouched[headline]:.2%}, "
            f"best {self.best[headline]:.2%} in round {self.best['round']})",
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
        """One row per round: metrics, traffic, seconds; a missing measurement is NaN.

        Round 0 is the backbone before the first round.
        """
        table = pd.DataFrame(read_metrics(self._home)).astype({"round": int})
        return table.set_index("round")

    @cached_property
    def row_scores(self) -> "pd.Series[float]":
        """The score of every test row after the last round, by its index in the test split.

        A class is right (1) or wrong (0), an answer has its F1; their mean is the headline metric.

        Raises:
            InputError: The task scores no single rows, or an older version ran it.
        """
        arrays = read_test_rows(self._home)
        return pd.Series(arrays["score"], index=pd.Index(arrays["row"], name="row"), name="score")

    def compare(self, other: "Result") -> ScoreComparison:
        """Compare this run with another on the test rows that both scored: on the same rows.

        Raises:
            InputError: They scored other rows, or one has no scores of rows.
        """
        first, second = self.row_scores, other.row_scores
        data = [run.summary.get("sources", {}).get("rows") for run in (self, other)]
        if data[0] != data[1] or not first.index.equals(second.index):
            raise InputError(
                f"runs {self.id} and {other.id} scored other test rows: compare runs of one "
                "dataset with the same evaluation.limit"
            )
        return compare_scores(first.to_numpy(), second.to_numpy())

    @property
    def adapter_path(self) -> str | None:
        """The folder of the PEFT adapter; None for full fine-tuning, which has a model instead."""
        return self._home.place("adapter") if self._home.exists("adapter") else None

    @property
    def model_path(self) -> str | None:
        """The folder of the whole model, where the method has no adapter; otherwise None."""
        return self._home.place("model") if self._home.exists("model") else None

    @cached_property
    def _trained(self) -> TrainedRun:
        return load_trained(self._experiment)

    def _trained_by(self, client: int | str | None) -> TrainedRun:
        """Return the global model, or a client's own: the last that was asked for is kept."""
        if client is None:
            return self._trained
        if self._own is None or self._own.client != str(client):
            self._own = load_trained(self._experiment, client)
        return self._own

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the columns of probabilities."""
        return self._trained.context.info.classes

    @own_errors()
    def model(self, client: int | str | None = None) -> nn.Module:
        """Return the trained model, with the update in its weights, in evaluation mode.

        It is a plain model of transformers, or of the class that was passed, on the CPU or the
        run's device; every call returns a new one.

        Args:
            client: Client whose own model to return, by its number or its name as in
                :attr:`personal`; None is the global model.

        Raises:
            InputError: The client has not taken part, or the method's clients have no own models.
            RunError: The last checkpoint is missing, or the backbone has changed.
        """
        run = self._trained_by(client)
        configure_answers(run.context)
        return as_passed(merge_trained(run.context.model, run.trained)).eval()

    @own_errors()
    def predict(
        self, rows: Any, *, batch_size: int = 64, client: int | str | None = None
    ) -> list[str]:
        """Return the class of every row, by name, or the answer to a question.

        Args:
            rows: Only texts, or only images (paths, Pillow images, arrays uint8 [H, W] or
                [H, W, 3]; or a batch of them, an array or tensor uint8 [N, H, W] or
                [N, H, W, C]), or rows with the columns of the run's dataset, in any form that
                :func:`trishul_ray.run` takes.
            batch_size: Rows computed at once.
            client: Client whose own model predicts; None is the global one. See :meth:`model`.

        Raises:
            InputError: The rows do not fit the run's dataset, or the client has no own model.
            RunError: The last checkpoint is missing, or the backbone has changed.
        """
        return prediction.predict(self._trained_by(client), rows, batch_size=batch_size)

    @own_errors()
    def predict_probabilities(
        self, rows: Any, *, batch_size: int = 64, client: int | str | None = None
    ) -> np.ndarray:
        """Return the probability of every class, float32 [N, K], in the order of :attr:`classes`.

        See :meth:`predict`; a task that writes texts has no probabilities.
        """
        return prediction.predict_probabilities(
            self._trained_by(client), rows, batch_size=batch_size
        )
