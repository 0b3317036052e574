"""Validate combinations of settings from different sections.

Each check raises a ``ValueError``, which pydantic reports with the other faults of an experiment.
"""

from collections.abc import Sequence

from trishul_ray.config.fields import (
    AdapterConfig,
    EvaluationConfig,
    FederationConfig,
    ModelConfig,
    ResourcesConfig,
    TaskConfig,
)
from trishul_ray.methods.base import MethodConfig, build_method, method_class, method_classes
from trishul_ray.tasks.base import task_kinds

#: Largest number of clients with ``evaluation.diagnostics_cohort=all``, which compares every pair.
MOST_COMPARED = 100


def check_task(task: TaskConfig) -> None:
    if task.kind != "auto" and task.kind not in task_kinds():
        raise ValueError(f"task.kind: {task.kind!r} is unknown; known: {', '.join(task_kinds())}")


def check_cohort(fed: FederationConfig, evaluation: EvaluationConfig) -> None:
    """Reject cohorts that exceed the number of clients, and settings that conflict with cohorts."""
    cohort = f"federation.clients_per_round={fed.clients_per_round}"
    if fed.clients_per_round > fed.clients:
        raise ValueError(f"{cohort} exceeds federation.clients={fed.clients}")
    if fed.clients_per_round > fed.participants:
        raise ValueError(
            f"federation.held_out={fed.held_out:g} leaves {fed.participants} of "
            f"federation.clients={fed.clients}, fewer than {cohort}"
        )
    if fed.held_out and not evaluation.per_client:
        raise ValueError(
            f"federation.held_out={fed.held_out:g} needs evaluation.per_client=true, which also "
            "scores these clients"
        )
    if fed.local_epochs is not None and fed.stacked > 1:
        raise ValueError(
            f"federation.stacked={fed.stacked} requires the same number of steps per client; set "
            "federation.local_steps instead of federation.local_epochs"
        )
    if evaluation.diagnostics_cohort == "all" and fed.clients > MOST_COMPARED:
        raise ValueError(
            f"evaluation.diagnostics_cohort='all' compares at most {MOST_COMPARED} clients, "
            f"not federation.clients={fed.clients}"
        )


def check_method(
    method: MethodConfig, as_set: str, fed: FederationConfig, model: ModelConfig
) -> None:
    """Reject settings that a method does not support; ``as_set`` is its name in messages."""
    classes, trains_all = method_classes(), method_class(method.name).train_all
    if fed.compute != "full" and not build_method(method).takes_limits:
        supported = [name for name, cls in classes.items() if cls.takes_limits]
        raise ValueError(
            f"federation.compute={fed.compute!r} needs a method that supports limited clients "
            f"({', '.join(supported)}), not {as_set}"
        )
    if model.quantize != "none" and trains_all:
        raise ValueError(
            f"model.quantize={model.quantize!r} is not supported with method={method.name!r}, "
            "which trains the backbone's weights; set it to none, or use a method with adapters"
        )
    if fed.stacked > 1 and trains_all:
        supported = [name for name, cls in classes.items() if not cls.train_all]
        raise ValueError(
            f"federation.stacked={fed.stacked} needs a method with adapters "
            f"({', '.join(supported)}), not method={method.name!r}, whose clients share no "
            "frozen backbone"
        )


def check_dropout(
    fed: FederationConfig, model: ModelConfig, adapter: AdapterConfig, resources: ResourcesConfig
) -> None:
    """Reject dropout with stacked clients, or with CUDA graphs, which would repeat its masks."""
    off = "model.dropout=false" if model.dropout else "adapter.dropout=0"
    if not (model.dropout or adapter.dropout):
        return
    if fed.stacked > 1:
        raise ValueError(
            f"federation.stacked={fed.stacked} is not supported with dropout; set "
            f"federation.stacked=1 or {off}"
        )
    if resources.cuda_graphs:
        raise ValueError(
            "resources.cuda_graphs=true is not supported with dropout, whose random masks a graph "
            f"would repeat; set it to false or {off}"
        )


def check_gradients(
    sections: Sequence[str],
    method: MethodConfig,
    fed: FederationConfig,
    model: ModelConfig,
    adapter: AdapterConfig,
    resources: ResourcesConfig,
) -> None:
    """Reject settings that do not support gradients per example, which ``sections`` compute."""
    if not sections:
        return
    section, *others = sections
    if others:
        raise ValueError(f"{section} and {others[0]} both compute gradients; set only one")
    if method_class(method.name).train_all:
        raise ValueError(
            f"{section}: method={method.name!r} trains the backbone, and gradients per example are "
            "only computed of adapters; use a method with adapters"
        )
    if fed.stacked > 1:
        raise ValueError(
            f"federation.stacked={fed.stacked}: {section} computes the gradients of one client at "
            "a time; set 1"
        )
    if model.dropout or adapter.dropout:
        off = "model.dropout=false" if model.dropout else "adapter.dropout=0"
        raise ValueError(f"{section}: gradients per example do not support dropout; set {off}")
    if resources.cuda_graphs:
        raise ValueError(
            f"resources.cuda_graphs=true: {section} computes gradients of batches of any size; set "
            "it to false"
        )


def check_actors(fed: FederationConfig, resources: ResourcesConfig) -> None:
    """Reject settings that define the number of actors twice."""
    if resources.actors != "auto" and fed.clients_per_actor != "auto":
        raise ValueError(
            "resources.actors and federation.clients_per_actor are mutually exclusive; set only one"
        )
