"""Run the app several times under Ray Serve, as one server."""

from mlxsrv.replicas.application import ReplicaScale, deployment

__all__ = ["ReplicaScale", "deployment"]
