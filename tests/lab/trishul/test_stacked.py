"""Clients of extensions that train in one forward (``federation.stacked``)."""

from functools import partial

import pytest

from trishul_ray.contract import methods

VARIANTS = {
    "trishul-private": ["method.private_heads=2", "evaluation.per_client=true"],
    "trishul-ranks": [],
    "ravan-ranks": ["federation.compute=uniform"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_client_trains_as_alone(name, executor, tmp_path):
    methods.stacks(tmp_path, name, partial(executor, f"method={name}", *VARIANTS[name]))
