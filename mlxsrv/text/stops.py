"""Ends a text where a stop string begins."""

from collections.abc import Sequence

from mlxsrv.text.scan import Scanner


class StopStrings:
    """Passes text on up to the first stop string, and nothing from there on.

    Text waits only as long as it may still be the beginning of a stop string. The first stop
    string is the one complete first: it is then that the model is stopped. `matched` names it.
    """

    __slots__ = ("_held", "_scanner", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._scanner = Scanner(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is safe to send."""
        if self.matched is not None:
            return ""
        if not self._held and not self._scanner.start(text):
            return text
        text = self._held + text
        if found := self._scanner.find(text):
            start, end = found
            self.matched = text[start:end]
            self._held = ""
            return text[:start]
        safe = len(text) - self._scanner.held(text)
        self._held = text[safe:]
        return text[:safe]

    def skip(self, text: str) -> str:
        """As `feed`, of text in which a stop string may begin, but one that ends is no match."""
        text = self._held + text
        begin = 0
        while found := self._scanner.find(text[begin:]):
            begin += found[1]
        safe = len(text) - self._scanner.held(text[begin:])
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """The text that waited for a match which never came."""
        text, self._held = self._held, ""
        return text
