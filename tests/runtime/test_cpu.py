"""CPU cores: how many threads share them."""

from trishul_ray.runtime.cpu import oversubscription_warning


def test_more_threads_than_cores_are_reported_in_one_line():
    assert oversubscription_warning(1, 2, 2) is None
    assert oversubscription_warning(4, 1, 4.0) is None
    one = oversubscription_warning(1, 3, 2)
    assert one.startswith("resources.threads=3 uses 3 threads on 2 cores: ")
    four = oversubscription_warning(4, 2, 6.0)
    assert four.startswith("4 actors x resources.threads=2 uses 8 threads on 6 cores: ")
