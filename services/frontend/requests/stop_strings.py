"""Stop strings across token borders: what of the text is certain, and where it ends.

Pure. Text that may be the beginning of a stop string is held back; nothing of a stop string ever leaves.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text for the first place where one of `strings` is complete; the longest one that ends there counts.

    Invariant: what is held back is the longest end of the text seen that begins a stop string.
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
        """Return what became certain with `text`; sets `matched` when the output ends there."""
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
        """Return what was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return the smallest end of a match and the longest string that ends there."""
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
