"""JAX's coordination service, as far as this library uses it: who the cluster says we are, and a few shared strings.

The one place that reaches for JAX's private names. The store is for small facts about the job, never for tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax._src import clusters, xla_bridge
from jax._src import distributed as runtime

PEER_TIMEOUT_EXIT = 75  # EX_TEMPFAIL of sysexits.h: worth another try
DEACTIVATE = "deactivate"  # no cluster is looked for
DISAGREEMENT_EXIT = 76  # EX_PROTOCOL: the processes do not run the same thing
_forgotten: list[Any] = []


class PeerTimeout(RuntimeError):
    """A process of the job did not start, fell silent, ended or fell behind; the message says which, and its step."""


class DisagreementError(RuntimeError):
    """The processes of a job are about to run different things; the message says what, and who is on which side."""


class Place(NamedTuple):
    """This process in its job, as a cluster's scheduler says; None is what it does not say."""

    coordinator: str | None
    processes: int | None
    process_id: int | None
    local_device_ids: list[int] | None


def detect_cluster(method: str | None, timeout: float) -> Place:
    """Asks JAX for the cluster around us: Slurm, Open MPI, Kubernetes, Cloud TPU.

    Args:
        method: one cluster's name in JAX; None tries all that need no opting in, "deactivate" none.
        timeout: seconds that a cluster's own look-ups may take.

    Raises:
        ValueError: no such cluster, this process is in no such one, or what it says cannot be understood.
    """
    if method == DEACTIVATE:
        return Place(None, None, None, None)
    known = {kind.name: kind for kind in clusters.ClusterEnv._cluster_types}
    if method is not None and method not in known:
        raise ValueError(f"the cluster must be one of {', '.join(sorted(known))}, {DEACTIVATE}, not {method!r}")
    try:
        if method is not None and not known[method].is_env_present():
            raise ValueError(f"this process is in no cluster of {method}")
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, method, int(timeout))
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        missing = f"{type(error).__name__}: {error}"
        raise ValueError(f"the cluster around this process says only half: {missing}") from error
    coordinator, processes, process_id, local = found
    return Place(coordinator, processes, process_id, list(local) if local is not None else None)


def runtime_has_started() -> bool:
    """Whether JAX's runtime or a device has been started in this process, which is too late for a job."""
    return runtime.global_state.client is not None or xla_bridge.backends_are_initialized()


def in_a_job() -> bool:
    """Whether this process shares JAX's runtime with others."""
    return runtime.global_state.client is not None and runtime.global_state.num_processes > 1


def forget() -> None:
    """Makes a forked child no part of the job; what JAX holds is kept, because destroying it would wait for threads."""
    state = runtime.global_state
    _forgotten.append((state.client, state.service))
    state.client = state.service = None


def process_count() -> int:
    """Processes of the job, without starting a device."""
    return runtime.global_state.num_processes if in_a_job() else 1


def process_index() -> int:
    """This process's number in the job, without starting a device."""
    return runtime.global_state.process_id if in_a_job() else 0


def put(key: str, value: str) -> None:
    """Sets a shared string, replacing what was there."""
    _client().key_value_set(key, value, allow_overwrite=True)


def put_first(key: str, value: str) -> bool:
    """Sets a shared string that nobody has set; False where somebody was first."""
    try:
        _client().key_value_set(key, value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def everything_under(folder: str) -> dict[str, str]:
    """All shared strings whose keys start with `folder`/, by the rest of the key."""
    return {key.removeprefix(f"{folder}/"): value for key, value in _client().key_value_dir_get(f"{folder}/")}


def drop(folder: str) -> None:
    """Forgets everything under `folder`/."""
    _client().key_value_delete(f"{folder}/")


def _client() -> Any:
    client = runtime.global_state.client
    if client is None:
        raise RuntimeError("this process is in no job; call jaxcoll.distributed.initialize() first")
    return client
