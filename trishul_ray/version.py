"""The version of the package, and the version of its numerics."""

from functools import cache

__version__ = "0.2.0"

#: Increment on every code change that can change a bit of a result, and on every change of a
#: default. It is part of every experiment's id, so results with different numerics never share an
#: id.
NUMERICS = 6

_PACKAGES = ("torch", "ray", "transformers", "datasets", "numpy", "pyarrow", "mlflow", "peft")


@cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that affect a run's results."""
    import platform
    from importlib import metadata  # imported here because it takes 20 ms in every command

    return {
        "trishul_ray": __version__,
        "numerics": str(NUMERICS),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }
