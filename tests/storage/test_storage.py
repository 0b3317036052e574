"""Files of a run on a pyarrow filesystem: atomic writes, and retries."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pyarrow as pa
import pytest
from pyarrow import fs
from s3_server import options_at

from trishul_ray.errors import InputError, StorageError, StorageRefusedError
from trishul_ray.storage import store as storage
from trishul_ray.storage.store import Store


class Stream:
    """An output stream that passes each write to a function of the test."""

    def __init__(self, inner, on_write):
        self.inner, self.on_write, self.closed = inner, on_write, False

    def write(self, data):
        self.on_write(self.inner, bytes(data))
        return len(data)

    def flush(self):
        self.inner.flush()

    def close(self):
        self.closed = True
        self.inner.close()


class Wrapper(fs.FileSystemHandler):
    """A real filesystem with the writes or calls that a test replaces."""

    def __init__(self, inner, on_write=None, before=lambda call: None):
        self.inner, self.on_write, self.before = inner, on_write, before

    def __eq__(self, other):
        return self is other

    def get_type_name(self):
        return "wrapper"

    def normalize_path(self, path):
        return self.inner.normalize_path(path)

    def get_file_info(self, paths):
        self.before("get_file_info")
        return self.inner.get_file_info(paths)

    def get_file_info_selector(self, selector):
        self.before("get_file_info")
        return self.inner.get_file_info(selector)

    def create_dir(self, path, recursive):
        self.before("create_dir")
        self.inner.create_dir(path, recursive=recursive)

    def delete_dir(self, path):
        self.before("delete_dir")
        self.inner.delete_dir(path)

    def delete_dir_contents(self, path, missing_dir_ok=False):
        self.inner.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self):
        raise NotImplementedError

    def delete_file(self, path):
        self.before("delete_file")
        self.inner.delete_file(path)

    def move(self, src, dest):
        self.before("move")
        self.inner.move(src, dest)

    def copy_file(self, src, dest):
        self.inner.copy_file(src, dest)

    def open_input_stream(self, path):
        self.before("open_input_stream")
        return self.inner.open_input_stream(path)

    def open_input_file(self, path):
        return self.inner.open_input_file(path)

    def open_output_stream(self, path, metadata):
        self.before("open_output_stream")
        inner = self.inner.open_output_stream(path)
        if self.on_write is None:
            return inner
        return pa.PythonFile(Stream(inner, self.on_write), mode="w")

    def open_append_stream(self, path, metadata):
        raise NotImplementedError


def wrapped(store, retry_seconds=0.0, **replacements):
    return Store(
        fs.PyFileSystem(Wrapper(store.filesystem, **replacements)),
        store.root,
        store.uri,
        retry_seconds,
    )


def test_local_round_trip(tmp_path):
    store = Store.open(str(tmp_path)).child("run")
    assert not store.exists()
    store.write("a.txt", b"one")
    store.write("a.txt", b"two")
    assert store.read("a.txt") == b"two"
    assert store.names() == ["a.txt"]
    store.remove("a.txt")
    store.remove("a.txt")
    assert store.names() == []
    store.remove_all()
    assert not store.exists()
    with pytest.raises(FileNotFoundError):
        store.read("a.txt")


def test_any_pyarrow_filesystem_works(tmp_path):
    inner = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    store = Store(inner, "bucket/run", "sub://bucket/run")
    store.write("a.bin", b"\0\1")
    assert store.read("a.bin") == b"\0\1"
    assert (tmp_path / "bucket/run/a.bin").read_bytes() == b"\0\1"


def test_a_folder_is_uploaded_with_its_subfolders(tmp_path):
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "x.txt").write_text("x")
    (source / "inner" / "y.txt").write_text("y")
    store = Store.open(str(tmp_path / "target"))
    store.upload_folder(source)
    assert store.read("x.txt") == b"x"
    assert store.child("inner").read("y.txt") == b"y"


def test_a_failed_write_leaves_no_file(tmp_path):
    store = Store.open(str(tmp_path))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("in the way")
    with pytest.raises(OSError):
        store.write("taken", b"data")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken"]


def test_an_unknown_scheme_is_named():
    with pytest.raises(InputError, match="nosuch"):
        Store.open("nosuch://bucket/runs")


def test_credentials_in_an_address_are_never_shown(s3_bucket):
    store = Store.open(s3_bucket("runs").replace("s3://", "s3://me:t0ps3cret@"))
    assert "t0ps3cret" not in store.uri
    with pytest.raises(InputError) as refused:
        Store.open("nosuch://me:t0ps3cret@bucket/runs")
    assert "t0ps3cret" not in str(refused.value)


def test_the_address_of_a_child_keeps_its_options_at_the_end(s3_bucket):
    child = Store.open(s3_bucket("runs")).child("abc")
    child.write("a.txt", b"one")
    assert Store.open(child.uri).read("a.txt") == b"one"
    assert "/runs/abc/a.txt?endpoint_override=" in child.place("a.txt")


DATA = bytes(range(256)) * 30_000  # 7.7 MB: more than one part of a multipart upload


@pytest.mark.parametrize("data", [b"", b"\0\1", DATA], ids=["empty", "small", "parts"])
def test_s3_round_trip(s3_bucket, data):
    store = Store.open(s3_bucket("runs")).child("abc")
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


def test_a_killed_writer_leaves_no_part_of_a_small_object(s3_server, s3_bucket):
    """S3 would keep it, unseen, for ever."""
    store = Store.open(s3_bucket("runs", bucket := s3_server.new_bucket()))
    stream = store.filesystem.open_output_stream(f"{store.root}/a.bin")
    stream.write(bytes(1000))
    assert s3_server.keys(bucket, "") == s3_server.uploads(bucket) == []
    stream.close()
    assert s3_server.keys(bucket, "") == ["runs/a.bin"]


def half_then(error):
    def write(inner, data):
        inner.write(data[: len(data) // 2])
        raise error

    return write


@pytest.mark.parametrize("error", [OSError("lost"), KeyboardInterrupt()], ids=["lost", "stopped"])
@pytest.mark.parametrize("before", [None, b"before"], ids=["new", "replaced"])
@pytest.mark.parametrize("size", [100, len(DATA)])
def test_a_stream_that_fails_in_mid_write_leaves_no_partial_object(s3_bucket, error, before, size):
    store = Store.open(s3_bucket("runs")).child("abc")
    if before is not None:
        store.write("a.bin", before)
    with pytest.raises(type(error)):
        wrapped(store, on_write=half_then(error)).write("a.bin", DATA[:size])
    if before is None:
        assert not store.exists("a.bin")
    else:
        assert store.read("a.bin") == before
    everything = store.filesystem.get_file_info(fs.FileSelector(store.root, allow_not_found=True))
    assert [info.base_name for info in everything] == ([] if before is None else ["a.bin"])


def test_an_object_too_large_to_be_copied_is_streamed(s3_bucket, monkeypatch):
    monkeypatch.setattr(storage, "COPY_LIMIT", 4)
    moved = []
    store = Store.open(s3_bucket("runs")).child("abc")
    wrapped(store, before=moved.append).write("a.bin", b"12345")
    assert store.read("a.bin") == b"12345"
    assert "move" not in moved


WRITER = """
    import sys, time
    sys.path[:0] = [{tests!r}]
    from test_storage import DATA, wrapped
    from trishul_ray.storage.store import Store

    def write(inner, data):
        inner.write(data[: len(data) // 2])
        print("half", flush=True)
        time.sleep(60)

    wrapped(Store.open(sys.argv[1]).child("abc"), on_write=write).write("a.bin", DATA)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_writer_killed_in_mid_write_leaves_no_partial_object(s3_bucket, start, by):
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


def failing(times, error):
    """Make the first ``times`` calls of the filesystem fail."""
    calls = []

    def before(call):
        calls.append(call)
        if len(calls) <= times:
            raise error

    return calls, before


#: One call of each kind of operation.
OPERATIONS = {
    "write": lambda store: store.write("a.txt", b"new"),
    "read": lambda store: store.read("a.txt"),
    "exists": lambda store: store.exists("a.txt"),
    "names": lambda store: store.names(),
    "remove": lambda store: store.remove("a.txt"),
    "remove_all": lambda store: store.remove_all(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_temporary_failure_is_retried(tmp_path, operation, caplog):
    store = Store.open(str(tmp_path)).child("run")
    store.write("a.txt", b"old")
    _, before = failing(2, OSError(errno.ENOSPC, "No space left on device"))
    OPERATIONS[operation](wrapped(store, retry_seconds=10, before=before))
    assert len([r for r in caplog.records if "No space left on device; retrying" in r.message]) == 1
    if operation == "write":
        assert store.read("a.txt") == b"new"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_lasting_failure_is_reported_in_one_line(tmp_path, operation):
    store = Store.open(str(tmp_path)).child("run")
    store.write("a.txt", b"old")
    calls, before = failing(10**9, OSError("the server is gone\nsecond line"))
    with pytest.raises(StorageError) as failed:
        OPERATIONS[operation](wrapped(store, retry_seconds=0.6, before=before))
    message = str(failed.value)
    assert not isinstance(failed.value, StorageRefusedError)
    assert "\n" not in message and str(tmp_path) in message
    assert "the server is gone" in message and "within 0.6 s" in message
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
def test_a_refusal_is_not_retried(tmp_path, error):
    calls, before = failing(10**9, error)
    store = wrapped(Store.open(str(tmp_path)).child("run"), retry_seconds=60, before=before)
    with pytest.raises(StorageRefusedError):
        store.write("a.txt", b"new")
    assert calls == ["create_dir"]


def test_a_missing_bucket_is_reported_plainly(s3_bucket):
    store = Store.open(s3_bucket("runs", bucket="no-such-bucket"), retry_seconds=60)
    with pytest.raises(InputError, match=r"storage.runs='s3://b/runs': bucket 'no-such-bucket' d"):
        store.check_bucket("s3://b/runs")
    with pytest.raises(StorageRefusedError, match="the bucket does not exist") as refused:
        store.write("a.txt", b"")
    assert "allow_bucket_creation" not in str(refused.value)
    Store.open(s3_bucket("runs")).check_bucket("runs")


def test_an_object_store_that_does_not_answer_is_reported(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with pytest.raises(StorageError, match=r"cannot access s3://bucket/runs.*tried once"):
        Store.open(f"s3://bucket/runs?{options_at('127.0.0.1:1')}").check_bucket("runs")


def test_a_full_disk_keeps_the_earlier_file(tmp_path):
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
    assert "cannot write" in done.stdout and "File too large (tried 2 times" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"1" * 1000
