"""Kill a run in an object store before any request; a repetition completes it.

The server kills its client, because no hook of Python sees the requests of Arrow.
"""

from dataclasses import replace

import pytest
from crashes import ALL, TINY, Place, crash_everywhere
from s3_server import KEYS, FaultyS3Server

from trishul_ray.experiment.loading import load_experiment

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(7200 if ALL else 900)]

#: A run with all kinds of files: client states are in separate files.
WORDS = [*TINY, "uploads.codec=int4", "uploads.error_feedback=true"]


@pytest.fixture(scope="module")
def server():
    server = FaultyS3Server()
    server.start()
    yield server
    server.end()


@pytest.fixture
def world(server, tmp_path, fork_environment, monkeypatch):
    """Create the storage of a run in a new bucket, its template, the bucket, and its observers."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    bucket = server.new_bucket()
    place = Place(tmp_path, server.uri(bucket, "runs"))
    place.restore(tmp_path / "nothing")
    other = place.run([*TINY, "seed=77"])
    assert other.code == 0, other.said
    server.replace(bucket, {})
    template = Place(tmp_path / "template")
    template.root.mkdir()
    template.restore(place.root)
    id = load_experiment(None, WORDS).id

    def observe():
        keys = (key.rpartition("/") for key in server.keys(bucket, ""))
        timed = ("round-", "clients-")
        names = [f"{at}/{name[:12] if name.startswith(timed) else name}" for at, _, name in keys]
        return place.observe(id) | {"objects": sorted(names), "uploads": server.uploads(bucket)}

    return place, template, bucket, observe


@pytest.mark.parametrize("late", [False, True], ids=["killed", "killed and listed late"])
def test_a_run_killed_before_a_request(server, world, late):
    """Kill a run before a request; a request without a response is executed before the next one.

    Late listings hide new files, but no hidden objects: a temporary object or a lease that no
    listing shows cannot be found.
    """
    place, template, bucket, observe = world
    newest = []

    def act(number):
        if number is not None:
            server.replace(bucket, {})
        server.watch(kill=number)
        ended = place.run(WORDS, started=server.sent_by)
        names = [n for n in dict.fromkeys(_written(server.requests, bucket)) if "/." not in n]
        newest[:] = [name for name in names if not name.endswith("/")][-2:]
        return replace(ended, calls=[*server.requests])

    def again():
        server.watch(late=newest if late else ())
        ended = place.run(WORDS, started=server.sent_by)
        server.watch()  # for the inspection of the bucket
        return ended

    stride = 30 if late else 15
    wrong = crash_everywhere(place, template, act, observe, first=7, stride=stride, again=again)
    assert wrong == {}


def _written(requests, bucket):
    """Return the keys of the objects that requests have written, in order."""
    for request in requests:
        path, _, query = request.partition(" ")[2].partition("?")
        if not request.startswith("DELETE") and "uploads" not in query and "partN" not in query:
            yield path.removeprefix(f"/{bucket}/")


def test_a_request_whose_answer_never_comes(server, world):
    place, template, bucket, observe = world
    server.watch()
    done = place.run(WORDS, started=server.sent_by)
    assert done.code == 0, done.said
    want, requests, wrong = observe(), [*server.requests], {}
    for number in range(1, len(requests) + 1, 1 if ALL else 17):
        place.restore(template.root)
        server.replace(bucket, {})
        server.watch(unanswered=number)
        done = place.run(WORDS, started=server.sent_by)
        got = observe() if done.code == 0 else {"code": done.said[-1000:]}
        if unlike := {k: (got.get(k), want[k]) for k in want if got.get(k) != want[k]}:
            wrong[f"{number} {requests[number - 1]}"] = unlike
    assert wrong == {}
