"""The paper's claims: each verdict on invented numbers, and all of them on real runs of seconds."""

import csv
import dataclasses
import io
import math

import numpy as np
import pytest
from fake_cells import parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from invented_outcomes import invent_run, product, random_of, square
from rich.console import Console
from scipy import stats
from shipped import shipped

from trishul_ray.paper.claims import VERDICTS, Claim, Part, all_claims, judge, measure_of
from trishul_ray.paper.claims_section import claims_csv
from trishul_ray.paper.commands import claims_table
from trishul_ray.paper.numbers import PAPER
from trishul_ray.report.outcomes import SweepOutcome
from trishul_ray.report.page import write_report
from trishul_ray.report.statistics import estimate
from trishul_ray.runs.runner import run_experiment
from trishul_ray.storage.store import Store
from trishul_ray.sweeps.cells import distinct
from trishul_ray.sweeps.loading import find_sweeps
from trishul_ray.sweeps.status import collect, examine
from trishul_ray.tracking.progress import RunProgress

SEEDS = ("0", "1", "2")
UNIFORM, FILLED = "Uniform", "Concave water-filling (TRISHUL)"
SETTINGS = ("w/o penalty (lambda=0)", "w/ penalty (lambda=0.01)", "RAVAN")
LEVELS = {"RAVAN": 1.0, "w/o penalty (lambda=0)": 0.8, "w/ penalty (lambda=0.01)": 0.6}
LAMBDAS = ("0 (no penalty)", "0.001", "0.01 (ours)", "0.1", "1.0")


def sweep(name, axes, value, *, profile="small", overrides=(), records=None, metric="accuracy"):
    """A sweep of finished runs; ``value(labels)`` is None for one that is missing."""
    cells = []
    for labels in product({**axes, "seed": SEEDS}):
        number = value(labels)
        status = "finished" if number is not None else "missing"
        cell = invent_run(labels, number or 0.0, status=status, metric=metric)
        if records is not None and number is not None:
            home = records[0].child(cell.id)
            home.write("metrics.parquet", parquet(records[1](labels)))
            cell = dataclasses.replace(cell, home=home)
        cells.append(cell)
    return SweepOutcome(
        name=name, title=name, profile=profile, description="", axes={**axes, "seed": SEEDS},
        shown={}, tables=(), figures=(), cells=tuple(cells), overrides=overrides,
    )  # fmt: skip


def allocation(differences, **options):
    """Water-filling minus uniform, in points, by seed; None for a missing run."""
    axes = {"allocation": (UNIFORM, FILLED), "dataset": ("cifar100",), "partition": ("iid",)}
    by_seed = dict(zip(SEEDS, differences, strict=True))

    def value(labels):
        level = 60.0 + 5 * int(labels["seed"])  # what a seed gives both does not matter
        more = by_seed[labels["seed"]] if labels["allocation"] == FILLED else 0.0
        return None if more is None else level + more

    return sweep("allocation", axes, value, **options)


def only(outcome, name="water-filling"):
    (finding,) = [each for each in judge([outcome]) if each.claim.name == name]
    return finding


def named(name):
    return next(claim for claim in all_claims() if claim.name == name)


def test_every_claim_is_about_cells_that_the_papers_sweeps_have():
    names = [claim.name for claim in all_claims()]
    assert len(names) == len(set(names)) >= 20
    wanted = {"exact-aggregation", "variance-lambda", "alignment", "entropy-and-rank", "between"}
    wanted |= {"water-filling", "lambda-peak", "gains", "overhead", "order"}
    assert wanted <= set(names)
    for claim in all_claims():
        found = shipped("paper")[claim.sweep]
        assert claim.paper is None or claim.paper in {*PAPER.tables(), *PAPER.figures()}
        assert claim.by in found.axes
        assert bool(claim.pairs) != (claim.at_most is not None)
        for label in [*claim.labels, *(label for pair in claim.pairs for label in pair)]:
            assert label in found.axes[claim.axis], (claim.name, label)
        for axis, labels in claim.where.items():
            assert {*labels} <= {*found.axes[axis]}, claim.name
        if claim.gain is not None:
            assert {*claim.gain.chain} <= {*found.axes[claim.gain.axis]}


