"""Commands on the machine: check it, and show its runs in MLflow."""

import os
import sys
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
    runs: Annotated[str, typer.Option(help="Folder of runs.", envvar="TRISHUL_RUNS")] = "runs",
    uri: Annotated[
        str | None,
        typer.Option(help="MLflow tracking URI; default: mlflow.db in the folder of runs."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000,
) -> None:
    """Show runs in MLflow, on localhost until Ctrl-C: `mlflow ui --backend-store-uri ...`."""
    from trishul_ray.tracking.store import SETTINGS, is_server, sqlite_file, tracking_uri, view_of

    store = tracking_uri(uri, runs)
    if is_server(store):
        print_field("MLflow", store)
        return
    file = sqlite_file(store)
    if file is not None and not file.exists():
        raise InputError(f"{file} does not exist: no run was logged there; use --runs or --uri")
    print_field("MLflow", f"http://127.0.0.1:{port}/{view_of(store)}  (Ctrl-C ends it)")
    sys.stdout.flush()
    # In the environment, where no other user sees a password; modules of this folder stay out.
    stores = {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_REGISTRY_STORE_URI": store}
    safe = {"PYTHONSAFEPATH": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    words = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    os.execve(sys.executable, [*words, "--workers", "1"], os.environ | SETTINGS | stores | safe)
