"""For a mirror that points into itself, the error names the folder to use at once."""

import pytest

from trishul_ray.config.fields import ModelConfig
from trishul_ray.config.places import Places
from trishul_ray.data.prepare import prepare
from trishul_ray.errors import InputError
from trishul_ray.models.backbone import Backbone


@pytest.mark.parametrize("inside", ["uoft-cs", "uoft-cs/cifar100"])
def test_a_mirror_one_folder_too_deep(tmp_path, inside):
    (tmp_path / "uoft-cs/cifar100/cifar100").mkdir(parents=True)
    with pytest.raises(InputError, match=rf"TRISHUL_HUB\) is too deep: .*; use {tmp_path}$"):
        prepare("cifar100", cache=tmp_path / "cache", hub=tmp_path / inside)


@pytest.mark.parametrize("inside", ["owner", "owner/vit"])
def test_a_mirror_of_models_one_folder_too_deep(tmp_path, inside):
    (tmp_path / "owner/vit").mkdir(parents=True)
    backbone = Backbone(ModelConfig(name="owner/vit"), Places(tmp_path, tmp_path / inside))
    with pytest.raises(InputError, match=rf"is too deep: owner/vit must .*; use {tmp_path}$"):
        _ = backbone.location


def test_a_repository_named_as_its_owner_is_found(tmp_path):
    (tmp_path / "me/me").mkdir(parents=True)
    (tmp_path / "me/me/config.json").write_text("{}")
    places = Places(tmp_path, tmp_path)
    assert Backbone(ModelConfig(name="me/me"), places).location == tmp_path / "me/me"
