"""The version of the package, and of the numbers it computes."""

from functools import cache

__version__ = "0.2.0"

#: Increase this with every code change that can change a bit of a result, and with every change of
#: a default. It is part of every experiment's id, so results of different numerics share no id.
NUMERICS = 6

_PACKAGES = ("torch", "ray", "transformers", "datasets", "numpy", "pyarrow", "mlflow", "peft")


@cache
def versions() -> dict[str, str]:
    """Return the versions of the software that a run's numbers depend on."""
    import platform
    from importlib import metadata  # takes 20 ms, in every command

    return {
        "trishul_ray": __version__,
        "numerics": str(NUMERICS),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }
