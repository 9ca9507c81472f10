"""Injected faults of the hashed engine: the specification of `--faults`, and which requests and tokens it hits. Pure.

The text has comma-separated items `name=value`; an empty text injects nothing. Draws are hashes of the Triton request
id, so all replicas with the same text fail the same requests. Draws of `flip` are hashes of the boot id instead.

| name         | range         | fault                                                                                   |
|--------------|---------------|-----------------------------------------------------------------------------------------|
| `errors`     | 0..1          | share of requests that end with an engine error: half at their start, half after tokens |
| `slow`       | 1..100        | factor of the simulated step durations (`--step-s`, `--prefill-s` and its terms)        |
| `hang`       | 0..1          | share of requests that get no further token; the engine keeps them until a cancel       |
| `leak_bytes` | 0..67108864   | resident memory kept for each ended request, at most LEAK_TOTAL_MAX_BYTES in all        |
| `wrong`      | 0..1          | share of tokens that are wrong; a function of the history, equal on all replicas        |
| `flip`       | 0..1          | share of tokens that differ by chance: at other places in each boot and in each run      |
| `die`        | ids, as 17-23 | the engine process dies at a prompt that starts with these 1..64 token ids              |
| `miss`       | 0 or 1        | the prefix cache never hits; blocks are still registered and announced                  |
| `begin_s`    | 0..86400      | seconds after boot at which all other items begin                                       |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from engines.reference.hashed import RESERVED_TOKENS

PATH_MARK: Final = "@"  # before the path of a file with the text
LEAK_TOTAL_MAX_BYTES: Final = 1 << 30
ERROR_TOKENS_MAX: Final = 8  # output tokens before an injected error, at most

_RANGES: Final[dict[str, tuple[int, int]]] = {
    "errors": (0, 1),
    "slow": (1, 100),
    "hang": (0, 1),
    "leak_bytes": (0, 1 << 26),
    "wrong": (0, 1),
    "flip": (0, 1),
    "miss": (0, 1),
    "begin_s": (0, 86_400),
}
_WHOLE: Final = ("leak_bytes", "miss")
_DIE_IDS_MAX: Final = 64
_TOKEN_ID_MAX: Final = 2**31 - 1
_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?", re.ASCII)
_TOKEN_IDS: Final = re.compile(r"[0-9]{1,10}(-[0-9]{1,10})*", re.ASCII)

# Seeds of the hashes: one per draw, so that the draws of one request are independent.
_ERROR_SEED, _ERROR_AT_SEED, _HANG_SEED, _WRONG_SEED, _FLIP_SEED = 1, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults that are active in an engine. Requests are named by their Triton id."""

    errors: float = 0.0
    slow: float = 1.0
    hang: float = 0.0
    leak_bytes: int = 0
    wrong: float = 0.0
    flip: float = 0.0
    die: tuple[int, ...] = ()
    miss: int = 0
    begin_s: float = 0.0

    def at(self, uptime_s: float) -> Faults:
        """Return the faults that are active `uptime_s` after boot: these, or none before `begin_s`."""
        return self if uptime_s >= self.begin_s else NO_FAULTS

    def error_after(self, request_id: str, output_tokens_max: int) -> int | None:
        """Return the number of tokens after which the request fails; None if it does not fail.

        The number is 0 for half of the requests, and below `output_tokens_max`.
        """
        if not _is_drawn(self.errors, request_id.encode(), _ERROR_SEED):
            return None
        draw = xxhash.xxh3_64_intdigest(request_id.encode(), seed=_ERROR_AT_SEED)
        tokens = 0 if draw % 2 else 1 + (draw >> 8) % ERROR_TOKENS_MAX
        return min(tokens, output_tokens_max - 1)

    def hangs(self, request_id: str) -> bool:
        """Return whether the request gets no further token."""
        return _is_drawn(self.hang, request_id.encode(), _HANG_SEED)

    def kills(self, prompt: npt.NDArray[np.int32]) -> bool:
        """Return whether the engine process dies at this prompt."""
        return bool(self.die) and tuple(prompt[: len(self.die)].tolist()) == self.die

    def emitted(self, token: int, history: npt.NDArray[np.int32], vocab_size: int) -> int:
        """Return the token that the engine emits after `history` if the model has drawn `token`.

        A wrong token is a permutation of the vocabulary at this history. It keeps the log-probability of `token` and
        fits greedy and sampled requests. Special tokens stay, so that outputs still end.
        """
        raw = history.astype("<i4", copy=False).tobytes()
        if token < RESERVED_TOKENS or not _is_drawn(self.wrong, raw, _WRONG_SEED):
            return token
        return _shifted(token, raw, vocab_size)

    def flipped(self, token: int, boot_id: str, token_number: int, vocab_size: int) -> int:
        """Return the token that the engine emits as the `token_number`-th of this boot if it would emit `token`.

        The draw does not depend on the history. It models kernels with results that vary with the batch. Two equal
        engines differ at random places, and a second run of a prompt differs at other places. Special tokens stay.
        """
        raw = f"{boot_id}:{token_number}".encode()
        if token < RESERVED_TOKENS or not _is_drawn(self.flip, raw, _FLIP_SEED):
            return token
        return _shifted(token, raw, vocab_size)


