"""What the sections of the edge make of uploads, means and cohorts, in the order they act.

Legend: W entries of the shared part, U units of aggregation.
"""

import math
from collections.abc import Sequence

import numpy as np

from trishul_ray.edge.draws import capacities, participants
from trishul_ray.edge.privacy.clipping import CLIPPED, automatic_norm, rounding_room
from trishul_ray.edge.privacy.config import PrivacyConfig
from trishul_ray.edge.privacy.mechanism import HIGH, LOW, Mechanism, reported
from trishul_ray.edge.privacy.stage import promised
from trishul_ray.edge.ring import Ring
from trishul_ray.edge.server_optimizer import ServerConfig
from trishul_ray.edge.state import EdgeState, PrivacyState
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import Blueprint, TrainReport
from trishul_ray.federation.records import RoundRecord
from trishul_ray.federation.reduce import Reducer, round_units
from trishul_ray.files import Json
from trishul_ray.methods.base import Method, State
from trishul_ray.stages import ArrayState, Partial


def privacy_report(experiment: Experiment, state: EdgeState, last: RoundRecord) -> Json | None:
    """Return what the summary of a run says of its privacy after a round; None without any."""
    fed = experiment.federation
    if state.privacy is None:
        return None
    simulated = (fed.participants, fed.clients_per_round)
    return reported(promised(experiment, state.privacy.noise), simulated, last.edge)


def unit_shares(experiment: Experiment, method: Method, blueprint: Blueprint) -> np.ndarray:
    """Return the share of the clients that train a unit, on average, [U] float64."""
    fed, seed = experiment.federation, experiment.seed
    every = capacities(fed.compute, seed, fed.clients, fed.compute_shares)
    shares = [every[client] for client in participants(fed, seed).tolist()]
    return method.unit_shares(blueprint.layout, shares)


def mechanism_of(
    experiment: Experiment, method: Method, blueprint: Blueprint, state: EdgeState
) -> Mechanism | None:
    """Return what a private experiment releases in a round; None for others.

    Args:
        experiment: The experiment.
        method: Its method.
        blueprint: What is known of the workers' benches.
        state: What the edge keeps between rounds; begun here if nothing is.

    Raises:
        InputError: As :func:`promised`, or rounding in fixed point is as large as the clip norm.
    """
    fed, layout = experiment.federation, blueprint.layout
    options, server = experiment.section(PrivacyConfig), experiment.section(ServerConfig)
    if not options.on:
        return None
    lengths = dict(blueprint.expected.lengths)
    total = sum(lengths.values())
    resting = min(_resting(method, blueprint, n) for n in (1, 2))
    del lengths["shared"]
    first_norm = options.clip
    if first_norm == "auto":
        first_norm = automatic_norm(experiment.optimizer.lr, fed.local_steps, total - resting)
    if server.sum == "ring":
        room = rounding_room(Ring(server.fraction_bits, 1).step / 2, total)
        if first_norm <= room:
            raise InputError(
                f"server.fraction_bits={server.fraction_bits}: rounding may lengthen a change of "
                f"{total:,} numbers by {room:.3g}, which leaves nothing of the clip norm "
                f"{first_norm:.3g}: allowed: more bits, or a larger privacy.clip"
            )
    kept = state.privacy
    guaranteed = promised(experiment, None if kept is None else kept.noise)
    state.privacy = kept or PrivacyState(first_norm, guaranteed.noise)
    return Mechanism(
        options=options,
        seed=experiment.seed,
        promised=guaranteed,
        clients=fed.participants,
        cohort=fed.clients_per_round,
        units=tuple(layout.units(blueprint.wire)),
        shares=unit_shares(experiment, method, blueprint),
        extra=lengths,
        first_norm=first_norm,
        resting=resting,
    )


def _resting(method: Method, blueprint: Blueprint, number: int) -> int:
    """Return how many numbers of the shared part clients do not send in a round."""
    sent = round_units(method, blueprint.layout, number)
    return 0 if sent is None else int(blueprint.expected.unit_sizes[~sent].sum())


def release(
    mechanism: Mechanism,
    number: int,
    total: Partial,
    reducer: Reducer,
    before: ArrayState,
    reports: Sequence[TrainReport],
    state: EdgeState,
) -> tuple[ArrayState, np.ndarray, dict[str, float]]:
    """Return what a private round releases.

    Args:
        mechanism: What is released.
        number: The round, from 1.
        total: The sum of the accepted uploads, if any.
        reducer: How they were summed.
        before: The server's state before the round.
        reports: Those of the cohort.
        state: What the edge keeps between rounds; updated.

    Returns:
        The noisy mean change; [U] bool, the units that it moves; and what the record says of it.
    """
    kept = state.privacy
    assert kept is not None
    norm = kept.clip_norm
    sums = total.sums or State(
        np.zeros(before.shared.shape), {k: np.zeros(n) for k, n in mechanism.extra.items()}
    )
    shared = sums.shared
    if mechanism.options.canaries:
        canaries = mechanism.canaries(number, norm)
        kept.arrays["canaries"] = kept.arrays.get("canaries", 0.0) + canaries
        shared = shared + canaries
    sent = round_units(reducer.method, reducer.layout, number)
    change, extra = mechanism.mean(number, shared, sums.extra, norm, sent)
    change = mechanism.denoised(change, before.shared, norm, kept)
    accepted = set(total.clients)
    balance = sum(0.5 - r.edge[CLIPPED] for r in reports if r.client in accepted)
    kept.clip_norm = mechanism.next_norm(number, norm, balance)
    found = {"privacy_clip_norm": norm}
    if (epsilon := mechanism.promised.epsilon(number)) < math.inf:
        found["privacy_epsilon"] = epsilon
    extra = {name: array.astype(np.float32) for name, array in extra.items()}
    moves = np.ones(len(mechanism.units), dtype=bool) if sent is None else sent
    return State(change, extra), moves, found


def audited(
    mechanism: Mechanism | None, number: int, now: ArrayState, state: EdgeState
) -> dict[str, float]:
    """Return what the record of a round says of an audit; empty if there is none."""
    if mechanism is None or state.privacy is None:
        return {}
    found = mechanism.audited(number, now.shared, state.privacy)
    return {} if found is None else dict(zip((LOW, HIGH), found, strict=True))
