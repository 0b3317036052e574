"""Core heads that change place during training."""

import numpy as np
import pytest
import torch
from method_runs import Recording, resumed, run, server_of, weights_of

from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.trishul import slots
from trishul_ray.methods.messages import Round

#: Six rounds in which heads certainly move: of gradients that differ much, from equal numbers.
MOVING = (
    "method=trishul-moving",
    "model=vit-digits",  # of four blocks, which exchange heads
    "method.move_every=1",
    "method.allocation=uniform",
    "federation.rounds=6",
    "federation.local_steps=6",
    "budget=4",
)
RULED = ("method=trishul-moving-rules",)


@pytest.fixture
def eager(monkeypatch):
    """Moves without a margin, so that few rounds have some."""
    monkeypatch.setattr(slots, "MARGIN", 1.0)


def cores_of(server):
    """Each core head of the server's state, in the order of its status."""
    state, layout = server.checkpoint.state, server.blueprint.layout
    tensors = server.method.named_tensors(layout, torch.from_numpy(state.shared.copy()))
    named = (value for name, value in tensors.items() if layout.entry(name).kind == "core")
    return [head for value in named for head in value]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("federation.compute=uniform",),
        ("method.head_fraction=0.5", "optimizer.weight_decay=0.1", "federation.weighting=size"),
        (*RULED, "method.rule=entropy", "method.selection=weight", "federation.compute=bell"),
        (*RULED, "method.rule=edge", "method.scalars=fixed"),
        ("uploads.codec=int8", "uploads.error_feedback=true", "server.optimizer=adam"),
        ("method=trishul-private-moving",),
        ("server.sum=ring", "server.optimizer=sgd", "server.momentum=0.9"),
    ],
)
def test_a_move_changes_no_bit_of_the_model_and_keeps_the_budget(more, executor, tmp_path, eager):
    inline = Recording(executor(*MOVING, *more))
    server = server_of(inline, tmp_path)
    private = getattr(inline.bench.settings.method, "private_heads", 0)
    matrices = len(inline.bench.model.specs)
    status, retired, moves = None, {}, 0
    while not server.finished:
        server.step()
        if server.checkpoint.round == 0:
            continue
        layout = server.blueprint.layout
        new = torch.from_numpy(server.checkpoint.state.extra["status"])
        cores, sizes = cores_of(server), slots.sizes(layout)
        budget = int(sizes[new == slots.ACTIVE].sum()) + private * int(sizes[0]) * matrices
        assert budget == server.blueprint.parameters["adapter"]
        for head, core in enumerate(cores):
            if new[head] == slots.SPARE:
                assert not core.any()
            if head in retired:  # frozen to the bit, and never trained again
                assert torch.equal(core, retired[head]) and new[head] > 0
        if status is not None:
            begun = (status == slots.SPARE) & (new == slots.ACTIVE)
            ended = (status == slots.ACTIVE) & (new > 0)
            assert all(not cores[head].any() for head in begun.nonzero().flatten())
            if begun.any() and server.checkpoint.round < 6:
                moves += 1
                # Statuses are no part of the model: it is the same with the ones of before.
                other = server.checkpoint.state
                old = type(other)(other.shared, other.extra | {"status": status.numpy()})
                both = [weights_of(inline, state) for state in (other, old)]
                assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])
            retired |= {int(h): cores[h].clone() for h in ended.nonzero().flatten()}
            for upload in inline.uploads:
                trained = upload.active[: len(status)]
                assert not trained[(status != slots.ACTIVE).numpy()].any()
        status = new
    assert moves > 0 and retired
    heads = [
        {k: v for k, v in record.diagnostics.items() if k.startswith("heads/")}
        for record in server.checkpoint.records[1:]
    ]
    first = {f"heads/{block}": float(n - private) for block, n in server.blueprint.heads.items()}
    assert {sum(each.values()) for each in heads} == {sum(first.values())}
    assert heads[0] == heads[1] == first and heads[-1] != first  # a fifth of six rounds is warm-up


def test_a_resumed_run_has_the_same_bytes(executor, tmp_path, eager):
    whole, _ = resumed(executor(*MOVING, "federation.compute=uniform"), tmp_path, stops=4)
    assert (whole.state.extra["status"] > 0).any()


def test_heads_stay_before_a_fifth_and_after_four_fifths(executor, tmp_path, eager):
    server = server_of(executor(*MOVING, "federation.rounds=10"), tmp_path)
    moved = set()
    while not server.finished:
        server.step()
        status = server.checkpoint.state.extra["status"]
        moved |= set(status[status > 0].tolist())
    assert moved and moved <= set(range(2, 9))


