"""Run the work with pfl-research: FederatedAveraging on its simulated backend, in one process."""

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from workload import Turns, Workload, adapted, read, shard

#: Number of rounds that is never reached, because the driver ends the process.
ENDLESS = 10**9


class Scored(nn.Module):
    """Model with the methods required by pfl, which counts its training batches."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.model = adapted(work)
        self.steps = 0

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.train()
        self.steps += 1
        return self.model(pixel_values=images, labels=labels).loss

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Compute the evaluation loss of a batch."""
        self.eval()
        loss = self.model(pixel_values=images, labels=labels).loss
        return {"loss": Weighted(float(loss) * len(labels), len(labels))}


class RoundByRound(TrainingProcessCallback):
    """Wait for a request before each round."""

    def __init__(self, model: Scored, turns: Turns) -> None:
        self.model, self.turns = model, turns

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.turns.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Reply to the request of this round, and wait for the next request."""
        self.turns.answer(self.model.steps)
        self.model.steps = 0
        self.turns.wait()
        return False, Metrics()


if __name__ == "__main__":
    turns, work = Turns(), read()
    scored = Scored(work)
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(shard(work, user), user_id=str(user)),
        get_user_sampler("random", range(work.clients)),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ENDLESS,
            evaluation_frequency=ENDLESS,  # only in the first round, which is the warm-up
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users),
        PyTorchModel(scored, torch.optim.Adam, torch.optim.SGD(scored.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch
        ),
        NNEvalHyperParams(local_batch_size=work.batch),
        callbacks=[RoundByRound(scored, turns)],
    )
