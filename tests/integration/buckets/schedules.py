"""Random histories of one organisation's budget for hypothesis: operations, their order, and faults in between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final, Literal, TypeAlias

from hypothesis import strategies as st

from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import (
    Draw,
    Lower,
    Operation,
    Renew,
    Renewal,
    Reserve,
    Settle,
    Spend,
    Sweep,
)

ORGANISATION: Final = "acme"
RIDS: Final = tuple("abcdef")
LEASES: Final = ("lease-1", "lease-2")
LEASE_S: Final = 15.0

_ORGANISATION = Scope("organisation:acme", Limit(600, 20, 120_000, 3000, 8, 5000))
_SEARCH = Scope("tenant:search", Limit(300, 10, 60_000, 1500, 5, 3000))
_CHAT = Scope("tenant:chat", Limit(0, 0, 30_000.5, 1000, 0))
_KEY = Scope("key:search-prod", Limit(90, 3, 0, 0, 2))

ACCOUNTS: Final = (
    Account(ORGANISATION, (_ORGANISATION, _SEARCH, _KEY)),
    Account(ORGANISATION, (_ORGANISATION, _SEARCH)),
    Account(ORGANISATION, (_ORGANISATION, _CHAT)),
    # The same scopes after a change of the limits: lower, higher, other kinds, none.
    Account(ORGANISATION, (_ORGANISATION, replace(_SEARCH, limit=Limit(30, 2, 6000, 200, 1, 100.5)))),
    Account(ORGANISATION, (replace(_ORGANISATION, limit=Limit(6000, 100, 6e6, 50_000, 50)), _SEARCH)),
    Account(ORGANISATION, (replace(_ORGANISATION, limit=Limit(0, 0, 120_000, 3000, 0)), _SEARCH)),
    Account(ORGANISATION, ()),
)

Loss: TypeAlias = Literal["levels", "open", "leases", "all", "script"]


@dataclass(frozen=True)
class Step:
    """The clock moves, possibly back; data may be lost; then operations arrive."""

    pass_ms: int
    lose: Loss | None
    operations: tuple[Operation, ...]


def _amounts(most: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 20), st.integers(0, most))


_ACCOUNT = st.one_of(st.just(ACCOUNTS[0]), st.sampled_from(ACCOUNTS))
_TOKENS = _amounts(1600)
_OVERRUN = st.just(0) | _amounts(4000)

_LARGE: Final = st.builds(
    Reserve,
    account=st.sampled_from(ACCOUNTS[:5]),
    rid=st.sampled_from(RIDS),
    tokens=st.sampled_from([100, 600, 800, 1000, 1500]),
    lease_s=st.just(LEASE_S),
    requests=st.just(0),
    slots=st.just(0),
    overrun=_OVERRUN,
)
"""Large compared with a burst: such amounts may leave and end claims."""

_OPERATION: Final[st.SearchStrategy[Operation]] = st.one_of(
    _LARGE,
    st.builds(
        Reserve,
        account=_ACCOUNT,
        rid=st.sampled_from(RIDS),
        tokens=_TOKENS,
        lease_s=st.sampled_from([1.0, LEASE_S]),
        requests=st.integers(0, 4),
        slots=st.integers(0, 3),
        force=st.sampled_from([False, False, False, True]),
        overrun=_OVERRUN,
    ),
    st.builds(
        Settle,
        account=_ACCOUNT,
        rid=st.sampled_from(RIDS + LEASES),
        actual_tokens=_TOKENS,
        refund_request=st.booleans(),
        used_requests=st.none() | st.integers(0, 5),
    ),
    st.builds(
        Renew,
        account=_ACCOUNT,
        items=st.lists(
            st.builds(
                Renewal,
                rid=st.sampled_from(RIDS),
                tokens=_TOKENS,
                requests=st.integers(0, 2),
                slots=st.integers(0, 2),
                extra_tokens=st.just(0) | _amounts(400),
                overrun=_OVERRUN,
            ),
            max_size=3,
        ).map(tuple),
        lease_s=st.just(LEASE_S),
    ),
    st.builds(
        Draw,
        account=_ACCOUNT,
        rid=st.sampled_from(LEASES),
        number=st.integers(1, 6),
        used_tokens=_amounts(3000),
        used_requests=st.integers(0, 12),
        tokens=_TOKENS,
        requests=st.integers(0, 8),
        slots=st.integers(0, 6),
        lease_s=st.just(LEASE_S),
        least_tokens=st.just(0) | _amounts(600),
        least_slots=st.integers(0, 2),
        overrun=_OVERRUN,
        least_overrun=st.just(0) | _amounts(600),
    ),
    st.builds(Lower, account=_ACCOUNT, rid=st.sampled_from(RIDS + LEASES), tokens=_TOKENS),
    st.builds(
        Spend,
        account=_ACCOUNT,
        tokens=_TOKENS,
        requests=st.integers(0, 5),
        rid=st.sampled_from(["", "spending-1"]),
    ),
    st.builds(Sweep, organisation=st.just(ORGANISATION), count=st.integers(1, 3)),
)

_PASS_MS = st.one_of(
    st.just(0),
    st.integers(0, 50),
    st.integers(0, 3000),
    st.sampled_from([15_000, 31_000, 3_700_000, 90_000_000]),
    st.integers(-100_000, -1),
)
_LOSS = st.sampled_from((None,) * 24 + ("levels", "open", "leases", "all", "script"))


@st.composite
def schedules(draw: st.DrawFn, chapters: int = 6) -> list[Step]:
    """Draw the deliveries of a message: once, never, twice at once, or again or only after others."""
    messages = [each for _ in range(chapters) for each in draw(st.lists(_OPERATION, max_size=20))]
    chance = draw(st.randoms(use_true_random=False))
    arrivals = sorted(
        ((at, each) for place, each in enumerate(messages) for at in _arrivals(place, chance)),
        key=lambda pair: pair[0],
    )
    steps, rest = [], [each for _, each in arrivals]
    while rest:
        size = draw(st.integers(1, 6))
        steps.append(Step(draw(_PASS_MS), draw(_LOSS), tuple(rest[:size])))
        rest = rest[size:]
    return steps


def _arrivals(place: int, chance: Random) -> list[float]:
    fate = chance.random()
    if fate < 0.1:  # lost
        return []
    if fate < 0.3:  # the response was lost: sent again
        return [place, place + chance.choice((0, 1, 8))]
    if fate < 0.4:  # overtaken by other messages
        return [place + 8]
    return [place]
