"""Commands on the machine: check it, and open the page of its MLflow store."""

from pathlib import Path
from typing import Annotated

import typer

from trishul_ray.cli.output import out, print_field, print_line
from trishul_ray.errors import InputError


def doctor(
    start_ray: Annotated[
        bool, typer.Option("--ray", help="Also start and stop a local Ray, as a run would.")
    ] = False,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Instead, remove failed and outdated preparations of own data and Ray's folders "
            "of finished runs, unless used within the last hour; and rows passed from Python, "
            "weights prepared for mapping and copies of results in buckets, after a month; and "
            "what killed processes were writing into the cache or --runs.",
        ),
    ] = False,
    runs: Annotated[
        str, typer.Option(help="Folder or URI where runs would be stored.", envvar="TRISHUL_RUNS")
    ] = "runs",
) -> None:
    """Check versions, devices, Ray, storage and the hub: what would fail, and how to fix it."""
    from trishul_ray.cli.doctor import clean as remove_leftovers
    from trishul_ray.cli.doctor import diagnose, exit_code, render
    from trishul_ray.config.places import Places

    if clean:
        removed = remove_leftovers(Places.at().cache, runs)
        for folder in removed:
            print_line(f"removed {folder}")
        print_line(f"{len(removed)} removed")
        return
    found = diagnose(runs=runs, start_ray=start_ray)
    render(found, out)
    raise typer.Exit(exit_code(found))


def ui(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="Run id, or its folder; default: all runs.")
    ] = "",
    runs: Annotated[
        str, typer.Option(help="Folder where runs are stored.", envvar="TRISHUL_RUNS")
    ] = "runs",
    uri: Annotated[
        str | None,
        typer.Option(help="MLflow tracking URI; default: the store in the folder of runs."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port; default: the first free one from 5000 on."),
    ] = None,
) -> None:
    """Open MLflow's page of the runs on this machine, on localhost, until Ctrl-C."""
    from trishul_ray.tracking.mlflow_store import is_server, tracking_uri
    from trishul_ray.tracking.mlflow_ui import FIRST_PORT, free_port, page_of_run, serve_ui

    if "/" in run:
        runs, run = str(Path(run).parent), Path(run).name
    store = tracking_uri(uri, runs)
    page = page_of_run(store, run)
    if is_server(store):
        print_field("MLflow", store.rstrip("/") + page)
        return
    chosen = free_port(FIRST_PORT if port is None else port)
    if port is not None and chosen != port:
        raise InputError(f"--port {port} is in use")
    serve_ui(
        store, chosen, lambda address: print_field("MLflow", f"{address}{page}  (Ctrl-C ends it)")
    )
