"""Joining a Ray cluster, or starting a local one and ending what was started."""

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from urllib.parse import urlsplit

import ray
from ray._private import ray_constants, utils, worker
from ray._raylet import (  # type: ignore[attr-defined]  # a compiled module without types
    AuthenticationTokenLoader,
    Config,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trishul_ray.errors import RunError
from trishul_ray.experiment import Experiment
from trishul_ray.federation.on_ray.slices import Slices, plan_slices, slices_of_bundles

#: Where Ray looks for a token, beside ~/.ray/auth_token.
_TOKEN_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


#: Seconds a cluster may take to answer.
PATIENCE = 10.0


@contextmanager
def ray_session(cpus: int | None = None) -> Iterator[dict[str, float]]:
    """Join the cluster at ``RAY_ADDRESS``, use the one this process is in, or start a local one.

    A runtime that was there before is left alone at the end; one started here is shut down, with
    every process it had, also if this process is killed (its children die with it). Local
    clusters listen on localhost alone, ask for a token that only this process and its children
    know, write nothing to the home folder, and show no dashboard.

    An existing cluster is sent a token where this machine has one (``RAY_AUTH_TOKEN``,
    ``~/.ray/auth_token``), as Ray's own commands do; one that asks for none is then joined with
    ``RAY_AUTH_MODE=disabled``.

    Args:
        cpus: CPUs of a local cluster; default what the machine has.

    Yields:
        What is free: ``{"CPU": ..., "GPU": ...}``.

    Raises:
        RunError: the cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield ray.available_resources()
        return
    address = os.environ.get("RAY_ADDRESS")
    joins = address not in (None, "", "local")
    # GPU slices are fractions of devices the actor must still see when it holds none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    before = {name: os.environ.get(name) for name in _TOKEN_SETTINGS}
    try:
        # Ray's own words go to its session folder; what a person must know, the run says itself.
        worker._worker_logs_enabled = False
        try:
            with _own_sigterm_handler():
                if joins:
                    _join(str(address))
                else:
                    _start(cpus)
        except Exception as error:  # a bare one of Ray's, too, where its processes do not come up
            what = f"join the cluster at RAY_ADDRESS={address}" if joins else "start a local Ray"
            raise RunError(f"cannot {what}: {_first_line(error)}") from error
        yield ray.available_resources()
    finally:
        # Also after a start that was interrupted half-way.
        ray.shutdown()
        worker._worker_logs_enabled = True
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, if it has one, instead of Ray's.

    Ray installs two while it starts. The one in Python ends the process where it stands; the one in
    C++ prints its stack and aborts.
    """
    mine = signal.getsignal(signal.SIGTERM)
    if not callable(mine) or threading.current_thread() is not threading.main_thread():
        yield
        return
    rays = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = rays
        signal.signal(signal.SIGTERM, mine)


def _start(cpus: int | None) -> None:
    if not any(os.environ.get(name) for name in _TOKEN_SETTINGS):
        # Ray would write one to the home folder, which may be read-only or shared.
        os.environ["RAY_AUTH_TOKEN"] = _own_token()
    # What Ray does on a laptop by itself: its servers listen on the loopback address alone. (An
    # `_node_ip_address` of 127.0.0.1 is replaced by the address that others see.)
    # Ray starts workers at niceness 15, so that whatever else runs here would starve the clients.
    os.environ.setdefault("RAY_worker_niceness", "0")
    reachable, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = reachable


def _join(address: str) -> None:
    _check_answers(address)
    if not os.environ.get("RAY_AUTH_MODE") and AuthenticationTokenLoader.instance().has_token(
        ignore_auth_mode=True
    ):
        # As `ray start` does where there is a token. With an explicit address Ray would send none.
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # the mode was read when Ray was imported
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


def _check_answers(address: str) -> None:
    """Fail at once where nothing listens: Ray itself tries for minutes."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), PATIENCE).close()


@cache
def _own_token() -> str:
    # One for all clusters this process starts: Ray reads it once.
    return secrets.token_hex(32)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def slices_here(experiment: Experiment) -> Slices:
    """What a run takes: the bundles of the trial it is in, else a share of the whole cluster.

    Raises:
        InputError: the slices asked for are not to be had.
    """
    group = ray.util.get_current_placement_group()
    if group is not None:
        return slices_of_bundles(experiment, group.bundle_specs)
    return plan_slices(experiment, ray.available_resources(), ray.cluster_resources())


def room_for(slices: Slices) -> bool:
    """Whether one of the slices can be had at once; a trial's own bundles are there for it."""
    free = ray.available_resources()
    return ray.util.get_current_placement_group() is not None or (
        free.get("CPU", 0.0) >= slices.cpus and free.get("GPU", 0.0) >= slices.gpus
    )


def beside_driver() -> NodeAffinitySchedulingStrategy | None:
    """Keeps an actor on this node, where a local folder of runs is; None inside a trial.

    A trial's actors belong into its bundles, and its storage is seen by every node.
    """
    if ray.util.get_current_placement_group() is not None:
        return None
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
