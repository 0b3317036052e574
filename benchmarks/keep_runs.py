"""Pack the numbers of finished runs into one archive, without models, spectra, figures and places.

Scores of generated answers are kept, the answers are not.

    python benchmarks/keep_runs.py RUNS ARCHIVE.tar.xz

`mkdir -p runs && tar -xf ARCHIVE.tar.xz -C runs` puts them back: a sweep that needs them takes them
as finished, on any machine with the same data and weights.
"""

import io
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

from trishul_ray.experiment.loading import load_experiment
from trishul_ray.report.outcomes import EVALUATION
from trishul_ray.report.summary import RunSummary
from trishul_ray.storage.store import Store

#: Fields that name the place of a run, and its user.
PLACES = ["storage.runs=runs", "tracking.mlflow=false", "tracking.parent_run=null"]


def main(runs: str, archive: str) -> None:
    """Write the archive; the same runs give the same bytes."""
    homes = sorted(path.parent for path in Path(runs).glob("*/result.json"))
    with tarfile.open(archive, "w:xz") as packed:
        for home in homes:
            for name, content in _kept(home).items():
                info = tarfile.TarInfo(f"{home.name}/{name}")
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))
    print(f"{len(homes)} runs in {archive}, {Path(archive).stat().st_size / 1e3:.0f} kB")


def _kept(home: Path) -> dict[str, bytes]:
    summary = RunSummary.read(Store.open(str(home)))
    experiment = load_experiment(home / "config.yaml", PLACES)
    assert experiment.id == summary.id == home.name
    names = [name for name in ("metrics.parquet", "test_rows.npz") if name in summary.files]
    moved = replace(
        summary,
        config=experiment.to_dict(),
        files=["config.yaml", *names],
        sha256={name: summary.sha256[name] for name in ("config.yaml", *names)},
        mlflow_run_id=None,
        logged_to=None,
        export=None,
    )
    return {
        "attempt.json": (home / "attempt.json").read_bytes(),
        "config.yaml": experiment.to_yaml(),
        "result.json": moved.to_json(),
        **{name: (home / name).read_bytes() for name in [*names, *_evaluations(home)]},
    }


def _evaluations(home: Path) -> list[str]:
    return [EVALUATION] if (home / EVALUATION).exists() else []


if __name__ == "__main__":
    main(*sys.argv[1:])
