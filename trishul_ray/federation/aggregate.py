"""Aggregate the uploads of a round into the next state."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trishul_ray.config.fields import FederationConfig
from trishul_ray.errors import PermanentError
from trishul_ray.federation.executor import Executor
from trishul_ray.federation.messages import Outcome, Upload, as_tensor, to_array, to_tensor
from trishul_ray.federation.reduce import Reducer, finish
from trishul_ray.methods.base.messages import ClientUpload, Round
from trishul_ray.plugins.loading import named
from trishul_ray.stages import ArrayState, MeanChange, Partial, Stages, Start


@dataclass(frozen=True)
class UploadReader:
    """Read the uploads of a run.

    Attributes:
        executor: Fetches uploads into this process.
        stages: The stages of the run.
    """

    executor: Executor
    stages: Stages

    def fetch(self, handles: Sequence[Any]) -> list[Upload]:
        """Fetch uploads into this process, given their handles."""
        return self.executor.fetch([*handles])

    def values(
        self, uploads: Sequence[Upload], broadcast: ArrayState, earlier: Sequence[Start] = ()
    ) -> list[Upload]:
        """Return uploads as values: ``broadcast`` plus the change since the broadcast of a client.

        Args:
            uploads: Uploads of a round, as clients send them.
            broadcast: The broadcast of the round.
            earlier: The clients that have read the broadcast of an earlier round.
        """
        origin = {client: start.read.shared for start in earlier for client in start.clients}
        if self.stages.act_on_changes:
            offsets = {each.client: broadcast.shared for each in uploads}
        else:
            offsets = {client: broadcast.shared - shared for client, shared in origin.items()}
        return [
            replace(u, arrays=replace(u.arrays, shared=offsets[u.client] + u.arrays.shared))
            if u.client in offsets
            else u
            for u in uploads
        ]

    def changes(self, handles: Sequence[Any], accepted: AbstractSet[int]) -> dict[int, np.ndarray]:
        """Return the changes [W] of the accepted clients, keyed by client in ascending order."""
        return {
            upload.client: upload.arrays.shared
            for upload in sorted(self.fetch(handles), key=lambda each: each.client)
            if upload.client in accepted
        }


@dataclass(frozen=True)
class Aggregator:
    """Compute the mean of a round's uploads, and the method's next state.

    Attributes:
        reducer: The method, the layout and the weights of uploads.
        stages: The stages of the run.
        uploads: Reads single uploads.
        federation: The section ``federation``.
    """

    reducer: Reducer
    stages: Stages
    uploads: UploadReader
    federation: FederationConfig

    def mean(self, number: int, state: ArrayState, total: Partial, outcome: Outcome) -> MeanChange:
        """Compute the mean of a round's uploads, with the first stage that overrides it.

        Otherwise the mean is weighted, and a unit that no client trained keeps its value in
        ``state`` or, if clients send changes, does not change.
        """
        stages = self.stages
        mean = stages.average(number, total)
        if mean is None:
            if stages.act_on_changes:
                state = replace(state, shared=np.zeros_like(state.shared))
            mean = MeanChange(*finish(total, state, self.reducer), len(total.clients))
        if not stages.read_changes:
            return mean
        changes = self.uploads.changes(outcome.uploads, {*total.clients})
        return stages.aggregate(number, mean, changes)

    def facts(
        self, number: int, broadcast: ArrayState, mean: MeanChange, total: Partial, outcome: Outcome
    ) -> Round:
        """Collect the facts about a round for a method; its clients have read ``broadcast``."""
        singles: tuple[ClientUpload, ...] = ()
        if self.reducer.method.needs_uploads:
            accepted = {*total.clients}
            fetched = [u for u in self.uploads.fetch(outcome.uploads) if u.client in accepted]
            singles = tuple(map(self._single, self.uploads.values(fetched, broadcast)))
        return Round(
            number,
            mean.clients,
            self.federation.participants,
            torch.from_numpy(mean.trained),
            singles,
        )

    def _single(self, upload: Upload) -> ClientUpload:
        return ClientUpload(
            client=upload.client,
            weight=self.reducer.weight(upload),
            arrays=self.reducer.contribution(upload).map(as_tensor),
            trained=None if upload.active is None else torch.from_numpy(upload.active.copy()),
        )

    def next_state(self, state: ArrayState, mean: MeanChange, facts: Round) -> ArrayState:
        """Compute the state after a round.

        Raises:
            PermanentError: The state is not finite, although the mean is.
        """
        method, layout = self.reducer.method, self.reducer.layout
        if self.stages.act_on_changes:
            mean = self.stages.mean(facts.number, mean)
            moved = state.shared + mean.state.shared.astype(np.float64)
            mean = mean.with_shared(moved.astype(np.float32))
        new = method.aggregate(state.map(to_tensor), mean.state.map(to_tensor), facts, layout)
        after = new.map(to_array)
        if not _is_finite(after) and _is_finite(mean.state):
            raise PermanentError(
                f"round {facts.number}: aggregate() of {named(type(method))} returns a "
                "state that is not finite, although the uploads are"
            )
        return replace(after, survey=state.survey)


def _is_finite(state: ArrayState) -> bool:
    """Return whether all numbers of a state, except its survey, are finite."""
    found: list[bool] = []
    state.map(lambda array: found.append(bool(np.isfinite(array).all())))
    return all(found)
