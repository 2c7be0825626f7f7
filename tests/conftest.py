"""Hypothesis settings and the fixtures that tests of several rooms share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.support.fixtures import client, folders, model_folder, narrow, server

__all__ = ["client", "folders", "model_folder", "narrow", "server"]

# A shared machine may stop for a moment at any example, so none has a deadline. A change is judged
# by the same examples each time it is checked; who develops gets new ones.
settings.register_profile(
    "mlxsrv",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mlxsrv")
