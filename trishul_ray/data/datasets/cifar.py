"""CIFAR-10 and CIFAR-100: 32x32 color photos in 10 or 100 classes, 50,000 train and 10,000 test.

CIFAR-100 uses the 100 fine labels; its 20 coarse labels are not read.

Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009,
https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from trishul_ray.data.hub import HubRepo
from trishul_ray.data.public import ImageRows, PublicDataset, register_dataset

CIFAR10 = register_dataset(
    PublicDataset(
        name="cifar10",
        description="32x32 color photos, 10 classes, 50,000 train / 10,000 test",
        repo=HubRepo(
            "uoft-cs/cifar10",
            config="plain_text",
            revision="0b2714987fa478483af9968de7c934580d0bb9a2",
            file_patterns=("plain_text/{split}-*.parquet",),
        ),
        rows=ImageRows(label="label", classes=10),
        sizes={"train": 50_000, "test": 10_000},
    )
)

CIFAR100 = register_dataset(
    PublicDataset(
        name="cifar100",
        description="32x32 color photos, 100 classes, 50,000 train / 10,000 test",
        repo=HubRepo(
            "uoft-cs/cifar100",
            config="cifar100",
            revision="aadb3af77e9048adbea6b47c21a81e47dd092ae5",
            file_patterns=("cifar100/{split}-*.parquet",),
        ),
        rows=ImageRows(label="fine_label", classes=100),
        sizes={"train": 50_000, "test": 10_000},
    )
)
