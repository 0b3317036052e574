"""Clients of limited compute that train the leading part of every core."""

import itertools

import numpy as np
import pytest
import torch
from method_runs import Recording, resumed, run, server_of
from pydantic import ValidationError

from trishul_ray.config.fields import COMPUTE_LEVELS
from trishul_ray.data.sampling import capacities
from trishul_ray.errors import InputError
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.lab.trishul.limited import leading_rank
from trishul_ray.methods.base import method_class

RANKS = ("federation.compute=uniform", "federation.local_steps=3")
LIMITS = "method.limits=ranks"
METHODS = [
    ("method=ravan-ranks",),
    ("method=trishul-ranks", LIMITS, "method.lam=1.0"),
    ("method=trishul-ranks-rules", LIMITS, "method.prox_on=change"),
    ("method=trishul-ranks-rules", LIMITS, "method.rule=entropy", "optimizer.weight_decay=0.1"),
    ("method=trishul-ranks-rules", LIMITS, "method.rule=unknown", "method.scalars=fixed"),
    ("method=trishul-ranks-moving", LIMITS, "method.move_every=1", "federation.weighting=size"),
    ("method=trishul-ranks", LIMITS, "method.ranks_by=head"),
]


def cores(server, shared):
    layout = server.blueprint.layout
    named = server.method.named_tensors(layout, torch.from_numpy(np.array(shared)))
    return {n: v.double() for n, v in named.items() if layout.entry(n).kind == "core"}


@pytest.mark.parametrize("words", METHODS)
def test_an_entry_is_the_mean_of_those_who_hold_it(words, executor, tmp_path):
    inline = Recording(executor(*words, *RANKS))
    server = server_of(inline, tmp_path)
    fed = server.experiment.federation
    share = capacities("uniform", server.experiment.seed, fed.clients)
    seen = set()
    for _ in range(fed.rounds):
        server.step()
        old, new = (
            cores(server, inline.broadcast.shared),
            cores(server, server.checkpoint.state.shared),
        )
        sent = {u.client: cores(server, u.arrays.shared) for u in inline.uploads}
        rows = {u.client: u.rows for u in inline.uploads}
        masks = {u.client: u.active for u in inline.uploads}
        first = 0
        for name, before in old.items():
            heads, rank, _ = before.shape
            for i, j in itertools.product(range(heads), range(rank)):
                holders = [c for c in sent if j < leading_rank(rank, share[c])]
                holders = [c for c in holders if masks[c] is None or masks[c][first + i]]
                expected = before[i, j, : j + 1]  # up to the diagonal, all have one lead
                if holders:
                    by_size = fed.weighting == "size"
                    weights = [rows[c] if by_size else 1.0 for c in holders]
                    terms = [
                        w * sent[c][name][i, j, : j + 1]
                        for w, c in zip(weights, holders, strict=True)
                    ]
                    expected = sum(terms) / sum(weights)
                torch.testing.assert_close(new[name][i, j, : j + 1], expected, atol=1e-6, rtol=1e-4)
                seen.add(len(holders))
            for client, found in sent.items():  # what a client does not hold is as it was
                lead = leading_rank(rank, share[client])
                assert torch.equal(found[name][:, lead:], before[:, lead:])
                assert torch.equal(found[name][:, :, lead:], before[:, :, lead:])
                if masks[client] is None or masks[client][first : first + heads].any():
                    assert not torch.equal(found[name], before)
            first += heads
    assert len(seen) > 1 and "aggregation_error" not in server.checkpoint.records[-1].diagnostics


@pytest.mark.parametrize("words", [METHODS[0], METHODS[1], METHODS[3], METHODS[5]])
def test_traffic_counts_the_leading_part_up_and_all_of_it_down(words, executor, tmp_path):
    inline = Recording(executor(*words, *RANKS))
    server = server_of(inline, tmp_path)
    units = list(server.blueprint.layout.units(server.blueprint.wire))
    share = capacities("uniform", server.experiment.seed, server.experiment.federation.clients)
    for _ in range(2):
        server.step()
        expected = 0
        for upload in inline.uploads:
            trained = [True] * len(units) if upload.active is None else upload.active
            for unit, sent in zip(units, trained, strict=True):
                lead = leading_rank(unit.rank, share[upload.client]) if unit.rank else 0
                expected += sent * (lead**2 if lead else unit.size)
            expected += sum(array.size for array in upload.arrays.extra.values())
        assert server.checkpoint.records[-1].uploaded_parameters == expected
    full = run(executor(*words), tmp_path)
    both = [
        [record.downloaded_parameters for record in each.checkpoint.records[1:]]
        for each in (server, full)
    ]
    last = 1 if words == METHODS[5] else 2  # other heads are retired after other uploads
    assert both[0][:last] == both[1][:last]


def test_with_full_compute_it_is_the_method_to_the_bit(executor, tmp_path):
    for ranks, plain in ((METHODS[0], ("method=ravan",)), (METHODS[1], ("method.lam=1.0",))):
        both = [run(executor(*words), tmp_path) for words in (ranks, plain)]
        assert np.array_equal(*(server.checkpoint.state.shared for server in both))


def test_a_resumed_run_has_the_same_bytes(executor, tmp_path):
    resumed(executor(*METHODS[1], *RANKS), tmp_path)


@pytest.mark.parametrize(
    ("rank", "expected"), [(8, (4, 5, 6, 8)), (110, (55, 77, 95, 110)), (1, (1,) * 4)]
)
def test_leading_ranks_by_hand(rank, expected):
    assert tuple(leading_rank(rank, share) for share in COMPUTE_LEVELS) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_fraction": 0.5}, "head_fraction=0.5 has no effect with limits='ranks'"),
        ({"selection": "weight"}, "selection='weight' has no effect with limits='ranks'"),
        ({"rule": "edge"}, "limits='ranks' cannot be set with rule='edge'"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        method_class("trishul-ranks-rules").Config(limits="ranks", **fields)


def test_what_needs_the_mean_alone_is_refused():
    for words in (["method=ravan-ranks"], ["method=trishul-ranks", LIMITS]):
        with pytest.raises(InputError, match=r"uploads: .*method='(ravan|trishul)-ranks'"):
            load_experiment(None, ["dataset=digits", *words, "uploads.codec=int8"])
