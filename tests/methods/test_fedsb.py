"""Fed-SB: its round 0 and its bases."""

from method_runs import run


def test_round_0_is_the_pretrained_backbone(executor, tmp_path):
    """Fed-SB's first broadcast already updates the model; its record of round 0 must not."""
    records = {
        name: run(executor(f"method={name}"), tmp_path).checkpoint.records[0]
        for name in ("fedit", "fedsb")
    }
    assert records["fedsb"].scores == records["fedit"].scores


def test_fedsb_counts_its_bases_once_for_each_client(executor, tmp_path):
    inline = executor("method=fedsb", "federation.rounds=3")
    server = run(inline, tmp_path)
    specs, adapters = inline.context.model.specs, inline.context.model.adapters
    bases = sum(adapters[spec.name].rank * (spec.d_out + spec.d_in) for spec in specs)
    core = sum(server.spec.parameters.values())
    known = set()
    for record in server.checkpoint.records[1:]:
        new = set(record.clients) - known
        known |= new
        assert record.downloaded_parameters == 3 * core + len(new) * bases
    assert len(known) == 4 and len(server.checkpoint.records[3].clients) == 3
