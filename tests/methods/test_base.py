"""What the platform does alike for several methods: limited clients, counted downloads."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from method_runs import run, same_run

from trishul_ray.methods.base import exact_share, method_class, method_names

LIMITED = [name for name in method_names() if method_class(name).takes_limits]


@pytest.mark.parametrize("name", LIMITED)
def test_the_full_profile_is_the_unmasked_run(executor, tmp_path, name):
    same_run(
        executor,
        tmp_path,
        [f"method={name}"],
        [f"method={name}", "federation.compute=full"],
    )


@pytest.mark.parametrize("name", LIMITED)
def test_limited_clients_send_less(executor, tmp_path, name):
    full = run(executor(f"method={name}"), tmp_path)
    limited = run(executor(f"method={name}", "federation.compute=skewed-right"), tmp_path)
    for before, after in zip(full.records[1:], limited.records[1:], strict=True):
        assert after["uploaded_parameters"] < before["uploaded_parameters"]


@pytest.mark.parametrize("name", ["trishul", "ravan", "fedit", "ffalora"])
def test_what_is_drawn_from_the_seed_is_not_downloaded(executor, tmp_path, name):
    server = run(executor(f"method={name}"), tmp_path)
    wire = server.blueprint.expected.lengths["shared"]
    assert [r["downloaded_parameters"] for r in server.records[1:]] == [3 * wire, 3 * wire]


@given(st.integers(1, 400), st.integers(1, 1000), st.integers(1, 1000))
def test_exact_share_is_exact(count, first, second):
    """Compare with integer arithmetic on thousandths."""
    share = exact_share(count, first / 1000, second / 1000)
    assert share * 10**6 == count * first * second
    assert math.ceil(exact_share(5, 0.8, 0.75)) == 3