@pytest.mark.parametrize("profile", ["paper", "small", "smoke"])
def test_a_profile_without_runs_says_which_command_makes_them(profile, tmp_path, monkeypatch):
    names = dict.fromkeys(claim.sweep for claim in all_claims())
    sweeps = [shipped(profile)[name] for name in names]
    monkeypatch.chdir(tmp_path)  # where no runs are
    findings = judge(collect(sweeps, examine(distinct(sweeps))))
    assert {finding.claim.name for finding in findings} >= {"between", "lambda-peak", "gains"}
    for finding in findings:
        assert finding.verdict == "no runs"
        assert finding.command == f"trishul table {finding.claim.sweep} --profile {profile}"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((1.0, 1.1, 0.9), "seen"),
        ((-1.0, -1.1, -0.9), "reversed"),
        ((0.01, -0.02, 0.02), "not seen"),
        ((0.1, 0.11, 0.09), "not seen"),  # decided to be above 0, and too small to count
        ((3.0, -2.0, 1.0), "undecided"),
        ((None, None, None), "no runs"),
        ((0.0, 0.0, 0.0), "not seen"),  # the same runs
        ((1.0, None, None), "undecided"),  # one seed
        ((1.0, 1.1, None), "seen"),
        ((0.7, 0.7, 0.7), "undecided"),  # no spread
    ],
)
def test_the_verdict_of_one_comparison(differences, verdict):
    finding = only(allocation(differences))
    assert finding.verdict == verdict
    (part,) = finding.parts
    known = [each for each in differences if each is not None]
    assert part.seeds == len(known)
    assert part.number == (pytest.approx(np.mean(known)) if known else None)
    assert bool(finding.command) == (verdict == "no runs")
    if 1 < len(known) < 3:  # a number says how much of what is planned it has
        assert part.shown.endswith("), 2 of 3")
    elif verdict == "seen":
        assert part.shown.endswith(")")


