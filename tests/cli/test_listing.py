"""Lists on the terminal."""

import io
import re

import pytest
from method_runs import SINGLE
from rich.console import Console
from summaries import invented_summary

from trishul_ray.cli.listing import (
    allowed,
    client_sentence,
    field_list,
    methods_table,
    models_table,
)
from trishul_ray.config.fields import FederationConfig
from trishul_ray.experiment.loading import field_names, load_experiment
from trishul_ray.methods.base import method_names
from trishul_ray.models.builtin import BUILTINS
from trishul_ray.tasks.base import task_kinds


def rows_of(table):
    """The cells of each row, as plain text."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return {row[0].split("\n")[0]: row for row in zip(*columns, strict=True)}


def test_every_method_is_listed():
    assert set(rows_of(methods_table())) == set(method_names())


@pytest.mark.parametrize(
    ("name", "short", "parameters", "adapted"),
    [
        # 85.8 M: transformers' own count of the ViT without pooler, and 1,538 of a head for two.
        ("google/vit-base-patch16-224-in21k", "vit-b16", "85.8 M",
         "12 x q_proj 768x768\n12 x v_proj 768x768"),
        ("google-t5/t5-base", "t5-base", "223 M", "24 x q 768x768\n24 x v 768x768"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b", "1.24 G",
         "16 x q_proj 2048x2048\n16 x v_proj 512x2048"),
    ],
)  # fmt: skip
def test_the_papers_backbones(name, short, parameters, adapted):
    row = rows_of(models_table())[name]
    assert row == (f"{name}\n{short}", parameters, adapted, "mirror or hub")


def test_built_in_and_packaged_models_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRISHUL_CACHE", str(tmp_path))
    rows = rows_of(models_table())
    assert {*BUILTINS, "all-MiniLM-L6-v2"} <= set(rows)
    assert all("`trishul pretrain`" in rows[name][-1] for name in BUILTINS)
    assert not list(tmp_path.iterdir())  # nothing is loaded, nothing written
    narrow = Console(width=80, file=io.StringIO())
    narrow.print(models_table())
    printed = narrow.file.getvalue()
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert all(f" {name} " in printed for name in rows)


@pytest.mark.parametrize("method", SINGLE)
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


def test_clients_are_named_in_a_line_the_worst_first():
    scores = {"Bern": 0.5, "Genf": 0.25}
    summary = invented_summary(per_client=scores)
    assert client_sentence(summary) == "mean accuracy of 2: 37.50%; Genf 25.00%, Bern 50.00%"
    summary = invented_summary(per_client={str(n): n / 10 for n in range(10)})
    assert client_sentence(summary).endswith("6 60.00%, 7 70.00%, and 2 better ones")
    assert client_sentence(invented_summary()) == ""
