"""The hub is asked once, shortly; what was downloaded before is read without it."""

import json
import threading

import huggingface_hub
import pytest
from huggingface_hub import close_session

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.places import Places
from trishul_ray.data.network import hub_fault, try_within
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import Backbone
from trishul_ray.models.lookup import ModelFiles, read_normalization

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def unreachable(monkeypatch):
    """The hub behind a proxy at which nothing listens; every pause of its client is an error."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("trishul_ray.data.network._asked", {})
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", pytest.fail)
    close_session()
    yield
    close_session()


def test_a_model_that_is_nowhere_is_named_after_one_attempt(unreachable, tmp_path, monkeypatch):
    asked = []
    client = type(huggingface_hub.utils.get_session())
    ask = client.head
    monkeypatch.setattr(client, "head", lambda *a, **k: asked.append(a) or ask(*a, **k))
    for name in ("nobody/nothing", "nobody/else"):
        backbone = Backbone(ModelConfig(name=name), Places(tmp_path, None))
        message = r"hub did not provide it: https://huggingface.co does not answer: "
        with pytest.raises(InputError, match=message):
            _ = backbone.architecture
    assert len(asked) == 1


def test_what_was_downloaded_before_is_read(unreachable, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--vit"
    for name, text in {
        "refs/main": COMMIT,
        f"snapshots/{COMMIT}/preprocessor_config.json": json.dumps(
            {"image_mean": [0.1], "image_std": [0.2]}
        ),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with ModelFiles("me/vit", "me/vit", None).reading():
        assert read_normalization("me/vit") == ((0.1,), (0.2,))
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_offline_mode_asks_nothing(unreachable, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("trishul_ray.data.network.try_within", pytest.fail)
    assert hub_fault() == ""


def test_a_hanging_action_times_out():
    never = threading.Event()
    assert try_within(0.1, never.wait) == "no answer within 0.1 s"
    never.set()
    assert try_within(2.0, lambda: None) == ""
