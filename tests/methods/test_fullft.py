"""Full fine-tuning: every parameter is trained."""

from method_runs import server_of


def test_full_fine_tuning_trains_every_parameter(executor, tmp_path):
    inline = executor("method=fullft")
    assert inline.bench.model.layout.size == sum(
        p.numel() for p in inline.bench.model.merge(inline.bench.initial).parameters()
    )
    server = server_of(inline, tmp_path)
    start = server.checkpoint.state.shared
    server.step()
    assert (server.checkpoint.state.shared != start).mean() > 0.9
