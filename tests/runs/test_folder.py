"""What killed processes leave of finished runs."""

from filelock import FileLock

from trishul_ray.report.summary import mark_finished, times_finished
from trishul_ray.runs.folder import tidy_finished
from trishul_ray.storage.store import Store


def test_locks_of_killed_processes_are_removed(tmp_path):
    for id in ("finished", "held", "unfinished"):
        (tmp_path / f".{id}.lock").touch()
    with FileLock(tmp_path / ".held.lock"):
        tidy_finished(str(tmp_path), {"finished", "held"})
    assert {path.name for path in tmp_path.iterdir()} == {".held.lock", ".unfinished.lock"}


def test_unfinished_files_in_a_bucket_are_removed(s3_server, s3_bucket):
    uri = s3_bucket("runs")
    bucket = uri.split("/")[2]
    for id in ("noted", "killed", "other"):
        for name in ("result.json", ".result.json.1.tmp"):
            s3_server.client().put_object(Bucket=bucket, Key=f"runs/{id}/{name}", Body=b"{}")
    mark_finished(Store.open(uri).child("noted"))
    tidy_finished(uri, {"noted", "killed"})
    assert times_finished(Store.open(uri)).keys() == {"noted", "killed"}
    left = [key for key in s3_server.keys(bucket, "runs") if key.endswith(".tmp")]
    assert left == ["runs/noted/.result.json.1.tmp", "runs/other/.result.json.1.tmp"]
