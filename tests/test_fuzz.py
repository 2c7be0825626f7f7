"""The targets of `make fuzz`, in brief: what was once found, the seeds, and inputs near them.

`FUZZ_EXAMPLES` says how many inputs each target gets (80): fifty thousand take an hour.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.run import FOUND
from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import DIALECTS, TARGETS
from tests.support.effort import EFFORT, examples
from tests.support.tool_calls import FAMILIES

ASKED = os.environ.get("FUZZ_EXAMPLES")
EXAMPLES = int(ASKED or examples(400, usual=80))
SLOW = {"growth": 10, "grammars": 100}
"""Targets that take so many times as long as others."""


@pytest.mark.parametrize("path", sorted(FOUND.iterdir()), ids=lambda path: path.name)
def test_what_was_found_is_mended(path: Path) -> None:
    TARGETS[path.name.rpartition("-")[0]](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_keep_the_rules(name: str) -> None:
    for seed in [b"", *SEEDS[name]]:
        TARGETS[name](seed)


@st.composite
def near(draw: st.DrawFn, name: str) -> bytes:
    """Anything, or a seed with some of its bytes replaced, or cut."""
    data = draw(st.sampled_from([b"", *SEEDS[name]]))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 8)))
        data = data[:start] + draw(st.binary(max_size=16)) + data[end:]
    return data if draw(st.booleans()) else data[: draw(st.integers(0, len(data)))]


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_near_the_seeds_keep_the_rules(name: str) -> None:
    # The search for a smaller example would take longer than the test.
    @settings(
        max_examples=max(1, EXAMPLES // SLOW.get(name, 1)),
        derandomize=EFFORT != "long" and not ASKED,
        phases=[Phase.reuse, Phase.generate],
    )
    @given(near(name))
    def run(data: bytes) -> None:
        TARGETS[name](data)

    run()


def test_every_dialect_is_tried() -> None:
    assert set(DIALECTS) == FAMILIES.keys()
