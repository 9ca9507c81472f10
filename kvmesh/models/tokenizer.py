"""The tokenizer of a model: prompts to token ids, conversations to token ids, token ids to text.

No text of a client becomes a special token, neither as a plain prompt nor inside a message. A special token in a rendered
conversation comes from the chat template.
"""

from __future__ import annotations

import base64
import json
import math
import re
import secrets
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from kvmesh.models.chat_template import ChatTemplate, words_of
from kvmesh.models.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    LibraryDetokenizer,
    TextDetokenizer,
)
from kvmesh.models.folder import TOKENIZER, ModelFolder, ModelFolderError, read
from kvmesh.models.template_budget import Effort, TemplateError
from kvmesh.models.token_table import ByteTable, TextTable, TokenTable, table_of

TEXT_MAX: Final = 16 << 20
"""Most characters of a rendered conversation, unless the caller says otherwise."""

VOCABULARY_MAX: Final = 1 << 22
"""Most token ids, holes included. The largest known vocabularies have 262,144."""

SPECIAL_CHARACTERS_MAX: Final = 256
"""Characters of the longest added token."""

GROWTH_MAX: Final = 64
"""Most characters that a normalizer or decoder makes of one."""

FRAME_TOKENS_MAX: Final = 64
"""Most tokens that a tokenizer adds to a plain text."""

MARK_BYTES_MAX: Final = 32
"""Bytes of a special token in a rendered conversation: two borders, 16 digits, a number."""

NESTING_MAX: Final = 50
"""Most groups in each other in a regular expression. The library reads them by recursion."""

_COMPOSED: Final = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt")
_SHRINKS: Final = dict.fromkeys(_COMPOSED, 4) | {"Prepend": 1}
"""Most bytes of a text that a normalizer makes one of, for those that leave no character out."""

SHRINKS_MAX: Final = 16
"""The same for all others. They may drop any text, but a prompt of that kind is none."""


_SPACES: Final = "\u2581\u0120 "
"""Characters for the space before a word in a vocabulary."""

