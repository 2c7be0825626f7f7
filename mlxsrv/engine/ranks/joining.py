"""Joining the ranks: first MLX's group, then a connection with rank 0 for the plans.

Used on the device thread only.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from mlxsrv.engine.ranks.follower import RankFollower
from mlxsrv.engine.ranks.leader import (
    COME_SECONDS,
    JOIN_SECONDS,
    Meeting,
    RankLeader,
    RankLost,
    Reception,
)
from mlxsrv.engine.ranks.messages import Hello, RankConnection
from mlxsrv.engine.ranks.rank_group import RankGroup, Split
from mlxsrv.engine.watchdog import Clock

_log = logging.getLogger("mlxsrv.engine")


def join(
    split: Split, clock: Clock, lost: Callable[[str], None], wished: Callable[[], None]
) -> tuple[RankGroup, RankLeader | RankFollower]:
    """Wait for all ranks. The process ends if MLX cannot connect them in time.

    Args:
        split: what each rank is to have of a model.
        clock: of this rank's device thread.
        lost: called on rank 0, once, with the reason, when another is lost.
        wished: called on rank 0 when another asks for a shutdown.

    Raises:
        RankLost: they did not all come; or there is only one.
    """
    if "NCCL_HOST_IP" in os.environ:
        raise RankLost("--parallel: not with nccl, which has no collectives of the CPU; use ring")
    with _ended_in_time():
        group = _connect(split)
        reception = _open_reception() if group.rank == 0 else None
        own = b"" if reception is None else msgspec.msgpack.encode(reception.meeting)
        meeting_data = group.exchange(own)[0]
    if not meeting_data:  # all ranks have to hear of it, for they wait
        raise RankLost("rank 0 cannot listen for the other ranks at its address; see its log")
    if reception is not None:
        return group, RankLeader(reception.receive(group.size - 1, COME_SECONDS), lost, wished)
    meeting = msgspec.msgpack.decode(meeting_data, type=Meeting)
    address = (meeting.host, meeting.port)
    try:
        connection = RankConnection(socket.create_connection(address, COME_SECONDS))
        connection.send(Hello(group.rank, meeting.token))
    except OSError as error:
        raise RankLost(
            f"--parallel: rank 0 cannot be reached at {address[0]}:{address[1]}: {error}; let this "
            "host connect to any port of rank 0's"
        ) from error
    return group, RankFollower(connection, clock)


@contextmanager
def _ended_in_time() -> Iterator[None]:
    """End the process if the block takes too long. While MLX waits for a rank, no Python runs in
    this process, so the block cannot end by itself."""
    faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _connect(split: Split) -> RankGroup:
    try:
        group = RankGroup.join(split)
    except RuntimeError as error:
        raise RankLost(
            f"--parallel: {error}; start all ranks with MLX's launcher: "
            "mlx.launch -n 2 -- python -m mlxsrv ..."
        ) from error
    if group.size == 1:
        raise RankLost("--parallel: there is one rank only; start more with mlx.launch -n 2")
    return group


def _open_reception() -> Reception | None:
    try:
        return Reception(own_address(os.environ))
    except (OSError, ValueError, LookupError):
        _log.exception("rank 0 cannot listen for the other ranks")
        return None


def own_address(environ: Mapping[str, str]) -> str:
    """The address at which the others reach rank 0, as the launcher of each back end says; else
    that of this host's name."""
    if path := environ.get("MLX_HOSTFILE"):
        with open(path, encoding="utf-8") as file:
            return str(json.load(file)[0][0].rpartition(":")[0])
    if address := environ.get("MLX_JACCL_COORDINATOR"):
        return address.partition(":")[0]
    return socket.gethostbyname(socket.gethostname())
