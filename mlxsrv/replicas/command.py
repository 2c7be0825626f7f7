"""`mlxsrv replicas`: the app under Ray Serve until a signal."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mlxsrv.arguments import Arguments, add_model, command_arguments, real_number, whole_number
from mlxsrv.configuration import settings_from
from mlxsrv.errors import ServeError
from mlxsrv.models.catalogue.catalogue import Catalogue
from mlxsrv.options import SettingsError
from mlxsrv.replicas.application import ReplicaScale, deployment, import_serve
from mlxsrv.replicas.response_files import responses_folder
from mlxsrv.server.listening import bind, is_loopback, url_of
from mlxsrv.service.service import check_models
from mlxsrv.settings import Settings
from mlxsrv.web.security.api_keys import load_keys

_FLAGS: tuple[tuple[str, Callable[[str], Any], str, str], ...] = (
    (
        "--replicas",
        whole_number,
        "NUMBER",
        "Replicas; the least of them with --max-replicas. Default: 1.",
    ),
    (
        "--max-replicas",
        whole_number,
        "NUMBER",
        "Most replicas; more than --replicas start under load.",
    ),
    (
        "--requests-per-replica",
        real_number,
        "NUMBER",
        "Requests under way at a replica on average, queued ones included, beyond which another "
        "one starts. Default: half of --max-concurrency.",
    ),
    (
        "--upscale-delay",
        real_number,
        "SECONDS",
        "More replicas must be wanted for so long before one starts. Default: 30.",
    ),
    (
        "--downscale-delay",
        real_number,
        "SECONDS",
        "Fewer replicas must be wanted for so long before one goes. Default: 600.",
    ),
    (
        "--num-cpus-per-replica",
        real_number,
        "NUMBER",
        "CPUs that Ray sets aside for each. Default: 1.",
    ),
    (
        "--num-gpus-per-replica",
        real_number,
        "NUMBER",
        "GPUs that Ray sets aside for each. Default: 0.",
    ),
    ("--memory-per-replica", whole_number, "BYTES", "Memory that Ray sets aside for each."),
    (
        "--ray-address",
        str,
        "ADDRESS",
        "Ray cluster to run in, or auto; Serve must not run there. None starts one here.",
    ),
)


_OBJECTS = 128 * 1024 * 1024
"""Bytes of Ray's object store. Requests and answers are small messages, which do not go there."""


def replicas(arguments: Sequence[str]) -> None:
    """Run replicas of the server until a signal. Raises SettingsError, ListenError."""
    flags = replicas_arguments().read(arguments)
    own = {flag: flags.pop(flag[2:].replace("-", "_")) for flag, *_ in _FLAGS}
    settings = settings_from(flags)
    run(settings, _scale(own), own["--ray-address"])


def replicas_arguments() -> Arguments:
    """Make the parser of the command."""
    parser = command_arguments(
        "replicas",
        "Run the server several times under Ray Serve (extra ray), behind one address. A "
        "conversation goes to the replica that has its beginning in the prompt cache.",
        operands="[MODEL]",
    )
    add_model(parser)
    for flag, kind, metavar, text in _FLAGS:
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    return parser


def _scale(given: dict[str, Any]) -> ReplicaScale:
    named = {
        "replicas": given["--replicas"],
        "most": given["--max-replicas"],
        "requests": given["--requests-per-replica"],
        "upscale_delay": given["--upscale-delay"],
        "downscale_delay": given["--downscale-delay"],
        "cpus": given["--num-cpus-per-replica"],
        "gpus": given["--num-gpus-per-replica"],
        "memory": given["--memory-per-replica"],
    }
    return ReplicaScale(**{name: value for name, value in named.items() if value is not None})


def _number(scale: ReplicaScale) -> str:
    most = scale.replicas if scale.most is None else scale.most
    return f"{scale.replicas}" if most == scale.replicas else f"{scale.replicas} to {most}"


def _stop_at_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as of nohup
            signal.signal(number, lambda *_: stop())


def run(settings: Settings, scale: ReplicaScale, address: str | None) -> None:
    """Start Ray Serve, or use the Ray of `address`; stop with a signal what was started.

    Raises ModelNotLoaded if the default model is here and cannot be served.
    """
    if settings.record is not None:
        raise SettingsError("--record: a record is of one engine, and replicas have several")
    if settings.stop_with_stdin:
        raise SettingsError("--stop-with-stdin: replicas are stopped by a signal")
    check_models(settings)  # here, so that a wrong one is reported at once and on one line
    Catalogue(settings).require_default()
    load_keys(settings)
    serve = import_serve()
    import ray

    responses = responses_folder(settings, "mlxsrv")
    stopped = threading.Event()
    with bind(settings) as listener:  # held until Ray has its own ports, which it chooses itself
        local, url, port = is_loopback(listener), url_of(listener), listener.getsockname()[1]
        _stop_at_signals(stopped.set)
        if address is None:
            _start(ray)
        else:
            _join(ray, serve, address)
    # As one process forgets when it ends; no replica runs yet.
    shutil.rmtree(responses, ignore_errors=True)

    def leave() -> None:
        _stop_at_signals(stopped.set)  # another signal does not end the end
        raise SystemExit

    try:
        _stop_at_signals(leave)  # Ray has handlers of its own, with which the process aborts
        if stopped.is_set():
            raise SystemExit
        serve.start(proxy_location="HeadOnly", http_options={"host": settings.host, "port": port})
        # It waits without end, where models are long in coming or no machine has room.
        serve.run(deployment(settings, scale, local=local), name="mlxsrv", route_prefix="/")
        _stop_at_signals(stopped.set)
        print(f"mlxsrv: {_number(scale)} replicas on {url}", flush=True)
        if settings.metrics:
            addresses = (f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes())
            print(f"mlxsrv: metrics of each node at /metrics of {', '.join(addresses)}", flush=True)
        stopped.wait()
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()


def _start(ray: Any) -> None:
    """Start Ray on this machine. Raises ServeError: it has 30 seconds, a fixed time."""
    try:
        ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECTS)
    except Exception as error:
        ray.shutdown()
        raise ServeError(f"Ray did not start: {error}") from error


def _join(ray: Any, serve: Any, address: str) -> None:
    """Connect with a Ray that runs. Raises SettingsError if there is none, or if Serve runs in it:
    the end of this command would be the end of all that Serve has."""
    try:
        ray.init(address=address)
    except ConnectionError as error:
        raise SettingsError(f"--ray-address {address}: {error}") from None
    status = serve.status()
    if status.proxies or status.applications:
        ray.shutdown()
        raise SettingsError(
            f"--ray-address {address}: Serve runs there already, and this command would end it; "
            "deploy mlxsrv.replicas.deployment(...) there with serve.run, or end it with "
            "`serve shutdown`"
        )