_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
_CHARSMAP: Final = re.compile(r'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_BASE64: Final = re.compile(r"[A-Za-z0-9+/=]*")
_ROLES: Final = ("system", "user", "assistant", "tool")


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
        named = _load(folder)
        pipeline = _pipeline(folder)
        added = named.get_added_tokens_decoder()
        specials = {each: token for each, token in added.items() if token.special}
        document = json.loads(named.to_str())
        words = _words(document["model"], {each.content for each in specials.values()})
        self.special_ids = frozenset(each for each, token in specials.items() if token.content not in words)
        """Without those that are words of the texts, too."""
        self.vocab_size = _vocab_size(folder, named)
        self._special_texts = {each: token.content for each, token in specials.items()}
        self._ids_of_specials = {token.content: each for each, token in specials.items()}
        self._prefix, self._suffix = self._frame_of_text(named)
        self._marks = _Marks([specials[each].content for each in sorted(self.special_ids)], folder)
        self._tokenizer = self._marks.renamed(document)
        """Knows special tokens by their marks alone, so that no text of a client is one."""
        self.end_token_ids = self._end_token_ids()
        self._table = self._table_of_tokens(pipeline.get("decoder"))
        self.token_bytes_max = self._token_bytes_max(pipeline.get("normalizer"))
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
        """Return the ids of `text` alone; no special token is among them, but the unknown one."""
        return self._ids(text)

    def encode_chat(self, conversation: Conversation, effort: Effort | None = None) -> list[int]:
        """Return the ids of a conversation. Raises TemplateError. `effort`: see ChatTemplate.render."""
        return self.encode_rendered(self.render(conversation, effort))

    def render(self, conversation: Conversation, effort: Effort | None = None) -> str:
        """Return the text of a conversation, with a mark for each special token. Raises TemplateError."""
        template = self._tool_template if conversation.tools else self._template
        if template is None:
            raise TemplateError("the model has no chat template, so it takes no messages; send a text")
        hidden = self._marks.hide(conversation)
        made = template.render(hidden.messages, tools=hidden.tools, arguments=hidden.arguments, effort=effort)
        return self._marks.swap(made)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of what `render` returned."""
        return self._ids(text)

    def readable(self, rendered: str) -> str:
        """Return what `render` returned with the special tokens as the template wrote them."""
        return self._marks.readable(rendered)

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
        if token_id in self._special_texts:
            return self._special_texts[token_id]
        if not 0 <= token_id < self.vocab_size:
            return None
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to an output. A special token has those of its name, an unknown id none."""
        special = self._special_texts.get(token_id)
        if special is not None:
            return special.encode()
        if not 0 <= token_id < self.vocab_size:
            return b""
        match self._table:
            case ByteTable():
                return self._table.token_bytes[token_id]
            case TextTable() if token_id in self._table.fallback:
                return bytes((self._table.fallback[token_id],))
            case TextTable():
                return self._table.texts[token_id].encode()
            case None:
                return self.decode([token_id]).encode()

    def token_id(self, text: str) -> int | None:
        """Return the id of the token `text`, or None."""
        found: int | None = self._ids_of_specials.get(text)
        return self._tokenizer.token_to_id(text) if found is None else found

    def _ids(self, text: str) -> list[int]:
        """Return the ids of `text`. Raises ModelFolderError where the library fails, which may be a panic of Rust."""
        try:
            # Without the offsets of `encode`, which take a fifth of its time. Other threads go on meanwhile.
            (made,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = made.ids
        except BaseException as error:  # noqa: BLE001  # a panic of Rust is no Exception
            raise _not_encoded(self.folder.path / TOKENIZER, error) from None
        return ids

    def _end_token_ids(self) -> tuple[int, ...]:
        ids = []
        for each in self.folder.end_tokens:
            found = self.token_id(each) if isinstance(each, str) else each
            if found is None or self.token(found) is None:
                where = f"{self.folder.path} names the end token {each!r}"
                raise ModelFolderError(
                    f"{where}, which is not in the vocabulary of {self.vocab_size} tokens."
                )
            ids.append(found)
        return tuple(dict.fromkeys(ids))

    def _frame_of_text(self, named: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor puts before and behind a text, as changed by the folder."""
        sample, file = "x", self.folder.path / TOKENIZER
        try:
            bare = named.encode(sample, add_special_tokens=False).ids
            whole = named.encode(sample, add_special_tokens=True).ids
        except BaseException as error:  # noqa: BLE001  # a panic of Rust is no Exception
            raise _not_encoded(file, error) from None
        starts = range(len(whole) - len(bare) + 1)
        at = next((each for each in starts if whole[each : each + len(bare)] == bare), -1)
        count = len(whole) - len(bare)
        is_lost = at < 0 or (whole and not bare)
        if is_lost or count > FRAME_TOKENS_MAX or not all(0 <= each < self.vocab_size for each in whole):
            allowed = f"a text with up to {FRAME_TOKENS_MAX} tokens of the vocabulary around it"
            raise ModelFolderError(
                f"{file}: post_processor makes {len(whole)} tokens of {sample!r}; allowed is {allowed}."
            )
        prefix, suffix = tuple(whole[:at]), tuple(whole[at + len(bare) :])
        return (
            self._framed("bos_token", self.folder.adds_bos, prefix),
            self._framed("eos_token", self.folder.adds_eos, suffix),
        )

    def _framed(self, name: str, is_added: bool | None, frame: tuple[int, ...]) -> tuple[int, ...]:
        text = self.folder.named_tokens.get(name)
        token_id = None if text is None else self._ids_of_specials.get(text)
        if is_added is None or token_id is None or is_added == (token_id in frame):
            return frame
        return (token_id,) if is_added else tuple(each for each in frame if each != token_id)

    def _table_of_tokens(self, decoder: Any) -> TokenTable | None:
        silent, text_of = self.special_ids, self._tokenizer.id_to_token
        tokens = [None if each in silent else text_of(each) for each in range(self.vocab_size)]
        return table_of(tokens, decoder)

    def _token_bytes_max(self, normalizer: Any) -> int:
        """Return the most bytes of a text, for each of its tokens, that are read at all."""
        normalizer = normalizer or {}
        shrinks = 1
        for each in normalizer.get("normalizers", [normalizer]):
            shrinks *= _shrinks(each)
        match self._table:
            case ByteTable():
                longest = max(map(len, self._table.token_bytes), default=1)
            case TextTable():
                longest = max((len(text.encode()) for text in self._table.texts), default=1)
            case None:
                longest = max(len(text.encode()) for text in self._tokenizer.get_vocab())
        return max(longest, 1) * min(shrinks, SHRINKS_MAX)

    def _compiled(self, source: str, text_max: int) -> ChatTemplate | None:
        if not source:
            return None
        try:
            return ChatTemplate(source, self.folder.named_tokens, text_max=text_max)
        except TemplateError as error:
            raise ModelFolderError(f"{self.folder.path}: the chat template is wrong: {error}.") from None


class _Marks:
    """Keeps the special tokens of a template apart from equal texts of a client.

    Before the template is rendered, each special token in a text of the client becomes a secret word (`hide`). Then each
    special token that is left comes from the template, and becomes a secret mark; the words become texts again (`swap`).
    The marks are the names of the special tokens in the tokenizer that reads the result (`renamed`).

    A template may also join texts to a special token: of two messages, or of its own text and a name. A client's text that
    is a part of a special token, or has one at an end, therefore gets a secret joint, which `swap` removes. Names that the
    template itself knows, such as roles, get none: `<|{{ role }}|>` is how some templates write a special token.
    """

    def __init__(self, specials: Sequence[str], folder: ModelFolder) -> None:
        secret = secrets.token_hex(8)  # of the words, which a template sees and may cut and show
        specials = [each for each in specials if each]
        self._words = {text: f"\ufdd0{secret}{index:x}\ufdd1" for index, text in enumerate(specials)}
        other = secrets.token_hex(8)  # so that a shown word never helps to write a mark
        self._marks = {text: f"\ufdd2{other}{index:x}\ufdd3" for index, text in enumerate(specials)}
        self._joint = f"\ufdd0{secret}\ufdd1"
        self._texts = {word: text for text, word in self._words.items()} | {self._joint: ""}
        self._found = re.compile(longest_of(specials))
        self._hidden = re.compile(f"\ufdd0{secret}[0-9a-f]*\ufdd1")
        self._heads = frozenset(text[:size] for text in specials for size in range(1, len(text)))
        self._tails = frozenset(text[size:] for text in specials for size in range(1, len(text)))
        self._head_ends = frozenset(each[-1] for each in self._heads)
        self._tail_starts = frozenset(each[0] for each in self._tails)
        self._insides = "\0".join(specials)
        self._part_max = max(map(len, specials), default=1) - 1
        self._file = folder.path / TOKENIZER
        self._known = frozenset(_ROLES) | words_of(folder.template) | words_of(folder.tool_template)

    def hide(self, conversation: Conversation) -> Conversation:
        """Return the conversation with a word for each special token in its texts."""
        return Conversation(
            [{key: self._map(each) for key, each in message.items()} for message in conversation.messages],
            self._map(conversation.tools),
            None
            if conversation.arguments is None
            else {key: self._map(each) for key, each in conversation.arguments.items()},
        )

    def swap(self, rendered: str) -> str:
        """Return the rendered text with marks for the template's special tokens, and the client's texts as they were."""
        marked = self._found.sub(lambda match: self._marks[match[0]], rendered)
        return self._hidden.sub(lambda match: self._texts.get(match[0], match[0]), marked)

    def readable(self, rendered: str) -> str:
        """Return the rendered text with special tokens in the place of their marks."""
        for text, mark in self._marks.items():
            rendered = rendered.replace(mark, text)
        return rendered

    def renamed(self, document: dict[str, Any]) -> Tokenizer:
        """Return a tokenizer with equal ids, in which a mark is the name of each special token.

        Special tokens without a mark are plain text. `document` is changed.
        """
        document["post_processor"] = None
        model, marks = document["model"], self._marks
        if "merges" in model:  # the library finds special tokens first, so it never makes one by a merge
            model["merges"] = [
                each
                for each, parts in zip(model["merges"], _merges(model), strict=True)
                if marks.keys().isdisjoint(parts)
            ]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {marks.get(text, text): each for text, each in model["vocab"].items()}
        else:
            model["vocab"] = [[marks.get(text, text), score] for text, score in model["vocab"]]
        unknown = model.get("unk_token")  # the model makes it of unknown characters, by its name
        if unknown is not None:
            model["unk_token"] = marks.get(unknown, unknown)
        document["added_tokens"] = [
            each | {"content": marks[each["content"]]} if each["special"] else each
            for each in document["added_tokens"]
            if not each["special"] or each["content"] in marks
        ]
        try:
            return Tokenizer.from_str(json.dumps(document))
        except BaseException as error:  # noqa: BLE001  # a panic of Rust is no Exception
            raise _not_marked(self._file, error) from None

    def _hide(self, text: str) -> str:
        hidden = self._found.sub(lambda match: self._words[match[0]], text)
        return self._broken(hidden) if hidden == text else hidden

    def _broken(self, text: str) -> str:
        """Return `text` with a joint where it is, begins with, or ends with a part of a special token."""
        bare = text.strip()
        if not bare or bare in self._known:
            return text
        start, end = text.index(bare), text.index(bare) + len(bare)
        if len(bare) <= self._part_max and bare in self._insides:
            at = start + (len(bare) > 1)
            return f"{text[:at]}{self._joint}{text[at:]}"
        if bare[-1] in self._head_ends:
            size = next((size for size in range(self._part_max, 0, -1) if bare[-size:] in self._heads), 0)
            if size:
                text = f"{text[: end - size + 1]}{self._joint}{text[end - size + 1 :]}"
        if bare[0] in self._tail_starts:
            size = next((size for size in range(self._part_max, 0, -1) if bare[:size] in self._tails), 0)
            if size:
                text = f"{text[: start + size - 1]}{self._joint}{text[start + size - 1 :]}"
        return text

    def _map(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hide(value)
        if isinstance(value, Mapping):
            return {self._hide(key): self._map(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._map(each) for each in value]
        return value


def longest_of(texts: Sequence[str]) -> str:
    """Return a regular expression for the longest of `texts` at a place.

    It reads a common beginning once. In a plain alternative of 256 texts that all begin alike, each is tried in turn.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    made = _branches(tree, NESTING_MAX)
    if made is None:
        made = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    return made or r"(?!)"


def _branches(node: Mapping[str, Any], nesting: int) -> str | None:
    """Return the expression for the texts of a node. None: it has more groups in each other than `nesting`."""
    made = []
    for chain in filter(None, node):  # "": a text ends here
        below = node[chain]
        escaped = re.escape(chain)
        while len(below) == 1 and "" not in below:
            ((character, below),) = below.items()
            escaped += re.escape(character)
        rest = _branches(below, nesting - 1) if nesting else None
        if rest is None:
            return None
        is_group = len(below) > 1
        made.append(escaped + (f"(?:{rest}){'?' * ('' in below)}" if is_group else rest))
    return "|".join(made)


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield both parts and the result of each merge."""
    cut = len(model.get("continuing_subword_prefix") or "")
    for each in model.get("merges", ()):
        left, right = each.split(" ", 1) if isinstance(each, str) else each
        yield left, right, left + right[cut:]


def _words(model: Mapping[str, Any], specials: set[str]) -> frozenset[str]:
    """Return the special tokens that are characters or words of plain texts. A mark would take them from these texts.

    Some folders name such a token where no other is to be had, for example "!" for the padding.
    """
    vocab = model["vocab"]
    known = specials.intersection(vocab if isinstance(vocab, dict) else (text for text, _ in vocab))
    found = {each for each in known if _is_character(each.lstrip(_SPACES))}
    if model.get("byte_fallback"):
        found |= {each for each in known if _BYTE.fullmatch(each)}
    words = {each for each in known if each.lstrip(_SPACES).isalnum()} - found
    if words:
        found |= words.intersection(part for parts in _merges(model) for part in parts)
    return frozenset(found)


def _is_character(text: str) -> bool:
    """Return True for a character of texts, or none. Those of private use are markers."""
    return not text or (len(text) == 1 and unicodedata.category(text) not in ("Co", "Cn"))


def _shrinks(normalizer: Mapping[str, Any]) -> int:
    """Return the most bytes of a text that a normalizer makes one of."""
    kind, pattern = normalizer.get("type", ""), (normalizer.get("pattern") or {}).get("String")
    if not normalizer:
        return 1
    if kind == "Replace" and pattern and normalizer.get("content"):
        return math.ceil(len(pattern.encode()) / len(normalizer["content"].encode()))
    return _SHRINKS.get(str(kind), SHRINKS_MAX)


def _load(folder: ModelFolder) -> Tokenizer:
    """Return the tokenizer with all special tokens of the folder. Raises ModelFolderError."""
    for text in (
        *folder.named_tokens.values(),
        *folder.special_texts,
        *(each.content for each in folder.declared),
    ):
        _check_special(folder.path, text)
    for table in _CHARSMAP.finditer(folder.tokenizer):
        _check_charsmap(folder.path / TOKENIZER, table[1])
    try:
        tokenizer = Tokenizer.from_str(folder.tokenizer)
    except BaseException as error:  # noqa: BLE001  # a panic of Rust is no Exception
        raise _not_read(folder.path / TOKENIZER, error) from None
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
    for added in tokenizer.get_added_tokens_decoder().values():
        _check_special(folder.path / TOKENIZER, added.content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_special(file: Path, text: str) -> None:
    if not 0 <= len(text) <= SPECIAL_CHARACTERS_MAX:
        what = f"the added token {text[:20]!r}... has {len(text)} characters"
        raise ModelFolderError(f"{file}: {what}; allowed are 1 to {SPECIAL_CHARACTERS_MAX}.")


def _check_charsmap(file: Path, text: str) -> None:
    """Refuse a table that says it is larger than it is: the library would end the process for want of memory."""
    head = text.replace("\\/", "/")[:8]
    size = (
        int.from_bytes(base64.b64decode(head + "A" * (8 - len(head)))[:4], "little")
        if _BASE64.fullmatch(head)
        else -1
    )
    if not 0 <= size <= len(text):
        what = (
            f"precompiled_charsmap names {size} bytes" if size >= 0 else "precompiled_charsmap is not Base64"
        )
        raise ModelFolderError(f"{file}: {what}; allowed are those that it has.")


def _pipeline(folder: ModelFolder) -> dict[str, Any]:
    """Return normalizer and decoder of a tokenizer that the library has read. Raises ModelFolderError."""
    document = json.loads(folder.tokenizer)
    found = {key: document.get(key) for key in ("normalizer", "decoder")}
    for key, value in found.items():
        _check_growth(folder, key, value)
    return found


def _check_growth(folder: ModelFolder, key: str, value: Any) -> None:
    """Refuse a normalizer or decoder that makes much longer texts: a client's short text would take all memory."""
    growth, left = 1, [value]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            growth *= max(
                [
                    1,
                    *(
                        len(text)
                        for name in ("content", "prepend")
                        if isinstance(text := each.get(name), str)
                    ),
                ]
            )
            left += (each.get("normalizers"), each.get("decoders"))
    if growth > GROWTH_MAX:
        what = f"{key} may make {growth} characters of one"
        raise ModelFolderError(f"{folder.path / TOKENIZER}: {what}; allowed are {GROWTH_MAX}.")


def _vocab_size(folder: ModelFolder, tokenizer: Tokenizer) -> int:
    """Return one more than the largest id: a vocabulary may have holes. Raises ModelFolderError."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 1 <= size <= VOCABULARY_MAX:
        what = f"vocab has {size - 1} as its largest token id" if size else "vocab is empty"
        raise ModelFolderError(f"{folder.path / TOKENIZER}: {what}; allowed is 0 to {VOCABULARY_MAX - 1}.")
    return size


def _not_read(file: Path, error: BaseException) -> BaseException:
    return _of_library(error, f"{file} is not a tokenizer")


def _not_marked(file: Path, error: BaseException) -> BaseException:
    return _of_library(error, f"{file} has special tokens that cannot be told from texts")


def _not_encoded(file: Path, error: BaseException) -> BaseException:
    return _of_library(error, f"{file} cannot encode a text")


def _of_library(error: BaseException, what: str) -> BaseException:
    """Return a ModelFolderError for an error of the library: a plain Exception, or a panic of Rust, which is none."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ModelFolderError(f"{what}: {' '.join(str(error).split())[:300].rstrip('.')}.")
    return error
