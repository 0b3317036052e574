"""20 Newsgroups from its original archive: read back, or refused when malformed."""

import io
import tarfile
from dataclasses import replace

import pytest

from trishul_ray.data.datasets.newsgroups import NEWSGROUPS, NewsgroupsArchive
from trishul_ray.errors import CorruptFileError

POST = """From: someone@example.org (Some One)
Subject: a question
Lines: 9

In article <1@x> another@example.org writes:
> was it the fan
| or the disk

It was the caf\xe9 next door.
Really.

--
Some One, signed
"""


def write(file, posts):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for name, text in posts.items():
            data = text.encode("latin-1")
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        entry = tarfile.TarInfo("20news-bydate-test/sci.med")
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    return file


POSTS = {
    "20news-bydate-train/sci.med/59302": POST,
    "20news-bydate-train/alt.atheism/49960": "Subject: x\n\nsecond by number",
    "20news-bydate-train/alt.atheism/5120": "Subject: y\n\nfirst by number",
    "20news-bydate-test/talk.religion.misc/82757": "Subject: z\n\n",
}


def test_round_trip_stripped_and_in_order(tmp_path):
    write(tmp_path / "archives/20news-bydate.tar.gz", POSTS)
    small = replace(NEWSGROUPS, sizes={"train": 3, "test": 1})
    info, columns = small.read(tmp_path, lambda *_: None)
    assert columns["train"]["text"].to_pylist() == [
        "first by number",
        "second by number",
        "\nIt was the caf\xe9 next door.\nReally.\n",
    ]
    assert columns["train"]["label"].tolist() == [0, 0, 13]
    # Some posts are empty after stripping; they are kept, as in the hub's version.
    assert columns["test"]["text"].to_pylist() == [""]
    assert columns["test"]["label"].tolist() == [19]
    assert info.fields == ("text",) and info.classes[13] == "sci.med" and len(info.classes) == 20
    with pytest.raises(CorruptFileError, match=r"20newsgroups has 3 rows, not the official 11314"):
        NEWSGROUPS.read(tmp_path, lambda *_: None)


def test_an_unknown_group_a_huge_post_and_a_cut_file_are_named(tmp_path):
    file = tmp_path / "20news-bydate.tar.gz"
    archive = NewsgroupsArchive()
    write(file, POSTS | {"20news-bydate-train/sci.magic/1": "x"})
    with pytest.raises(CorruptFileError, match=r"sci.magic/1 is of an unknown newsgroup"):
        archive.read((file,), lambda *_: None)
    write(file, POSTS | {"20news-bydate-train/sci.med/1": "x" * (4 * 2**20 + 1)})
    with pytest.raises(
        CorruptFileError, match=r"sci.med/1 has 4194305 bytes; the limit is 4194304"
    ):
        archive.read((file,), lambda *_: None)
    write(file, POSTS)
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(CorruptFileError, match=r"20news-bydate.tar.gz: an incomplete download"):
        archive.read((file,), lambda *_: None)
