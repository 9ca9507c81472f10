"""Guided decoding: masks of the tokens that a JSON schema, a regular expression or a grammar allows next.

The state of a guide is a function of the output tokens alone. A request that is resumed on another engine therefore goes
on exactly. Compilation and masks are those of `llguidance`; its limits bound time and memory of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engines.contract import errors
from engines.contract.errors import EngineError
from engines.contract.guide_text import GUIDE_BYTES_MAX, GuideKind, GuideText

_JSON: Any = {"whitespace_flexible": False}
"""A small model would fill its output with white space. A schema may say otherwise (`x-guidance`)."""


class Guide:
    """The state of one output: which tokens may follow. Not thread-safe."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._bits = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size

    @property
    def is_over(self) -> bool:
        """True if the output is complete, and nothing may follow it. Raises EngineError if that cannot be computed."""
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())
        return bool(self._matcher.is_stopped())

    def consume(self, token: int) -> None:
        """Append an output token. Raises EngineError if the guide does not allow it, or needs too much time."""
        if not self._matcher.consume_token(token):
            raise _refused(self._matcher.get_error() or f"token {token} is not allowed")

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return [vocabulary]: True for each token that may follow. Raises EngineError if that takes too much time."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())
        bits = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)


class GuideCompiler:
    """Compiles guides for one vocabulary. `token_bytes` has the bytes of each id, b"" for special tokens."""

    def __init__(self, token_bytes: Sequence[bytes], end_id: int, encode: Any) -> None:
        self._vocab_size = len(token_bytes)
        special = [each for each, text in enumerate(token_bytes) if not text]
        named = [
            text or b"\xff<%d>" % each for each, text in enumerate(token_bytes)
        ]  # llguidance's mark of specials
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(named, end_id, special, encode))
        self._tokenizer = llguidance.LLTokenizer(wrapped)

    def compile(self, guide: GuideText) -> Guide:
        """Return the guide at the beginning of an output. Raises EngineError with the reason."""
        grammar = grammar_of(guide)
        reason = llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer)
        if reason:
            raise _refused(reason)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return Guide(matcher, self._vocab_size)


def grammar_of(guide: GuideText) -> str:
    """Return llguidance's text of a guide. Raises EngineError for JSON that cannot be read."""
    matcher = llguidance.LLMatcher
    if len(guide.text.encode()) > GUIDE_BYTES_MAX:
        raise _refused(f"{len(guide.text.encode())} bytes; allowed are {GUIDE_BYTES_MAX}")
    try:
        match guide.kind:
            case GuideKind.JSON:
                return str(matcher.grammar_from_json_schema("{}", defaults=_JSON))
            case GuideKind.JSON_SCHEMA:
                json.loads(guide.text)
                return str(matcher.grammar_from_json_schema(guide.text, defaults=_JSON))
            case GuideKind.REGEX:
                return str(matcher.grammar_from_regex(guide.text))
            case GuideKind.EBNF_GRAMMAR:
                return str(matcher.grammar_from_lark(guide.text))
    except (ValueError, RecursionError) as error:
        raise _refused(str(error)) from None


def compiler_of(tokenizer_json: str, special_ids: Iterable[int], end_id: int) -> GuideCompiler:
    """Return the compiler for a byte-level vocabulary."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    special = frozenset(special_ids)
    alphabet = byte_alphabet()
    token_bytes = [
        b""
        if each in special
        else bytes(alphabet[character] for character in tokenizer.id_to_token(each) or "")
        for each in range(tokenizer.get_vocab_size())
    ]
    return GuideCompiler(
        token_bytes, end_id, lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's alphabet)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end_id: int, special: list[int], encode: Any) -> None:
        self.tokens = tokens
        self.eos_token_id = end_id
        self.special_token_ids = special
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        ids: list[int] = self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)
        return ids


def _refused(reason: str) -> EngineError:
    line = " ".join(reason.split())[:300]
    return EngineError(
        errors.BAD_VALUE.format(field="guided_decoding_guide", value=line, allowed="a guide that can be met")
    )
