"""Stages, the optional plug-in steps between the clients' updates and the next global state.

A stage is one file: a section of the configuration, and hooks that run in each round while that
section is set. Without the section, a run has the id, the results and the imports of a run without
the stage. A stage may encode uploads, add noise to the mean or modify it, or select the clients.

Example:
    A stage that adds momentum to the mean change::

        class FedAvgMConfig(Section):
            momentum: float = Field(0.0, ge=0, lt=1, description="of the mean change")

        @register_stage("fedavgm")
        class FedAvgM(Stage):
            Config = FedAvgMConfig
            config: FedAvgMConfig

            def mean(self, number: int, mean: MeanChange) -> MeanChange:
                before = self.memory.get("momentum", 0.0)
                self.memory["momentum"] = self.config.momentum * before + mean.state.shared
                return mean.with_shared(self.memory["momentum"])

    Users enable it with ``fedavgm.momentum=0.9``.

Each upload passes through :meth:`Stage.send` on the client's worker, in ascending order of
``wire``. The mean of a round passes through :meth:`Stage.mean` on the server, in descending order.
Both hooks transform changes of the shared part since the broadcast: while a stage acts on changes,
clients send changes instead of values.

The hooks run in this order in a round: :meth:`Stage.broadcast`, :meth:`Stage.cohort`,
:meth:`Stage.instruct`, :meth:`Stage.gradient`, :meth:`Stage.send`, :meth:`Stage.rebase`,
:meth:`Stage.average`, :meth:`Stage.aggregate`, :meth:`Stage.mean`, :meth:`Stage.end`. The survey of
a method is round 0 and runs :meth:`Stage.cohort`, :meth:`Stage.instruct`, :meth:`Stage.answer` and
:meth:`Stage.survey`.

Legend: W entries of the shared part, U units of aggregation, N clients.
"""

from trishul_ray.stages.base import STAGES, Stage, StageSettings, register_stage, stage_names
from trishul_ray.stages.messages import (
    ArrayState,
    BroadcastMessage,
    Change,
    ClientRound,
    ClientRoundInfo,
    Cohort,
    LocalStep,
    MeanChange,
    Memory,
    Partial,
    RunPlan,
    Start,
    StepFlops,
    Traffic,
    norm_of,
)
from trishul_ray.stages.pipeline import Stages, noted_hashes

__all__ = [
    "STAGES",
    "ArrayState",
    "BroadcastMessage",
    "Change",
    "ClientRound",
    "ClientRoundInfo",
    "Cohort",
    "LocalStep",
    "MeanChange",
    "Memory",
    "Partial",
    "RunPlan",
    "Stage",
    "StageSettings",
    "Stages",
    "Start",
    "StepFlops",
    "Traffic",
    "norm_of",
    "noted_hashes",
    "register_stage",
    "stage_names",
]
