"""Texts of single tokens, for log-probabilities. Pure."""

from __future__ import annotations

from typing import Any

from kvmesh.models.tokenizer import ModelTokenizer


class TokenTexts:
    """The tokens of one model as texts and bytes. A token that is a part of a character has a replacement character."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; a special token has those of its name."""
        return self._tokenizer.token_bytes(token)

    def text(self, token: int) -> str:
        """Return the text of a token."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Return token, log-probability and bytes as OpenAI's API has them."""
        encoded = self.bytes_of(token)
        return {
            "token": encoded.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(encoded),
        }
