"""Commands on what a run is made of: methods, models, datasets, pretraining."""

from pathlib import Path
from typing import Annotated

import typer

import trishul_ray.cli.lazy as lazy
from trishul_ray import plugins
from trishul_ray.cli.output import (
    Plugins,
    err,
    print_field,
    print_line,
    print_table,
    show_progress,
)
from trishul_ray.errors import InputError
from trishul_ray.plugins import load_plugin


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
    builtin = lazy.pretraining.get_builtin(name, dataset)
    with show_progress() as progress, lazy.session.ray_session():
        report = progress.task_progress(f"pretraining {name}")
        folder = lazy.pretraining.pretrain(
            builtin, lazy.config.Places.at(cache, hub), progress=report
        )
    print_line(f"{name}: {folder}")


def methods(plugin: Plugins = None) -> None:
    """List the methods: what they do, what they send, where they are published."""
    print_table(lazy.listing.methods_table())
    for fault in plugins.faults():
        print_line(f"warning: {fault}", err)


def check(plugin: Plugins = None) -> None:
    """Check what a file of your own defines: methods with their adapters, datasets, tasks, codecs.

    A line for each promise of the contract: ok, failed with the reason, or skipped. The exit code
    is 1 if one failed. Methods and tasks run on small data that the package brings.

    - `trishul check --plugin mine.py`
    """
    if not plugin:
        raise InputError("name the file to check: trishul check --plugin mine.py")
    failed = 0
    for file in plugin:
        for found in lazy.plugin_checks.check_plugin(load_plugin(file)):
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
    if not arguments:
        print_table(lazy.listing.models_table())
        return
    name, *overrides = arguments
    experiment = lazy.loading.load_experiment(None, [f"model={name}", *overrides])
    print_table(lazy.listing.heads_table(lazy.fit.heads_by_block(experiment)))


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
    picture: Annotated[Path | None, typer.Option(help="Also draw it, as a PNG file.")] = None,
    plugin: Plugins = None,
) -> None:
    """List the datasets; with a name, show how its rows are partitioned among the clients.

    - `trishul datasets digits --partition dirichlet:0.1 federation.clients=10`
    - `trishul datasets mrqa --picture mrqa.png` — by sub-dataset
    - `trishul datasets table data.path=notes.csv data.columns='{text: body, label: topic}'`
    """
    if not arguments:
        print_table(lazy.listing.datasets_table(lazy.prepare.describe_datasets()))
        for fault in lazy.prepare.dataset_faults():
            print_line(f"warning: {fault}", err)
        return
    name, *overrides = arguments
    lazy.prepare.find_source(name)  # an unknown name is refused first
    if partition is not None:
        overrides += _partition_overrides(partition)
    # Rows are partitioned among clients, whatever the cohort.
    whole = ["federation.clients_per_round=1", *overrides]
    experiment = lazy.loading.load_experiment(None, [f"dataset={name}", *whole])
    with show_progress() as progress:
        prepared = lazy.rows.prepare_rows(experiment, progress.task_progress("preparing data"))
    held = lazy.partition.count_labels(
        prepared.dataset.train, prepared.shards, experiment.partition
    )
    print_line(lazy.listing.describe_partition(held, experiment))
    print_table(lazy.listing.partition_table(held))
    coverage = lazy.rows.coverage_of(experiment, prepared.dataset).sentence
    print_field("data", coverage)
    if picture is not None:
        lazy.drawing.save_png(
            lazy.clients.draw_rows, lazy.clients.RowsData(held), picture, coverage
        )
        print_field("picture", picture)


def _partition_overrides(text: str) -> list[str]:
    """Return ``KIND`` or ``dirichlet:ALPHA`` as key=value overrides."""
    kind, colon, alpha = text.partition(":")
    if colon and kind != "dirichlet":
        raise InputError(f"--partition {text!r}: only dirichlet has an alpha, as dirichlet:0.1")
    return [f"partition.kind={kind}", *([f"partition.alpha={alpha}"] if colon else [])]
