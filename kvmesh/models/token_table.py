"""The text of each token of a vocabulary, by the decoder of its tokenizer.json. Pure.

Three families of decoders have a table, from which text is made much faster than by the library: ByteLevel (GPT-2,
Llama 3, Qwen), byte fallback with Replace or Metaspace (Llama 2, Mistral, Gemma), and WordPiece (BERT).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_CLEANED: Final = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""Replacements of the WordPiece decoder with `cleanup`, in its order (tokenizers, decoders/wordpiece.rs)."""


@dataclass(frozen=True, slots=True)
class ByteTable:
    """A vocabulary of byte strings: a text is the UTF-8 reading of the joined bytes."""

    token_bytes: Sequence[bytes]
    """Bytes of each id; b"" for tokens without text."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A vocabulary of texts, and of single bytes for the characters that it lacks (byte fallback)."""

    texts: Sequence[str]
    """Text of each id, where it does not come first; "" for tokens without text."""
    first_texts: Sequence[str]
    """Text of each id at the beginning of an output."""
    fallback: Mapping[int, int]
    """The byte that an id stands for. Such an id has no text."""
    drops_first_space: bool
    """True: a space at the beginning of an output is left out, also one that is written as a byte."""


TokenTable = ByteTable | TextTable


def table_of(tokens: Sequence[str | None], decoder: Mapping[str, Any] | None) -> TokenTable | None:
    """Return the table of a vocabulary, or None if its decoder has none.

    `tokens`: by id, None for ids without text. `decoder`: that of tokenizer.json.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteTable([_bytes_of(token) for token in tokens])
    if kinds == ["WordPiece"]:
        return _word_piece(tokens, steps[0])
    if not _grows_at_its_end(kinds):
        return None
    fallback = _fallback(tokens) if "ByteFallback" in kinds else {}
    rest = [step for step in steps if step.get("type") not in ("ByteFallback", "Fuse")]
    match [step.get("type") for step in rest]:
        case ["Metaspace"]:
            return _metaspace(tokens, rest[0], fallback)
        case ["Replace"] | ["Replace", "Strip"] if _is_fused(kinds):
            return _replaced(tokens, rest, fallback)
        case _:
            return None


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the decoders of a sequence, or the only one."""
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [step for each in decoder["decoders"] for step in _steps(each)]
    return [decoder]


def _grows_at_its_end(kinds: Sequence[object]) -> bool:
    """False if a step behind Fuse may change text of earlier tokens, or a Replace the characters that bytes made."""
    order = [each for each in kinds if each in ("Metaspace", "Replace", "ByteFallback", "Fuse")]
    return order == sorted(order, key=("Metaspace", "Replace", "ByteFallback", "Fuse").index)


def _is_fused(kinds: Sequence[object]) -> bool:
    """True if a Strip, if there is one, applies to the whole text."""
    return "Strip" not in kinds or ("Fuse" in kinds and kinds.index("Fuse") < kinds.index("Strip"))


def _fallback(tokens: Sequence[str | None]) -> dict[int, int]:
    found = ((each, _BYTE_TOKEN.fullmatch(token)) for each, token in enumerate(tokens) if token)
    return {each: int(match[1], 16) for each, match in found if match}


def _word_piece(tokens: Sequence[str | None], step: Mapping[str, Any]) -> TextTable:
    prefix, is_cleaned = step.get("prefix", "##"), step.get("cleanup", True)
    clean = _cleaned if is_cleaned else str
    texts = [
        ""
        if token is None
        else clean(token.removeprefix(prefix) if token.startswith(prefix) else f" {token}")
        for token in tokens
    ]
    firsts = ["" if token is None else clean(token) for token in tokens]
    return TextTable(texts, firsts, {}, drops_first_space=False)


def _metaspace(
    tokens: Sequence[str | None], step: Mapping[str, Any], fallback: Mapping[int, int]
) -> TextTable:
    mark = step.get("replacement", "▁")
    is_dropped = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
    texts = _spaced(tokens, mark, " ", fallback)
    firsts = _spaced(tokens, mark, "", fallback) if is_dropped else texts
    return TextTable(texts, firsts, fallback, drops_first_space=False)


def _replaced(
    tokens: Sequence[str | None], steps: Sequence[Mapping[str, Any]], fallback: Mapping[int, int]
) -> TextTable | None:
    """Return the table for Replace, and for a Strip of one space at the beginning. None for other parameters."""
    pattern = steps[0].get("pattern", {}).get("String")
    if not pattern:
        return None
    texts = _spaced(tokens, pattern, steps[0].get("content", ""), fallback)
    if len(steps) == 1:
        return TextTable(texts, texts, fallback, drops_first_space=False)
    strip = steps[1]
    if (strip.get("content"), strip.get("start"), strip.get("stop")) != (" ", 1, 0):
        return None
    return TextTable(texts, [text.removeprefix(" ") for text in texts], fallback, drops_first_space=True)


def _spaced(tokens: Sequence[str | None], mark: str, content: str, fallback: Mapping[int, int]) -> list[str]:
    return [
        "" if token is None or each in fallback else token.replace(mark, content)
        for each, token in enumerate(tokens)
    ]


def _cleaned(text: str) -> str:
    for old, new in _CLEANED:
        text = text.replace(old, new)
    return text


def _bytes_of(token: str | None) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary. An added token may have other characters: its own bytes."""
    if token is None:
        return b""
    try:
        return bytes(map(_ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's alphabet).

    Printable bytes stand for themselves, the others for characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET: Final = _byte_alphabet()
