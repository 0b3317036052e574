"""Find the images of a folder with one folder of images for each class."""

import os
from collections.abc import Iterator
from pathlib import Path

from trishul_ray.data.images import HEIC_SUFFIXES
from trishul_ray.errors import InputError

#: Suffixes of the files that are read as images in a class folder.
_SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

#: Folders of test rows beside ``train``; the first that exists is read.
_TEST_FOLDERS = ("test", "val", "valid", "validation")


def find_images(root: Path) -> dict[str, list[tuple[Path, str]]]:
    """Return pairs of image and class, by split.

    Raises:
        InputError: ``root`` holds no class folders, or other folders beside those of splits; or a
            class folder holds no image.
    """
    folders = {folder.name: folder for folder in _subfolders(root)}
    splits = {"train", *_TEST_FOLDERS} & set(folders)
    if "train" in folders and set(folders) == splits:
        test = next((name for name in _TEST_FOLDERS if name in folders), None)
        found = {"train": _class_files(folders["train"])}
        return found if test is None else found | {"test": _class_files(folders[test])}
    for name in sorted(splits):
        # All below it would be of one class.
        if not any(_is_photo(file.name) for file in folders[name].iterdir()):
            others = ", ".join(sorted(set(folders) - splits)) or "no train"
            raise InputError(
                f"{folders[name]} holds folders instead of images, as one of test or training "
                f"rows does, but beside it there is {others}; data.path must hold class "
                "folders, or train and test alone"
            )
    return {"train": _class_files(root)}


def _class_files(root: Path) -> list[tuple[Path, str]]:
    """Return pairs of file and class of the class folders in ``root``, sorted."""
    pairs = []
    for folder in _subfolders(root):
        files = sorted(_photos(folder), key=lambda file: (len(file.parts), file))
        if not files:
            raise InputError(f"class folder {folder} holds no image ({', '.join(_SUFFIXES)})")
        pairs += [(file, folder.name) for file in files]
    if not pairs:
        raise InputError(
            f"data.path={str(root)!r} holds no class folders with images; it must hold "
            "<class>/*.jpg, or train/<class>/*.jpg and test/<class>/*.jpg"
        )
    return pairs


def _photos(folder: Path) -> Iterator[Path]:
    """Yield the images in and below a folder, also links that lead nowhere, which are named."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        # A link may lead to a folder above it.
        seen.add(os.path.realpath(place))
        inner = [name for name in folders if name[0] != "."]
        folders[:] = [n for n in inner if os.path.realpath(os.path.join(place, n)) not in seen]
        yield from (Path(place, name) for name in names if _is_photo(name))


def _is_photo(name: str) -> bool:
    # macOS puts a file ._NAME, which is no image, beside each NAME on a foreign disk. Photos in
    # HEIC are not passed over: as Pillow cannot read them, they are named.
    return name[0] != "." and Path(name).suffix.lower() in (*_SUFFIXES, *HEIC_SUFFIXES)


def _subfolders(root: Path) -> list[Path]:
    if not root.is_dir():
        raise InputError(f"data.path={str(root)!r} is not a folder of class folders")
    found = sorted(path for path in root.iterdir() if path.name[0] != ".")
    for path in found:
        if path.is_symlink() and not path.exists():
            raise InputError(f"{path} is a link that leads nowhere ({path.readlink()}); remove it")
    return [path for path in found if path.is_dir()]
