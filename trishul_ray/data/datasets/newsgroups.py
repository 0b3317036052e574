"""20 Newsgroups, split by date: posts of 20 groups, 11,314 train and 7,532 test.

The original archive is ``20news-bydate.tar.gz``, with one member for each post. Headers,
signatures and quotes are stripped with scikit-learn's functions, in scikit-learn's order, as in
the hub's version ``SetFit/20_newsgroups``. Some posts are empty afterwards; they are kept, as
there. Rows are sorted by group and post number.

Source: K. Lang, collected by J. Rennie, http://qwone.com/~jason/20Newsgroups/.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from trishul_ray.data.archives import find_files, tar_members
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.prepared import ProgressCallback
from trishul_ray.data.public import ClassNames, PublicDataset, Splits, TextRows
from trishul_ray.errors import CorruptFileError

#: Class names: the newsgroups, in the order of their labels.
GROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)

#: Path of a post in the archive: split, group and post number.
_MEMBER = re.compile(r"20news-bydate-(train|test)/([^/]+)/(\d+)")

#: Maximum bytes of a post, far above the longest.
_MEMBER_LIMIT = 4 * 2**20


class NewsgroupsArchive:
    """The original archive."""

    title = "20news-bydate.tar.gz"

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """Return the archive's path in ``folder``, or None if it is not there."""
        return find_files(folder, (self.title,))

    def read(self, files: Sequence[Path], progress: ProgressCallback) -> tuple[Splits, ClassNames]:
        """Return ``text`` and ``label`` int64 [N] by split; no class names.

        Raises:
            CorruptFileError: the archive is damaged or has an unknown group; the message names
                the file and the member.
        """
        from sklearn.datasets._twenty_newsgroups import (  # takes seconds to import
            strip_newsgroup_footer,
            strip_newsgroup_header,
            strip_newsgroup_quoting,
        )

        posts: dict[str, list[tuple[int, int, str]]] = {"train": [], "test": []}
        members = tar_members(files[0], lambda name: bool(_MEMBER.fullmatch(name)), _MEMBER_LIMIT)
        for count, (name, data, fraction) in enumerate(members):
            match = _MEMBER.fullmatch(name)
            assert match is not None  # other members are skipped
            split, group, post = match.groups()
            if group not in GROUPS:
                raise CorruptFileError(f"{files[0]}: member {name} is of an unknown newsgroup")
            # scikit-learn reads the posts as Latin-1, too, in which every byte is a character.
            text = strip_newsgroup_header(data.decode("latin-1"))
            text = strip_newsgroup_quoting(strip_newsgroup_footer(text))
            posts[split].append((GROUPS.index(group), int(post), text))
            if count % 500 == 0:
                progress(split, fraction)
        splits = {}
        for split, rows in posts.items():
            rows.sort()
            splits[split] = {
                "text": pa.array([text for *_, text in rows], pa.large_string()),
                "label": np.array([label for label, *_ in rows], dtype=np.int64),
            }
            progress(split, 1.0)
        return splits, None


NEWSGROUPS = PublicDataset(
    name="20newsgroups",
    description="newsgroup posts, stripped, 20 classes, 11,314 / 7,532",
    repo=HubRepo(
        "SetFit/20_newsgroups",
        revision="f1b91292074e7cfb69be58b642d583ec262f30ed",
        file_patterns=("data/{split}-*.parquet", "{split}.jsonl"),
    ),
    rows=TextRows(fields=("text",), classes=GROUPS),
    sizes={"train": 11_314, "test": 7_532},
    archive=NewsgroupsArchive(),
)
