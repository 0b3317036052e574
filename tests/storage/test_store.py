"""Files of a run on a pyarrow filesystem: atomic writes, and retries."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial

import pytest
from pyarrow import fs
from s3_server import options_at

from trishul_ray.errors import CorruptFileError, InputError, StorageError, StorageRefusedError
from trishul_ray.storage import store as storage
from trishul_ray.storage.store import Store


class Wrapper:
    """A filesystem that calls ``before`` with the name of each method, and may replace writes."""

    def __init__(self, inner, before=lambda name: None, on_write=None):
        self.inner, self.before, self.on_write = inner, before, on_write

    def __getattr__(self, name):
        def call(*args, **options):
            self.before(name)
            result = getattr(self.inner, name)(*args, **options)
            if name == "open_output_stream" and self.on_write is not None:
                return Stream(result, self.on_write)
            return result

        return call


class Stream:
    """An output stream that passes each write to ``on_write``, and closes like pyarrow's."""

    def __init__(self, inner, on_write):
        self.inner, self.on_write = inner, on_write

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.inner.close()

    def write(self, data):
        self.on_write(self.inner, data)


def wrapped(store, retry_seconds=0.0, **options):
    filesystem = Wrapper(store.filesystem, **options)
    return replace(store, filesystem=filesystem, retry_seconds=retry_seconds)


def everything_in(store):
    return store.filesystem.get_file_info(fs.FileSelector(store.root, allow_not_found=True))


DATA = bytes(range(256)) * 30_000  # 7.7 MB: more than one part of a multipart upload


@pytest.mark.parametrize("data", [b"", b"\0\1", DATA], ids=["empty", "small", "parts"])
@pytest.mark.parametrize("place", ["local", "s3"])
def test_round_trip(s3_bucket, tmp_path, place, data):
    store = Store.open(s3_bucket("runs") if place == "s3" else str(tmp_path)).child("abc")
    assert not store.exists("a.bin")
    store.write("a.bin", b"before")
    store.write("a.bin", data)
    assert store.read("a.bin") == data
    assert store.names() == ["a.bin"]
    store.remove("a.bin")
    store.remove("a.bin")
    assert not store.exists("a.bin")
    with pytest.raises(FileNotFoundError):
        store.read("a.bin")
    store.remove_all()
    assert not store.exists()


def test_folder_is_uploaded_with_its_subfolders(tmp_path):
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "x.txt").write_text("x")
    (source / "inner" / "y.txt").write_text("y")
    store = Store.open(str(tmp_path / "target"))
    store.upload_folder(source)
    assert store.read("x.txt") == b"x"
    assert store.child("inner").read("y.txt") == b"y"


def test_fragment_of_an_address_is_rejected(tmp_path):
    with pytest.raises(InputError, match=r"/x#1' must not contain '#'; write %23"):
        Store.open(f"file://{tmp_path}/x#1")
    for place in (f"file://{tmp_path}/x%231", f"{tmp_path}/x#1"):
        assert Store.open(place).root == f"{tmp_path}/x#1"


@pytest.mark.parametrize("name", ["/etc/passwd", "../b", "a/../../b", "a\0b", "a//b"])
@pytest.mark.parametrize("place", ["local", "s3"])
def test_names_outside_the_folder_are_rejected(s3_bucket, tmp_path, place, name):
    root = s3_bucket("runs") if place == "s3" else str(tmp_path / "runs")
    Store.open(root).write("b", b"mine")
    store = Store.open(root).child("abc")
    overwrite = partial(store.write, data=b"theirs")
    for action in (store.child, store.read, store.exists, store.remove, overwrite):
        with pytest.raises(CorruptFileError, match="is not the name of a file in a folder"):
            action(name)
    assert Store.open(root).read("b") == b"mine"


