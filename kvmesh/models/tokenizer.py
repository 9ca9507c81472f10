"""The tokenizer of a model: prompts to token ids, conversations to token ids, token ids to text.

No text of a client becomes a special token, neither as a plain prompt nor inside a message. A special token in a rendered
conversation comes from the chat template.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from kvmesh.models.chat_template import ChatTemplate, TemplateError
from kvmesh.models.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    LibraryDetokenizer,
    TextDetokenizer,
)
from kvmesh.models.folder import TOKENIZER, ModelFolder, ModelFolderError, read
from kvmesh.models.token_table import ByteTable, TextTable, TokenTable, table_of

TEXT_MAX: Final = 16 << 20
"""Most characters of a rendered conversation, unless the caller says otherwise."""

UNBOUNDED: Final = 1 << 31
"""`token_bytes_max` of a tokenizer that can make few tokens of any text."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders. All strings come from the client."""

    messages: Sequence[Mapping[str, Any]]
    """Each with `role` and `content`, and with further keys that templates know."""
    tools: Sequence[Any] | None = None
    arguments: Mapping[str, Any] | None = None
    """Further variables of the template."""

    @property
    def key(self) -> object:
        """A value whose `repr` tells conversations apart. That of release 0.1.0 for roles and contents alone."""
        plain = all(each.keys() == {"role", "content"} for each in self.messages)
        if plain and not self.tools and not self.arguments:
            return tuple((each["role"], each["content"]) for each in self.messages)
        return json.dumps([self.messages, self.tools, self.arguments], sort_keys=True)


