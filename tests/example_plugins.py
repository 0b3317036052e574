"""Methods and a task that were written using only the guides, as plug-ins for the tests."""

import sys
from contextlib import contextmanager
from pathlib import Path

from trishul_ray.plugins import loading
from trishul_ray.plugins.registry import REGISTRIES

FOLDER = Path(__file__).parent / "methods" / "example_plugins"
EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py"))


@contextmanager
def unloaded_after():
    """Unload the plug-ins loaded in this context: other tests expect only the built-in ones."""
    for registry in REGISTRIES:  # Register the built-in ones first.
        registry.all()
    tables = [loading.LOADED.owners, loading.LOADED.newest]
    tables += [table for registry in REGISTRIES for table in (registry.items, registry.owners)]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for module in loading.LOADED.owners.keys() - before[0].keys():
            if module.startswith(loading.PREFIX):
                sys.modules.pop(module, None)
        for table, content in zip(tables, before, strict=True):
            table.clear()
            table.update(content)
