"""SVHN (cropped digits): 32x32 color photos of house numbers, 73,257 train and 26,032 test.

The 531,131 images of the ``extra`` split are not read.

Source: Y. Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning",
2011, http://ufldl.stanford.edu/housenumbers/.
"""

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import ImageRows, PublicDataset, register_dataset

SVHN = register_dataset(
    PublicDataset(
        name="svhn",
        description="32x32 house numbers, 10 digits, 73,257 train / 26,032 test",
        repo=HubRepo(
            "ufldl-stanford/svhn",
            config="cropped_digits",
            revision="f9e1717d73324ebbc1ece84267ccd80d0aca0690",
            file_patterns=("cropped_digits/{split}-*.parquet",),
            # Do not fetch the configuration's third split, `extra`, which is five times as large as
            # the other two combined.
            fetch="cropped_digits/{split}-*.parquet",
        ),
        rows=ImageRows(label="label", classes=10, image="image"),
        sizes={"train": 73_257, "test": 26_032},
    )
)
