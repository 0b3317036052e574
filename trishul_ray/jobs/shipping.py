"""Shipping of a working directory to a cluster: no secrets, no file that hides a module."""

import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from trishul_ray.errors import InputError, join_limited
from trishul_ray.federation.on_ray.ray_internals import matcher, quiet_jobs, shipped_paths
from trishul_ray.storage.redaction import redact

#: Files that are never shipped, in the syntax of .gitignore, besides those that .gitignore names.
NOT_SHIPPED = (
    *("/data", "/runs", "/report", "/cache", "mlruns", "mlartifacts", "*.db", "*.safetensors"),
    *(".git", ".venv", "venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"),
)
#: Files that may hold secrets, in the same syntax and in lower case: shipped only if named.
SECRETS = (
    # environments and keys
    *(".env", ".env.*", "*.env", ".envrc", "!.env.example", "!.env.sample", "!.env.template"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", ".*_history"),
    *(".ssh", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "!id_*.pub", ".gnupg"),
    # clouds and clusters
    *(".aws", ".azure", ".boto", ".s3cfg", "rclone.conf", ".oci", ".kube", "kubeconfig*"),
    *("**/.config/gcloud", "*service-account*.json", "*service_account*.json", "*.tfstate*"),
    *("client_secret*.json", "application_default_credentials.json", ".databrickscfg"),
    # packages, repositories and hubs
    *(".netrc", "_netrc", ".git-credentials", "**/.config/gh", ".npmrc", ".pypirc", ".dockercfg"),
    *("**/.docker/config.json", ".kaggle", "kaggle.json", "**/huggingface/token", ".huggingface"),
    *("**/huggingface/stored_tokens", ".vault-token", ".pgpass", ".my.cnf", ".mylogin.cnf"),
    # Ray, MLflow, and the names that people choose
    *("auth_token", "credentials", "credentials.*", "*[-_]credentials.*", "*.credentials"),
    *("secrets", "secrets.*", ".secrets", ".secrets.*"),
)


def check_no_secret(words: Sequence[str]) -> None:
    """Refuse a command with credentials: the cluster shows the commands of jobs."""
    for word in words:
        if redact(word) != word:
            raise InputError(
                f"{redact(word)}: no credentials in the command, which the cluster shows to all "
                "its users; give its nodes a role, or set the environment there"
            )


def check_directory(directory: Path) -> None:
    """Refuse a directory in which a file or package hides an installed module, or one of Python.

    Ray puts the directory before all others on ``sys.path``, in the job and in its workers. A
    checkout of this package may be there.
    """
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for path in sorted(directory.iterdir()):
        name = path.stem
        if not (path.suffix == ".py" or (path / "__init__.py").is_file()) or name == "trishul_ray":
            continue
        found = PathFinder.find_spec(name, list(installed))
        owner = "Python's" if name in sys.stdlib_module_names else "the installed"
        if owner == "Python's" or (found and found.origin):
            raise InputError(f"{path}: hides {owner} module {name!r} from the job; rename it")


def find_secrets(directory: Path, wanted: Sequence[str] = ()) -> list[str]:
    """Return what may hold secrets of a working directory that Ray would ship otherwise.

    These are paths in the directory; a folder, which ends with ``/``, stands for all that is in it.
    Names count (:data:`SECRETS`), contents do not; that of a symbolic link is also its target's.

    Args:
        directory: The working directory.
        wanted: Paths in it that are shipped although they may hold secrets.

    Raises:
        InputError: One that is wanted is not among them.
    """
    quiet_jobs()
    is_secret = matcher(SECRETS)
    shipped = {name.removeprefix("./").rstrip("/") for name in wanted}
    unused, found = set(shipped), dict[str, bool]()
    for path in shipped_paths(directory, NOT_SHIPPED):
        name = path.relative_to(directory).as_posix()
        names = [name, path.resolve().as_posix()[1:]] if path.is_symlink() else [name]
        around = {name, *(parent.as_posix() for parent in Path(name).parents)}
        if not any(is_secret(each.lower()) for each in names) or around & found.keys():
            continue
        if around & shipped:
            unused -= around
        elif not any(each.startswith(f"{name}/") for each in shipped):
            found[name] = path.is_dir()
    left_out = sorted(f"{name}/" if folder else name for name, folder in found.items())
    if unused:
        raise InputError(
            f"--ship {min(unused)}: is not among what may hold secrets and is left out: "
            f"{join_limited(left_out, 10) or 'nothing'}"
        )
    return left_out


def check_shipped(files: Sequence[str], directory: Path, left_out: Sequence[str]) -> None:
    """Refuse a command that names a file of the directory that is not shipped."""
    shipped = {*shipped_paths(directory, not_shipped(left_out))} if files else ()
    for file in files:
        if Path(os.path.normpath(directory / file)) not in shipped:
            raise InputError(
                f"{file}: is not shipped: folders of data and results are not, nor is what "
                ".gitignore names or may hold secrets; move or rename it"
            )


def not_shipped(left_out: Sequence[str]) -> list[str]:
    """Return the patterns of all that is not shipped, with the paths that are ``left_out``."""
    return [*NOT_SHIPPED, *map(_exactly, left_out)]


def _exactly(path: str) -> str:
    """Return the pattern of .gitignore that matches one path."""
    return "/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", path.rstrip("/"))
