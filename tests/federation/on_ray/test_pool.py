"""Messages about an actor that failed."""

import pytest
from ray.exceptions import RayTaskError

from trishul_ray.errors import RunError
from trishul_ray.federation.on_ray.pool import cause_of
from trishul_ray.sweeps.trial import NodeDrainsError

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/mine.py", line 60, in upload
  File "/usr/lib/python3/site-packages/torch/nn.py", line 3, in forward
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("x"), "KeyError: 'x' (mine.py, line 60)"),
        (ValueError("boom\nand more"), "ValueError: boom (mine.py, line 60)"),
        (AssertionError(), "AssertionError (mine.py, line 60)"),
        (RunError("the disk is full"), "the disk is full"),
        (NodeDrainsError("its node is being drained"), "its node is being drained"),
    ],
)
def test_a_fault_is_named_with_its_type_and_line_and_our_own_errors_as_they_are(error, said):
    assert cause_of(RayTaskError("train", TRACEBACK, error)) == said
