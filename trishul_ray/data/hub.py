"""A dataset of the Hugging Face hub as tables: from a local mirror's files, or from the hub itself.

A mirror is a folder that holds ``<owner>/<dataset>/...`` with the files of the hub's repository.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from trishul_ray.data.tables import read_table
from trishul_ray.errors import InputError


@dataclass(frozen=True)
class HubRepo:
    """Where a dataset lies on the hub and in a mirror.

    Attributes:
        repo: owner/name.
        config: the configuration's name; None for a dataset that has but one.
        revision: the commit that is read from the hub; None reads the newest.
        layouts: the files of a split in a mirror, relative to the repository, as patterns with
            ``{split}``; the first that fits any file counts.
        fetch: the pattern of the files to fetch from the hub, where a configuration holds large
            splits that are not wanted; None fetches the configuration as its card has it.
    """

    repo: str
    config: str | None = None
    revision: str | None = None
    layouts: tuple[str, ...] = ("data/{split}-*.parquet",)
    fetch: str | None = None

    @property
    def key(self) -> str:
        """What decides the rows that the hub gives."""
        at = f"@{self.revision}" if self.revision else ""
        return f"hub:{self.repo}/{self.config or ''}{at}"

    def mirrored(self, hub: Path | None, splits: Sequence[str]) -> dict[str, list[Path]] | None:
        """Files of every split in the mirror, or None where the mirror lacks all of them.

        Raises:
            InputError: the mirror has a part of the splits.
        """
        if hub is None:
            return None
        folder = hub / self.repo
        for layout in self.layouts:
            files = {s: sorted(folder.glob(layout.format(split=s))) for s in splits}
            lacking = [split for split, found in files.items() if not found]
            if not lacking:
                return files
            if len(lacking) < len(splits):
                pattern = layout.format(split=lacking[0])
                raise InputError(f"mirror {folder} lacks {pattern} of {self.repo}")
        return None

    def mirrored_revision(self, hub: Path | None, files: Sequence[Path]) -> str | None:
        """Return the commit from which files of the mirror were downloaded, where that is known.

        ``hf download --local-dir`` notes each file's commit in the first line of
        ``.cache/huggingface/download/<file>.metadata``; all files must agree.
        """
        if hub is None:
            return None
        folder = hub / self.repo
        notes = folder / ".cache" / "huggingface" / "download"
        found = set()
        for file in files:
            note = notes / f"{file.relative_to(folder)}.metadata"
            lines = note.read_text(errors="replace").splitlines() if note.is_file() else []
            found.add(lines[0].strip() if lines else "")
        revision = found.pop() if len(found) == 1 else ""
        return revision if re.fullmatch("[0-9a-f]{40}", revision) else None

    def download(self, split: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A split from the hub or from its own offline cache; images stay encoded.

        Args:
            split: its name on the hub.
            columns: those that are wanted, by default all; one that the data lack is left out.

        Raises:
            InputError: the hub did not give it; the message is the reason alone.
        """
        import datasets  # seconds to import: only where the hub is asked
        from huggingface_hub.errors import HfHubHTTPError

        files = {split: self.fetch.format(split=split)} if self.fetch else None
        name = None if self.fetch else self.config
        try:
            with _quiet_attempts():
                loaded = datasets.load_dataset(
                    self.repo, name, data_files=files, split=split, revision=self.revision
                )
        except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
            raise _refused(error) from error
        wanted = [column for column in columns or () if column in loaded.column_names]
        if wanted:
            loaded = loaded.select_columns(wanted)
        for column, feature in loaded.features.items():
            if isinstance(feature, datasets.Image):
                loaded = loaded.cast_column(column, datasets.Image(decode=False))
        return loaded.data.table

    def splits(self) -> tuple[str, ...]:
        """Names of the splits on the hub.

        Raises:
            InputError: the hub did not tell; the message is the reason alone.
        """
        import datasets
        from huggingface_hub.errors import HfHubHTTPError

        try:
            with _quiet_attempts():
                names = datasets.get_dataset_split_names(
                    self.repo, self.config, revision=self.revision
                )
        except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
            raise _refused(error) from error
        return tuple(str(name) for name in names)


@contextmanager
def _quiet_attempts() -> Iterator[None]:
    """Without the hub client's lines on each of its attempts; what came of them, we say."""
    from huggingface_hub.utils import logging as hub_logging

    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def _refused(error: Exception) -> InputError:
    """The reason in one line of bearable length."""
    said = " ".join(str(error).split()) or type(error).__name__
    return InputError(said if len(said) <= 300 else f"{said[:297]}...")


def read_files(
    files: Sequence[Path], columns: Sequence[str] | None = None
) -> list[tuple[str, pa.Table]]:
    """Each file's name and its wanted columns; see :func:`trishul_ray.data.tables.read_table`."""
    return [(str(file), read_table(file, columns)) for file in files]


def class_names(table: pa.Table, column: str) -> tuple[str, ...] | None:
    """Class names from the Hugging Face metadata of a table, where it carries them."""
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return tuple(str(name) for name in features[column]["names"])
    except (KeyError, TypeError, ValueError):
        return None
