"""A Ray cluster: one that is already running, or one on this machine that ends with the run."""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from tether.config import cores
from tether.errors import UserError, one_line

CONNECT_SECONDS = 20.0  # for a cluster to answer

ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths in a config start where the command was typed
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
    "GOMP_SPINCOUNT": "1000",
}


# Of the command itself: no usage reports, and no output but the user's.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}


# Of a cluster that ends with the run and that no other machine reaches.
OWN = {
    # At 0 a node may be 127.0.0.1, and its services listen there alone. Otherwise Ray, on every
    # system, replaces that by the address at which others reach this machine, and listens on all.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # After kill -9 Ray's agents try for so long to tell the dead server; by default for 60 s.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
}


def import_ray() -> ModuleType:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    before = signal.getsignal(signal.SIGTERM)
    try:
        import ray
        import ray.train
    except ImportError as error:
        raise UserError(
            f"launch.kind ray needs Ray Train, and {error.name} is not installed: "
            f"pip install '.[ray]' in tether's source folder."
        ) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray takes it for itself when it is imported
    return ray


@contextmanager
def connected(
    address: str | None, workers: int, cpus: int | None = None, loopback: bool = False
) -> Iterator[ModuleType]:
    """Connect to the cluster at that address, or start one here that ends with the run.

    `cpus` are those that one that is started here counts, by default the cores. With `loopback` it
    is out of reach for other machines. Ray reads of it when it is imported, so a program that has
    imported Ray before keeps what it had then.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {}
    if address == "local":
        _refuse_more_than_cores(workers)
        _lock()
        options |= {"num_cpus": cpus or cores(), "include_dashboard": False}
    else:
        _refuse_silent(address)
    with ExitStack() as held:
        if address == "local" and loopback:
            held.enter_context(_own_cluster())
            options["_node_ip_address"] = "127.0.0.1"
        ray = import_ray()
        if ray.is_initialized():  # by a notebook, say, which keeps it
            yield ray
            return
        try:
            _init(ray, address, options)
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def _own_cluster() -> Iterator[None]:
    """Set these variables while the cluster is there; others of this program are not meant."""
    before = {name: os.environ.get(name) for name in OWN}
    os.environ.update(OWN)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _lock() -> None:
    """Set a token for this run alone; Ray would leave one in the home directory for later runs."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _init(ray: ModuleType, address: str, options: dict[str, Any]) -> None:
    try:
        with _nothing_on_stderr():
            ray.init(
                address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": ENVIRONMENT},
                **options,
            )
    except (RuntimeError, ValueError, OSError) as error:  # connections and time-outs among these
        raise UserError(
            f"Ray at launch.address {address} refused: {one_line(error)} (where it asks for a "
            f"token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN)."
        ) from None
    except Exception as error:
        if type(error) is not Exception:  # as Ray says that a node was not there in 30 s
            raise
        raise UserError(f"Ray did not start: {one_line(error)}") from None


@contextmanager
def _nothing_on_stderr() -> Iterator[None]:
    """Silence Ray's own lines about attempts and failures; the error says what came of them."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def _refuse_more_than_cores(workers: int) -> None:
    if workers > cores():
        raise UserError(
            f"launch.num_workers is {workers}, but this machine has {cores()} cores; lower it, or "
            f"name a cluster by launch.address."
        )


def _refuse_silent(address: str) -> None:
    """Refuse an address that does not answer; Ray itself would go on trying for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(
            f"launch.address is {address!r}; write HOST:PORT, ray://HOST:PORT, or leave it out for "
            f"this machine alone."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as found:
            problem = None if _speaks_http2(found) else "something else than Ray listens there"
    except (OSError, OverflowError) as error:
        problem = one_line(error)
    if problem is not None:
        raise UserError(
            f"launch.address {address} does not answer: {problem}; is a Ray cluster up there?"
        )


def _speaks_http2(found: socket.socket) -> bool:
    """Return whether the answer to a greeting begins with a settings frame, as gRPC's does."""
    if os.environ.get("RAY_USE_TLS") == "1":
        return True
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    found.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    return found.recv(9)[3:4] == settings[3:4]
