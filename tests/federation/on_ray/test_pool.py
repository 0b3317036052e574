"""Messages about an actor that failed."""

import pytest
from ray.exceptions import RayActorError, RayTaskError

from trishul_ray.errors import RunError
from trishul_ray.federation.on_ray.pool import cause_of

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
    ],
)
def test_cause_of_a_fault_has_type_and_line(error, said):
    assert cause_of(RayTaskError("train", TRACEBACK, error)) == said


@pytest.mark.parametrize("end", [". There are some causes", ". Some common causes", ""])
def test_cause_of_a_death_is_its_detail(end):
    text = f"The actor died.\nWorker exit detail: End of file{end}"
    assert cause_of(RayActorError(error_msg=text)) == "End of file"
