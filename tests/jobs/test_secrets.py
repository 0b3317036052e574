"""Files that may hold secrets are not shipped with a job, unless they are named."""

import zipfile

import pytest
from ray._private.runtime_env.packaging import create_package

from trishul_ray.errors import InputError
from trishul_ray.jobs.shipping import find_secrets, not_shipped

SECRET = (
    *(".env", ".ENV.local", "prod.env", ".envrc", ".netrc", ".git-credentials", ".npmrc"),
    *("id_rsa", "keys/id_ed25519", "keys/server.pem", "a b.key", "[x]!.pem", "#y.key", "z .pem"),
    *(".ray/auth_token", "service-account.json", "my-service-account-1.json", "kubeconfig"),
    *(".docker/config.json", ".config/gcloud/adc.json", ".pypirc", "secrets.yaml", ".pgpass"),
    *("hub/huggingface/token", ".mlflow/credentials", "gcp-credentials.json", ".bash_history"),
    *(".aws/credentials", ".aws/config", ".ssh/config", ".kube/config", ".ssh/known_hosts"),
)
HARMLESS = (
    *("mine.yaml", "mine.py", ".env.example", "keys/id_ed25519.pub", "tokenizer.json", "data.csv"),
    *("huggingface/tokenizer.json", ".docker/Dockerfile", "environment.yaml", "keyboard.py"),
)


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    for name in (*SECRET, *HARMLESS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def shipped(project, left_out, tmp_path):
    """Return the names in the package that Ray makes."""
    package = tmp_path / "package.zip"
    excludes = not_shipped(left_out)
    create_package(str(project), package, include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(package) as file:
        return {name for name in file.namelist() if not name.endswith("/")}


def test_what_may_hold_secrets_is_left_out_and_named(project, tmp_path):
    left_out = find_secrets(project)
    assert shipped(project, left_out, tmp_path) == set(HARMLESS)
    # A folder stands for all that is in it.
    within = {name for name in left_out if name.endswith("/")}
    assert within == {".aws/", ".config/gcloud/", ".kube/", ".ssh/"}
    assert {n for n in SECRET if not n.startswith(tuple(within))} == set(left_out) - within


def test_what_is_named_is_shipped_and_nothing_else(project, tmp_path):
    wanted = [".env", "./keys/server.pem", ".aws/config", "[x]!.pem", ".ssh/"]
    left_out = find_secrets(project, wanted)
    named = {".env", "keys/server.pem", ".aws/config", "[x]!.pem"}
    named |= {".ssh/config", ".ssh/known_hosts"}
    assert shipped(project, left_out, tmp_path) == {*HARMLESS, *named}
    with pytest.raises(InputError, match=r"--ship mine\.yaml: is not among .*: #y\.key, "):
        find_secrets(project, ["mine.yaml"])


def test_a_link_to_a_secret_is_one_and_gitignore_stays_in_force(tmp_path):
    project, outside = tmp_path / "project", tmp_path / ".aws"
    project.mkdir()
    outside.mkdir()
    (outside / "credentials").write_text("secret")
    (project / "harmless").symlink_to(outside / "credentials")
    (project / "also").symlink_to(outside)
    (project / ".env").write_text("secret")
    (project / ".gitignore").write_text("*.env\n!.env.mine\n")
    (project / ".env.mine").write_text("secret")
    assert find_secrets(project) == [".env.mine", "also/", "harmless"]
    assert shipped(project, find_secrets(project), tmp_path) == {".gitignore"}
