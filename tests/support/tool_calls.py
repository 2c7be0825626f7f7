"""Tool calls in the format of Hermes, and what is heard of them."""

from collections.abc import Iterable

import msgspec

from mlxsrv.text.call_formats.calls import Tools, WrittenCall
from mlxsrv.text.call_formats.json_calls import HERMES
from mlxsrv.text.formats import CALLS
from tests.support.reading import caller, merge

START, END = "<tool_call>", "</tool_call>"
TOOLS = Tools(
    {
        "weather": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
        "f": {},
        "g": {},
    }
)

CUT = "cut off by a limit"
UNCLOSED = "never closed"
NO_OBJECT = "its arguments are no JSON object"
UNREADABLE = "no call could be read, so it is content"
UNKNOWN = "the request has no tool of this name"


class Heard(msgspec.Struct, frozen=True):
    """An answer put together: content and calls in order, as one text or (name, arguments)."""

    parts: list[str | tuple[str, str]]
    calls: int
    broken: list[int] = []
    fragment: str = ""
    faults: list[str] = []

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def tools(self) -> list[tuple[str, str]]:
        return [part for part in self.parts if not isinstance(part, str)]


def run(
    feeds: Iterable[str],
    tools: Tools = TOOLS,
    *,
    end: bool = False,
    parallel: bool = True,
    bound: bool = False,
) -> Heard:
    """The answer that `feeds` are, cut off by a limit at the `end`."""
    stage = caller(HERMES, tools, parallel=parallel, bound=bound)
    parts = [part for text in feeds for part in stage.feed(text)] + stage.flush(cut=end)
    assert not stage.inside or stage.done
    assert stage.flush(cut=end) == []
    return Heard(merge(parts), stage.calls, stage.broken, stage.fragment, [*stage.faults])


# Every format, and what a model writes in it.

PARIS = {"city": "Paris é", "days": 3}
FORMATS = CALLS
FAMILIES = {name: each.spell([WrittenCall("weather", PARIS)]) for name, each in FORMATS.items()}
SECTIONS = {
    name: each.spell([WrittenCall("f", {}), WrittenCall("g", {"x": 1})])
    for name, each in FORMATS.items()
}
