"""Audit the files of a run against those of an undisturbed run."""

from contract.digests import differences, outcome

from trishul_ray.federation.checkpoint import open_checkpoints, round_of, run_folder, state_digest
from trishul_ray.report.summary import RunSummary, read_metrics
from trishul_ray.runs.mlflow_log import grouped_metrics
from trishul_ray.tracking.store import is_server, open_client


def rounds_saved(runs):
    """Return the newest round that each run in a folder has saved, keyed by id."""
    saved = {}
    for file in runs.glob("*/checkpoints/round-*"):
        id = file.parent.parent.name
        saved[id] = max(saved.get(id, 0), round_of(file.name))
    return saved


def audit(experiment, reference, paths, database):
    """Return the faults of a finished run, each as (kind, text).

    Args:
        reference: :func:`contract.digests.outcome` of the same run, undisturbed.
        paths: All paths in the storage of the run and in the cache.
        database: Database of MLflow with the run, or None.
    """
    home, checkpoint, wrong = run_folder(experiment), open_checkpoints(experiment).newest(), []
    if found := list(differences(reference, outcome(checkpoint))):
        wrong.append(("different", f"{len(found)} values, first {', '.join(found[:3])}"))
    summary = RunSummary.read(home)
    if summary.state_sha256 != state_digest(checkpoint.state):
        wrong.append(("different", "result.json names another state"))
    if damaged := summary.damaged_files(home):
        wrong.append(("different", f"damaged: {damaged}"))
    unfinished = [path for path in paths if path.suffix == ".tmp" or ".partial-" in path.name]
    if unfinished:
        wrong.append(("left", f"files: {', '.join(map(str, unfinished))}"))
    if database is not None:
        wrong += _audit_mlflow(experiment, home, summary.mlflow_run_id, database)
    return wrong


def _audit_mlflow(experiment, home, run_id, database):
    """Check that MLflow has one finished run with every point once per step."""
    client = open_client(f"sqlite:///{database}")
    group = client.get_experiment_by_name(experiment.tracking.experiment)
    runs = [] if group is None else client.search_runs([group.experiment_id])
    kept = [(run.info.run_id, run.info.status) for run in runs]
    if kept != [(run_id, "FINISHED")]:
        return [("lost", f"in MLflow: {kept}, in result.json: {run_id}")]
    records = {record["round"]: grouped_metrics(record) for record in read_metrics(home)}
    for name in sorted({name for record in records.values() for name in record}):
        history = client.get_metric_history(run_id, name)
        got = sorted((point.step, point.value) for point in history)
        if is_server(str(experiment.tracking.uri)):  # A request without a response is sent again.
            got = sorted(set(got))
        want = [(step, record[name]) for step, record in records.items() if name in record]
        if got != want:
            return [("lost", f"in MLflow, {name} has {got} for {want}")]
    return []
