"""Folders of user images: classes, splits, sizes, and unreadable images."""

import numpy as np
import pytest
from PIL import Image
from user_files import COLORS, encoded, paint, paint_classes, prepare_user, rejected, save

from trishul_ray.config.fields import DataConfig
from trishul_ray.data.coverage import measure_coverage
from trishul_ray.data.images import resize_images
from trishul_ray.data.prepare import find_source
from trishul_ray.data.user.python_rows import encode_image
from trishul_ray.errors import CorruptFileError


def test_class_folders_become_classes(tmp_path):
    root = paint_classes(tmp_path / "photos", 5)
    (root / "red/notes.txt").write_text("not an image")
    (root / "red/._1.png").write_bytes(b"Mac OS X")
    (root / ".cache").mkdir()
    data = prepare_user("images", root, tmp_path, test_share=0.3)
    assert data.info.classes == ("green", "red") and data.info.image_shape == (3, 6, 6)
    assert (len(data.train), len(data.test)) == (7, 3)
    for split in (data.train, data.test):
        for pixels, label in zip(split.column("pixels"), split.labels, strict=True):
            assert tuple(pixels[:, 0, 0]) == COLORS[data.info.classes[label]]
    again = prepare_user("images", root, tmp_path / "elsewhere", test_share=0.3)
    assert again.fingerprint == data.fingerprint
    config = DataConfig(name="images", path=str(root))
    content = find_source(config).content()
    paint(root / "red/9.png", COLORS["red"])
    assert prepare_user("images", root, tmp_path, test_share=0.3).folder != data.folder
    assert find_source(config).content() != content


def test_any_name_of_a_folder_is_a_class(tmp_path):
    """Include a name that marks a missing value in a table; names are not sorted as numbers."""
    names = ["1", "1.0", "10", "2", "NA", "null"]
    for value, name in enumerate(names):
        for number in range(4):
            paint(tmp_path / "photos" / name / f"{number}.png", (value,) * 3)
    data = prepare_user("images", tmp_path / "photos", tmp_path)
    assert data.info.classes == tuple(names)
    for split in (data.train, data.test):
        np.testing.assert_array_equal(split.column("pixels")[:, 0, 0, 0], split.labels)


@pytest.mark.parametrize(
    ("others", "read"), [(["val"], "val"), (["validation", "test"], "test"), ([], None)]
)
def test_test_folder_has_a_usual_name(tmp_path, others, read):
    root = tmp_path / "photos"
    for number, split in enumerate(["train", *others]):
        for name, value in {"dark": 10, "light": 200}.items():
            for image in range(4):
                paint(root / split / name / f"{image}.png", (value + number,) * 3)
    data = prepare_user("images", root, tmp_path)
    assert data.info.classes == ("dark", "light")
    assert len(data.train) + len(data.test) == 8 * (1 + bool(read))
    if read:
        number = 1 + others.index(read)
        assert np.unique(data.test.column("pixels")).tolist() == [10 + number, 200 + number]