@pytest.mark.timeout(10)
def test_links_outside_and_pipes_are_rejected(tmp_path):
    folder, secret = tmp_path / "runs" / "abc", tmp_path / "secret"
    folder.mkdir(parents=True)
    secret.write_text("mine")
    (folder / "link").symlink_to(secret)
    (folder / "dangling").symlink_to(tmp_path / "new")
    (folder / "adapter").symlink_to(tmp_path)
    (folder / "inside").symlink_to(folder / "a.txt")
    os.mkfifo(folder / "pipe")
    (tmp_path / ".a.01234567.tmp").touch()
    (tmp_path / "moved").symlink_to(folder.parent)
    store = Store.open(str(tmp_path / "moved")).child("abc")
    overwrite = partial(store.write, data=b"theirs")
    for name in ("link", "dangling", "adapter", "adapter/secret", "pipe"):
        for action in (store.read, store.remove, store.child, overwrite):
            with pytest.raises(CorruptFileError, match=r"outside the folder|neither a file nor"):
                action(name)
    store.write("a.txt", b"1")
    assert store.read("inside") == b"1"
    store.remove_unfinished()
    store.remove_all()
    assert {path.name for path in tmp_path.iterdir()} == {
        *("runs", "moved", "secret", ".a.01234567.tmp")
    }
    assert secret.read_text() == "mine"


def test_unknown_scheme_is_named_without_credentials(s3_bucket):
    with pytest.raises(InputError, match="nosuch") as refused:
        Store.open("nosuch://me:t0ps3cret@bucket/runs")
    assert "t0ps3cret" not in str(refused.value)
    store = Store.open(s3_bucket("runs").replace("s3://", "s3://me:t0ps3cret@"))
    assert "t0ps3cret" not in store.uri


@pytest.mark.parametrize(("letter", "written"), [("ä", "%C3%A4"), (" ", "%20"), ("%", "%25")])
def test_letters_to_encode_are_named(letter, written):
    with pytest.raises(InputError, match=f"write '{letter}' as {written}"):
        Store.open(f"s3://bucket/a{letter}")


def test_empty_part_of_an_address_is_rejected(s3_bucket):
    with pytest.raises(InputError, match=r"storage\.runs=.* must not contain '//' in its path"):
        Store.open(s3_bucket("a//b"))


def test_child_address_keeps_its_options(s3_bucket):
    child = Store.open(s3_bucket("runs")).child("abc")
    child.write("a.txt", b"one")
    assert Store.open(child.uri).read("a.txt") == b"one"
    assert "/runs/abc/a.txt?endpoint_override=" in child.place("a.txt")


def test_killed_writer_leaves_no_upload(s3_server, s3_bucket):
    """S3 would keep the parts of a multipart upload, invisible and forever."""
    store = Store.open(s3_bucket("runs", bucket := s3_server.new_bucket()))
    stream = store.filesystem.open_output_stream(f"{store.root}/a.bin")
    stream.write(bytes(1000))
    assert s3_server.keys(bucket, "") == s3_server.uploads(bucket) == []
    stream.close()
    assert s3_server.keys(bucket, "") == ["runs/a.bin"]


