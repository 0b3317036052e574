"""Commands on what a run is made of: methods, models, datasets, pretraining."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trishul_ray.cli.output import Plugins, err, print_field, print_line, print_table, show_progress
from trishul_ray.errors import InputError
from trishul_ray.plugins.loading import faults, load_plugin

if TYPE_CHECKING:
    from trishul_ray.experiment.experiment import Experiment


def pretrain(
    name: Annotated[str, typer.Argument(help="Name of a built-in backbone.")] = "vit-digits",
    dataset: Annotated[
        str | None,
        typer.Option(help="Dataset whose texts train a text model; default 20newsgroups."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Cache folder; default $TRISHUL_CACHE.")
    ] = None,
    hub: Annotated[
        Path | None, typer.Option(help="Local mirror of the hub; default $TRISHUL_HUB.")
    ] = None,
) -> None:
    """Train a built-in backbone centrally (Ray Train), once. Runs do so when they need one.

    - `trishul pretrain` — the small ViT for digits
    - `trishul pretrain llama-tiny` — a small LLaMA, on the raw texts of 20 Newsgroups
    - `trishul pretrain t5-tiny --dataset mrqa` — on other texts; use it as `model=FOLDER`
    """
    from trishul_ray.config.places import Places
    from trishul_ray.federation.on_ray.session import ray_session
    from trishul_ray.models import pretraining

    builtin = pretraining.get_builtin(name, dataset)
    with show_progress() as progress, ray_session():
        report = progress.task_progress(f"pretraining {name}")
        folder = pretraining.pretrain(builtin, Places.at(cache, hub), progress=report)
    print_line(f"{name}: {folder}")


def methods(plugin: Plugins = None) -> None:
    """List the methods: what they do, what they send, where they are published."""
    from trishul_ray.cli.listing import methods_table

    print_table(methods_table())
    for fault in faults():
        print_line(f"warning: {fault}", err)


def check(plugin: Plugins = None) -> None:
    """Check what a file of your own defines: methods with their adapters, stages, datasets, tasks.

    A line for each promise of the contract: ok, failed with the reason, or skipped. The exit code
    is 1 if one failed. Methods and tasks run on small data that the package brings.

    - `trishul check --plugin mine.py`
    """
    from trishul_ray.contract.plugin_checks import check_plugin

    if not plugin:
        raise InputError("name the file to check: trishul check --plugin mine.py")
    failed = 0
    for file in plugin:
        for found in check_plugin(load_plugin(file)):
            failed += found.result == "failed"
            reason = f": {found.reason}" if found.reason else ""
            print_line(f"{found.result:<7}  {found.subject}  {found.name}{reason}")
    raise typer.Exit(1 if failed else 0)


def models(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="A backbone, then key=value overrides: shows its heads by block."),
    ] = None,
) -> None:
    """List the known backbones: size, adapted matrices, source of the weights.

    With a name, show how many core heads each of its blocks gets, from its weights alone.
    Name any other model by its hub name, its name in a mirror, or its folder: `model=owner/name`.

    - `trishul models vit-digits`
    - `trishul models vit-b16 method.block_scores=attention budget=higher`
    """
    from trishul_ray.cli.listing import heads_table, models_table
    from trishul_ray.experiment.fit import heads_by_block
    from trishul_ray.experiment.loading import load_experiment

    if not arguments:
        print_table(models_table())
        return
    name, *overrides = arguments
    experiment = load_experiment(None, [f"model={name}", *overrides])
    print_table(heads_table(heads_by_block(experiment)))


def datasets(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="A dataset, then key=value overrides: shows each client's rows."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:ALPHA]",
            help="iid, natural, dirichlet or e.g. dirichlet:0.1; short for partition.kind and "
            "partition.alpha.",
        ),
    ] = None,
    row: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Show training row N as the model reads it instead."),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """List the datasets; with a name, show how its rows are partitioned among the clients.

    - `trishul datasets digits --partition dirichlet:0.1 federation.clients=10`
    - `trishul datasets table data.path=notes.csv data.columns='{text: body, label: topic}'`
    - `trishul datasets synthetic/instructions --row 0` — its tokens, and which carry loss
    """
    from trishul_ray.cli.listing import datasets_table
    from trishul_ray.data.prepare import describe_datasets, find_source
    from trishul_ray.experiment.loading import load_experiment

    if not arguments:
        print_table(datasets_table(describe_datasets()))
        for fault in faults():
            print_line(f"warning: {fault}", err)
        return
    name, *overrides = arguments
    find_source(name)  # an unknown name is refused first
    if partition is not None:
        overrides += _partition_overrides(partition)
    # Rows are partitioned among clients, whatever the cohort.
    whole = ["federation.clients_per_round=1", *overrides]
    experiment = load_experiment(None, [f"dataset={name}", *whole])
    if row is not None:
        _show_row(experiment, row)
    else:
        _show_partition(experiment)


def _show_row(experiment: "Experiment", row: int) -> None:
    """Print the tokens of a training row, and what is remarkable about all rows."""
    from trishul_ray.cli.listing import tokens_table
    from trishul_ray.federation.prepare import encoded_rows

    with show_progress() as progress:
        dataset, task = encoded_rows(experiment, progress.task_progress("preparing data"))
    print_table(tokens_table(dataset.train, task, row))
    for remark in task.remarks(dataset.train):
        print_field("rows", remark)


def _show_partition(experiment: "Experiment") -> None:
    """Print the rows of each client by label."""
    from trishul_ray.cli.listing import describe_partition, partition_table
    from trishul_ray.data.partition import count_labels  # computes with tensors
    from trishul_ray.federation.prepare import coverage_of, prepare_rows

    with show_progress() as progress:
        prepared = prepare_rows(experiment, progress.task_progress("preparing data"))
    held = count_labels(prepared.dataset.train, prepared.shards, experiment.partition)
    print_line(describe_partition(held, experiment))
    print_table(partition_table(held))
    print_field("data", coverage_of(experiment, prepared).sentence)


def _partition_overrides(text: str) -> list[str]:
    """Return ``KIND`` or ``dirichlet:ALPHA`` as key=value overrides."""
    kind, colon, alpha = text.partition(":")
    if colon and kind != "dirichlet":
        raise InputError(f"--partition {text!r}: only dirichlet has an alpha, as dirichlet:0.1")
    return [f"partition.kind={kind}", *([f"partition.alpha={alpha}"] if colon else [])]
