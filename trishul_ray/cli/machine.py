"""The command that checks the machine: doctor."""

from typing import Annotated

import typer

from trishul_ray.cli.output import out


def doctor(
    start_ray: Annotated[
        bool, typer.Option("--ray", help="Also start and stop a local Ray, as a run would.")
    ] = False,
    runs: Annotated[
        str, typer.Option(help="Folder or URI where runs would be stored.", envvar="TRISHUL_RUNS")
    ] = "runs",
) -> None:
    """Check versions, devices, Ray, storage and the hub: what would fail, and how to fix it."""
    from trishul_ray.doctor import diagnose
    from trishul_ray.doctor.check import exit_code, render

    checks = diagnose(runs=runs, start_ray=start_ray)
    render(checks, out)
    raise typer.Exit(exit_code(checks))