class ModelTokenizer:
    """Tokenizer and chat template of one model. Immutable; safe to use from several threads."""

    def __init__(self, folder: ModelFolder, *, text_max: int = TEXT_MAX) -> None:
        """Raises ModelFolderError. `text_max`: most characters of a rendered conversation."""
        self.folder = folder
        self._tokenizer = _load(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        specials = {each: token for each, token in added.items() if token.special}
        self.special_ids = frozenset(specials)
        self.vocab_size = _vocab_size(self._tokenizer)
        self.end_token_ids = self._end_token_ids()
        self._prefix, self._suffix = self._frame_of_text()
        self._marks = _Marks([each.content for _, each in sorted(specials.items())])
        self._plain: Tokenizer | None = None
        """Reads special tokens as plain text. Made when a text has one."""
        self._making_plain = threading.Lock()
        self._table = self._table_of_tokens()
        self.token_bytes_max = self._token_bytes_max()
        """Bytes of the longest token. A longer text than this for each token of the context cannot fit it."""
        self._template = self._compiled(folder.template, text_max)
        self._tool_template = self._compiled(folder.tool_template, text_max) or self._template

    @classmethod
    def load(cls, path: Path, *, text_max: int = TEXT_MAX) -> ModelTokenizer:
        """Read the model's folder. Raises ModelFolderError."""
        return cls(read(path), text_max=text_max)

    @property
    def has_template(self) -> bool:
        """True if the model takes conversations."""
        return self._template is not None

    @property
    def text_prefix(self) -> tuple[int, ...]:
        """Ids before the ids of a plain text, for example BOS."""
        return self._prefix

    @property
    def decoding(self) -> str:
        """How token ids become text, in a word."""
        match self._table:
            case ByteTable():
                return "bytes"
            case TextTable():
                return "text with byte fallback" if self._table.fallback else "text"
            case None:
                return "library"

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain text, with BOS and EOS as the folder says. No special token is made of the text."""
        return [*self._prefix, *self.encode_plain(text), *self._suffix]

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text` alone; no special token is among them."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.special_ids.isdisjoint(ids):
            return ids
        plain: list[int] = self._plain_tokenizer().encode(text, add_special_tokens=False).ids
        return plain

    def encode_chat(self, conversation: Conversation) -> list[int]:
        """Return the ids of a conversation. Raises TemplateError."""
        template = self._tool_template if conversation.tools else self._template
        if template is None:
            raise TemplateError("the model has no chat template, so it takes no messages; send a text")
        if not self._marks.are_in(conversation):
            ids: list[int] = self._tokenizer.encode(
                _render(template, conversation), add_special_tokens=False
            ).ids
            return ids
        text = self._marks.swap(_render(template, self._marks.hide(conversation)))
        marked: list[int] = self._plain_tokenizer().encode(text, add_special_tokens=False).ids
        return marked

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one output: by the table, or by the library if its decoder has none."""
        match self._table:
            case ByteTable():
                return ByteDetokenizer(self._table.token_bytes)
            case TextTable():
                return TextDetokenizer(self._table)
            case None:
                return LibraryDetokenizer(self._tokenizer, self.special_ids, self.vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out."""
        made = self.detokenizer()
        return made.feed(ids) + made.flush()

    def run_once(self, text: str) -> list[int]:
        """Encode and decode `text`, alone and as a conversation; return its ids. The first run is slow."""
        ids = self.encode(text)
        self.decode(ids)
        if self.has_template:
            self.encode_chat(Conversation([{"role": "user", "content": text}]))
        return ids

    def token(self, token_id: int) -> str | None:
        """Return the token `token_id` as the vocabulary has it, or None."""
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def token_id(self, text: str) -> int | None:
        """Return the id of the token `text`, or None."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def _end_token_ids(self) -> tuple[int, ...]:
        ids = []
        for each in self.folder.end_tokens:
            found = self._tokenizer.token_to_id(each) if isinstance(each, str) else each
            if found is None or not found < self.vocab_size:
                where = f"{self.folder.path} names the end token {each!r}"
                raise ModelFolderError(
                    f"{where}, which is not in the vocabulary of {self.vocab_size} tokens."
                )
            ids.append(found)
        return tuple(dict.fromkeys(ids))

    def _frame_of_text(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor puts before and behind a text, as changed by the folder."""
        sample = "x"
        bare = self._tokenizer.encode(sample, add_special_tokens=False).ids
        whole = self._tokenizer.encode(sample, add_special_tokens=True).ids
        at = next((i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare), 0)
        prefix, suffix = tuple(whole[:at]), tuple(whole[at + len(bare) :])
        return (
            self._framed("bos_token", self.folder.adds_bos, prefix),
            self._framed("eos_token", self.folder.adds_eos, suffix),
        )

    def _framed(self, name: str, is_added: bool | None, frame: tuple[int, ...]) -> tuple[int, ...]:
        text = self.folder.named_tokens.get(name)
        token_id = None if text is None else self._tokenizer.token_to_id(text)
        if is_added is None or token_id is None or is_added == (token_id in frame):
            return frame
        return (token_id,) if is_added else tuple(each for each in frame if each != token_id)

    def _table_of_tokens(self) -> TokenTable | None:
        silent, text_of = self.special_ids, self._tokenizer.id_to_token
        tokens = [None if each in silent else text_of(each) for each in range(self.vocab_size)]
        return table_of(tokens, json.loads(self.folder.tokenizer).get("decoder"))

    def _token_bytes_max(self) -> int:
        """Return the bound for tokenizers that keep each byte of a text; else UNBOUNDED."""
        document = json.loads(self.folder.tokenizer)
        normalizer = document.get("normalizer") or {}
        kinds = {each.get("type") for each in normalizer.get("normalizers", [normalizer])}
        if not kinds <= {None, "Prepend", "Replace"}:
            return UNBOUNDED
        if isinstance(self._table, ByteTable):
            return max(map(len, self._table.token_bytes), default=1) or 1
        if isinstance(self._table, TextTable) and self._table.fallback:
            return max((len(text.encode()) for text in self._table.texts), default=1) or 1
        return UNBOUNDED

    def _compiled(self, source: str, text_max: int) -> ChatTemplate | None:
        if not source:
            return None
        try:
            return ChatTemplate(source, self.folder.named_tokens, text_max=text_max)
        except TemplateError as error:
            raise ModelFolderError(f"{self.folder.path}: the chat template is wrong: {error}.") from None

    def _plain_tokenizer(self) -> Tokenizer:
        with self._making_plain:
            if self._plain is None:
                self._plain = self._marks.renamed(self._tokenizer)
            return self._plain


class _Marks:
    """Keeps the special tokens of a template apart from equal texts of a client.

    Before the template is rendered, each special token in a text of the client becomes a secret word (`hide`). Then each
    special token that is left comes from the template, and becomes a secret mark; the words become texts again (`swap`).
    The marks are the names of the special tokens in the tokenizer that reads the result (`renamed`).
    """

    def __init__(self, specials: Sequence[str]) -> None:
        secret = secrets.token_hex(8)
        self._words = {text: f"\ufdd0{secret}{index:x}\ufdd1" for index, text in enumerate(specials)}
        self._marks = {text: f"\ufdd2{secret}{index:x}\ufdd3" for index, text in enumerate(specials)}
        self._texts = {word: text for text, word in self._words.items()}
        longest_first = sorted(specials, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._hidden = re.compile(f"\ufdd0{secret}[0-9a-f]+\ufdd1")

    def are_in(self, conversation: Conversation) -> bool:
        """True if some text of the client has a special token."""
        given = (conversation.messages, conversation.tools, conversation.arguments)
        return any(self._found.search(text) for text in _strings(given))

    def hide(self, conversation: Conversation) -> Conversation:
        """Return the conversation with a word for each special token in its texts."""
        return Conversation(
            self._map(conversation.messages, self._hide),
            self._map(conversation.tools, self._hide),
            self._map(conversation.arguments, self._hide),
        )

    def swap(self, rendered: str) -> str:
        """Return the rendered text with marks for the template's special tokens, and the client's texts as they were."""
        marked = self._found.sub(lambda match: self._marks[match[0]], rendered)
        return self._hidden.sub(lambda match: self._texts.get(match[0], match[0]), marked)

    def renamed(self, tokenizer: Tokenizer) -> Tokenizer:
        """Return a tokenizer with equal ids, in which a mark is the name of each special token."""
        document = json.loads(tokenizer.to_str())
        document["post_processor"] = None
        model = document["model"]
        unknown = model.get("unk_token")  # the model makes it by this name, so it keeps it there
        marks = {text: mark for text, mark in self._marks.items() if text != unknown}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {marks.get(text, text): each for text, each in model["vocab"].items()}
        else:
            model["vocab"] = [[marks.get(text, text), score] for text, score in model["vocab"]]
        added = [
            each for each in document["added_tokens"] if not each["special"] or each["content"] != unknown
        ]
        for each in added:
            if each["special"]:
                each["content"] = marks.get(each["content"], each["content"])
        document["added_tokens"] = added
        return Tokenizer.from_str(json.dumps(document))

    def _hide(self, text: str) -> str:
        return self._found.sub(lambda match: self._words[match[0]], text)

    def _map(self, value: Any, change: Callable[[str], str]) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {self._map(key, change): self._map(each, change) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._map(each, change) for each in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _strings(each)


def _render(template: ChatTemplate, conversation: Conversation) -> str:
    return template.render(
        conversation.messages,
        tools=conversation.tools,
        arguments=conversation.arguments,
    )


def _load(folder: ModelFolder) -> Tokenizer:
    """Return the tokenizer with all special tokens of the folder. Raises ModelFolderError."""
    try:
        tokenizer = Tokenizer.from_str(folder.tokenizer)
    except Exception as error:  # noqa: BLE001  # the library raises plain Exception for a file that it cannot parse
        raise ModelFolderError(f"{folder.path / TOKENIZER} is not a tokenizer: {error}.") from None
    known = tokenizer.get_added_tokens_decoder()
    for token in folder.declared:
        if token.token_id in known:
            continue
        flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
        added = AddedToken(token.content, normalized=token.normalized, special=token.is_special, **flags)
        (tokenizer.add_special_tokens if token.is_special else tokenizer.add_tokens)([added])
        found = tokenizer.token_to_id(token.content)
        if found != token.token_id:
            what = f"added_tokens_decoder gives {token.content!r} the id {token.token_id}"
            raise ModelFolderError(f"{folder.path}: {what}; in the vocabulary it has {found}.")
    specials = {token.content for token in known.values() if token.special}
    for text in (*folder.named_tokens.values(), *folder.special_texts):
        if text not in specials and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True)])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _vocab_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id: a vocabulary may have holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
