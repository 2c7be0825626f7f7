"""Ends a text where a stop string begins."""

from collections.abc import Sequence

from mlxsrv.text.scan import Scanner
from mlxsrv.text.stage import Stage


class StopStrings(Stage[str, str]):
    """Passes text on up to the first stop string, and nothing after that.

    Text waits only while it may be the beginning of a stop string. The first stop string is the one
    that is complete first, since the model is stopped then.

    Attributes:
        matched: the stop string that was found.
    """

    __slots__ = ("_held", "_scanner", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._scanner = Scanner(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._held and not self._scanner.start(text):
            return text
        text = self._held + text
        if found := self._scanner.search(text):
            start, end = found
            self.matched = text[start:end]
            self._held = ""
            return text[:start]
        safe = len(text) - self._scanner.held(text)
        self._held = text[safe:]
        return text[:safe]

    def skip(self, text: str) -> str:
        """As `feed`, but a stop string that is complete in this text does not count."""
        text = self._held + text
        begin = 0
        while found := self._scanner.search(text[begin:]):
            begin += found[1]
        safe = len(text) - self._scanner.held(text[begin:])
        self._held = text[safe:]
        return text[:safe]

    def flush(self, *, cut: bool = False) -> str:
        text, self._held = self._held, ""
        return text
