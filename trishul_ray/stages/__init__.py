"""The contract of a stage: one of the things that may stand between clients and the next state.

A stage is one file: a section of the configuration, and what happens to a round while that section
is set. Without the section, a run has the id, the bytes and the imports that it has without the
stage. A stage may encode what is sent, add noise to the mean or move it, or choose the clients::

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

A user then writes ``fedavgm.momentum=0.9``. All that a client sends passes :meth:`Stage.send` on
its worker, by ascending ``wire``; the mean of a round passes :meth:`Stage.mean` on the server in
descending order. Both act on changes of the shared part since the broadcast: while a stage acts on
changes, clients send changes instead of values.

The hooks of a round, in order: :meth:`Stage.broadcast`, :meth:`Stage.cohort`,
:meth:`Stage.instruct`, :meth:`Stage.send`, :meth:`Stage.average`, :meth:`Stage.aggregate`,
:meth:`Stage.mean`, :meth:`Stage.end`. A method's survey is round 0: :meth:`Stage.cohort`,
:meth:`Stage.instruct`, :meth:`Stage.answer`, :meth:`Stage.survey`.

Legend: W entries of the shared part, U units of aggregation, N clients.
"""

from trishul_ray.stages.base import STAGES, Stage, StageSettings, register_stage, stage_names
from trishul_ray.stages.messages import (
    ArrayState,
    Change,
    ClientRound,
    Cohort,
    MeanChange,
    Memory,
    Partial,
    RunPlan,
    Sender,
    Sent,
    StepFlops,
    Traffic,
    norm_of,
)
from trishul_ray.stages.row import Stages, noted_hashes

__all__ = [
    "STAGES",
    "ArrayState",
    "Change",
    "ClientRound",
    "Cohort",
    "MeanChange",
    "Memory",
    "Partial",
    "RunPlan",
    "Sender",
    "Sent",
    "Stage",
    "StageSettings",
    "Stages",
    "StepFlops",
    "Traffic",
    "norm_of",
    "noted_hashes",
    "register_stage",
    "stage_names",
]
