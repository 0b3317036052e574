"""Images of any size and mode to one array: one's own, which no one has prepared.

A prepared dataset holds images of one size. Where they differ, each is resized (bilinear, with
antialiasing) to the size that most of them have, at most :data:`MAX_SIDE` a side; and where not
all are gray, gray ones and those with transparency become RGB. ``info.source`` says how many were
resized.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from trishul_ray.data.pixels import MODE_CHANNELS, open_image, planes

#: Larger images are stored with this longer side: 256 is what backbones for 224 crop from.
MAX_SIDE = 256

#: An encoded image or its file, and what to call it in messages.
Item = tuple[bytes | Path, str]


def decode_all(
    splits: Mapping[str, Sequence[Item]], tell: Callable[[str, float], None]
) -> tuple[dict[str, np.ndarray], str]:
    """Pixels of every split, uint8 [N, C, H, W], and what was done to them, for people.

    Args:
        splits: the images by split; not all empty.
        tell: told of the split and the fraction done.

    Raises:
        CorruptFileError: an image cannot be read; names it.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    gray = True
    for items in splits.values():
        for encoded, where in items:
            with open_image(encoded, where) as image:
                sizes[image.height, image.width] += 1
                gray = gray and image.mode in ("1", "L")
    common = min(sizes, key=lambda size: (-sizes[size], size))
    shrink = min(1.0, MAX_SIDE / max(common))
    height, width = (max(1, round(side * shrink)) for side in common)
    mode = "L" if gray else "RGB"
    pixels = {}
    for split, items in splits.items():
        stored = np.empty((len(items), MODE_CHANNELS[mode], height, width), dtype=np.uint8)
        for row, (encoded, where) in enumerate(items):
            with open_image(encoded, where) as image:
                whole = image.convert(mode)
            if whole.size != (width, height):
                whole = whole.resize((width, height), Image.Resampling.BILINEAR)
            stored[row] = planes(whole)
            if row % 500 == 0:
                tell(split, row / len(items))
        pixels[split] = stored
        tell(split, 1.0)
    resized = sum(sizes.values()) - sizes[height, width]
    note = f", {resized} of {sum(sizes.values())} images resized to {width}x{height}"
    return pixels, note if resized else ""
