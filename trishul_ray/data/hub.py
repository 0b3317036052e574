"""Read tables of a Hugging Face dataset from a local mirror or from the hub.

A mirror is a folder with the files of the hub's repositories, ``<owner>/<dataset>/...``.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa

from trishul_ray.data.dataset import Origin
from trishul_ray.data.tables import file_signature, read_table
from trishul_ray.errors import InputError, one_line
from trishul_ray.runtime.lazy import datasets

#: Prefix of the key of rows that are read from the hub.
ON_HUB = "hub:"


@dataclass(frozen=True)
class HubRepo:
    """A dataset repository on the hub and in a local mirror.

    Attributes:
        repo: Hub name ``owner/name``. Any other text is a folder of the mirror, or a path, and is
            not searched on the hub.
        config: Name of the configuration, or None if the dataset has only one.
        revision: Commit to read from the hub. None reads the newest commit.
        file_patterns: Glob patterns with ``{split}`` for the files of a split in a mirror, relative
            to the repository. The first pattern with a match applies.
        fetch: Pattern with ``{split}`` of the files to download from the hub. None downloads the
            configuration. Set it if a configuration has large unused splits.

    Example:
        >>> repo = HubRepo("ucirvine/sms_spam", config="plain_text")
        >>> repo.on_hub
        True
        >>> repo.key(None, ["train"])
        'hub:ucirvine/sms_spam/plain_text'
    """

    repo: str
    config: str | None = None
    revision: str | None = None
    file_patterns: tuple[str, ...] = ("data/{split}-*.parquet",)
    fetch: str | None = None

    @property
    def on_hub(self) -> bool:
        """Whether :attr:`repo` is a name on the hub."""
        return re.fullmatch(r"[^/]+/[^/]+", self.repo) is not None

    @property
    def _example(self) -> str:
        return f"{self.repo}/{self.file_patterns[0].format(split='train')}"

    def mirror_files(
        self, hub: Path | None, splits: Sequence[str], others: Sequence[str] = ()
    ) -> dict[str, list[Path]] | None:
        """Find the files of every split in a mirror.

        Args:
            hub: Root folder of the mirror, or None.
            splits: Names of the required splits.
            others: Names of optional splits, which are included if they exist.

        Returns:
            Sorted files keyed by split, or None if the mirror has none of ``splits``.

        Raises:
            InputError: The mirror has some of ``splits``, but not all.
        """
        if hub is None:
            return None
        folder = hub / self.repo
        for pattern in self.file_patterns:
            files = {s: sorted(folder.glob(pattern.format(split=s))) for s in (*splits, *others)}
            missing = [split for split in splits if not files[split]]
            if not missing:
                return {split: found for split, found in files.items() if found}
            if len(missing) < len(splits):
                name = pattern.format(split=missing[0])
                raise InputError(f"mirror {folder} is missing {name} of {self.repo}")
        return None

    def key(self, hub: Path | None, splits: Sequence[str], others: Sequence[str] = ()) -> str:
        """Return a text that changes whenever the rows may change.

        Args:
            hub: Root folder of the mirror, or None.
            splits: Names of the required splits.
            others: Names of optional splits.

        Returns:
            A signature of the files in the mirror, or a text that starts with :data:`ON_HUB`.

        Raises:
            InputError: The mirror has some of ``splits``, but not all.
        """
        files = self.mirror_files(hub, splits, others)
        if files is not None:
            return file_signature(chain(*files.values()))
        at = f"@{self.revision}" if self.revision else ""
        return f"{ON_HUB}{self.repo}/{self.config or ''}{at}"

    def read(
        self, hub: Path | None, splits: Sequence[str], others: Sequence[str] = ()
    ) -> tuple[Origin, dict[str, list[pa.Table]]]:
        """Read the tables of every split from the mirror, or from the hub if the mirror has none.

        Args:
            hub: Root folder of the mirror, or None.
            splits: Names of the required splits.
            others: Names of optional splits, which are read if they exist.

        Returns:
            The origin of the rows, and the tables keyed by split, one per file in a mirror. The
            revision of files in a mirror is unknown.

        Raises:
            InputError: Neither the mirror nor the hub has the splits.
            CorruptFileError: A file in the mirror is malformed.

        Example:
            >>> repo = HubRepo("ucirvine/sms_spam", config="plain_text")
            >>> origin, tables = repo.read(None, ["train"])  # doctest: +SKIP
            >>> tables["train"][0].column_names  # doctest: +SKIP
            ['sms', 'label']
        """
        files = self.mirror_files(hub, splits, others)
        if files is not None:  # files in a mirror have no known revision
            return Origin("mirror", self.repo), {
                s: list(map(read_table, f)) for s, f in files.items()
            }
        if not (self.on_hub or Path(self.repo).is_dir()):
            raise InputError(
                f"dataset {self.repo} not found; set TRISHUL_HUB or storage.hub to a folder with "
                f"{self._example}"
            )
        name = f"{self.repo}/{self.config}" if self.config else self.repo
        return Origin("hub", name, self.revision), self._download(hub, splits, others)

    def _download(
        self, hub: Path | None, splits: Sequence[str], others: Sequence[str]
    ) -> dict[str, list[pa.Table]]:
        """Download the splits, or read them from the cache of the ``datasets`` library."""
        from huggingface_hub.errors import HfHubHTTPError

        files = {s: self.fetch.format(split=s) for s in splits} if self.fetch else None
        name = None if self.fetch else self.config
        loggers = [logging.getLogger(each) for each in ("huggingface_hub", "datasets")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:  # otherwise each retry is logged
            logger.setLevel(logging.CRITICAL)
        try:
            if others:
                existing = datasets.get_dataset_split_names(self.repo, name, revision=self.revision)
                others = [split for split in others if split in existing]
            loaded = {
                split: datasets.load_dataset(
                    self.repo, name, data_files=files, split=split, revision=self.revision
                )
                for split in (*splits, *others)
            }
        except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
            searched = f"mirror {hub} does not have it" if hub else "no mirror is set"
            raise InputError(
                f"dataset {self.repo} not found: {searched}, and the Hugging Face hub failed "
                f"({one_line(error)[:300]}); repeat the command with internet access, or set "
                f"TRISHUL_HUB or storage.hub to a folder with {self._example}"
            ) from error
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
        return {split: [table_of(rows)] for split, rows in loaded.items()}


def table_of(rows: "datasets.Dataset") -> pa.Table:
    """Convert a Hugging Face dataset to an Arrow table.

    Args:
        rows: The dataset, which may have been filtered or shuffled.

    Returns:
        The rows as a table. Images are embedded as bytes, and the metadata contains class names.

    Example:
        >>> import datasets
        >>> table_of(datasets.Dataset.from_dict({"text": ["a", "b"]})).num_rows
        2
    """
    # Filtered and shuffled rows lose the description of the columns.
    metadata = rows.features.arrow_schema.metadata
    table = rows.with_format("arrow")[:].replace_schema_metadata(metadata)
    return datasets.table.embed_table_storage(table)
