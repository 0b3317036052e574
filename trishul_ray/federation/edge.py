"""What the sections of the edge make of uploads, means and cohorts, in the order they act.

Legend: W entries of the shared part, U units of aggregation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from trishul_ray.adapters.layout import Unit
from trishul_ray.edge.changes import Change, Sender, UploadFilter
from trishul_ray.edge.codecs.base import Units, build_codec
from trishul_ray.edge.draws import capacities, participants
from trishul_ray.edge.privacy.clipping import CLIPPED, Clip, automatic_norm, rounding_room
from trishul_ray.edge.privacy.config import PrivacyConfig
from trishul_ray.edge.privacy.mechanism import HIGH, LOW, Mechanism, reported
from trishul_ray.edge.privacy.stage import promised
from trishul_ray.edge.ring import Ring
from trishul_ray.edge.server_optimizer import ServerConfig, server_step
from trishul_ray.edge.state import EdgeState, PrivacyState
from trishul_ray.edge.traffic import (
    CodedState,
    DownloadsConfig,
    UploadCodec,
    UploadsConfig,
    coded_state,
)
from trishul_ray.errors import InputError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.messages import ArrayState, Blueprint, TrainJob, TrainReport, Upload
from trishul_ray.federation.records import RoundRecord
from trishul_ray.federation.reduce import Partial, Reducer, configured_weight, round_units
from trishul_ray.files import Json
from trishul_ray.lazy import scipy
from trishul_ray.methods.base import Method, State, method_class
from trishul_ray.rng import numpy_rng

#: Share of units that too few clients train, on average, above which a run warns of it.
OFTEN = 0.05


class Edge:
    """What an experiment's sections of the edge ask for; the same in every process.

    Attributes:
        filters: What a change passes on the worker. Codecs come first and clipping after them, so
            that what is added never exceeds the norm; fixed point is last.
        downloads: The codec of broadcasts, if there is one.
        moves_beyond_mean: Whether the next state is another one than the mean of what clients have.
        ring: Fixed point, if sums are in it.
        sends_changes: Whether clients send the change since the broadcast instead of the value.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        fed, privacy = experiment.federation, experiment.section(PrivacyConfig)
        server, uploads = experiment.section(ServerConfig), experiment.section(UploadsConfig)
        plain = method_class(experiment.method.name).plain_mean
        self._mirrored = method_class(experiment.method.name).mirrored
        codec = UploadCodec.of(uploads, self._mirrored)
        self.downloads = build_codec(experiment.section(DownloadsConfig))
        self.ring: Ring | None = None
        if server.sum == "ring":
            poisson = privacy.on and privacy.sampling == "poisson"
            most = fed.participants if poisson else fed.clients_per_round
            self.ring = Ring(server.fraction_bits, most, plain, server.min_clients)
        clip = Clip(self.ring.step / 2 if self.ring else 0.0) if privacy.on else None
        chain: tuple[UploadFilter | None, ...] = (codec, clip, self.ring)
        self.filters = tuple(each for each in chain if each is not None)
        changed = server.optimizer != "none" or self.downloads is not None
        self.moves_beyond_mean = changed or privacy.on
        self.sends_changes = bool(self.filters) or self.moves_beyond_mean

    def coded_broadcast(
        self, whole: ArrayState, round_number: int, units: Iterable[Unit]
    ) -> CodedState | None:
        """Return what clients read of a round's broadcast; None if they read it as it is."""
        if self.downloads is None:
            return None
        rng = numpy_rng(self.experiment.seed, "codec-down", round_number)
        return coded_state(self.downloads, whole, Units.of(units), rng)

    def send(
        self,
        upload: Upload,
        report: TrainReport,
        broadcast: ArrayState,
        job: TrainJob,
        units: Sequence[Unit],
    ) -> tuple[Upload, TrainReport]:
        """Turn a client's upload into a change and pass it through the filters, on its worker."""
        weight = self._weight(upload)
        sender = Sender(
            self.experiment.seed, job.round, job.client, weight, units, upload.active, job.kept,
            job.clip_norm, broadcast.shared,
        )  # fmt: skip
        moved = upload.arrays.shared - broadcast.shared
        if upload.active is not None:
            moved[np.repeat(~upload.active, [unit.size for unit in units])] = 0
        change = Change(moved, upload.arrays.extra)
        sent = read = change.extra
        for each in self.filters:
            change = each(change, sender)
            if each is not self.ring:  # which writes the same numbers in fixed point
                read = change.extra
        altered = self._mirrored if read is not sent else ()
        corrected = {name: job.state.get(name, 0.0) + read[name] for name in altered}
        arrays = replace(upload.arrays, shared=change.shared, extra=change.extra)
        report = replace(
            report,
            state={**report.state, **corrected},
            uploaded_bytes=change.uploaded_bytes,
            kept=change.kept,
            edge=change.metrics,
        )
        return replace(upload, arrays=arrays), report

    def _weight(self, upload: Upload) -> float:
        return configured_weight(self.experiment.federation.weighting, upload)

    def restored(self, upload: Upload, broadcast: ArrayState) -> Upload:
        """Return an upload with values in place of changes, for diagnostics."""
        if not self.sends_changes:
            return upload
        moved = upload.arrays.shared
        if self.ring is not None:
            moved = self.ring.decode(moved) / self._weight(upload)
        value = broadcast.shared + moved
        return replace(upload, arrays=replace(upload.arrays, shared=value.astype(np.float32)))

    def kept_value(self, before: ArrayState) -> ArrayState:
        """Return what stands in the mean for a unit that nobody trained: its value, or no change.

        Args:
            before: The server's state before the round.
        """
        if not self.sends_changes:
            return before
        return replace(before, shared=np.zeros_like(before.shared))

    def move(
        self, before: ArrayState, mean: ArrayState, trained: np.ndarray, state: EdgeState
    ) -> ArrayState:
        """Return the mean as a value, given the mean change; update the state of the stages.

        Args:
            before: The server's state before the round.
            mean: The mean of what clients sent, whose ``shared`` is a change.
            trained: [W] bool, the entries that at least one client trained.
            state: What the edge keeps between rounds.
        """
        step, server = mean.shared.astype(np.float64), self.experiment.section(ServerConfig)
        if server.optimizer != "none":
            step, state.moments = server_step(step, state.moments, server, trained)
        return replace(mean, shared=(before.shared + step).astype(np.float32))


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


def ring_lines(experiment: Experiment, method: Method, blueprint: Blueprint) -> list[str]:
    """Return what a reader must know of sums in fixed point before the run, a line each."""
    server, privacy = experiment.section(ServerConfig), experiment.section(PrivacyConfig)
    if server.sum != "ring":
        return []
    lines = [
        "server.sum=ring: secure sums show nothing of single clients; what is recorded of them "
        "(diagnostics, losses, refused uploads) is the simulator's view"
    ]
    if privacy.on:
        return lines
    binom = scipy.stats.binom
    size = experiment.federation.clients_per_round
    shares = unit_shares(experiment, method, blueprint)
    few = binom.cdf(server.min_clients - 1, size, shares) - binom.pmf(0, size, shares)
    if (share := float(few.mean())) > OFTEN:
        lines.append(
            f"warning: server.min_clients={server.min_clients}: so many of {size} clients do not "
            f"train a unit in {share:.0%} of cases, and it stays as it was: take larger cohorts "
            "or clients that train more heads"
        )
    return lines


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
    if reducer.ring is not None:
        sums = sums.map(reducer.ring.decode)
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
