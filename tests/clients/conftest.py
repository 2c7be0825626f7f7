"""One server for all tests of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.clients.serving import serving

# Read when LiteLLM is imported: without it LiteLLM asks the internet for its list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


# The agents' tests make models, in the server's environment: `make test-clients` runs them there.
collect_ignore = [] if find_spec("mlx") else ["test_agents.py"]


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL that clients are given: the server's, with `/v1`."""
    with serving(tmp_path_factory.mktemp("server") / "log") as url:
        yield f"{url}/v1"
