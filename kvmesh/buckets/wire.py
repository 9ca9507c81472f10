"""Encodes operations as arguments of the script, and decodes its replies as answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct, pack
from typing import Any, Final, TypeAlias, cast

from kvmesh.buckets.limits import Account
from kvmesh.buckets.operations import (
    LEASE_S_MAX,
    SCOPES_MAX,
    TOKENS_MAX,
    Answer,
    Denied,
    Draw,
    Drawn,
    Granted,
    LedgerTotals,
    Lower,
    Lowered,
    Operation,
    Reason,
    RemainingBudget,
    Renew,
    Renewed,
    RenewedState,
    Reserve,
    ScopeUsage,
    Settle,
    Settled,
    SettledState,
    Show,
    Shown,
    Spend,
    Spent,
    Sweep,
    Swept,
)
from kvmesh.redis_script import Call

UNIT: Final = 60_000
"""Units of a level per token or request: a rate of 1 per minute adds one unit in 1 ms."""

SWEEP_MAX: Final = 1000

Words: TypeAlias = tuple[tuple[float, ...], tuple[str, ...]]
"""Numbers and names of an operation."""


@lru_cache(maxsize=4096)
def keys(mesh: str, organisation: str) -> tuple[str, str, str]:
    """Return the keys of an organisation's budget: levels, reservations, leases. One hash tag puts them on one node.

    The names contain the version of the format. A script cannot read another version, and frontends of two releases would
    otherwise delete each other's keys.
    """
    tag = f"{{{mesh}:{organisation}}}:budget2"
    return f"{tag}:levels", f"{tag}:open", f"{tag}:leases"


def organisation(operation: Operation) -> str:
    """Return the organisation of the budget that `operation` concerns."""
    return operation.organisation if isinstance(operation, Sweep) else operation.account.organisation


def calls(mesh: str, operations: Sequence[Operation], now_ms: int) -> list[Call]:
    """Return the script calls for `operations`; consecutive operations of one account share a call.

    `now_ms` 0: the clock of Redis. Raises ValueError for an invalid operation.
    """
    made: list[Call] = []
    words: list[str | bytes] = []
    count, last = 0, None
    for operation in operations:
        account = None if isinstance(operation, Sweep) else operation.account
        if account is None or account is not last or count >= _TOGETHER_MAX:
            limits, scopes = _NO_SCOPES if account is None else _scopes(account)
            words, count = [_NUMBERS[1].pack(now_ms), limits, *scopes], 0
            made.append((keys(mesh, organisation(operation)), words))
        words += _words(operation)
        count += 1
        last = None if isinstance(operation, Renew) else account  # one Renew has many items already
    return made


def answers(operations: Sequence[Operation], replies: Iterable[Sequence[Any]]) -> list[Answer]:
    """Return the answers in the script's `replies` to the calls for `operations`."""
    parts = [each for reply in replies for each in reply]
    return [_DECODERS[type(each)](each, part) for each, part in zip(operations, parts, strict=True)]


def _words(operation: Operation) -> tuple[str | bytes, ...]:
    name, encode = _ENCODERS[type(operation)]
    numbers, names = encode(operation)
    count = len(numbers)
    packer = _NUMBERS[count] if count < len(_NUMBERS) else Struct(f"<{count}d")
    return name, packer.pack(*numbers), *names


_NUMBERS: Final = [Struct(f"<{count}d") for count in range(16)]

_TOGETHER_MAX: Final = 16
"""Most operations in one call, because a running script blocks all other clients of Redis."""

_NO_SCOPES: Final[tuple[bytes, tuple[str, ...]]] = b"", ()


@lru_cache(maxsize=4096)
def _scopes(account: Account) -> tuple[bytes, tuple[str, ...]]:
    """Return the limits of all scopes in the script's format, and the names of the scopes."""
    if len(account.scopes) > SCOPES_MAX:
        raise ValueError(f"an account has {len(account.scopes)} scopes; at most {SCOPES_MAX} are allowed")
    limits = b""
    for scope in account.scopes:
        if not scope.name or "\n" in scope.name:
            raise ValueError(f"the name of a scope is {scope.name!r}; one line that is not empty is allowed")
        limit = scope.limit
        for rate in (limit.requests_per_min, limit.tokens_per_min, limit.concurrency, limit.tokens_overrun):
            if not 0 <= rate < float("inf"):
                raise ValueError(f"a limit of {scope.name} is {rate}; 0 or more is allowed")
        limits += pack(
            "<6d",
            *(limit.requests_per_min, _burst(limit.requests_per_min, limit.requests_burst)),
            *(limit.tokens_per_min, _burst(limit.tokens_per_min, limit.tokens_burst)),
            limit.concurrency or float("inf"),
            (limit.tokens_per_min and limit.tokens_overrun) or float("inf"),
        )
    return limits, tuple(scope.name for scope in account.scopes)


def _burst(rate: float, burst: float) -> float:
    return round(burst * UNIT) if rate else float("inf")


def _rid(rid: str) -> str:
    if not rid or rid[0] in "#+":
        raise ValueError(
            f"the rid of a reservation is {rid!r}; a name that does not begin with # or + is allowed"
        )
    return rid


def _whole(what: str, *numbers: int) -> tuple[int, ...]:
    for number in numbers:
        if not 0 <= number <= TOKENS_MAX:
            raise ValueError(f"{what} is {number}; 0 to {TOKENS_MAX} is allowed")
    return numbers


