"""Find a dataset by name, and prepare its rows in a cache folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trishul_ray.data.cache import Contents, prepared
from trishul_ray.data.dataset import PreparedDataset, ProgressCallback
from trishul_ray.data.datasets.digits import Digits
from trishul_ray.data.datasets.synthetic import SYNTHETIC, SyntheticDataset
from trishul_ray.data.hub import ON_HUB
from trishul_ray.data.public import DATASETS, PublicDataset
from trishul_ray.data.user.user_data import USER_DATA, HubData, ImageFolder, TableFiles
from trishul_ray.errors import InputError

if TYPE_CHECKING:
    from trishul_ray.config.fields import DataConfig

#: Source of the rows of a dataset. Its ``key`` is a text that changes whenever the rows may change.
#: It starts with :data:`~trishul_ray.data.hub.ON_HUB` if ``read`` would download the rows.
Source = PublicDataset | SyntheticDataset | Digits | ImageFolder | TableFiles | HubData


#: Built-in sources.
_BUILT_IN: dict[str, Source] = {Digits.name: Digits(), **{s.name: s for s in SYNTHETIC}}
DATASETS.reserve([*_BUILT_IN, *USER_DATA])


def _sources() -> dict[str, Source]:
    """Return the built-in and public datasets, including plug-ins, keyed by name."""
    return {**_BUILT_IN, **DATASETS.all()}


def dataset_names() -> tuple[str, ...]:
    """List the names that :func:`prepare` accepts: public datasets, user data, synthetic ones."""
    synthetic = [source.name for source in SYNTHETIC]
    return (*sorted(_sources().keys() - synthetic), *USER_DATA, *synthetic)


def describe_datasets() -> dict[str, str]:
    """Describe each dataset in one line, keyed by name."""
    sources = _sources()
    return {n: (sources.get(n) or USER_DATA[n]).description for n in dataset_names()}


def official_rows(name: str) -> Mapping[str, int] | None:
    """Return the published numbers of ``train`` and ``test`` rows, or None for user data."""
    source = _sources().get(name)
    return None if source is None else source.official


def prepare(
    data: "DataConfig | str",
    *,
    cache: Path,
    hub: Path | None,
    progress: ProgressCallback | None = None,
    download: bool = True,
) -> PreparedDataset:
    """Prepare a dataset as memory-mapped files, or open the files of an earlier call.

    A missing or damaged folder is prepared again. Several processes on one machine, or on a shared
    file system with locks, may call this function concurrently.

    Args:
        data: The section ``data`` of an experiment, or the name of a public dataset.
        cache: Folder of the prepared files.
        hub: Local mirror with the hub's layout, which is searched before the hub.
        progress: Called with a stage and its completed fraction.
        download: Whether rows may be downloaded; otherwise rows on the hub count as missing.

    Raises:
        InputError: The name is unknown, or the dataset was not found.
        CorruptFileError: The source is malformed; the message names the file and the fault.
    """
    source = find_source(data)
    if hub is not None and not hub.is_dir():
        raise InputError(f"mirror {hub} (storage.hub or TRISHUL_HUB) is not a folder")
    report = progress or (lambda stage, fraction: None)
    key = source.key(hub)

    def contents() -> Contents:
        if not download and key.startswith(ON_HUB):
            raise InputError(f"dataset {source.name} is not on this machine")
        return source.read(hub, report)

    return prepared(cache, "raw", source.name, key, source.splits, contents)


def find_source(data: "DataConfig | str") -> Source:
    """Find the source of a dataset's rows without reading them.

    Raises:
        InputError: The name is unknown, or a field of ``data`` does not apply to the dataset.
    """
    name = data if isinstance(data, str) else data.name
    if name in USER_DATA:
        if isinstance(data, str):
            return USER_DATA[name](None, {}, 0.2)
        return USER_DATA[name](data.path, data.columns, data.test_share, data.skip_broken)
    sources = _sources()
    if name not in sources:
        raise InputError(DATASETS.unknown(name))
    if not isinstance(data, str) and (data.path is not None or data.columns or data.skip_broken):
        field = "path" if data.path is not None else "columns" if data.columns else "skip_broken"
        raise InputError(
            f"data.{field} requires user data (dataset {', '.join(USER_DATA)}), not dataset {name}"
        )
    return sources[name]
