"""``trishul run --fields``: every field of every method, with what it allows and means."""

import re

import pytest

from trishul_ray.config import FederationConfig, task_kinds
from trishul_ray.loading import field_names, load_experiment
from trishul_ray.methods.base import method_names
from trishul_ray.report.field_list import allowed, field_list


@pytest.mark.parametrize("method", method_names())
def test_every_field_is_listed_with_its_value_and_meaning(method):
    text = field_list(load_experiment(None, [f"method={method}", "budget=2"]), width=90)
    entries = re.findall(r"^(\S+?)=(.*?)  \((.*)\)((?:\n    .*)*)$", text, re.MULTILINE)
    assert [name for name, *_ in entries] == list(field_names(method))
    assert "<class" not in text and "typing" not in text
    # The name of a method means itself.
    assert [name for name, _, _, meaning in entries if not meaning] == ["method.name"]
    assert f"task.kind=auto  ({' | '.join(task_kinds())})" in text
    assert "seed=0  (integer >= 0, < 9223372036854775808)" in text
    assert "tracking.mlflow=true  (true or false; not in the id)" in text
    assert max(len(line) for line in text.splitlines() if line.startswith(" ")) <= 90


def test_what_a_field_allows():
    fields = FederationConfig.model_fields
    assert allowed(fields["quorum"]) == "number > 0, <= 1"
    assert allowed(fields["clients_per_actor"]) == "integer >= 1 or auto"
    assert allowed(fields["compute_shares"]) == "list of 4 numbers or null"
