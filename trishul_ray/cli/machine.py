"""Commands for this machine: check a plug-in, check the machine, and open MLflow."""

import os
import sys
from typing import Annotated

import typer

from trishul_ray.cli.output import Plugins, Runs, print_field, print_line
from trishul_ray.errors import InputError
from trishul_ray.plugins.loading import load_plugin


def check(plugin: Plugins = None) -> None:
    """Check the methods, stages, datasets and tasks of a plug-in file.

    Prints one line per check: ok, failed with the reason, or skipped. The exit code is 1 if a check
    failed.

    - `trishul check --plugin mine.py`
    """
    from trishul_ray.contract.plugin_checks import check_plugin

    if not plugin:
        raise InputError("no plug-in to check; run trishul check --plugin mine.py")
    failed = 0
    for file in plugin:
        for found in check_plugin(load_plugin(file)):
            failed += found.result == "failed"
            reason = f": {found.reason}" if found.reason else ""
            print_line(f"{found.result:<7}  {found.subject}  {found.name}{reason}")
    raise typer.Exit(1 if failed else 0)


def doctor(
    start_ray: Annotated[
        bool, typer.Option("--ray", help="Also start and stop Ray as a run would.")
    ] = False,
    clean: Annotated[
        bool,
        typer.Option(
            "--clean",
            help="Only remove outdated prepared user data, Ray folders of finished runs, temporary "
            "files of killed processes, and data and weights that no run has used for a month.",
        ),
    ] = False,
    runs: Runs = "runs",
) -> None:
    """Check this machine: versions, devices, Ray, folders and the hub."""
    from trishul_ray.cli.doctor import diagnose, remove_leftovers
    from trishul_ray.config.paths import StoragePaths

    if clean:
        removed = remove_leftovers(StoragePaths.at().cache, runs)
        for path in removed:
            print_line(f"removed {path}")
        print_line(f"{len(removed)} removed")
        return
    checks = diagnose(runs, start_ray)
    for check in checks:
        print_line(f"{check.status:<4}  {check.name:<8}  {check.detail}")
    failed = [check.name for check in checks if check.status == "fail"]
    print_line(f"a run would fail here: {', '.join(failed)}" if failed else "runs work here")
    raise typer.Exit(bool(failed))


def ui(
    runs: Runs = "runs",
    uri: Annotated[
        str | None,
        typer.Option(help="MLflow tracking URI; default: mlflow.db in the folder of runs."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000,
) -> None:
    """Open the runs in MLflow: start `mlflow ui` on localhost, until Ctrl-C."""
    from trishul_ray.tracking.store import SETTINGS, is_server, sqlite_file, tracking_uri, view_of

    store = tracking_uri(uri, runs)
    if is_server(store):
        print_field("MLflow", store)
        return
    file = sqlite_file(store)
    if file is not None and not file.exists():
        raise InputError(f"{file} does not exist: no run was logged there; use --runs or --uri")
    print_field("MLflow", f"http://127.0.0.1:{port}/{view_of(store)}  (stop with Ctrl-C)")
    sys.stdout.flush()
    # Pass the stores in the environment, since they may contain a password and other users cannot
    # read it. PYTHONSAFEPATH ignores modules in this folder.
    stores = {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_REGISTRY_STORE_URI": store}
    safe = {"PYTHONSAFEPATH": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    words = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    os.execve(sys.executable, [*words, "--workers", "1"], os.environ | SETTINGS | stores | safe)