def test_traffic_leaves_out_what_is_zero_or_known(executor, tmp_path, eager):
    """Up: active heads. Down: these, and a retired core once for each client that lacks it."""
    options = (*MOVING, "method.scalars=fixed")
    server = run(executor(*options), tmp_path)
    still = run(executor("method.allocation=uniform", options[1], *options[4:]), tmp_path)
    layout, n = server.blueprint.layout, len(server.checkpoint.state.extra["status"])
    sizes = slots.sizes(layout)
    status = torch.from_numpy(server.checkpoint.state.extra["status"])
    last, found = {}, 0
    records = zip(server.checkpoint.records[1:], still.checkpoint.records[1:], strict=True)
    for record, other in records:
        clients = record.clients
        assert clients == other.clients
        assert record.uploaded_parameters == other.uploaded_parameters + 2 * n * len(clients)
        down = n * len(clients)
        for client in clients:
            # Retired after a round that the client has not followed.
            new = (status > 0) & (status < record.round) & (status >= last.get(client, 1))
            down += int(sizes[new].sum())
            found += int(new.any())
        assert record.downloaded_parameters == other.downloaded_parameters + down
        last |= dict.fromkeys(clients, record.round)
    assert found > 0


def test_the_score_of_a_block_is_what_it_moves_times_how_far_clients_agree(executor):
    layout = executor(*MOVING).bench.model.layout
    blocks = slots.blocks_of(layout)
    status = slots.first_status(layout, 2)
    loud, quiet = blocks[1], blocks[2]
    energy = torch.ones(len(status), dtype=torch.float64)
    spread = energy.clone()
    agreed = slots.moved_status(status, energy, spread, layout, 3)
    assert torch.equal(agreed, status)  # equal blocks of equal heads
    for slot in loud.active(status):
        energy[loud.entries(slot)] = 9.0
        spread[loud.entries(slot)] = 9.0
    least = loud.active(status)[1]
    for block in blocks:
        energy[block.entries(least)] *= 0.5
    moved = slots.moved_status(status, energy, spread, layout, 3)
    assert len(loud.active(moved)) == len(loud.active(status)) + 1
    (giver,) = [b for b in blocks if len(b.active(moved)) < len(b.active(status))]
    assert giver.with_status(moved, 3.0) == [least]
    for slot in loud.active(status):  # as loud as before, but clients disagree
        spread[loud.entries(slot)] = 90.0
    disputed = slots.moved_status(status, energy, spread, layout, 3)
    assert len(loud.active(disputed)) <= len(loud.active(status))
    assert len(quiet.active(disputed)) >= len(quiet.active(status))


def test_a_head_that_has_just_come_is_not_taken_for_a_weak_one(executor, eager):
    """A block that moves most gets a head, which moves more than its others, and then gives one."""
    layout = executor(*MOVING).bench.model.layout
    block = slots.blocks_of(layout)[1]
    extra = slots.first_extra(layout, 2)
    old, ages = block.active(extra["status"]), torch.zeros(len(extra["status"]))
    for number in range(1, 9):
        active = extra["status"] == slots.ACTIVE
        ages += active
        energy = (1.0 if number <= 4 else 100.0) * active.double()
        for slot in block.active(extra["status"]):
            energy[block.entries(slot)] = 9.0 if slot in old else 9.1
        round_ = Round(number, 3, 4, torch.ones(1, dtype=torch.bool), rounds=10)
        extra = slots.next_extra(extra, energy, energy, round_, 4, layout)
        if number == 4:
            new = [slot for slot in block.active(extra["status"]) if slot not in old]
            assert new
    gone = block.with_status(extra["status"], 8.0)
    assert gone and {*gone} <= {*old}
    expected = 1 - slots.MEMORY ** ages.double()
    torch.testing.assert_close(extra["active"][active], expected[active])


def test_an_exported_adapter_leaves_spare_heads_out_and_keeps_retired_ones(executor, tmp_path):
    inline = executor(*MOVING)
    server = run(inline, tmp_path)
    model, status = inline.bench.model, server.checkpoint.state.extra["status"]
    from trishul_ray.federation.workbench import global_model

    trained = global_model(inline.bench, server.broadcast(), 6)
    first = 0
    for name, adapter, params in model.iter_layers(trained.vector):
        mine = status[first : first + adapter.heads]
        first += adapter.heads
        constants = model.constants(name)
        factor_B, factor_A = adapter.lora_factors(None, constants, params)
        assert len(factor_A) == int((mine != slots.SPARE).sum()) * adapter.rank
        dense = sum(
            constants["basis_B"].double()[:, part]
            @ adapter.product(params)[head].double()
            @ constants["basis_A"].double()[part]
            for head in range(adapter.heads)
            for part in [slice(head * adapter.rank, (head + 1) * adapter.rank)]
        )
        torch.testing.assert_close(factor_B @ factor_A, dense, atol=1e-12, rtol=1e-9)


def test_heads_that_must_be_orthogonal_leave_room_for_those_to_come(executor):
    words = ("method=trishul-moving", "budget=2", "adapter.overflow=cap")
    bench = executor(*words).bench
    for spec in bench.model.specs:
        adapter = bench.model.adapters[spec.name]
        assert adapter.heads * adapter.rank <= min(spec.d_out, spec.d_in)
        basis = bench.model.constants(spec.name)["basis_A"]
        np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-5)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("privacy.noise=1", "privacy: method='trishul-moving' sends statistics"),
        ("downloads.codec=int8", "downloads: a codec sends all core heads in every round"),
    ],
)
def test_what_alters_or_hides_statistics_is_refused(word, message):
    with pytest.raises(InputError, match=message):
        load_experiment(None, ["dataset=digits", "method=trishul-moving", word])
