"""Run the work with Flower: FedAvg in its Ray simulation, one client at a time, all threads."""

import os
from collections.abc import Iterable
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's spelling; equal to the other systems

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import Turns, adapted, load, read, train, trained

#: Number of rounds that is never reached, because the driver ends the process.
ENDLESS = 10**9


class RoundByRound(FedAvg):
    """FedAvg that waits for a request before each round."""

    def __init__(self, turns: Turns, **options: Any) -> None:
        super().__init__(**options)
        self.turns = turns

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Wait for a request, and start the round."""
        self.turns.wait()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the updates, and reply to the request."""
        replies = list(replies)
        found = super().aggregate_train(server_round, replies)
        self.turns.answer(sum(int(reply.content["metrics"]["steps"]) for reply in replies))
        return found


if __name__ == "__main__":
    turns, work = Turns(), read()
    clients, servers = ClientApp(), ServerApp()

    @clients.train()
    def train_one(message: Message, context: Context) -> Message:
        import torch

        torch.set_num_threads(work.threads)
        model = adapted(work)
        load(model, message.content["arrays"].to_torch_state_dict())
        steps = train(model, work, int(context.node_config["partition-id"]))
        metrics = {"steps": steps, "num-examples": steps * work.batch}
        content = {"arrays": ArrayRecord(trained(model)), "metrics": MetricRecord(metrics)}
        return Message(content=RecordDict(content), reply_to=message)

    @servers.main()
    def serve(grid: Grid, context: Context) -> None:
        """Run rounds until the driver ends the process."""
        strategy = RoundByRound(
            turns,
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.clients,
        )
        start = ArrayRecord(trained(adapted(work)))
        strategy.start(grid=grid, initial_arrays=start, num_rounds=ENDLESS)

    resources = {"client_resources": {"num_cpus": work.threads, "num_gpus": 0.0}}
    run_simulation(servers, clients, num_supernodes=work.clients, backend_config=resources)
