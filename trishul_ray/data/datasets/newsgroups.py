"""20 Newsgroups by date as published: ``20news-bydate.tar.gz``.

Headers, signatures and quotes are stripped by scikit-learn's functions, in its order, as in the
public version ``SetFit/20_newsgroups``. Rows stand in the order of their paths.

Source: K. Lang, collected by J. Rennie, http://qwone.com/~jason/20Newsgroups/.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from trishul_ray.data.archives_files import all_or_none, tar_members
from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import Columns, PublicDataset, TextLayout
from trishul_ray.errors import CorruptFileError

#: The groups, in the order of their labels.
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


_MEMBER = re.compile(r"20news-bydate-(train|test)/([^/]+)/(\d+)")


#: Far above the longest post.
_LIMIT = 4 * 2**20


class NewsgroupsArchive:
    """The archive of posts, one member each."""

    title = "20news-bydate.tar.gz"

    def find(self, folder: Path) -> tuple[Path, ...] | None:
        """The archive in ``folder``, if it is there."""
        return all_or_none(folder, (self.title,))

    def read(
        self, files: Sequence[Path], tell: Callable[[str, float], None]
    ) -> tuple[Mapping[str, Columns], tuple[str, ...] | None]:
        """``text`` and ``label`` int64 [N] by split.

        Raises:
            CorruptFileError: names the file, the member where there is one, and the fault.
        """
        from sklearn.datasets._twenty_newsgroups import (  # seconds to import
            strip_newsgroup_footer,
            strip_newsgroup_header,
            strip_newsgroup_quoting,
        )

        posts: dict[str, list[tuple[int, int, str]]] = {"train": [], "test": []}
        members = tar_members(files[0], lambda name: bool(_MEMBER.fullmatch(name)), _LIMIT)
        for number, (name, data, done) in enumerate(members):
            match = _MEMBER.fullmatch(name)
            assert match is not None  # it was wanted
            split, group, post = match.groups()
            if group not in GROUPS:
                raise CorruptFileError(f"{files[0]}: member {name} is of an unknown newsgroup")
            # Any byte is a character of Latin 1, which is what scikit-learn reads them as.
            text = strip_newsgroup_header(data.decode("latin-1"))
            text = strip_newsgroup_quoting(strip_newsgroup_footer(text))
            posts[split].append((GROUPS.index(group), int(post), text))
            if number % 500 == 0:
                tell(split, done)
        splits = {}
        for split, rows in posts.items():
            rows.sort()
            splits[split] = {
                "text": pa.array([text for *_, text in rows], pa.large_string()),
                "label": np.array([label for label, *_ in rows], dtype=np.int64),
            }
            tell(split, 1.0)
        return splits, None


NEWSGROUPS = PublicDataset(
    name="20newsgroups",
    description="newsgroup posts, stripped, 20 classes, 11,314 / 7,532",
    repo=HubRepo(
        "SetFit/20_newsgroups",
        revision="f1b91292074e7cfb69be58b642d583ec262f30ed",
        layouts=("data/{split}-*.parquet", "{split}.jsonl"),
    ),
    layout=TextLayout(fields=("text",), classes=GROUPS),
    sizes={"train": 11_314, "test": 7_532},
    archive=NewsgroupsArchive(),
)
