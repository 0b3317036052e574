"""Tables of a Hugging Face dataset, from the files of a local mirror or from the hub itself.

A mirror is a folder that holds ``<owner>/<dataset>/...`` with the files of the hub's repository.
"""

import json
import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from trishul_ray.data.columns import nfc
from trishul_ray.data.network import check_depth, hub_fault, hub_or_cache
from trishul_ray.errors import CorruptFileError, InputError, one_line
from trishul_ray.runtime.lazy import datasets
from trishul_ray.storage.integrity import download_fault

#: Beginning of the key of rows that are read from the hub itself.
ON_HUB = "hub:"


@dataclass(frozen=True)
class HubRepo:
    """A dataset's repository on the hub and in a mirror.

    Attributes:
        repo: owner/name. Any other text is a folder of the mirror (or a path), not on the hub.
        config: name of the configuration; None for a dataset that has only one.
        revision: commit to read from the hub; None reads the newest.
        file_patterns: patterns with ``{split}`` for the files of a split in a mirror, relative to
            the repository. The first that matches any file is used.
        fetch: pattern with ``{split}`` of the files to fetch from the hub; None fetches all files
            of the configuration. Set it if a configuration has large splits that are not used.
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
    def key(self) -> str:
        """Identity of the rows read from the hub: repository, configuration and revision."""
        at = f"@{self.revision}" if self.revision else ""
        return f"{ON_HUB}{self.repo}/{self.config or ''}{at}"

    def mirror_files(
        self, hub: Path | None, splits: Sequence[str], others: Sequence[str] = ()
    ) -> dict[str, list[Path]] | None:
        """Return the files of every split in the mirror ``hub``, or None if it has none of them.

        Add the files of ``others`` if they are there.

        Raises:
            InputError: the mirror has some of the splits, but not all, or is a folder inside one.
            CorruptFileError: a file is not as it was downloaded.
        """
        if hub is None:
            return None
        check_depth(hub, self.repo)
        folder = hub / self.repo
        for pattern in self.file_patterns:
            files = {s: sorted(folder.glob(pattern.format(split=s))) for s in splits}
            missing = [split for split, split_files in files.items() if not split_files]
            if not missing:
                more = {s: sorted(folder.glob(pattern.format(split=s))) for s in others}
                files |= {split: found for split, found in more.items() if found}
                if fault := download_fault(folder, [file for of in files.values() for file in of]):
                    raise CorruptFileError(fault)
                return files
            if len(missing) < len(splits):
                name = pattern.format(split=missing[0])
                raise InputError(f"mirror {folder} lacks {name} of {self.repo}")
        return None

    def mirror_source(self, hub: Path | None, files: Sequence[Path]) -> str:
        """Return the source of rows that are read from files of the mirror, for reports.

        It has the commit of which they are, where that is known: ``hf download --local-dir`` notes
        each file's commit in the first line of ``.cache/huggingface/download/<file>.metadata``.
        All files must agree.
        """
        folder = (hub or Path()) / self.repo
        found = set()
        for file in files:
            name = f"{file.relative_to(folder)}.metadata"
            note = folder / ".cache" / "huggingface" / "download" / name
            lines = note.read_text(errors="replace").splitlines() if note.is_file() else []
            found.add(lines[0].strip() if lines else "")
        revision = found.pop() if len(found) == 1 else ""
        known = re.fullmatch("[0-9a-f]{40}", revision) is not None
        return f"mirror:{self.repo}" + f"@{revision}" * known

    def mirror_command(self, splits: Sequence[str], hub: Path | None) -> str:
        """Return the command that downloads the splits' files at the pinned commit into a mirror.

        It comes with the client of the hub, on which the library ``datasets`` depends.
        """
        names = [p.format(split=split) for p in self.file_patterns for split in splits]
        words = ["hf", "download", "--repo-type", "dataset", self.repo]
        words += ["--revision", self.revision] if self.revision else []
        words += [word for name in names for word in ("--include", name)]
        return shlex.join([*words, "--local-dir", str((hub or Path("hub")) / self.repo)])

    def call_split(self, split: str) -> str:
        """Return what messages call a split that is read from the hub."""
        return f"hub dataset {self.repo}, split {split}"

    def not_found(self, what: str, hub: Path | None, fault: InputError, way_out: str) -> InputError:
        """Return the error that the dataset is neither in a mirror nor can be downloaded."""
        searched = f"mirror {hub} does not have it" if hub else "no mirror is set"
        return InputError(
            f"{what} not found: {searched} (storage.hub or TRISHUL_HUB), and downloading it from "
            f"the Hugging Face hub failed: {fault}; {way_out}"
        )

    def download(self, split: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return a split from the hub, or from the offline cache of the ``datasets`` library.

        Images stay encoded; ``columns`` that the data lack are left out.

        Raises:
            InputError: the download failed; the message is the reason alone.
            CorruptFileError: a downloaded file is damaged.
        """
        files = {split: self.fetch.format(split=split)} if self.fetch else None
        name = None if self.fetch else self.config
        self._check_downloads()
        with _hub_errors_as_input_errors():
            loaded = datasets.load_dataset(
                self.repo, name, data_files=files, split=split, revision=self.revision
            )
        self._check_downloads({Path(file["filename"]).parent for file in loaded.cache_files})
        wanted = [column for column in columns or () if column in loaded.column_names]
        if wanted:
            loaded = loaded.select_columns(wanted)
        for column, feature in loaded.features.items():
            if isinstance(feature, datasets.Image):
                loaded = loaded.cast_column(column, datasets.Image(decode=False))
        return loaded.data.table

    def _check_downloads(self, made: Iterable[Path] = ()) -> None:
        """Compare the files of the pinned commit, or of the newest one here, with their hashes."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        if self.on_hub:
            with suppress(LocalEntryNotFoundError, HFValidationError):  # nothing was downloaded
                folder = Path(
                    snapshot_download(
                        self.repo,
                        repo_type="dataset",
                        revision=self.revision,
                        local_files_only=True,
                    )
                )
                files = sorted(file for file in folder.rglob("*") if file.is_file())
                if fault := download_fault(folder, files, made):
                    raise CorruptFileError(fault)

    def split_names(self) -> tuple[str, ...]:
        """Return the names of the splits on the hub, or raise an InputError with the reason."""
        with _hub_errors_as_input_errors():
            names = datasets.get_dataset_split_names(self.repo, self.config, revision=self.revision)
        return tuple(str(name) for name in names)


@contextmanager
def _hub_errors_as_input_errors() -> Iterator[None]:
    """Convert errors of the hub client to an InputError with the reason in one short line.

    The client's log lines on each retry are suppressed: the error tells the outcome. If the hub
    does not answer at once, only what was downloaded before is read.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        with hub_or_cache():
            yield
    except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        reason = hub_fault() or one_line(error)
        raise InputError(reason if len(reason) <= 300 else f"{reason[:297]}...") from error
    finally:
        hub_logging.set_verbosity(verbosity)


def class_names(table: pa.Table, column: str) -> tuple[str, ...] | None:
    """Return the class names in a table's Hugging Face metadata, or None if it has none.

    They, and the names of columns among which ``column`` is sought, are in the Unicode form NFC.
    """
    try:
        features = json.loads((table.schema.metadata or {})[b"huggingface"])["info"]["features"]
        composed = {nfc(key): value for key, value in features.items()}
        return tuple(nfc(str(name)) for name in composed[column]["names"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
