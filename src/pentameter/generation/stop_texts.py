"""Stop texts, which end a text that grows, and how much of it can be shown before one has come."""

from __future__ import annotations

from collections.abc import Collection


class StopSearch:
    """Search for the first of the texts `stops`, none of them empty, in a text that grows. Its last
    characters are held back while they could be the beginning of one."""

    def __init__(self, stops: Collection[str]) -> None:
        self._stops = stops
        self.is_found = False
        """True once a stop text has come."""
        self.held = ""
        """The characters that are held back."""

    def push(self, piece: str, undecided: str = "") -> str:
        """Append `piece`, and return the text that can be shown now: up to the first stop text, if
        there is one. It may also end in `undecided`, characters behind the piece that are not
        appended yet."""
        text = self.held + piece
        found = [at for each in self._stops if (at := (text + undecided).find(each)) >= 0]
        if found:
            self.is_found, self.held = True, ""
            return (text + undecided)[: min(found)]
        n_shown = len(text) - n_begun(text, self._stops)
        self.held = text[n_shown:]
        return text[:n_shown]

    def flush(self) -> str:
        """Return the text that is held back."""
        text, self.held = self.held, ""
        return text


def n_begun(text: str, stops: Collection[str]) -> int:
    """Return how many of the last characters of `text` may be the beginning of one of `stops`."""
    return max(
        (n for each in stops for n in range(1, len(each)) if text.endswith(each[:n])), default=0
    )
