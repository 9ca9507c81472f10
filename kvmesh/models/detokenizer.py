"""Incremental detokenization: token ids to text, piece by piece, never half a character.

The joined pieces are the text that the tokenizer's own `decode` makes of all ids. There is one exception, in vocabularies
with byte fallback. The library reads a run of byte tokens as a whole: if one byte is wrong, all become U+FFFD. Here a
character is sent as soon as it is complete, and keeps its text if a wrong byte follows it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence, Set
from typing import Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvmesh.models.token_table import TextTable

REPLACEMENT: Final = "\ufffd"

_open_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Turns one request's ids into text. Special tokens have no text."""

    @property
    def vocabulary_size(self) -> int:
        """Size of the vocabulary; ids below it may be fed."""
        ...

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that became certain with `ids`; may be empty. Raises IndexError for an id out of range."""
        ...

    def flush(self) -> str:
        """Return the text that was undecided at the end of the output."""
        ...


class ByteDetokenizer:
    """For vocabularies of byte strings. Bytes that are no UTF-8 become U+FFFD.

    The only state between two tokens is the beginning of one character: at most 3 bytes. `token_bytes` is shared.
    """

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = _open_decoder(errors="replace")

    @property
    def vocabulary_size(self) -> int:
        """See Detokenizer."""
        return len(self._token_bytes)

    def feed(self, ids: Iterable[int]) -> str:
        """See Detokenizer."""
        table = self._token_bytes
        return self._decoder.decode(b"".join([table[each] for each in ids]))

    def flush(self) -> str:
        """See Detokenizer; at most one U+FFFD per broken start of a character."""
        return self._decoder.decode(b"", final=True)


class TextDetokenizer:
    """For vocabularies of texts, with or without byte fallback.

    State: whether there was text, the bytes of an incomplete character, and whether its run of bytes is broken.
    """

    __slots__ = ("_has_begun", "_is_run_broken", "_table", "_undecided")

    def __init__(self, table: TextTable) -> None:
        self._table = table
        self._has_begun = False
        self._undecided = b""
        self._is_run_broken = False

    @property
    def vocabulary_size(self) -> int:
        """See Detokenizer."""
        return len(self._table.texts)

    def feed(self, ids: Iterable[int]) -> str:
        """See Detokenizer."""
        table, pieces = self._table, []
        texts, fallback = table.texts, table.fallback
        for each in ids:
            text = texts[each]
            if text:
                if self._undecided or self._is_run_broken:
                    pieces.append(self._end_run())
                if not self._has_begun:
                    self._has_begun, text = True, table.first_texts[each]
                pieces.append(text)
            elif fallback and each in fallback:
                pieces.append(self._add_byte(fallback[each]))
        return "".join(pieces)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._end_run()

    def _add_byte(self, byte: int) -> str:
        """Return the character that is complete with `byte`, or U+FFFD for each byte of a run that is not UTF-8."""
        if self._is_run_broken:
            return REPLACEMENT
        self._undecided += bytes((byte,))
        try:
            text = self._undecided.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._is_run_broken = True
            return self._broken()
        self._undecided = b""
        if not self._has_begun:
            self._has_begun = True
            if self._table.drops_first_space:
                text = text.removeprefix(" ")
        return text

    def _end_run(self) -> str:
        self._is_run_broken = False
        return self._broken()

    def _broken(self) -> str:
        text, self._undecided = REPLACEMENT * len(self._undecided), b""
        self._has_begun = self._has_begun or bool(text)
        return text


class LibraryDetokenizer:
    """For all other decoders: the library's own stream of text, which decodes the last ids twice for each step."""

    __slots__ = ("_held", "_sent", "_special_ids", "_stream", "_tokenizer", "vocabulary_size")

    def __init__(self, tokenizer: Tokenizer, special_ids: Set[int], vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._stream = DecodeStream(skip_special_tokens=False)
        self._sent: list[int] = []
        """Ids of the last text that was sent."""
        self._held: list[int] = []
        """Ids whose text is undecided."""

    def feed(self, ids: Iterable[int]) -> str:
        """See Detokenizer."""
        return "".join(self._step(each) for each in ids if each not in self._special_ids)

    def flush(self) -> str:
        """See Detokenizer."""
        before = self._tokenizer.decode(self._sent, skip_special_tokens=False)
        whole: str = self._tokenizer.decode([*self._sent, *self._held], skip_special_tokens=False)
        self._sent, self._held = [], []
        return whole.removeprefix(before)

    def _step(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocabulary_size:
            raise IndexError("a token id is out of range")
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001  # the library's own kind: later ids changed a text that was sent
            self._stream = DecodeStream(skip_special_tokens=False)
            self._sent, self._held = [], [token_id]
            text = self._stream.step(self._tokenizer, token_id)
        if not text:
            return ""
        self._sent, self._held = self._held, []
        return text