def _ms(lease_s: float) -> int:
    if not 0 < lease_s <= LEASE_S_MAX:
        raise ValueError(f"lease_s is {lease_s}; above 0 to {LEASE_S_MAX:g} is allowed")
    return max(1, round(lease_s * 1000))


def _reserve(each: Reserve) -> Words:
    amounts = _whole("an amount of a Reserve", each.tokens, each.requests, each.slots, each.overrun)
    return (*amounts, _ms(each.lease_s), each.force), (_rid(each.rid),)


def _settle(each: Settle) -> Words:
    requests = 0 if each.refund_request else -1 if each.used_requests is None else each.used_requests
    if each.used_requests is None or each.actual_tokens < 0:
        _whole(
            "actual_tokens", each.actual_tokens
        )  # a quota lease counts since its opening, without this bound
    return (each.actual_tokens, requests), (_rid(each.rid),)


def _renew(each: Renew) -> Words:
    numbers = [_ms(each.lease_s)]
    for item in each.items:
        amounts = item.tokens, item.requests, item.slots, item.extra_tokens, item.overrun
        numbers += _whole("an amount of a Renewal", *amounts)
    return tuple(numbers), tuple(_rid(item.rid) for item in each.items)


def _lower(each: Lower) -> Words:
    return _whole("tokens of a Lower", each.tokens), (_rid(each.rid),)


def _draw(each: Draw) -> Words:
    if each.number < 1:
        raise ValueError(f"number of a Draw is {each.number}; 1 or more is allowed")
    held = (each.tokens, each.requests, each.slots, each.overrun)
    amounts = _whole("an amount of a Draw", *held, each.least_tokens, each.least_slots, each.least_overrun)
    used = (
        each.used_tokens,
        each.used_requests,
    )  # counted since the opening of the quota lease, so not bounded like one operation
    return (each.number, _ms(each.lease_s), *used, *amounts), (_rid(each.rid),)


def _spend(each: Spend) -> Words:
    name = _rid(each.rid) if each.rid else ""
    return _whole("an amount of a Spend", each.tokens, each.requests), (name,)


def _show(_: Show) -> Words:
    return (), ()


def _sweep(each: Sweep) -> Words:
    if not 1 <= each.count <= SWEEP_MAX:
        raise ValueError(f"count of a Sweep is {each.count}; 1 to {SWEEP_MAX} is allowed")
    return (each.count,), ()


_ENCODERS: Final[Mapping[type, tuple[str, Callable[[Any], Words]]]] = {
    Reserve: ("reserve", _reserve),
    Settle: ("settle", _settle),
    Renew: ("renew", _renew),
    Lower: ("lower", _lower),
    Draw: ("draw", _draw),
    Spend: ("spend", _spend),
    Show: ("show", _show),
    Sweep: ("sweep", _sweep),
}


def _text(word: Any) -> str:
    return bytes(word).decode()


def _level(word: bytes | int) -> float | None:
    return None if word == b"" else int(word) / UNIT


def _remaining(requests: bytes | int, tokens: bytes | int, slots: bytes | int) -> RemainingBudget:
    return RemainingBudget(_level(requests), _level(tokens), None if slots == b"" else int(slots))


def _reserved(_: Reserve, reply: Any) -> Answer:
    if reply[0] == b"granted":
        return Granted(_remaining(*reply[2:]), is_repeated=bool(reply[1]))
    reason, scope, wait = cast("Reason", _text(reply[1])), _text(reply[2]), reply[3]
    wait_s = None if wait == b"" else wait / 1000
    return Denied(
        reason, scope, wait_s, _remaining(*reply[6:]), is_claimed=bool(reply[4]), overrun_excess=int(reply[5])
    )


def _settled(_: Settle, reply: Any) -> Answer:
    state = cast("SettledState", _text(reply[0]))
    return Settled(int(reply[1]), int(reply[2]), state, _remaining(*reply[3:]))


def _renewed(_: Renew, reply: Any) -> Answer:
    return Renewed(tuple(cast("RenewedState", _text(state)) for state in reply[0]), _remaining(*reply[1:]))


def _lowered(_: Lower, reply: Any) -> Answer:
    return Lowered(int(reply[0]), _remaining(*reply[1:]))


def _drawn(_: Draw, reply: Any) -> Answer:
    is_open, tokens, requests, slots, overrun = (int(word) for word in reply[:5])
    return Drawn(tokens, requests, slots, bool(is_open), _remaining(*reply[5:]), overrun)


def _spent(_: Spend, reply: Any) -> Answer:
    return Spent(bool(reply[0]), _remaining(*reply[1:]))


def _shown(each: Show, reply: Any) -> Answer:
    uses = tuple(
        ScopeUsage(scope.name, _level(requests), _level(tokens), int(slots), int(overrun))
        for scope, (requests, tokens, slots, overrun) in zip(each.account.scopes, reply[0], strict=True)
    )
    values = [int(word or 0) for word in reply[1]]
    values[-1] -= values[-2]  # rows that are not open are tombstones
    return Shown(uses, LedgerTotals(*values))


def _swept(_: Sweep, reply: Any) -> Answer:
    return Swept(int(reply[0]), int(reply[1]), bool(reply[2]))


_DECODERS: Final[Mapping[type, Callable[[Any, Any], Answer]]] = {
    Reserve: _reserved,
    Settle: _settled,
    Renew: _renewed,
    Lower: _lowered,
    Draw: _drawn,
    Spend: _spent,
    Show: _shown,
    Sweep: _swept,
}
