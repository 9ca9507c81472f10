"""Prefixes that operators registered, for example system prompts: packages keep their tokens. Pure.

They stand in Redis, in the memory and in the state folder of each control process. The highest revision counts. A deleted
prefix stays as an empty one for a while, so that no process puts it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kvmesh.snapshot.content import REVISION_MAX

PREFIX_TOKENS_MAX: Final = 16_384
"""Tokens of one prefix."""

PREFIXES_MAX: Final = 64
"""Registered prefixes."""

STORED_MAX: Final = 4 * PREFIXES_MAX
"""Stored ones, the deleted ones among them."""

TOKEN_ID_MAX: Final = (1 << 31) - 1

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PrefixError(ValueError):
    """A prefix cannot be registered. The text names the field, the value and the allowed range."""

    def __init__(self, field: str, value: str, allowed: str) -> None:
        super().__init__(f"{field} is {value}; {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class RegisteredPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """One prefix. Without tokens: it was deleted."""

    name: str
    revision: int = 1
    model_version: str = ""
    token_ids: tuple[int, ...] = ()
    by: str = ""
    at_s: float = 0.0
    """Unix time of the registration."""

    def __repr__(self) -> str:
        return f"RegisteredPrefix({self.name}, revision {self.revision}, {len(self.token_ids)} tokens)"


def check(prefix: RegisteredPrefix, versions: Iterable[str]) -> None:
    """Raise PrefixError unless the prefix may be registered for one of the configured model versions."""
    if _NAME.fullmatch(prefix.name) is None:
        raise PrefixError("name", f'"{prefix.name[:64]}"', "up to 64 letters, digits and ._- are allowed")
    known = sorted(set(versions))
    if prefix.model_version not in known:
        names = ", ".join(f'"{each}"' for each in known)
        raise PrefixError("model_version", f'"{prefix.model_version[:64]}"', f"{names} are served")
    count = len(prefix.token_ids)
    if not 1 <= count <= PREFIX_TOKENS_MAX:
        raise PrefixError("token_ids", f"{count} tokens", f"1 to {PREFIX_TOKENS_MAX} tokens are allowed")
    if not all(0 <= each <= TOKEN_ID_MAX for each in prefix.token_ids):
        raise PrefixError("token_ids", "a token id out of range", f"0 to {TOKEN_ID_MAX} is allowed")


class Prefixes:
    """The prefixes that this process knows."""

    def __init__(self) -> None:
        self._prefixes: dict[str, RegisteredPrefix] = {}

    def ordered(self) -> list[RegisteredPrefix]:
        """Return the registered prefixes by name."""
        found = (self._prefixes[name] for name in sorted(self._prefixes))
        return [each for each in found if each.token_ids]

    def get(self, name: str) -> RegisteredPrefix | None:
        """Return a prefix. None: there is none of that name."""
        found = self._prefixes.get(name)
        return found if found is not None and found.token_ids else None

    def of_version(self, model_version: str) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of the prefixes of a model version, by name."""
        return tuple(each.token_ids for each in self.ordered() if each.model_version == model_version)

    def learn(self, stored: Mapping[str, bytes]) -> None:
        """Take stored prefixes. A higher revision counts; one that cannot be read is ignored."""
        for name, data in stored.items():
            found = _read(name, data)
            known = self._prefixes.get(name)
            if found is not None and (known is None or found.revision > known.revision):
                self._prefixes[name] = found
        self._trim()

    def adopt(self, prefix: RegisteredPrefix) -> RegisteredPrefix:
        """Keep `prefix` as the next revision of its name, and return it. Raises PrefixError if there are too many."""
        known = self._prefixes.get(prefix.name)
        if self.get(prefix.name) is None and len(self.ordered()) >= PREFIXES_MAX and prefix.token_ids:
            raise PrefixError("name", f'"{prefix.name}"', f"{PREFIXES_MAX} prefixes are registered already")
        revision = known.revision + 1 if known is not None else 1
        made = msgspec.structs.replace(prefix, revision=revision)
        self._prefixes[prefix.name] = made
        self._trim()
        return made

    def unwritten(self, stored: Mapping[str, bytes]) -> list[RegisteredPrefix]:
        """Return the prefixes that `stored` lacks, or has in an earlier revision.

        A full store gets no deleted prefix back: it dropped one for another, and would drop the next one.
        """
        found = {name: _read(name, data) for name, data in stored.items()}
        is_full = len(stored) >= STORED_MAX
        return [
            each
            for each in self._prefixes.values()
            if ((there := found.get(each.name)) is None and (each.token_ids or not is_full))
            or (there is not None and there.revision < each.revision)
        ]

    def _trim(self) -> None:
        """Forget the earliest deleted prefixes beyond STORED_MAX."""
        surplus = len(self._prefixes) - STORED_MAX
        if surplus > 0:
            deleted = [each for each in self._prefixes.values() if not each.token_ids]
            for each in sorted(deleted, key=lambda each: (each.at_s, each.name))[:surplus]:
                del self._prefixes[each.name]


def encode(prefix: RegisteredPrefix) -> bytes:
    """Return the prefix as JSON."""
    return msgspec.json.encode(prefix)


def _read(name: str, data: bytes) -> RegisteredPrefix | None:
    try:
        found = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    is_fine = found.name == name and 1 <= found.revision <= REVISION_MAX
    has_tokens = len(found.token_ids) <= PREFIX_TOKENS_MAX
    return found if is_fine and has_tokens and _are_ids(found.token_ids) else None


def _are_ids(token_ids: Iterable[int]) -> bool:
    return all(0 <= each <= TOKEN_ID_MAX for each in token_ids)


_decoder: Final = msgspec.json.Decoder(RegisteredPrefix)
