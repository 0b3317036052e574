"""The inline server: validation of uploads, quorum, resuming past a corrupt checkpoint."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from trishul_ray.data.sampling import capacities
from trishul_ray.errors import RunError
from trishul_ray.federation.checkpoint import open_checkpoints
from trishul_ray.federation.inline import InlineDriver, InlineExecutor
from trishul_ray.federation.messages import MOST_CLIENTS, TrainJob
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.federation.reduce import FAN_IN
from trishul_ray.federation.server import Server


class Faulty(InlineExecutor):
    """Executor that replaces the uploads of the first clients by NaN."""

    spoilt = 0

    def run(self, broadcast, jobs, *more):
        outcome = super().run(broadcast, jobs, *more)
        for index, upload in enumerate(outcome.uploads[: self.spoilt]):
            spoilt = upload.arrays.map(lambda array: np.full(array.shape, np.nan, "f4"))
            outcome.uploads[index] = replace(upload, arrays=spoilt)
        return outcome


def serve(experiment, spoilt):
    executor = Faulty(experiment, prepare_run(experiment))
    server = Server(experiment, executor, open_checkpoints(experiment), "a")
    server.step()
    executor.spoilt = spoilt
    return server


def test_invalid_upload_is_rejected_and_recorded(small):
    experiment = small("resources.backend=inline")
    server = serve(experiment, spoilt=1)
    report = server.step()
    record = server.checkpoint.records[2]
    first = record.clients[0]
    assert list(record.refused) == [str(first)]
    assert f"upload of client {first} rejected: shared has" in report.events[-1]
    assert np.isfinite(server.checkpoint.state.shared).all()


def test_run_below_quorum_fails_with_its_checkpoint(small):
    experiment = small("resources.backend=inline")
    server = serve(experiment, spoilt=2)
    with pytest.raises(RunError, match=r"round 2: only 1 of 3 uploads are valid"):
        server.step()
    assert open_checkpoints(experiment).newest().round == 1


def test_corrupt_checkpoint_is_reported_and_skipped(
    small, inline_result, assert_same, drive_to_end, tmp_path
):
    experiment = small("resources.backend=inline")
    prepared = prepare_run(experiment)
    driver = InlineDriver(experiment, prepared, "a")
    for _ in range(2):
        driver.step()
    folder = tmp_path / "runs" / experiment.id / "checkpoints"
    newest = max(folder.glob("round-*"))
    newest.write_bytes(newest.read_bytes()[:-10])
    result = drive_to_end(InlineDriver(experiment, prepared, "b"))
    events = result.__dict__["events"]
    assert events[0] == f"checkpoint {newest.name} is corrupt (checksum differs): skipped"
    assert events[1] == "continuing after round 1"
    assert_same(result, inline_result(experiment))


def test_another_stack_resumes_only_if_allowed(small):
    experiment = small("resources.backend=inline")
    prepared, store = prepare_run(experiment), open_checkpoints(experiment)
    driver = InlineDriver(experiment, prepared, "a")
    driver.step()
    driver.close()
    stored = store.newest()
    (here,) = stored.stacks
    older = replace(here, torch="2.12.0+cpu")
    store.save(replace(stored, stacks=[older]))
    difference = rf"torch 2\.12\.0\+cpu and not {re.escape(here.torch)}"
    with pytest.raises(RunError, match=rf"was computed with {difference}: restore that, set res"):
        InlineDriver(experiment, prepared, "a")

    allowed = small("resources.backend=inline", "resources.mixed_stack=true")
    assert allowed.id == experiment.id
    driver = InlineDriver(allowed, prepared, "a")
    assert any("from round 2 on torch" in line for line in driver.begin().events)
    driver.step()
    assert store.newest().stacks == [older, here]
    assert [stack.first_round for stack in store.newest().stacks] == [0, 2]
    driver.close()


@pytest.mark.parametrize("method", ["ravan", "trishul"])
def test_a_cohort_may_mix_full_and_limited_clients(small, inline_result, method):
    # A client of full capacity sends no mask, a constrained client does.
    experiment = small(
        f"method={method}",
        "federation.compute=uniform",
        "federation.clients_per_round=4",
        "federation.rounds=1",
    )
    shares = capacities("uniform", experiment.seed, experiment.federation.clients)[:4]
    assert 1.0 in shares and min(shares) < 1.0, "choose another seed"
    record = inline_result(experiment).checkpoint.records[1]
    assert record.clients == [0, 1, 2, 3]
    assert record.diagnostics["effective_rank"] > 0
    assert np.isfinite(record.diagnostics["aggregation_variance"])


def test_a_survey_is_a_round_before_the_first(small):
    """Its uploads are validated, summed and counted like those in any round."""
    experiment = small("method=fedsb", "method.init_clients=3")
    executor = Faulty(experiment, prepare_run(experiment))
    server = Server(experiment, executor, open_checkpoints(experiment), "a")
    jobs = [TrainJob(0, client) for client in range(experiment.federation.clients)]
    answers = [
        upload.arrays.extra for upload in executor.run(server.checkpoint.state, jobs).uploads
    ]
    numbers = sum(array.size for array in answers[0].values())
    assert server.checkpoint.records[0].uploaded_parameters == 3 * numbers
    layer, found = next(iter(server.survey().items()))
    means = [
        np.mean(trio, axis=0) for trio in itertools.combinations([a[layer] for a in answers], 3)
    ]
    assert any(np.allclose(found, mean, atol=1e-7) for mean in means)
    executor.spoilt = 3
    with pytest.raises(RunError, match=r"round 0: only 0 of 3 .* other weights or data"):
        server.survey()


def test_uploads_are_summed_on_arrival_and_released(small):
    """With 40 clients, two and a half groups: the same bytes as sums over all uploads at once."""
    wide = ["federation.clients=60", "federation.clients_per_round=40", "federation.local_steps=1"]
    words = ["resources.backend=inline", "partition.kind=iid", "data.train_limit=600", *wide]
    experiment = small(*words, "federation.compute=uniform", "federation.weighting=size")
    executor = InlineExecutor(experiment, prepare_run(experiment))
    server = Server(experiment, executor, open_checkpoints(experiment), "a")
    jobs = [TrainJob(1, client) for client in range(40)]
    everything = executor.run(server.broadcast(), jobs)
    reducer = server.reducer
    summed = executor.run(server.broadcast(), jobs, reducer)
    assert (len(everything.uploads), everything.sums) == (40, [])
    assert [len(each.clients) for each in summed.sums] == [FAN_IN, FAN_IN, 8]
    assert [u.client for u in summed.uploads] == [job.client for job in jobs[:MOST_CLIENTS]]
    assert [r.client for r in summed.reports] == [job.client for job in jobs]
    one, other = (executor.reduce(outcome, reducer) for outcome in (everything, summed))
    assert one.sums.shared.tobytes() == other.sums.shared.tobytes()
    assert one.clients == other.clients and one.weight == other.weight
    np.testing.assert_array_equal(one.unit_weight, other.unit_weight)