NO_FAULTS: Final = Faults()


def parse(text: str) -> Faults:
    """Return the faults of a text. Raises ValueError with the item's name, its value and the allowed range."""
    values: dict[str, float | int | tuple[int, ...]] = {}
    for item in text.split(",") if text.strip() else ():
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator:
            raise ValueError(f'faults: each item must be name=value, got "{item.strip()}"')
        if name not in _NAMES:
            raise ValueError(f'faults: unknown name "{name}"; allowed: {", ".join(_NAMES)}')
        if name in values:
            raise ValueError(f"faults: {name} must occur once, got it twice")
        values[name] = _token_ids(value) if name == "die" else _number(name, value)
    return Faults(**values)  # type: ignore[arg-type]


def path_of(option: str) -> str | None:
    """Return the path in a `--faults` option of the form `@PATH`, otherwise None. Raises ValueError if it is empty."""
    if option == PATH_MARK:
        raise ValueError(f'faults must be name=value,... or @PATH with a path, got "{option}"')
    return option[1:] if option.startswith(PATH_MARK) else None


def check_option(option: str) -> None:
    """Raise ValueError if the value of `--faults` is neither `@PATH` nor a text of faults."""
    if path_of(option) is None:
        parse(option)


_NAMES: Final = tuple(field.name for field in fields(Faults))


def _number(name: str, text: str) -> float | int:
    low, high = _RANGES[name]
    is_whole = name in _WHOLE
    is_number = _NUMBER.fullmatch(text) is not None and not (is_whole and "." in text)
    if not is_number or not low <= float(text) <= high:
        kind = "a whole number" if is_whole else "a number"
        raise ValueError(f'faults: {name} must be {kind} in {low}..{high}, got "{text}"')
    return int(text) if is_whole else float(text)


def _token_ids(text: str) -> tuple[int, ...]:
    ids = tuple(map(int, text.split("-"))) if _TOKEN_IDS.fullmatch(text) else ()
    if not 1 <= len(ids) <= _DIE_IDS_MAX or max(ids) > _TOKEN_ID_MAX:
        allowed = f"1..{_DIE_IDS_MAX} token ids in 0..{_TOKEN_ID_MAX} joined by -"
        raise ValueError(f'faults: die must be {allowed}, got "{text}"')
    return ids


def _shifted(token: int, data: bytes, vocab_size: int) -> int:
    """Return another token of the vocabulary, not a special one; a permutation of the vocabulary for each `data`."""
    span = vocab_size - RESERVED_TOKENS
    shift = 1 + xxhash.xxh3_64_intdigest(data) % (span - 1)
    return RESERVED_TOKENS + (token - RESERVED_TOKENS + shift) % span


def _is_drawn(share: float, data: bytes, seed: int) -> bool:
    return share > 0.0 and xxhash.xxh3_64_intdigest(data, seed=seed) < share * 2.0**64