TABLES = {
    "nuclear": "tab:ablation_nuclear", "lambda": "tab:lambda_sensitivity", "vision": "tab:vision",
    "allocation": "tab:ablation_waterfilling", "heterogeneity": "tab:extreme_heterogeneity",
    "scaling": "tab:ablation_scaling", "language": "tab:language",
    "initialization": "tab:ablation_init", "compute": "tab:ablation_heterogeneity",
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_own_numbers_show_its_claims(name):
    """With hardly any spread, and with room: half of each difference would still count."""
    found = shipped("paper")[name]
    axes = {axis: labels for axis, labels in found.axes.items() if axis != "seed"}

    def value(labels):
        where = {axis: label for axis, label in labels.items() if axis != "seed"}
        number = PAPER.table_value(TABLES[name], where)
        return None if number is None else number + 1e-3 * random_of(*labels.values()).normal()

    findings = [f for f in judge([sweep(name, axes, value)]) if "score" in f.claim.measures]
    assert findings
    for finding in findings:
        assert finding.verdict == "seen", (finding.claim.name, finding.label)
        smallest = min(part.number for part in finding.parts)
        assert finding.claim.least <= smallest / 2 + 0.01, (finding.claim.name, smallest)


@settings(deadline=None, max_examples=40)
@given(
    differences=st.lists(st.floats(-3, 3), min_size=3, max_size=3).filter(lambda x: np.std(x) > 0.1)
)
def test_the_interval_is_that_of_a_paired_t_test(differences):
    (part,) = only(allocation(tuple(differences))).parts
    expected = stats.ttest_1samp(np.round(differences, 9), 0.0).confidence_interval()
    assert part.interval == pytest.approx((expected.low, expected.high), abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(number=st.floats(-3, 3), half=st.floats(0.01, 2), wider=st.floats(1, 3))
def test_a_claim_and_its_opposite_are_never_both_seen(number, half, wider):
    claim = named("water-filling")
    ends = ((number - half, number + half), (number - wider * half, number + wider * half))
    higher, lower = (
        Part("", "score", side, percent=True, number=number, interval=ends[0], strict=ends[1])
        for side in ("higher", "lower")
    )
    pair = higher.verdict(claim), lower.verdict(claim)
    assert pair != ("seen", "seen") and pair != ("reversed", "reversed")
    if pair[0] == "reversed":
        assert pair[1] in ("seen", "not seen")


def test_equal_scores_of_runs_that_differ_show_no_effect_and_no_absence_of_one():
    outcome = allocation((0.0, 0.0, 0.0))
    assert only(outcome).verdict == "not seen"  # the runs have one state
    cells = tuple(
        dataclasses.replace(cell, summary=dataclasses.replace(cell.summary, state_sha256=cell.id))
        for cell in outcome.cells
    )
    assert only(dataclasses.replace(outcome, cells=cells)).verdict == "undecided"


@pytest.mark.parametrize(
    ("missing", "error", "verdict"),
    [
        ("", 3e-8, "seen"),
        ("2", 3e-8, "undecided"),
        ("2", 1.0, "not seen"),
        ("", math.nan, "no runs"),
    ],
)
def test_a_bound_is_seen_if_all_runs_are_below_it(tmp_path, missing, error, verdict):
    axes = {"setting": SETTINGS, "dataset": ("cifar100",)}
    rounds = [{"round": 0.0}, {"round": 1.0, "aggregation_error": 1e-8}]
    rounds.append({"round": 2.0, "aggregation_error": error})
    records = (Store.open(str(tmp_path)), lambda labels: rounds)

    def value(labels):
        return None if labels["seed"] == missing else 60.0

    outcome = sweep("nuclear", axes, value, records=records)
    assert only(outcome, "exact-aggregation").verdict == verdict


def test_a_loss_is_better_if_lower():
    finding = only(allocation((-0.1, -0.11, -0.09), metric="test_loss"))
    assert finding.verdict == "seen"
    assert finding.parts[0].shown.startswith("−0.00")


def peak(levels, noise=0.05):
    def value(labels):
        place = LAMBDAS.index(labels["lambda"])
        return levels[place] + noise * math.sin(7 * place + 3 * int(labels["seed"]))

    return sweep("lambda", {"lambda": LAMBDAS, "dataset": ("cifar100",)}, value)


@pytest.mark.parametrize(
    ("levels", "verdict", "seen"),
    [
        ((76, 78, 79, 78, 74), "seen", 4),
        ((81, 82, 79, 81, 83), "reversed", 0),
        ((76, 78, 79, 82, 74), "not seen", 3),  # it peaks at 0.1
        ((79, 79, 79, 79, 74), "not seen", 1),
    ],
)
def test_parts_of_a_claim_stand_or_fall_together(levels, verdict, seen):
    finding = only(peak(levels), "lambda-peak")
    assert (finding.verdict, finding.verdicts.count("seen")) == (verdict, seen)
    assert finding.decisive.verdict(finding.claim) in (verdict, "reversed")
    assert f"{seen} of 4 seen" in finding.summary


def test_one_part_of_several_fails_only_at_a_stricter_level():
    values = estimate([-0.35, -0.2, -0.3])
    assert values.interval()[1] < 0 < values.interval(4)[1]
    for of in (1, 4):
        low, _ = stats.t.interval(1 - 0.05 / of, 2, values.mean, values.deviation / math.sqrt(3))
        assert values.interval(of)[0] == pytest.approx(low)
    claim = named("lambda-peak")
    assert claim.least is not None
    part = Part("", "score", "higher", True, values.mean, values.interval(), values.interval(4), 3)
    assert part.verdict(claim) == "not seen" or part.strict[1] >= claim.least
    alone = dataclasses.replace(part, strict=values.interval())
    assert alone.verdict(claim) == "reversed"


def test_the_lead_is_compared_between_partitions():
    axes = {
        "method": ("RAVAN", "TRISHUL"), "dataset": ("cifar100",),
        "partition": ("dirichlet(0.3)", "dirichlet(0.1)", "dirichlet(0.05)"),
    }  # fmt: skip
    leads = dict(zip(axes["partition"], (3.2, 4.3, 6.0), strict=True))

    def value(labels):
        seed, lead = int(labels["seed"]), leads[labels["partition"]]
        wobble = 0.05 * math.sin(5 * seed + len(labels["partition"]))
        return 60 + wobble + lead * (labels["method"] == "TRISHUL") * (1 + 0.02 * seed)

    finding = only(sweep("heterogeneity", axes, value), "gains")
    assert finding.verdict == "seen"
    gains = [part.number for part in finding.parts]
    assert gains == pytest.approx([1.7 * 1.02, 1.1 * 1.02])
    # A label that the sweep leaves out is named, and is no part.
    best = only(sweep("heterogeneity", axes, value), "best")
    assert len(best.parts) == 1
    assert "Not in the sweep: SCAFFOLD+LoRA, Fed-SB, FedIT" in best.differs


def diagnosed(tmp_path, levels, **more):
    """The sweep of the penalty, with diagnostics; ``levels(setting)`` are factors."""
    axes = {"setting": SETTINGS, "dataset": ("cifar100",), "partition": ("dirichlet(0.3)",)}

    def rounds(labels):
        seed = int(labels["seed"])
        factor = levels[labels["setting"]] * (1 + 1e-4 * seed * len(labels["setting"]))
        row = {
            "aggregation_error": 3e-8, "delta_aggregation_variance": 10.0**seed * factor,
            "delta_spectral_entropy": 2 * factor, "delta_effective_rank": 8 * factor,
            "delta_principal_angle_similarity": 0.5 / factor,
            "delta_dominant_similarity": 0.4 / factor, **more,
        }  # fmt: skip
        return [{"round": 0, "loss": 1.0}, {"round": 1, **row}, {"round": 2, **row}]

    store = Store.open(str(tmp_path))
    return sweep("nuclear", axes, lambda labels: 70.0, records=(store, rounds))


def test_diagnostics_come_from_the_records(tmp_path):
    found = {f.claim.name: f for f in judge([diagnosed(tmp_path, LEVELS)])}
    for name in ("exact-aggregation", "variance", "alignment", "entropy-and-rank", "between"):
        assert found[name].verdict == "seen", name
    assert len(found["between"].parts) == 10
    # The scale of a seed does not matter to a ratio.
    assert found["variance"].parts[0].number == pytest.approx(-0.4, abs=2e-3)
    assert measure_of(found["variance"].parts[0].measure).ratio
    assert found["variance"].parts[0].shown.startswith("−39.9 %")


def test_lambda_0_beyond_ravan_is_not_between(tmp_path):
    levels = {"RAVAN": 0.9, "w/o penalty (lambda=0)": 1.0, "w/ penalty (lambda=0.01)": 0.6}
    outcome = diagnosed(tmp_path, levels, aggregation_error=0.3)
    assert only(outcome, "between").verdict == "not seen"
    assert only(outcome, "entropy-and-rank").verdict == "seen"
    assert only(outcome, "exact-aggregation").verdict == "not seen"


def test_unreadable_files_cost_their_claims_alone(tmp_path):
    outcome = diagnosed(tmp_path, LEVELS)
    outcome.cells[0].home.write("metrics.parquet", b"nothing")
    found = {f.claim.name: f for f in judge([outcome])}
    assert found["between"].problem and found["between"].verdict == "no runs"
    assert found["penalty"].verdict == "not seen"  # it reads result.json alone


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.01, "seen"), (0.3, "not seen"), (-0.1, "not seen"), (0.0185, "undecided")],
)
def test_an_overhead_lies_within_a_range(tmp_path, share, verdict):
    def rounds(labels):
        slower = 1 + share * (labels["method"] == "TRISHUL")
        jitter = 1 + 0.001 * int(labels["seed"]) * (labels["method"] == "TRISHUL")
        # The first round warms up, and does not count.
        seconds = [50.0, *[2.0 * slower * jitter] * 3]
        return [{"round": n, "client_seconds": s} for n, s in enumerate(seconds, 1)]

    axes = {"method": ("RAVAN", "TRISHUL"), "model": ("ViT-B/16",)}
    records = (Store.open(str(tmp_path)), rounds)
    finding = only(sweep("overhead", axes, lambda labels: 70.0, records=records), "overhead")
    assert finding.parts[0].number == pytest.approx((1 + share) * 1.001 - 1, abs=1e-5)
    assert (finding.verdict, finding.timed) == (verdict, True)


