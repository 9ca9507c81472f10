"""Incremental detokenization: token ids to text, piece by piece, never half a character.

Pure. The vocabulary is a table of byte strings. The text of a sequence is therefore the UTF-8 reading of the joined bytes.
The only state between two tokens is the beginning of one character: at most 3 bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

_open_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns one request's ids into text; bytes that are no UTF-8 become U+FFFD, as in the tokenizer's own `decode`.

    `token_bytes`: the bytes of each id, shared and never changed; b"" for tokens that are not text.
    """

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = _open_decoder(errors="replace")

    @property
    def vocabulary_size(self) -> int:
        """Size of the vocabulary; ids below it have bytes."""
        return len(self._token_bytes)

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that became certain with `ids`; may be empty. Raises IndexError for an id out of range."""
        table = self._token_bytes
        return self._decoder.decode(b"".join([table[each] for each in ids]))

    def flush(self) -> str:
        """Return the text of the undecided bytes at the end of the output; at most one U+FFFD per broken start."""
        return self._decoder.decode(b"", final=True)
