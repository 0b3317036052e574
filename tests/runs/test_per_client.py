"""Scores per class and per client, from the rows to the result."""

import pytest

import trishul_ray
from trishul_ray.data.partition import class_mix
from trishul_ray.federation.prepare import prepare_run

CITIES = ("Aarhus", "Bergen", "Cork")


@pytest.fixture
def run(cache, tmp_path):
    def make(*dataset, **fields):
        paths = {"runs": tmp_path / "runs", "cache": cache}
        common = {"rounds": 2, "local_steps": 2, "backend": "inline", "mlflow": False}
        common |= {"clients": 3, "clients_per_round": 2, "progress": "off", "method": "fedit"}
        return trishul_ray.run(*dataset, **(common | paths | fields))

    return make


def test_clients_are_scored_on_their_test_rows(run, called, tmp_path, cache):
    rows = {
        split: [
            {"text": f"{n}", "label": f"{n % 2}", "client": CITIES[n % 3]} for n in range(count)
        ]
        for split, count in (("train", 36), ("test", 18))
    }
    options = {"model": {"name": "bert-tiny", "init": "random"}, "max_length": 16, "budget": 2}
    options |= {"partition": {"kind": "natural"}}
    result = run(rows, per_client=True, **options)
    assert tuple(result.per_client) == CITIES
    mean = sum(result.per_client.values()) / 3
    assert result.final["accuracy"] == pytest.approx(mean)  # as many rows each
    history = result.history
    assert history["per_client_mean"][2] == pytest.approx(mean)
    assert history["per_client_worst_decile"][2] == min(result.per_client.values())
    assert result.recall.keys() == {"0", "1"} and "macro_f1" in result.final
    path = result.config["data"]["path"]
    code, said, error = called(
        "list", "datasets", "rows", f"data.path={path}", "partition.kind=natural",
        "federation.clients=3",
        "federation.clients_per_round=2", "model=bert-tiny", f"storage.cache={cache}",
    )  # fmt: skip
    assert code == 0 and all(city in said for city in CITIES), error
    # It is off by default, and does not affect the results.
    plain = run(rows, **options)
    assert plain.per_client == {} and plain.id != result.id
    assert plain.summary["state_sha256"] == result.summary["state_sha256"]


def test_personalized_models_are_scored(run, tmp_path):
    rows = [
        {"text": f"{'ab'[n % 2]} {n}", "label": f"{n % 2}", "client": CITIES[n % 3]}
        for n in range(60)
    ]
    options = {"model": {"name": "bert-tiny", "init": "random"}, "max_length": 16, "budget": 2}
    options |= {"method": "fedsa", "lr": 0.01, "local_steps": 9}
    result = run(rows, per_client=True, partition={"kind": "natural"}, **options)
    assert tuple(result.personal) == tuple(result.per_client) == CITIES
    mean = sum(result.personal.values()) / 3
    assert result.history["personal_mean"][2] == pytest.approx(mean)
    # A client of the run is then not a client of the data: no rows can score its model.
    with pytest.raises(trishul_ray.InputError, match="method=fedsa has a model for each"):
        run(rows, per_client=True, partition={"kind": "iid"}, **options)
    assert run(rows, partition={"kind": "iid"}, **(options | {"method": "fedit"})).personal == {}


def test_clients_without_test_rows_use_class_mix(run):
    result = run(per_client=True, model={"init": "random"}, evaluation={"limit": 64})
    experiment = result._experiment
    prepared = prepare_run(experiment)
    mix = class_mix(prepared.shards, prepared.dataset.train.labels, 10)
    recall = [value or 0.0 for value in result.recall.values()]
    for client, score in result.per_client.items():
        weights = [
            n * (r is not None)
            for n, r in zip(mix[int(client)], result.recall.values(), strict=True)
        ]
        want = sum(w * r for w, r in zip(weights, recall, strict=True)) / sum(weights)
        assert score == pytest.approx(want)


def test_scores_of_clients_without_rows_are_rejected(run):
    rows = [{"question": "q", "context": "c", "answers": ["a"]}] * 20
    with pytest.raises(trishul_ray.InputError, match=r"evaluation\.per_client: the test rows"):
        run(rows, per_client=True, model={"name": "t5-tiny", "init": "random"}, max_length=64,
            budget=2, partition={"kind": "iid"})  # fmt: skip
