"""Folders that appear when they are complete."""

import os

import pytest
import torch
from safetensors.torch import save_file

from trishul_ray.files import complete_folder


def test_a_folder_is_complete_or_not_there(tmp_path):
    with complete_folder(tmp_path / "new" / "model") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "new/model").exists()
    assert (tmp_path / "new/model/a").read_text() == "1"
    with pytest.raises(RuntimeError), complete_folder(tmp_path / "new" / "other") as folder:
        (folder / "a").write_text("1")
        raise RuntimeError
    with pytest.raises(OSError), complete_folder(tmp_path / "new" / "model") as folder:
        (folder / "a").write_text("2")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    assert (tmp_path / "new/model/a").read_text() == "1"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_who_may_read_the_folder_may_read_its_tensors(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with complete_folder(tmp_path / "model") as folder:
            (folder / "backbone").mkdir()
            for place in (folder, folder / "backbone"):
                save_file({"w": torch.zeros(2)}, place / "model.safetensors")
    finally:
        os.umask(before)
    for file in (tmp_path / "model").rglob("*.safetensors"):
        assert file.stat().st_mode & 0o777 == mode