def test_sweeps_of_ones_own_decide_nothing():
    assert judge([allocation((1.0, 1.1, 0.9), profile="custom")]) == ()


def test_the_command_has_the_overrides():
    missing = allocation((None, 1.0, 1.0), overrides=("budget=4", "model.name=a b"))
    finding = only(missing)
    assert finding.verdict == "undecided" and not finding.command  # two seeds are there
    finding = only(allocation((None,) * 3, overrides=("budget=4", "model.name=a b")))
    expected = "trishul table allocation --profile small budget=4 'model.name=a b'"
    assert finding.command == expected and "overridden: budget=4" in finding.differs


def test_the_report_has_the_claims(tmp_path):
    sweeps = [allocation((1.0, 1.1, 0.9)), peak((76, 78, 79, 82, 74))]
    page = write_report(sweeps, tmp_path, figures=square).read_text(encoding="utf-8")
    section = page.partition('<h2 id="claims">')[2].partition("</section>")[0]
    assert "concave water-filling performs best" in section and "Table 8, line 1060" in section
    assert "<b>seen</b>" in section and "<b>not seen</b>" in section
    assert "1 seen, 1 not seen, 2 no runs" in section and "All 4 comparisons" in section
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## What the paper claims" in text and "1 of 4 seen" not in text
    rows = list(csv.DictReader(io.StringIO((tmp_path / "tables/claims.csv").read_text())))
    parts = sum(len(finding.parts) for finding in judge(sweeps))
    assert len(rows) == parts and {row["verdict"] for row in rows} <= {*VERDICTS}
    shown = next(row for row in rows if row["claim"] == "water-filling")
    assert float(shown["number"]) == pytest.approx(1.0)
    assert float(shown["low"]) < 1 < float(shown["high"]) and shown["seeds"] == "3"