@pytest.mark.parametrize("error", [OSError("lost"), KeyboardInterrupt()], ids=["lost", "stopped"])
@pytest.mark.parametrize("size", [100, len(DATA)])
def test_failed_write_keeps_the_earlier_object(s3_bucket, error, size):
    def half(inner, data):
        inner.write(data[: len(data) // 2])
        raise error

    store = Store.open(s3_bucket("runs")).child("abc")
    for before in (None, b"before"):
        if before is not None:
            store.write("a.bin", before)
        with pytest.raises(type(error)):
            wrapped(store, on_write=half).write("a.bin", DATA[:size])
        assert [info.base_name for info in everything_in(store)] == ["a.bin"] * (before is not None)
    assert store.read("a.bin") == b"before"


def test_large_object_is_streamed(s3_bucket, monkeypatch):
    monkeypatch.setattr(storage, "COPY_LIMIT", 4)
    calls = []
    store = Store.open(s3_bucket("runs")).child("abc")
    wrapped(store, before=calls.append).write("a.bin", b"12345")
    assert store.read("a.bin") == b"12345"
    assert "move" not in calls


WRITER = """
    import sys, time
    sys.path[:0] = [{tests!r}, {tests!r} + "/.."]
    from test_store import DATA, wrapped
    from trishul_ray.storage.store import Store

    def write(inner, data):
        inner.write(data[: len(data) // 2])
        print("half", flush=True)
        time.sleep(60)

    wrapped(Store.open(sys.argv[1]).child("abc"), on_write=write).write("a.bin", DATA)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_writer_keeps_the_earlier_object(s3_bucket, start, by):
    uri = s3_bucket("runs")
    store = Store.open(uri).child("abc")
    store.write("a.bin", b"before")
    script = textwrap.dedent(WRITER.format(tests=os.path.dirname(__file__)))
    writer = start(sys.executable, "-c", script, uri)
    assert writer.process.stdout.readline() == "half\n", writer.end()
    writer.process.send_signal(by)
    assert writer.process.wait(timeout=20) != 0
    assert store.read("a.bin") == b"before"
    assert store.names() == ["a.bin"]
    store.remove_unfinished()
    assert [info.base_name for info in everything_in(store)] == ["a.bin"]


def failing(times, error):
    """Return the calls of a filesystem, and a function that fails the first ``times`` of them."""
    calls = []

    def before(call):
        calls.append(call)
        if len(calls) <= times:
            raise error

    return calls, before


#: One call per kind of operation.
OPERATIONS = {
    "write": lambda store: store.write("a.txt", b"new"),
    "read": lambda store: store.read("a.txt"),
    "exists": lambda store: store.exists("a.txt"),
    "names": lambda store: store.names(),
    "remove": lambda store: store.remove("a.txt"),
    "remove_all": lambda store: store.remove_all(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_temporary_failure_is_retried(tmp_path, operation, caplog):
    store = Store.open(str(tmp_path)).child("run")
    store.write("a.txt", b"old")
    _, before = failing(2, OSError(errno.ENOSPC, "No space left on device"))
    OPERATIONS[operation](wrapped(store, retry_seconds=10, before=before))
    assert len([r for r in caplog.records if "No space left on device; retrying" in r.message]) == 1
    if operation == "write":
        assert store.read("a.txt") == b"new"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_lasting_failure_is_reported_in_one_line(tmp_path, operation):
    store = Store.open(str(tmp_path)).child("run")
    store.write("a.txt", b"old")
    calls, before = failing(10**9, OSError("the server is gone\nsecond line"))
    with pytest.raises(StorageError) as failed:
        OPERATIONS[operation](wrapped(store, retry_seconds=0.6, before=before))
    message = str(failed.value)
    assert not isinstance(failed.value, StorageRefusedError)
    assert "\n" not in message and str(tmp_path) in message
    assert "the server is gone (retried for 0.6 s)" in message
    assert len(calls) > 1
    assert store.read("a.txt") == b"old"


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EROFS, "Read-only file system"),
        OSError("When initiating an upload: AWS Error ACCESS_DENIED during PutObject"),
    ],
)
def test_permanent_failure_is_not_retried(tmp_path, error):
    calls, before = failing(10**9, error)
    store = wrapped(Store.open(str(tmp_path)).child("run"), retry_seconds=60, before=before)
    with pytest.raises(StorageRefusedError):
        store.write("a.txt", b"new")
    assert calls == ["create_dir"]


def test_missing_bucket_is_reported(s3_bucket):
    store = Store.open(s3_bucket("runs", bucket="no-such-bucket"), retry_seconds=60)
    with pytest.raises(InputError, match=r"storage.runs='s3://b/runs': bucket 'no-such-bucket' d"):
        store.check_bucket("s3://b/runs")
    with pytest.raises(StorageRefusedError, match="the bucket does not exist") as refused:
        store.write("a.txt", b"")
    assert "allow_bucket_creation" not in str(refused.value)
    Store.open(s3_bucket("runs")).check_bucket("runs")


def test_silent_object_store_is_reported(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with pytest.raises(StorageError, match=r"cannot access s3://bucket/runs.*for 0 s"):
        Store.open(f"s3://bucket/runs?{options_at('127.0.0.1:1')}").check_bucket("runs")


def test_full_disk_keeps_the_earlier_file(tmp_path):
    """A limit on file sizes imitates a full disk: the kernel truncates the write."""
    script = f"""
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        from trishul_ray.storage.store import Store
        store = Store.open({str(tmp_path)!r}, retry_seconds=0.3)
        store.write("a.bin", b"1" * 1000)
        try:
            store.write("a.bin", b"2" * 5000)
        except OSError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),
    )
    assert "cannot write" in done.stdout and "File too large (retried for 0.3 s)" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"1" * 1000
