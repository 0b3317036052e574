"""Settings of different sections that exclude each other. All raise a ValueError."""

from trishul_ray.config.fields import (
    EvaluationConfig,
    FederationConfig,
    ModelConfig,
    ResourcesConfig,
    TaskConfig,
)
from trishul_ray.methods.base import MethodConfig, build_method, method_class, method_classes
from trishul_ray.tasks.base import task_kinds

#: Clients that ``evaluation.diagnostics_cohort=all`` compares at most: every pair, in memory.
MOST_COMPARED = 100


def check_task(task: TaskConfig) -> None:
    """Refuse a kind that is not registered."""
    if task.kind != "auto" and task.kind not in task_kinds():
        raise ValueError(f"task.kind: {task.kind!r} is unknown; known: {', '.join(task_kinds())}")


def check_cohort(federation: FederationConfig, evaluation: EvaluationConfig) -> None:
    """Refuse a cohort larger than its clients, and evaluations that these clients do not have."""
    fed = federation
    if fed.clients_per_round > fed.clients:
        raise ValueError(
            f"federation.clients_per_round={fed.clients_per_round} exceeds "
            f"federation.clients={fed.clients}"
        )
    if fed.clients_per_round > fed.participants:
        raise ValueError(
            f"federation.held_out={fed.held_out:g} leaves {fed.participants} of "
            f"federation.clients={fed.clients}, fewer than "
            f"federation.clients_per_round={fed.clients_per_round}"
        )
    if fed.held_out and not evaluation.per_client:
        raise ValueError(
            f"federation.held_out={fed.held_out:g} needs evaluation.per_client=true, which "
            "scores those clients, too"
        )
    if evaluation.diagnostics_cohort == "all" and fed.clients > MOST_COMPARED:
        raise ValueError(
            f"evaluation.diagnostics_cohort='all' compares at most {MOST_COMPARED} clients, "
            f"not federation.clients={fed.clients}"
        )


def check_method(
    method: MethodConfig, as_set: str, federation: FederationConfig, model: ModelConfig
) -> None:
    """Refuse what a method cannot do; ``as_set`` names it as messages do."""
    fed, trains_all = federation, method_class(method.name).train_all
    if fed.compute != "full" and not build_method(method).takes_limits:
        supported = [name for name, cls in method_classes().items() if cls.takes_limits]
        raise ValueError(
            f"federation.compute={fed.compute!r} needs a method that supports limited clients "
            f"({', '.join(supported)}), not {as_set}"
        )
    if model.quantize != "none" and trains_all:
        raise ValueError(
            f"model.quantize={model.quantize!r} stores frozen weights, and method="
            f"{method.name!r} trains them: use none, or a method with adapters"
        )
    if fed.stacked > 1 and trains_all:
        fitting = [name for name, cls in method_classes().items() if not cls.train_all]
        raise ValueError(
            f"federation.stacked={fed.stacked} needs a method with adapters "
            f"({', '.join(fitting)}), not method={method.name!r}, whose clients share no "
            "frozen backbone"
        )


def check_dropout(
    federation: FederationConfig, model: ModelConfig, resources: ResourcesConfig
) -> None:
    """Refuse dropout where clients share a forward pass, or a CUDA graph repeats its draws."""
    if federation.stacked > 1 and model.dropout:
        raise ValueError(
            f"federation.stacked={federation.stacked}: stacked clients cannot use dropout; set "
            "federation.stacked=1 or model.dropout=false"
        )
    if resources.cuda_graphs and model.dropout:
        raise ValueError(
            "resources.cuda_graphs=true: a CUDA graph would repeat the draws of dropout; set "
            "it to false or model.dropout=false"
        )


def check_actors(federation: FederationConfig, resources: ResourcesConfig) -> None:
    """Refuse two settings of how many actors there are."""
    if resources.actors != "auto" and federation.clients_per_actor != "auto":
        raise ValueError(
            "resources.actors and federation.clients_per_actor exclude each other; set only one"
        )
