from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from PIL import Image
from tolerances import rounding

from trishul_ray.data.dataset import DatasetInfo
from trishul_ray.errors import InputError
from trishul_ray.models.find_model import Preprocessing
from trishul_ray.tasks.image_classification import ImageClassification, image_task

RGB = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
GRAY = {"mean": (0.5,), "std": (0.25,)}


def task(image_size=8, channels=3, num_classes=5):
    scale = RGB if channels == 3 else GRAY
    return ImageClassification(
        **scale, image_size=image_size, channels=channels, num_classes=num_classes
    )


def rows(b=4, c=3, side=8, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "pixels": torch.from_numpy(rng.integers(0, 256, (b, c, side, side), dtype=np.uint8)),
        "label": torch.from_numpy(rng.integers(0, classes, b)),
    }


def test_pixels_are_normalised():
    batch = task().prepare_batch(rows(), "cpu", torch.float32)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in RGB.values())
    want = (rows()["pixels"].double() / 255 - mean) / std
    torch.testing.assert_close(batch["pixel_values"].double(), want, rtol=0, atol=1e-6)
    assert batch["pixel_values"].dtype == torch.float32
    assert torch.equal(batch["labels"], rows()["label"])
    assert set(task().inputs(batch)) == {"pixel_values"}


def test_stored_rows_stay_unchanged():
    stored = rows()
    task().prepare_batch(stored, "cpu", torch.float32)
    assert torch.equal(stored["pixels"], rows()["pixels"])


@pytest.mark.parametrize(
    ("channels", "side", "dtype"),
    pairwise([(1, 3), (3, 1), (1, 1), (3, 3)], [5, 8, 16], [torch.float32, torch.bfloat16]),
)
def test_shapes_and_channels_become_the_models(channels, side, dtype):
    have, want = channels
    batch = task(image_size=side, channels=want).prepare_batch(rows(c=have), "cpu", dtype)
    assert batch["pixel_values"].shape == (4, want, side, side)
    assert batch["pixel_values"].dtype == dtype


def test_color_becomes_gray_as_pillow_does():
    stored = rows(side=8)
    unit = ImageClassification(mean=(0,), std=(1,), image_size=8, channels=1, num_classes=5)
    got = unit.prepare_batch(stored, "cpu", torch.float32)["pixel_values"][0, 0] * 255
    want = Image.fromarray(stored["pixels"][0].permute(1, 2, 0).numpy()).convert("L")
    torch.testing.assert_close(got, torch.tensor(np.asarray(want)).float(), rtol=0, atol=1.0)


@pytest.mark.parametrize("side", [3, 20])
def test_resizing_is_as_pillow_does(side):
    stored = rows(c=1, side=8)
    unit = ImageClassification(mean=(0,), std=(1,), image_size=side, channels=1, num_classes=5)
    got = unit.prepare_batch(stored, "cpu", torch.float32)["pixel_values"][0, 0] * 255
    image = Image.fromarray(stored["pixels"][0, 0].numpy()).resize((side, side), Image.BILINEAR)
    torch.testing.assert_close(got, torch.tensor(np.asarray(image)).float(), rtol=0, atol=1.5)


@settings(deadline=None, max_examples=50)
@given(b=st.integers(1, 20), seed=st.integers(0, 1000), wrapped=st.booleans())
def test_loss_and_sums_agree_with_float64(b, seed, wrapped):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(b, 5, generator=generator)
    batch = {"labels": torch.randint(0, 5, (b,), generator=generator)}
    outputs = SimpleNamespace(logits=logits) if wrapped else logits
    chosen = logits.double().log_softmax(1)[torch.arange(b), batch["labels"]]
    sums = task().evaluate(outputs, batch)
    # One row: log sum exp over 5 classes less a logit. Their sum adds b terms.
    row = rounding(5) + rounding(4, logits.abs().max())
    whole = b * row + rounding(b, -float(chosen.sum()))
    assert sums.loss == pytest.approx(-float(chosen.sum()), rel=0, abs=whole)
    assert sums.scores["accuracy"] == float((logits.argmax(1) == batch["labels"]).sum())
    assert sums.count == b
    loss = task().loss(outputs, batch)
    mean = -float(chosen.mean())
    allowed = row + rounding(b + 1, mean)
    assert loss.shape == () and float(loss) == pytest.approx(mean, rel=0, abs=allowed)
    assert task().metrics.merge([sums])["loss"] == pytest.approx(mean, rel=0, abs=allowed)


def test_logits_that_are_not_finite_are_wrong_answers():
    logits = torch.zeros(3, 5)
    logits[0], logits[1, 2] = float("nan"), float("inf")
    sums = task().evaluate(logits, {"labels": torch.tensor([0, 2, 0])})
    assert sums.scores["accuracy"] == 1.0 and np.isnan(sums.loss)
    assert np.isnan(task().metrics.merge([sums])["loss"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 4}, "channels=4 must be 1 or 3"),
        ({"mean": (0.5,)}, "mean has 1 and std 3 entries"),
        ({"std": (1.0, 0.0, 1.0)}, "must be positive"),
        ({"image_size": 0}, "image_size=0"),
    ],
)
def test_numbers_that_do_not_fit_are_rejected(change, message):
    good = {**RGB, "image_size": 8, "channels": 3, "num_classes": 5}
    with pytest.raises(InputError, match=message):
        ImageClassification(**{**good, **change})


def test_other_channel_counts_are_rejected():
    with pytest.raises(InputError, match="images have 2 channels"):
        task().prepare_batch(rows(c=2), "cpu", torch.float32)


@pytest.mark.parametrize(
    ("backbone", "want"),
    [
        (Preprocessing(32, 3, (0.1, 0.2, 0.3), (1, 2, 3)), (32, 3, (0.1, 0.2, 0.3), (1, 2, 3))),
        (Preprocessing(32, 3, None, None), (32, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))),
        (Preprocessing(16, 1, None, None), (16, 1, (0.4,), (0.3,))),
        (Preprocessing(None, None, None, None), (8, 3, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))),
    ],
)
def test_what_a_backbone_leaves_open_the_dataset_decides(backbone, want):
    info = DatasetInfo("toy", "image", ("a", "b"), (), (), (3, 8, 8), RGB["mean"], RGB["std"])
    made = image_task(backbone, info)
    assert (made.image_size, made.channels) == want[:2] and made.num_classes == 2
    assert made.mean == pytest.approx(want[2]) and made.std == pytest.approx(want[3])


def test_images_that_are_not_square_need_a_size():
    info = DatasetInfo("toy", "image", ("a", "b"), (), (), (3, 8, 6), RGB["mean"], RGB["std"])
    assert image_task(Preprocessing(8, 3, None, None), info).image_size == 8
    with pytest.raises(InputError, match=r"images of 6x8: set model\.image_size"):
        image_task(Preprocessing(None, 3, None, None), info)
