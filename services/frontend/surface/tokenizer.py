"""The tokenizer of the model: prompts to token ids, the chat template, the bytes of each token.

Reads `tokenizer.json` and `model.json` of the model's folder once. Encoding never yields a special token, whatever the text
contains. The chat template adds special tokens by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer


class ModelFolderError(ValueError):
    """The model's folder cannot be used. The text names the file and the reason in one sentence."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Token ids around the turns of a conversation."""

    role_prefix: Mapping[str, tuple[int, ...]]
    """By role: "system", "user", "assistant"."""
    turn_suffix: tuple[int, ...]
    generation_prefix: tuple[int, ...]
    """Token ids that open the model's own turn."""


class ModelTokenizer:
    """Tokenizer and chat template of one model. Immutable; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        special_ids: Iterable[int],
        end_token_id: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.special_ids = frozenset(special_ids)
        self.end_token_id = end_token_id
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.token_bytes: Sequence[bytes] = _token_bytes(tokenizer, self.vocab_size, self.special_ids)
        """Bytes of each id; b"" for special tokens."""
        self.token_bytes_max = max(len(each) for each in self.token_bytes)

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Read the model's folder. Raises ModelFolderError."""
        model = _read_json(folder / "model.json")
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelFolderError(f"Cannot read {path}: {error.strerror}.") from error
        except Exception as error:  # the library raises plain Exception for a file that it cannot parse
            raise ModelFolderError(f"{path} is not a tokenizer: {error}.") from error
        try:
            specials: dict[str, int] = model["special_tokens"]
            chat = model["chat_template"]
            parts = _TemplateParts(tokenizer, specials)
            template = ChatTemplate(
                role_prefix={role: parts.ids(text) for role, text in chat["role_prefix"].items()},
                turn_suffix=parts.ids(chat["turn_suffix"]),
                generation_prefix=parts.ids(chat["generation_prefix"]),
            )
            missing = ROLES - template.role_prefix.keys()
            if missing:
                raise ModelFolderError(
                    f"{folder / 'model.json'} has no chat_template.role_prefix for {sorted(missing)}."
                )
            made = cls(tokenizer, template, specials.values(), model["stop_token_id"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelFolderError(f"{folder / 'model.json'} lacks or misuses {error}.") from error
        for text in specials:
            if made.special_ids.intersection(made.encode(text)):
                raise ModelFolderError(f"{path} makes a special token of the plain text {text!r}.")
        return made

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; no special token is among them."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, messages: Iterable[tuple[str, str]]) -> list[int]:
        """Return the ids of a conversation of (role, content), the opened turn of the model included."""
        template = self._template
        ids: list[int] = []
        for role, content in messages:
            ids += template.role_prefix[role]
            ids += self.encode(content)
            ids += template.turn_suffix
        ids += template.generation_prefix
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""
        return b"".join([self.token_bytes[each] for each in ids]).decode("utf-8", errors="replace")

    def run_once(self, text: str) -> list[int]:
        """Encode and decode `text`, alone and as a conversation; return its ids. The first run is slow."""
        ids = self.encode(text)
        self.decode(self.encode_chat([("user", text)]))
        return ids


ROLES: Final = frozenset({"system", "user", "assistant"})


class _TemplateParts:
    """Turns the template's texts into ids: names of special tokens into their ids, all other text as plain text."""

    def __init__(self, tokenizer: Tokenizer, specials: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._specials = specials
        names = sorted(specials, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(re.escape(name) for name in names) + ")") if names else None

    def ids(self, text: str) -> tuple[int, ...]:
        ids: list[int] = []
        for part in self._split.split(text) if self._split else [text]:
            if part in self._specials:
                ids.append(self._specials[part])
            elif part:
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return tuple(ids)


def _token_bytes(tokenizer: Tokenizer, vocab_size: int, specials: frozenset[int]) -> list[bytes]:
    """Return the bytes of each id of a byte-level vocabulary. Raises ModelFolderError for another kind."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        raise ModelFolderError(
            f"The tokenizer's decoder is {decoder.get('type')!r}; only ByteLevel is supported."
        )
    alphabet = _byte_alphabet()
    table = []
    for each in range(vocab_size):
        token = tokenizer.id_to_token(each)
        if token is None or each in specials:
            table.append(b"")
            continue
        try:
            table.append(bytes(alphabet[character] for character in token))
        except KeyError as error:
            raise ModelFolderError(f"Token {each} ({token!r}) is not made of bytes: {error}.") from error
    return table


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's alphabet).

    Printable bytes stand for themselves, the others for characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFolderError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise ModelFolderError(f"{path} is not a JSON object.")
    return document
