"""The commands ``trishul claims`` and ``trishul theory``."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from trishul_ray.cli.output import Plugins, as_typed, print_field, print_line, print_table
from trishul_ray.cli.run import Runs
from trishul_ray.cli.sweeps import Profile, RunsOption, load_sweeps, read_outcomes, split_arguments
from trishul_ray.errors import InputError
from trishul_ray.storage.durable import check_writable, write_file

if TYPE_CHECKING:
    from trishul_ray.paper.claims import Finding
    from trishul_ray.paper.theory import Check


def claims(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE ...]",
            help="The overrides that the tables were run with.",
            show_default=False,
        ),
    ] = None,
    profile: Profile = "paper",
    runs: RunsOption = None,
    output: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Also write every comparison.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Print what the paper claims beside what finished runs show: seen or not, with the numbers.

    - `trishul claims --profile smoke`
    - `trishul claims --profile small --csv claims.csv`

    Runs nothing. Where runs are missing it says which command would make them. The page of the
    command `report` has the same, with every comparison.
    """
    # Imported here, so that other commands start without them.
    from trishul_ray.paper.claims import all_claims, judge
    from trishul_ray.paper.claims_section import claims_csv
    from trishul_ray.report.page import comparable, departures

    names, overrides = split_arguments(arguments or [])
    if names:
        raise InputError(f"{names[0]!r} is no override: write FIELD=VALUE")
    if output is not None:
        check_writable(output.absolute().parent, "--csv")
    needed = dict.fromkeys(claim.sweep for claim in all_claims())
    outcomes = read_outcomes(load_sweeps([*needed, *overrides], profile, runs))
    findings = judge(outcomes)
    print_table(claims_table(findings))
    print_line(f"{profile}: {comparable(outcomes)}")
    if departs := departures(outcomes):
        print_line(f"departures: {'; '.join(departs)}")
    missing = dict.fromkeys(finding.command for finding in findings if finding.command)
    for command in missing:
        place = f" {shlex.quote(f'storage.runs={runs}')}" if runs is not None else ""
        print_field("missing", as_typed(command + place))
    if output is not None:
        write_file(output, claims_csv(findings).encode())
        print_field("written", output)


def theory(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="Run id, or its folder; default: the stand-in.")
    ] = "",
    runs: Runs = "runs",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the stand-in's training.")] = 10000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the stand-in.")] = 0,
    plugin: Plugins = None,
) -> None:
    """Print the paper's bounds beside measured numbers, and which of them hold.

    They are about the variance of uploads, the allocation of heads, nuclear norms and convergence:
    on federated least squares on the cores, in half a minute; with RUN, what the files of a
    finished run tell. A bound that fails, fails; nothing is an error.
    """
    from trishul_ray import api
    from trishul_ray.paper.theory import run_checks, stand_in_checks
    from trishul_ray.report.summary import RunSummary
    from trishul_ray.storage.store import Store

    if run:
        home = Store.open(api.load(run, runs=runs).path)
        checks = run_checks(RunSummary.read(home), home)
        if not checks:
            raise InputError(f"run {run!r} has no core heads: no theorem is about it")
    else:
        checks = stand_in_checks(seed, rounds)
    print_table(checks_table(checks))
    print_field("holds", f"{sum(check.holds for check in checks)} of {len(checks)}")


def claims_table(findings: "Sequence[Finding]") -> Table:
    """Return the claims for the terminal, with the number of the decisive part of each."""
    table = Table("claim", "paper", "on", "number", "verdict")
    last = None
    for finding in findings:
        claim = finding.claim
        head = ("", "") if claim is last else (claim.title, claim.place)
        row = (*head, finding.label, finding.summary, finding.told)
        table.add_row(*map(Text, row))
        last = claim
    return table


def checks_table(checks: "Sequence[Check]") -> Table:
    """List statements of the paper, measured beside bound, and whether they hold."""
    table = Table(
        "statement",
        "setting",
        Column("measured", justify="right"),
        "",
        Column("bound", justify="right"),
        Column("ratio", justify="right"),
        "holds",
        "note",
    )
    statement = ""
    for check in checks:
        table.add_row(
            "" if check.statement == statement else check.statement,
            check.setting,
            f"{check.measured:.4g}",
            check.relation,
            f"{check.bound:.4g}",
            f"{check.ratio:.3g}" if check.bound else "",
            "yes" if check.holds else "no",
            check.note,
        )
        statement = check.statement
    return table