def test_a_page_without_claims_has_no_section(tmp_path):
    own = allocation((1.0, 1.1, 0.9), profile="custom")
    page = write_report([own], tmp_path, figures=square).read_text(encoding="utf-8")
    assert "What the paper claims" not in page
    assert not (tmp_path / "tables" / "claims.csv").exists()


@pytest.fixture(scope="module")
def real(tmp_path_factory, plain_figures):
    """Outcomes of the smoke profile's ablation of the penalty, of which some cells were run."""
    folder = tmp_path_factory.mktemp("runs")
    overrides = ["federation.rounds=2", "federation.local_steps=2", "evaluation.limit=32"]
    overrides += ["model.init=random", "resources.backend=inline", "tracking.mlflow=false"]
    (found,) = find_sweeps(["nuclear"], "smoke", [*overrides, f"storage.runs={folder}"])
    quiet = RunProgress(2, Console(file=io.StringIO()))
    for cell in found.cells:
        labels = cell.labels
        place = (labels["dataset"], labels["partition"])
        if place == ("cifar100", "dirichlet(0.3)") and labels["seed"] != "2":
            run_experiment(cell.experiment, quiet)
    return collect([found], examine(distinct([found])))


@pytest.mark.slow
def test_real_runs_are_judged(real):
    found = {(f.claim.name, f.label): f for f in judge(real)}
    digits = "digits (for CIFAR-100)"
    exact = found["exact-aggregation", digits]
    # The claim is about every run of the sweep, of which some are missing.
    assert exact.verdict == "undecided" and "of" in exact.parts[0].shown
    assert 0 < max(part.number for part in exact.parts) < 1e-6
    between = found["between", digits]
    assert len(between.parts) == 10 and between.verdict != "no runs"
    assert all(part.seeds == 2 and math.isfinite(part.number) for part in between.parts)
    assert found["penalty", "synthetic shapes (for SVHN)"].verdict == "no runs"
    written = claims_csv(judge(real))
    assert written == claims_csv(judge(real)) and written.count("\n") > 20
    shown = io.StringIO()
    Console(file=shown, width=200).print(claims_table(judge(real)))
    assert "Aggregation is exact" in shown.getvalue()


def test_names_of_a_claim_are_checked():
    known = all_claims()[0].model_dump()
    with pytest.raises(ValueError, match="measure"):
        Claim(**{**known, "measures": {"score": "sideways"}})
