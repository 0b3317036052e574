"""Full fine-tuning: every parameter is trained."""

from method_runs import server_of

from trishul_ray.adapters.model import Trained


def test_full_fine_tuning_trains_every_parameter(executor, tmp_path):
    inline = executor("method=fullft")
    assert inline.context.model.layout.size == sum(
        p.numel() for p in inline.context.model.merge(Trained(inline.context.initial)).parameters()
    )
    server = server_of(inline, tmp_path)
    start = server.checkpoint.state.shared
    server.step()
    assert (server.checkpoint.state.shared != start).mean() > 0.9
