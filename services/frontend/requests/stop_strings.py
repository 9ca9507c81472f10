"""Finds stop strings across token borders, and releases text once no stop string can contain it.

Pure. Text that may begin a stop string is held back; no part of the stop string that ends the output is ever sent.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text for the first position at which one of `strings` ends; of several that end at it the longest counts.

    INVARIANT: the held-back text is the longest end of the seen text that begins a stop string.
    """

    __slots__ = ("_held", "_strings", "matched")

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise ValueError("a stop string is empty; at least 1 character is needed")
        self._strings = tuple(strings)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be fed afterwards."""

    def feed(self, text: str) -> str:
        """Return the text that became certain with `text`; set `matched` if a stop string ends the output."""
        assert self.matched is None, "text was fed behind a stop string"
        seen = self._held + text
        found = self._first(seen)
        if found is not None:
            end, self.matched = found
            self._held = ""
            return seen[: end - len(self.matched)]
        keep = self._undecided(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def flush(self) -> str:
        """Return the held-back text: the output ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return the smallest end of a match and the longest string that ends there; None without a match."""
        best: tuple[int, str] | None = None
        for string in self._strings:
            at = text.find(string)
            if at < 0:
                continue
            end = at + len(string)
            if best is None or end < best[0] or (end == best[0] and len(string) > len(best[1])):
                best = (end, string)
        return best

    def _undecided(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        longest = 0
        for string in self._strings:
            at = text.find(string[0], max(0, len(text) - len(string) + 1))
            while at >= 0:
                if len(text) - at <= longest:
                    break
                if string.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(string[0], at + 1)
        return longest
