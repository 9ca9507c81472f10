"""Whether an engine knows every token of the model's tokenizer. Pure."""

from __future__ import annotations

import msgspec


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[msgspec.Raw] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []


def largest_token_id(tokenizer: bytes) -> int | None:
    """Return the largest id in the text of a tokenizer.json; None: it has none, or cannot be read."""
    try:
        found = msgspec.json.decode(tokenizer, type=_Tokenizer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    vocabulary = found.model.vocab
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max((*ids, *(each.id for each in found.added_tokens)), default=None)


def vocabulary_fault(tokenizer: bytes, vocab_size: int) -> str:
    """Return why an engine with `vocab_size` tokens cannot serve the tokenizer; empty: it can, or nothing is known.

    An engine may have more tokens than the tokenizer: many models pad their vocabulary.
    """
    largest = largest_token_id(tokenizer)
    if largest is None or not vocab_size or largest < vocab_size:
        return ""
    return (
        f"The engine has a vocabulary of {vocab_size} tokens, and the tokenizer of the model has token id {largest}: "
        f"allowed is an engine with {largest + 1} tokens or more."
    )
