"""A process that is one of several ranks: it joins them, and unless it is rank 0, follows."""

from __future__ import annotations

import gc
import logging
import os
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from time import sleep
from typing import TYPE_CHECKING, NoReturn

from mlxsrv.engine.device import DeviceThread
from mlxsrv.engine.ranks.follower import RankFollower
from mlxsrv.engine.ranks.leader import JOIN_SECONDS, RankLeader, RankLost
from mlxsrv.engine.recording.recorder import Recording
from mlxsrv.engine.watchdog import Clock
from mlxsrv.errors import EngineFailed
from mlxsrv.logs import log
from mlxsrv.models.catalogue.catalogue import has_adapter
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings

if TYPE_CHECKING:
    from mlxsrv.engine.ranks.rank_group import RankGroup

_log = logging.getLogger("mlxsrv.server")

_LOOK_SECONDS = 1.0


def check_parallel(settings: Settings) -> None:
    """Raises SettingsError if an option cannot be used on several ranks."""
    refused: dict[str, object] = {
        "draft_model": settings.draft_model,
        "prompt_cache_dir": settings.prompt_cache_dir,
        "model": list(filter(has_adapter, settings.model)),
    }
    if settings.parallel == "pipeline":
        refused |= {"control_vector": settings.control_vector, "kv_bits": settings.kv_bits}
    for name, value in refused.items():
        if value:
            what = "an adapter" if name == "model" else f"--{name.replace('_', '-')}"
            raise SettingsError(f"{what} cannot be used with --parallel {settings.parallel}")


def join_ranks(settings: Settings) -> DeviceThread:
    """Wait for all ranks. The process ends if they do not come in time.

    Raises:
        EngineFailed: they cannot come.
    """
    check_parallel(settings)
    launcher = _find_launcher()

    def join(
        clock: Clock, lost: Callable[[str], None], wished: Callable[[], None]
    ) -> tuple[RankGroup, RankLeader | RankFollower]:
        # On the device thread, which must be the first to import MLX.
        from mlxsrv.engine.ranks.joining import join
        from mlxsrv.engine.ranks.rank_group import Split

        return join(Split(settings.parallel), clock, lost, wished)

    log(_log, logging.INFO, "waiting for ranks", seconds=JOIN_SECONDS)
    device = DeviceThread.shared(Recording.from_settings(settings), join)
    try:
        rank = device.joined.result()
    except RankLost as error:
        raise EngineFailed(str(error)) from None
    log(
        _log,
        logging.INFO,
        "ranks joined",
        rank=rank,
        ranks=device.ranks,
        split=settings.parallel,
    )
    if launcher is not None:
        follower = device.follower
        stop = follower.ask_to_stop if follower else lambda: device.shutdown_wished()
        threading.Thread(target=_stop_without, args=(launcher, stop), daemon=True).start()
    return device


def _find_launcher() -> int | None:
    """Return the launcher's process; None if a shell has started this rank, which may outlive it.

    MLX's launcher is the parent of its ranks on this machine, and has a pipe to the stdin of each.
    """
    with suppress(OSError):  # there is no stdin
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            return os.getppid()
    return None


def _stop_without(launcher: int, stop: Callable[[], None]) -> None:
    """Stop once the launcher has ended. It passes no signal on, and macOS sends none of its own."""
    while os.getppid() == launcher:
        sleep(_LOOK_SECONDS)
    log(_log, logging.WARNING, "the launcher has ended")
    stop()


def follow_rank_0(device: DeviceThread, follower: RankFollower) -> int:
    """Do what rank 0 says until it stops. Returns the exit status.

    Ctrl-C reaches all ranks, and rank 0 decides then. SIGTERM to this rank asks rank 0 to end.
    """
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a connection that Ctrl-C has ended
    signal.signal(signal.SIGTERM, lambda *_: follower.ask_to_stop())
    status = device.wait()
    if status:
        end_after_loss(status)
    return status


def end_after_loss(status: int) -> NoReturn:
    """End the process when a rank is lost. At a usual exit MLX's threads for it would abort."""
    os._exit(status)