def test_sizes_and_modes_become_one(tmp_path):
    root = tmp_path / "photos"
    for split, sizes in {"train": [(8, 8), (8, 8), (4, 12)], "test": [(8, 8), (600, 8)]}.items():
        for name, value in {"dark": 10, "light": 200}.items():
            for number, size in enumerate(sizes):
                paint(root / split / name / f"{number}.png", (value,) * 3, size, "L")
    data = prepare_user("images", root, tmp_path)
    assert data.info.image_shape == (1, 8, 8) and (len(data.train), len(data.test)) == (6, 4)
    assert data.info.origin.notes == ("4 of 10 images resized and cropped to 8x8",)
    assert np.unique(data.test.column("pixels")[data.test.labels == 1]).tolist() == [200]
    # With one color image, all images become RGB.
    paint(root / "train/dark/3.jpg", (10, 10, 10), (8, 8))
    assert prepare_user("images", root, tmp_path).info.image_shape == (3, 8, 8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photo_is_turned_upright(tmp_path, orientation):
    """A phone stores the sensor's pixels, and their orientation in EXIF."""
    seen = np.array([[[200, 0, 0], [0, 200, 0]], [[0, 0, 200], [90, 90, 90]]], np.uint8)
    turned = {
        1: seen, 2: seen[:, ::-1], 3: seen[::-1, ::-1], 4: seen[::-1], 5: seen.transpose(1, 0, 2),
        6: np.rot90(seen), 7: np.rot90(seen, 2).transpose(1, 0, 2), 8: np.rot90(seen, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    for name in ("a", "b"):
        file = save(np.ascontiguousarray(turned), tmp_path / "p" / name / "1.png", exif=exif)
    data = prepare_user("images", tmp_path / "p", tmp_path)
    assert (data.train.column("pixels")[0].transpose(1, 2, 0) == seen).all()
    with Image.open(file) as photo:  # passed from Python
        pixels = resize_images([(encode_image(photo), "a")], (3, 2, 2))
    assert (pixels[0].transpose(1, 2, 0) == seen).all()


def test_center_is_cropped_and_large_images_shrink(tmp_path):
    wide = Image.new("RGB", (600, 300), (255, 0, 0))
    wide.paste((0, 0, 255), (150, 0, 450, 300))
    for name in ("a", "b"):
        save(wide, tmp_path / "photos" / name / "1.png")
        save(wide.transpose(Image.Transpose.ROTATE_90), tmp_path / "photos" / name / "2.png")
    data = prepare_user("images", tmp_path / "photos", tmp_path)
    assert data.info.image_shape == (3, 256, 256)
    assert data.train.column("pixels")[:, 0].max() <= 64  # The filter blends border pixels.


def test_broken_images_are_named_at_once_or_skipped(tmp_path):
    root = paint_classes(tmp_path / "photos")
    good = prepare_user("images", root, tmp_path)
    (root / "red/text.jpg").write_bytes(b"JFIF?")
    noise = np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)
    whole = save(noise, root / "green/cut.png").read_bytes()
    (root / "green/cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "red/gone.png").symlink_to(tmp_path / "nowhere.png")
    names = r"cut.png, .*gone.png, .*text.jpg; the first: .*cut.png: not a .*; remove them, or set"
    rejected(rf"3 images cannot be read: .*{names}", "images", root, tmp_path)
    data = prepare_user("images", root, tmp_path, skip_broken=True)
    assert data.fingerprint == good.fingerprint
    assert data.info.origin.notes[-1] == "3 broken images skipped"
    names = (f"{root}/green/cut.png", f"{root}/red/gone.png", f"{root}/red/text.jpg")
    assert data.info.skipped == names == measure_coverage(data).skipped


def test_photos_below_a_class_folder_belong_to_it(tmp_path):
    root = paint_classes(tmp_path / "photos")
    flat = prepare_user("images", root, tmp_path)
    (root / "red/2024/may").mkdir(parents=True)
    (root / "red/3.png").rename(root / "red/2024/may/3.png")
    (root / "red/.thumbnails").mkdir()
    (root / "red/.thumbnails/0.png").write_bytes((root / "red/0.png").read_bytes())
    assert prepare_user("images", root, tmp_path).fingerprint == flat.fingerprint


def test_class_folders_in_two_unicode_forms_are_one(tmp_path):
    for split, name in (("train", "Caf\u00e9"), ("test", "Cafe\u0301")):
        for number in range(3):
            paint(tmp_path / "photos" / split / name / f"{number}.png", COLORS["red"])
            paint(tmp_path / "photos" / split / "bar" / f"{number}.png", COLORS["green"])
    data = prepare_user("images", tmp_path / "photos", tmp_path)
    assert data.info.classes == ("Caf\u00e9", "bar")
    assert sorted(data.train.labels) == sorted(data.test.labels)


def test_wrong_folders_are_named(tmp_path):
    root = tmp_path / "photos"
    rejected(r"data.path is not set; it must be a folder with", "images", None, tmp_path)
    rejected(r"data.path='.*photos' does not exist", "images", root, tmp_path)
    root.mkdir()
    rejected(r"photos' contains .*; it must contain <class>/\*.jpg, or", "images", root, tmp_path)
    paint(root / "a/1.png", COLORS["red"])
    rejected(r"the 1 row of .*photos cannot be split|all rows have", "images", root, tmp_path)
    paint(root / "a/2.png", COLORS["red"])
    rejected(r"all rows have class 'a'; provide at least two", "images", root, tmp_path)
    (root / "b").mkdir()
    rejected(r"class folder .*/b contains no image", "images", root, tmp_path)
    rejected(r"a folder of images has no columns", "images", root, tmp_path, columns={"label": "x"})
    for split in ("train", "holdout"):
        paint_classes(tmp_path / "sets" / split)
    rejected(
        r"sets/train contains folders instead of images", "images", tmp_path / "sets", tmp_path
    )


def gray_values(bits=8):
    """Return twelve gray images of 8x8, the first one all black."""
    values = np.random.default_rng(0).integers(0, 256, (12, 8, 8))
    values[0] = 0
    return (values * 257 if bits == 16 else values).astype(np.uint16 if bits == 16 else np.uint8)


def save_classes(root, arrays, suffix):
    for number, array in enumerate(arrays):
        save(array, root / "abc"[number % 3] / f"{number}.{suffix}")
    return root


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_images_of_16_bits_equal_those_of_8(tmp_path, suffix):
    found = [
        prepare_user("images", save_classes(tmp_path / f"{b}", gray_values(b), suffix), tmp_path)
        for b in (8, 16)
    ]
    assert found[0].fingerprint == found[1].fingerprint and found[1].info.image_shape == (1, 8, 8)
    assert found[1].info.origin.notes == ("12 of 12 images scaled from 16 to 8 bits",)
    turned = encode_image(Image.frombytes("I;16B", (8, 8), b"\x80\x00" * 64))
    assert np.unique(resize_images([(turned, "b")], (1, 8, 8))).tolist() == [128]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_images_are_shown_on_white(tmp_path, mode):
    """Test black images with their content in the alpha channel, such as icons and sketches."""
    for number, name in enumerate("abab"):
        pixels = np.zeros((8, 8, 4), np.uint8)
        pixels[:, 4 * (name == "b") :][:, :4, 3] = 255
        image = Image.fromarray(pixels).convert("RGBA" if mode == "P" else mode)
        save(image.quantize() if mode == "P" else image, tmp_path / "p" / name / f"{number}.png")
    data = prepare_user("images", tmp_path / "p", tmp_path)
    left = data.train.column("pixels")[:, 0, 0, 0]
    assert left.tolist() == [255 * label for label in data.train.labels]
    assert data.info.origin.notes == ("4 of 4 transparent images composited on white",)
    seen = resize_images([(encode_image(image), "b")], (3, 8, 8))
    assert seen[0, 0, 0].tolist() == [255] * 4 + [0] * 4


def test_pixels_of_unknown_range_are_rejected(tmp_path):
    floats = gray_values().astype(np.float32) / 255
    root = save_classes(tmp_path / "floats", floats[:1], "tif")
    save_classes(root, gray_values()[1:], "png")
    rejected(r"floats/a/0.tif: 32-bit pixels have an unknown range", "images", root, tmp_path)
    assert len(prepare_user("images", root, tmp_path, skip_broken=True).info.skipped) == 1


def test_images_of_12_bits_are_rejected(tmp_path):
    few = (gray_values(16) // 16)[2:4]  # next to images that use all 16 bits
    root = save_classes(tmp_path / "mixed", [*gray_values(16)[:2], *few], "png")
    rejected(r"2 images .*a/3.png, .*c/2.png; the first: .*a/3.png: a 16-bit image with",
             "images", root, tmp_path)  # fmt: skip
    image = root / "c/2.png", "the image"
    with pytest.raises(CorruptFileError, match=r"^the image: .*nearly black; scale it"):
        resize_images([image], (1, 8, 8))


def test_images_in_a_table_are_paths_or_bytes(tmp_path):
    rows = [{"image": f"img/{name}.png", "label": name, "client": 7} for name in COLORS] * 3
    for name, color in COLORS.items():
        paint(tmp_path / f"img/{name}.png", color)
    by_path = prepare_user("table", encoded(tmp_path / "paths.csv", rows), tmp_path)
    stored = [row | {"image": (tmp_path / row["image"]).read_bytes()} for row in rows]
    by_bytes = prepare_user("table", encoded(tmp_path / "bytes.parquet", stored), tmp_path)
    assert by_path.info.image_shape == (3, 6, 6) and by_path.info.classes == ("green", "red")
    assert by_path.fingerprint == by_bytes.fingerprint
    rows[2] = rows[2] | {"image": "img/none.png"}
    file = encoded(tmp_path / "paths.csv", rows)
    rejected(r"img/none.png: not a readable image", "table", file, tmp_path)
    skipped = prepare_user("table", file, tmp_path, skip_broken=True)
    assert len(skipped.train) + len(skipped.test) == 5 and len(skipped.info.skipped) == 1


def test_table_without_any_image_is_rejected(tmp_path):
    rows = [{"image": "", "label": label} for label in "abab"]
    file = encoded(tmp_path / "none.csv", rows)
    message = r"the 0 rows of .*none\.csv cannot be split"
    rejected(message, "table", file, tmp_path, skip_broken=True)
