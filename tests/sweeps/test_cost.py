"""The operations that the cost model counts, against arithmetic and against those that are done."""

import pytest
import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.federation.inline import InlineDriver
from trishul_ray.federation.prepare import prepare_run
from trishul_ray.spectral.svt import svt_by_iteration
from trishul_ray.sweeps.cost import DEVICES, EFFICIENCY, RUN_SECONDS, evaluated_rows, work_of

#: By hand: 35.2 GFLOP for a forward pass of ViT-B/16 on an image, less 2.4 for all but one token of
#: its last block's queries, output and MLP; twice that for a training step of the frozen model; 50
#: rounds of 3 clients x 50 steps of 32 images, and 51 evaluations of 10,000.
FORWARD = 32.8e9
TRAINING = 2 * FORWARD * 50 * 3 * 50 * 32
EVALUATION = FORWARD * 51 * 10_000


def test_the_vision_run_takes_33_seconds_at_the_peak_of_an_h100():
    work = work_of(load_experiment(None, ["dataset=cifar100", "model.precision=bf16"]))
    assert work.training.backbone == pytest.approx(TRAINING, rel=0.03)
    assert work.evaluation.backbone == pytest.approx(EVALUATION, rel=0.01)
    seconds = (work.training.backbone + work.evaluation.backbone) / DEVICES["h100"].peak["bf16"]
    assert seconds == pytest.approx(33, rel=0.03)
    with FlopCounterMode(display=False) as counted:
        svt_by_iteration(torch.randn(96, 110, 110), 1e-3)
    # After each of 7,500 local steps: 20 GFLOP, in float64.
    assert work.prox / 7500 == counted.get_total_flops() == pytest.approx(20e9, rel=0.03)


def test_seconds_are_operations_by_rate_or_layers_by_latency():
    experiment = load_experiment(None, ["dataset=cifar100", "method=fedit"])
    work = work_of(experiment)
    total = sum(p.backbone + p.adapters for p in (work.training, work.evaluation))
    rate = EFFICIENCY["fp32"] * DEVICES["v100"].peak["fp32"]
    assert work.seconds("v100", "fp32") == pytest.approx(RUN_SECONDS + total / rate)
    tiny = work_of(load_experiment(None, ["method=fedit"]))
    layers = tiny.training.layers + tiny.evaluation.layers
    expected = RUN_SECONDS + layers * DEVICES["h100"].layer_seconds
    assert tiny.seconds("h100", "fp32") == pytest.approx(expected)


def test_clients_that_train_for_a_comparison_alone_are_counted():
    words = ["dataset=cifar100", "federation.rounds=2", "federation.clients=13"]
    plain, more = (
        work_of(load_experiment(None, [*words, *asked]))
        for asked in ([], ["evaluation.diagnostics_cohort=all"])
    )
    # Ten clients beside the three of the last round; six trained before.
    assert more.training.backbone == pytest.approx(plain.training.backbone * 16 / 6)
    assert more.evaluation == plain.evaluation


#: The attention of a CPU, which PyTorch does not count.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(grad, query, key, value)
    ),
}
RUNS = {
    "images": ["model.name=vit-digits"],
    "images, full fine-tuning": ["model.name=vit-digits", "method=fullft"],
    "images, merged": ["model.name=vit-digits", "method=ravan", "adapter.path=merged"],
}


@pytest.mark.parametrize("name", RUNS)
def test_the_operations_of_a_run_are_those_that_are_counted_while_it_runs(small, name):
    experiment = small(*RUNS[name], "federation.rounds=2", "evaluation.diagnostics_every=0")
    work = work_of(experiment)
    driver = InlineDriver(experiment, prepare_run(experiment), "counted")
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        report = driver.begin()
        while not report.finished:
            report = driver.step()
    expected = sum(p.backbone + p.adapters for p in (work.training, work.evaluation))
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.08)


def test_clients_own_models_are_scored_on_all_rows_again():
    words = ["dataset=cifar100", "method=fedsa", "federation.rounds=1", "evaluation.every=0"]
    plain, more = (
        work_of(load_experiment(None, [*words, *asked])).evaluation.backbone
        for asked in ([], ["evaluation.per_client=true"])
    )
    # The untouched and the last model, and those of the three clients of the only round.
    assert more == pytest.approx(plain * 5 / 2)


def test_other_settings_cost_what_they_add():
    def flops(*words):
        work = work_of(load_experiment(None, ["dataset=cifar100", "method=fedit", *words]))
        return work.training.backbone, work.evaluation.backbone

    training, evaluation = flops()
    assert flops("federation.rounds=100", "evaluation.every=2") == pytest.approx(
        (2 * training, evaluation)
    )
    assert flops("evaluation.limit=1000")[1] == pytest.approx(evaluation / 10)
    assert flops("model.gradient_checkpointing=true")[0] == pytest.approx(1.5 * training, rel=0.02)
    assert flops("model.image_size=112")[0] < training / 3.5
    assert evaluated_rows(load_experiment(None, ["dataset=glue/mnli"])) == (9815 + 9832, 0)
    share = ["data.validation_share=0.1", "evaluation.limit=6000"]
    assert evaluated_rows(load_experiment(None, ["dataset=svhn", *share])) == (6000, 6000)
    share[1] = "evaluation.limit=10000"
    assert evaluated_rows(load_experiment(None, ["dataset=svhn", *share])) == (10000, 7326)


def test_rows_of_unseen_groups_are_scored_and_a_decoders_head_sees_the_labels():
    words = ["dataset=synthetic/instructions", "method=fedit"]
    plain = load_experiment(None, words)
    unseen = load_experiment(None, [*words, "data.test_groups=[copy]"])
    (test, _), (more, _) = evaluated_rows(plain), evaluated_rows(unseen)
    rows = prepare_run(unseen).dataset
    assert (test, more) == (150, len(rows.test)) and more > 200
    longer = load_experiment(None, [*words, "task.target_length=64"])
    assert work_of(longer).training.backbone > work_of(plain).training.backbone


def test_a_model_that_is_not_on_this_machine_is_named():
    with pytest.raises(InputError, match="nobody/nothing"):
        work_of(load_experiment(None, ["model=nobody/nothing"]))
