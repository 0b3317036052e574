"""Remove what earlier runs left and no run needs: the work of ``trishul doctor --clean``."""

from pathlib import Path

from trishul_ray.data.cache import remove_leftovers
from trishul_ray.data.from_python import remove_unused_rows
from trishul_ray.federation.on_ray.old_sessions import remove_old_sessions, temporary_folder
from trishul_ray.files import remove_abandoned
from trishul_ray.models.shared_weights import remove_unused_weights

#: Seconds without use before a prepared folder is removed.
UNUSED_SECONDS = 3600.0


def clean(cache: Path) -> list[Path]:
    """Remove failed and outdated preparations of own data, and folders of runs that are over.

    Nothing is removed that a process uses or that was used within the last hour. Rows passed from
    Python and prepared weights, which later runs may need, are kept for a month after their use.

    Args:
        cache: The cache folder.

    Returns:
        The folders and files that were removed.
    """
    removed = remove_leftovers(cache, keep=1, unused_seconds=UNUSED_SECONDS)
    removed += [*remove_unused_rows(cache), *remove_unused_weights(cache)]
    return removed + remove_old_sessions(temporary_folder()) + remove_abandoned()
