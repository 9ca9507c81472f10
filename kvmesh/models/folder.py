"""The files of a model's folder, in the format of Hugging Face, as far as a frontend needs them.

`read` takes `tokenizer.json` (needed), `tokenizer_config.json`, `chat_template.jinja` (or `chat_template.json`),
`additional_chat_templates/tool_use.jinja`, `generation_config.json`, `special_tokens_map.json` and `config.json`. Weights
are the engine's alone.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from errno import ENOENT
from pathlib import Path
from typing import Any, Final

TOKENIZER_BYTES_MAX: Final = 64 << 20
"""Largest tokenizer.json that is read. The largest known one has 35 MB."""

FILE_BYTES_MAX: Final = 8 << 20
"""Largest one of the other files. JSON takes up to 25 times its size in memory."""

TEMPLATE_CHARACTERS_MAX: Final = 1 << 16
"""Longest chat template. The longest known one has 20,000 characters."""

TOKEN_ID_DIGITS_MAX: Final = 10

NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The special tokens with a name, which chat templates get as variables."""

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"
OLD_TEMPLATE: Final = "chat_template.json"
GENERATION_CONFIG: Final = "generation_config.json"
SPECIAL_TOKENS_MAP: Final = "special_tokens_map.json"
CONFIG: Final = "config.json"

_CONTEXT_KEYS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


class ModelFolderError(ValueError):
    """The model's folder cannot be used. The text names the file and the reason in one sentence."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters of requests that name none, from generation_config.json. None: the file has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


NO_DEFAULTS: Final = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class DeclaredToken:
    """A token that tokenizer_config.json adds to the tokenizer (`added_tokens_decoder`)."""

    token_id: int
    content: str
    is_special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The content of a model's folder. Token ids are not checked against the vocabulary yet."""

    path: Path
    tokenizer: str
    """Text of tokenizer.json."""
    template: str = ""
    """The chat template. Empty: none."""
    tool_template: str = ""
    """The template named `tool_use`, for requests with tools. Empty: `template` serves them, too."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text of the special tokens by name, for example "bos_token"."""
    special_texts: tuple[str, ...] = ()
    """Texts of further special tokens."""
    declared: tuple[DeclaredToken, ...] = ()
    end_tokens: tuple[int | str, ...] = ()
    """End tokens by id or text, at least one if the folder names any."""
    adds_bos: bool | None = None
    """Whether plain text gets the BOS token. None: tokenizer.json decides."""
    adds_eos: bool | None = None
    """The same for EOS behind a text."""
    defaults: SamplingDefaults = NO_DEFAULTS
    context_tokens: int | None = None
    """Tokens of the longest context. None: the folder does not say."""

    @property
    def shaping(self) -> tuple[object, ...]:
        """All that shapes token ids and text. Folders with an equal value can share a tokenizer object."""
        return (
            self.tokenizer,
            self.template,
            self.tool_template,
            tuple(sorted(self.named_tokens.items())),
            self.special_texts,
            self.declared,
            self.end_tokens,
            self.adds_bos,
            self.adds_eos,
        )


def read(path: Path) -> ModelFolder:
    """Return the content of the folder `path`. Raises ModelFolderError."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise ModelFolderError(f"{path} does not exist; allowed is a folder with {TOKENIZER}.") from None
    except OSError as error:
        raise ModelFolderError(f"Cannot read {path}: {error.strerror}.") from error
    if not is_folder:
        raise ModelFolderError(f"{path} is no folder; allowed is a folder with {TOKENIZER}.")
    tokenizer = _text(path / TOKENIZER, TOKENIZER_BYTES_MAX)
    settings = _Document.read(path / TOKENIZER_CONFIG)
    generation = _Document.read(path / GENERATION_CONFIG)
    tokens = _Document.read(path / SPECIAL_TOKENS_MAP)
    model = _Document.read(path / CONFIG)
    template, tool_template = _templates(path, settings)
    for each in (template, tool_template):
        if len(each) > TEMPLATE_CHARACTERS_MAX:
            allowed = f"allowed are {TEMPLATE_CHARACTERS_MAX}"
            raise ModelFolderError(f"{path}: the chat template has {len(each)} characters; {allowed}.")
    named: dict[str, str] = {}
    for source in (tokens, settings):  # the later one wins, as in transformers
        named |= {name: text for name in NAMED_TOKENS if (text := source.token(name))}
    return ModelFolder(
        path=path,
        tokenizer=tokenizer,
        template=template,
        tool_template=tool_template,
        named_tokens=named,
        special_texts=_special_texts((tokens, settings)),
        declared=_declared(settings),
        end_tokens=_end_tokens(generation, model, named),
        adds_bos=settings.flag("add_bos_token"),
        adds_eos=settings.flag("add_eos_token"),
        defaults=_defaults(generation),
        context_tokens=_context(model),
    )


class _Document:
    """A JSON object of the folder; empty if there is no such file. Reads check the type of a value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    @classmethod
    def read(cls, path: Path) -> _Document:
        if not os.path.lexists(path):
            return cls(path, {})
        text = _text(path)
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelFolderError(f"{path} is not JSON: {error}.") from None
        if not isinstance(values, dict):
            raise ModelFolderError(f"{path} is not a JSON object.")
        return cls(path, values)

    def wrong(self, key: str, value: object, allowed: str) -> ModelFolderError:
        return ModelFolderError(f"{self.path}: {key} is {_shown(value)}; allowed is {allowed}.")

    def get(self, key: str) -> Any:
        """Return a value of any type. None: absent, or null."""
        return self._values.get(key)

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, value, "true or false")

    def token(self, key: str) -> str:
        """Return the text of a token, written as a string or as an object with `content`. Empty: absent."""
        value = self.get(key)
        return "" if value is None else self.token_text(key, value)

    def token_text(self, key: str, value: object) -> str:
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str) or not is_encodable(text):
            raise self.wrong(
                key, value, "a string or an object with a string `content`, without lone surrogates"
            )
        return text

    def number(self, key: str, low: float, high: float, *, above: bool = False) -> float | None:
        """Return a number from `low` to `high`; `above`: `low` itself is not allowed. None: absent."""
        value = self.get(key)
        if value is None:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (low < value if above else low <= value) or not value <= high:
            raise self.wrong(key, value, f"a number {'above' if above else 'from'} {low:g} to {high:g}")
        return float(value)


