"""Serve until a signal: from the settings to the exit status."""

from __future__ import annotations

import gc
import logging
import os
import signal
from functools import partial
from time import monotonic

from mlxsrv.configuration import warn_of_variables
from mlxsrv.engine.backend import require_backend
from mlxsrv.logs import configure, log, on_terminal
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.server.banner import show_banner, show_ready
from mlxsrv.server.descriptors import raise_limit
from mlxsrv.server.listening import bind, is_loopback, listen, url_of
from mlxsrv.server.process_end import call_at_end_of_input
from mlxsrv.server.ranks import end_after_loss, follow_rank_0, join_ranks
from mlxsrv.server.server import Server
from mlxsrv.settings import Settings
from mlxsrv.web.app import App, create_app

_log = logging.getLogger("mlxsrv.server")

_THREADS_SECONDS = 1.0  # at the very end, for threads to finish


def serve(settings: Settings) -> int:
    """Run the server in this process until a signal, and return the exit status.

    Returns:
        0 after a shutdown, 130 if Ctrl-C began it before the models of the start were loaded, 3 if
        the engine failed under `--exit-on-failure`.

    Raises:
        SettingsError: a model, a key file or an SAE of the settings cannot be used.
        BackendMissing: MLX has no back end for this machine.
        ListenError: the address cannot be used.
        ModelNotLoaded: the files of the default model are here and cannot be served.
    """
    begun = monotonic()
    gc.disable()  # until the model is loaded: imports make no garbage, and collections cost 6 %
    configure(settings.log_level, settings.log_format)
    warn_of_variables()
    raise_limit()
    require_backend()
    device = None if settings.parallel is None else join_ranks(settings)
    if device is not None and device.follower is not None:
        return follow_rank_0(device, device.follower)
    listener = bind(settings)
    local = is_loopback(listener)
    app = create_app(settings, local=local)
    default = Catalogue(settings).require_default()
    # A client that connects from here on waits for the app; one that came before was refused.
    listen(listener, settings)
    # transformers would log lines of its own about prompts that this server refuses anyway.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    url = url_of(listener)
    watched = _greet(app, default, url)
    if not local and not app.key_count:
        why = "whoever can reach this address can use the server; --api-key-file FILE asks for keys"
        log(_log, logging.WARNING, "no api key", why=why)
    server = Server(app, partial(_tell_state, app, url, begun, watched=watched))
    # uvicorn handles signals only while it runs, and raises them again after its shutdown, when
    # there is nothing left to do for them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        # Of a terminal that closes, whose shell may send another: that is no second signal.
        signal.signal(signal.SIGHUP, lambda *_: server.exit_once())
    if device is not None:
        device.shutdown_wished = server.exit_once
    if settings.stop_with_stdin:
        call_at_end_of_input(server.exit_once)
    server.run(sockets=[listener])
    if device is not None and server.end.status:
        end_after_loss(server.end.status)
    if server.early:
        server.end.now()  # Python would wait for threads that still import, and fail their imports
    server.end.within(_THREADS_SECONDS)
    return server.end.status


def _greet(app: App, default: ModelEntry, url: str) -> bool:
    """Tell where the server listens. Returns whether somebody watches on a terminal."""
    watched = on_terminal() and _log.isEnabledFor(logging.INFO)
    if watched:
        show_banner(app.settings, default, url, keys=bool(app.key_count))
    else:
        log(_log, logging.INFO, "listening", url=url, model=app.default_model, keys=app.key_count)
    return watched


def _tell_state(app: App, url: str, begun: float, *, watched: bool) -> None:
    """Tell whether requests are answered, once the models of the start are loaded or could not be.

    Args:
        begun: when the start began, by time.monotonic.
    """
    seconds = monotonic() - begun
    if app.service.health == "failed":
        why = "its model could not be loaded; /health is 503, and the next request tries again"
        log(_log, logging.WARNING, "not ready", model=app.default_model, why=why)
    elif app.service.health == "ok" and watched:
        show_ready(seconds, url)
    elif app.service.health == "ok":
        log(_log, logging.INFO, "ready", model=app.default_model, seconds=seconds)
