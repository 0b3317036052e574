"""The public datasets, one file each: source, columns, row counts and classes.

Every :class:`~trishul_ray.data.public.PublicDataset` at the top level of a file in this folder is
found. The handwritten digits in ``digits.py``, which come with scikit-learn, and the stand-ins in
``synthetic.py`` need no files and are not in :data:`PUBLIC`. A file that cannot be imported is left
out and named in :data:`FAULTS`: the others can still be used.
"""

import importlib
import pkgutil

from trishul_ray.data.public import PublicDataset
from trishul_ray.errors import first_line

__all__ = ["FAULTS", "PUBLIC"]


def _find_datasets() -> tuple[tuple[PublicDataset, ...], tuple[str, ...]]:
    found: dict[str, PublicDataset] = {}
    faults = []
    for file in pkgutil.iter_modules(__path__):
        where = f"data/datasets/{file.name}.py"
        try:
            module = importlib.import_module(f"{__name__}.{file.name}")
        except Exception as error:
            faults.append(f"{where} is left out: {type(error).__name__}: {first_line(error)}")
            continue
        for value in vars(module).values():
            if not isinstance(value, PublicDataset):
                continue
            if found.setdefault(value.name, value) is not value:
                faults.append(f"{where}: its dataset {value.name!r} is left out: the name is taken")
    return tuple(found.values()), tuple(faults)


#: All datasets that are read from a mirror or the hub; and, in one line each, which files or
#: datasets are left out, and why.
PUBLIC, FAULTS = _find_datasets()