def _templates(path: Path, settings: _Document) -> tuple[str, str]:
    """Return the chat template and that for requests with tools. The file of its own comes before the settings."""
    file, tool_file = path / TEMPLATE, path / TOOL_TEMPLATE
    if os.path.lexists(file):
        return _text(file), _text(tool_file) if os.path.lexists(tool_file) else ""
    if settings.get("chat_template") is None:
        settings = _Document.read(path / OLD_TEMPLATE)
    value = settings.get("chat_template")
    if value is None:
        return "", ""
    if isinstance(value, str) and is_encodable(value):
        return value, ""
    allowed = "a string, or a list of objects with `name` and `template`, one of them named default"
    if not isinstance(value, list):
        raise settings.wrong("chat_template", value, allowed)
    named: dict[str, str] = {}
    for each in value:
        if not isinstance(each, dict):
            raise settings.wrong("chat_template", value, allowed)
        name, template = each.get("name"), each.get("template")
        if not isinstance(name, str) or not isinstance(template, str) or not is_encodable(template):
            raise settings.wrong("chat_template", value, allowed)
        named[name] = template
    if "default" not in named:
        raise settings.wrong("chat_template", sorted(named), allowed)
    return named["default"], named.get("tool_use", "")


def _special_texts(sources: Iterable[_Document]) -> tuple[str, ...]:
    texts: list[str] = []
    for source in sources:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = source.get(key)
            if value is None:
                continue
            items = value.values() if isinstance(value, dict) else value
            if not isinstance(value, (dict, list)):
                raise source.wrong(key, value, "a list of tokens")
            texts += [source.token_text(key, each) for each in items]
    return tuple(dict.fromkeys(texts))


def _declared(settings: _Document) -> tuple[DeclaredToken, ...]:
    key = "added_tokens_decoder"
    value = settings.get(key)
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise settings.wrong(key, value, "an object of tokens by id")
    found = []
    for number, token in value.items():
        is_id = number.isascii() and number.isdigit() and len(number) <= TOKEN_ID_DIGITS_MAX
        if not is_id or not isinstance(token, dict):
            raise settings.wrong(
                f"{key}[{number[:20]!r}]", token, "an object with `content`, under a token id"
            )
        flags = {name: token.get(name, False) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        special = token.get("special", False)
        if not all(isinstance(flag, bool) for flag in (*flags.values(), special)):
            raise settings.wrong(f"{key}[{number[:20]!r}]", token, "true or false for each of its flags")
        content = settings.token_text(f"{key}[{number[:20]!r}]", token)
        if not content:
            raise settings.wrong(f"{key}[{number[:20]!r}]", token, "a `content` of 1 character or more")
        found.append(DeclaredToken(int(number), content, special, **flags))
    return tuple(sorted(found, key=lambda token: token.token_id))


def _end_tokens(generation: _Document, model: _Document, named: Mapping[str, str]) -> tuple[int | str, ...]:
    """Return the end tokens of the first file that names some."""
    for source in (generation, model):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(
            isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids
        ):
            raise source.wrong("eos_token_id", value, "a token id, or a list of token ids")
        return tuple(dict.fromkeys(ids))
    return (named["eos_token"],) if "eos_token" in named else ()


def _defaults(generation: _Document) -> SamplingDefaults:
    top_k = generation.number("top_k", 0, 1_000_000)
    if top_k is not None and top_k != int(top_k):
        raise generation.wrong("top_k", top_k, "a whole number from 0 to 1000000")
    return SamplingDefaults(
        temperature=generation.number("temperature", 0, 10),
        top_p=generation.number("top_p", 0, 1, above=True),
        top_k=None if top_k is None else int(top_k),
        repetition_penalty=generation.number("repetition_penalty", 0.01, 10),
    )


def _context(model: _Document) -> int | None:
    for source in (
        model.get("text_config"),
        model,
    ):  # models of text and pictures keep those of the text apart
        document = _Document(model.path, source) if isinstance(source, dict) else model
        for key in _CONTEXT_KEYS:
            found = document.number(key, 1, 1 << 31)
            if found is not None:
                return int(found)
    return None


def is_encodable(text: str) -> bool:
    """Return True if `text` has no lone surrogate, which JSON may have and UTF-8 cannot."""
    return text.isascii() or not _SURROGATE.search(text)


_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def _text(path: Path, bytes_max: int = FILE_BYTES_MAX) -> str:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
            raise ModelFolderError(f"{path} is {kind}; allowed is a file.")
        if found.st_size > bytes_max:
            raise ModelFolderError(f"{path} has {found.st_size} bytes; allowed are {bytes_max}.")
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except OSError as error:
        what = (
            "a link to a file that does not exist"
            if error.errno == ENOENT and path.is_symlink()
            else error.strerror
        )
        raise ModelFolderError(f"Cannot read {path}: {what}.") from error
    except UnicodeDecodeError as error:
        raise ModelFolderError(f"{path} is not UTF-8: {error.reason} at byte {error.start}.") from error


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."
