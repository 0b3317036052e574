"""FedEx-LoRA: counted traffic of its residual."""

from method_runs import run

from trishul_ray.federation.checkpoint import state_digest


def test_fedex_counts_its_residual(executor, tmp_path):
    inline = executor("method=fedex")
    dense = run(inline, tmp_path)
    factors = run(executor("method=fedex", "method.ship=factors"), tmp_path)
    lora = dense.spec.parameters["adapter"]
    head = dense.spec.parameters["head"]
    widths = len(inline.context.model.specs) * 64 * 64
    cohort = 3
    assert [r.downloaded_parameters for r in dense.checkpoint.records[1:]] == [
        cohort * (lora + head),
        cohort * (lora + head + widths),
    ]
    assert factors.checkpoint.records[2].downloaded_parameters == cohort * (
        lora + head + (cohort + 1) * lora
    )
    assert state_digest(dense.checkpoint.state) == state_digest(factors.checkpoint.state)
