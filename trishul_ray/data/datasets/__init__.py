"""The public datasets, one file each: source, original archive, columns, row counts and classes.

Every :class:`~trishul_ray.data.public.PublicDataset` at the top level of a file in this folder is
found. The handwritten digits in ``digits.py``, which come with scikit-learn, and the stand-ins in
``synthetic.py`` need no files and are not in :data:`PUBLIC`.
"""

import importlib
import pkgutil

from trishul_ray.data.public import PublicDataset

__all__ = ["PUBLIC"]


def _find_datasets() -> tuple[PublicDataset, ...]:
    found: dict[str, PublicDataset] = {}
    for file in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{file.name}")
        for value in vars(module).values():
            if not isinstance(value, PublicDataset):
                continue
            if found.setdefault(value.name, value) is not value:
                raise ValueError(f"two datasets are named {value.name!r}; one is in {file.name}.py")
    return tuple(found.values())


#: All datasets that are read from a mirror, an original archive or the hub.
PUBLIC = _find_datasets()
