"""From settings to a deployment of Ray Serve."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import msgspec

from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings

if TYPE_CHECKING:
    from ray.serve import Application

FRONT_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
FRONT = "mlxsrv.replicas.front.middlewares"

_HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"

_MOST_REQUESTS = 10_000
"""At a replica. It has its own queue, and refuses what does not fit in words of the dialect."""

_CLOSING_SECONDS = 10.0  # after the grace, for models and files


class ReplicaScale(msgspec.Struct, frozen=True, kw_only=True):
    """The number of replicas, and what each one takes of its machine.

    Attributes:
        replicas: how many; the least, if `most` is more.
        most: how many there may be under load; None: no more.
        requests: under way at a replica on average, beyond which another one starts; None: half of
            the rows that are decoded together.
        upscale_delay, downscale_delay: seconds for which more, or fewer, replicas must be wanted
            before one starts, or goes.
        cpus, gpus, memory: what Ray sets aside for each replica; memory in bytes.
        period: seconds between two checks of a replica's health.
    """

    replicas: int = 1
    most: int | None = None
    requests: float | None = None
    upscale_delay: float = 30.0
    downscale_delay: float = 600.0
    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | None = None
    period: float = 10.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise SettingsError(f"--replicas {self.replicas}: there is at least 1")
        if self.most is not None and self.most < self.replicas:
            raise SettingsError(f"--max-replicas {self.most}: it is less than --replicas")
        if self.requests is not None and not 0 < self.requests < math.inf:
            raise SettingsError(f"--requests-per-replica {self.requests:g}: it is more than 0")
        for name, seconds in (("upscale", self.upscale_delay), ("downscale", self.downscale_delay)):
            if not 0 <= seconds < math.inf:
                raise SettingsError(f"--{name}-delay {seconds:g}: it is at least 0")
        for name, taken in (("num-cpus", self.cpus), ("num-gpus", self.gpus)):
            if not 0 <= taken < math.inf:
                raise SettingsError(f"--{name}-per-replica {taken:g}: it is at least 0")
        if self.memory is not None and self.memory < 1:
            raise SettingsError(f"--memory-per-replica {self.memory}: it is at least 1")


def deployment(
    settings: Settings, scale: ReplicaScale | None = None, *, local: bool = False, **options: Any
) -> Application:
    """Return the app as an application for `serve.run` or a Serve config.

    Serve's proxies have to run `mlxsrv.replicas.front.middlewares` (see `FRONT_VARIABLE`), so that
    conversations go where they are cached.

    Args:
        scale: None: one replica.
        local: Serve listens on loopback only, so Host must name this machine.
        options: of `serve.deployment`, in place of what is chosen here.

    Raises:
        SettingsError: Ray is not installed, or Serve is to use HAProxy.
    """
    serve = import_serve()
    from mlxsrv.replicas.replica import Replica

    scale = ReplicaScale() if scale is None else scale
    chosen: dict[str, Any] = {
        "name": "mlxsrv",
        "max_ongoing_requests": _MOST_REQUESTS,
        "ray_actor_options": _resources(scale),
        "request_router_config": {
            "request_router_class": "mlxsrv.replicas.router.ConversationRouter"
        },
        "health_check_period_s": scale.period,
        "health_check_timeout_s": max(30.0, scale.period),
        "graceful_shutdown_timeout_s": settings.shutdown_grace + _CLOSING_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.2,
        # New replicas are there before old ones go.
        "max_surge_percent": 100,
        **_count(scale, settings),
        **options,
    }
    return serve.deployment(serve.ingress()(Replica), **chosen).bind(settings, local)


def _resources(scale: ReplicaScale) -> dict[str, float]:
    taken = {"num_cpus": scale.cpus, "num_gpus": scale.gpus}
    return taken if scale.memory is None else taken | {"memory": scale.memory}


def _count(scale: ReplicaScale, settings: Settings) -> dict[str, Any]:
    if scale.most is None:
        return {"num_replicas": scale.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": scale.replicas,
            "max_replicas": scale.most,
            "target_ongoing_requests": scale.requests or max(1, settings.max_concurrency / 2),
            "upscale_delay_s": scale.upscale_delay,
            "downscale_delay_s": scale.downscale_delay,
        }
    }


def import_serve() -> Any:
    """Return Ray Serve. Its proxies will run the front, unless the environment says otherwise.

    Raises:
        SettingsError: it is not installed, or it is to use HAProxy, which chooses replicas itself.
    """
    if os.environ.get(_HAPROXY_VARIABLE) == "1":
        raise SettingsError(
            f"{_HAPROXY_VARIABLE}: HAProxy does not ask where a conversation is cached; unset it"
        )
    os.environ.setdefault(FRONT_VARIABLE, FRONT)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from ray import serve
    except ImportError:
        raise SettingsError(
            "replicas need Ray Serve, which is not installed: pip install 'mlxsrv[ray]'"
        ) from None
    return serve
