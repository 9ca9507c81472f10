"""The encoding of operations for Redis, and the refusal of invalid ones."""

from __future__ import annotations

from math import inf
from struct import pack

import pytest

from kvmesh.buckets.ledger import SCRIPT
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import (
    Draw,
    Lower,
    Operation,
    Renew,
    Renewal,
    Reserve,
    Settle,
    Show,
    Spend,
    Sweep,
)
from kvmesh.buckets.wire import calls, keys

ACCOUNT = Account("acme", (Scope("tenant:search", Limit(60, 1.5, 0.5, 10, 3)),))


def test_all_keys_of_an_organisation_are_in_one_slot() -> None:
    """The hash tag consists of mesh and organisation."""
    names = keys("kvmesh", "acme")
    assert len(set(names)) == 3
    assert {name[: name.index("}") + 1] for name in names} == {"{kvmesh:acme}"}


def test_levels_are_in_units_of_a_60000th() -> None:
    """A rate of 1 per minute adds one unit in 1 ms."""
    ((_, (now, limits, *rest)),) = calls("kvmesh", [Show(ACCOUNT)], 7)
    assert (now, rest) == (pack("<d", 7), ["tenant:search", "show", b""])
    assert limits == pack("<6d", 60, 90_000, 0.5, 600_000, 3, inf)


def test_a_limit_of_0_is_infinite() -> None:
    """The burst of such a limit does not matter."""
    free = Account("acme", (Scope("tenant:search", Limit(0, 7, 0, 7, 0, 7)),))
    ((_, words),) = calls("kvmesh", [Show(free)], 0)
    assert words[1] == pack("<6d", 0, inf, 0, inf, inf, inf)


@pytest.mark.parametrize(
    ("operation", "sentence"),
    [
        (Reserve(ACCOUNT, "", 1, 15), "the rid of a reservation is ''"),
        (Reserve(ACCOUNT, "+rows", 1, 15), "the rid of a reservation is '+rows'"),
        (Reserve(ACCOUNT, "#tenant", 1, 15), "the rid of a reservation is '#tenant'"),
        (Reserve(ACCOUNT, "r", -1, 15), "an amount of a Reserve is -1; 0 to"),
        (Reserve(ACCOUNT, "r", 1, 0), "lease_s is 0; above 0 to 3600"),
        (Reserve(ACCOUNT, "r", 1, 86_400), "lease_s is 86400; above 0 to 3600"),
        (Settle(ACCOUNT, "r", -5), "actual_tokens is -5; 0 to"),
        (Renew(ACCOUNT, (Renewal("r", 1, slots=-1),), 15), "an amount of a Renewal is -1"),
        (Draw(ACCOUNT, "r", 0, 0, 0, 1, 1, 1, 15), "number of a Draw is 0; 1 or more"),
        (Draw(ACCOUNT, "r", 1, 0, 0, 1, 1, -1, 15), "an amount of a Draw is -1"),
        (Lower(ACCOUNT, "r", -1), "tokens of a Lower is -1; 0 to"),
        (Spend(ACCOUNT, 2**40, 1), f"an amount of a Spend is {2**40}"),
        (Sweep("acme", 0), "count of a Sweep is 0; 1 to 1000"),
        (Show(Account("acme", (Scope("a\nb", Limit(1, 1)),))), r"the name of a scope is 'a\nb'"),
        (Show(Account("acme", (Scope("a", Limit(float("nan"), 1)),))), "a limit of a is nan; 0 or more"),
        (Show(Account("acme", ACCOUNT.scopes * 17)), "an account has 17 scopes; at most 16"),
    ],
)
def test_an_invalid_operation_is_refused_before_it_is_sent(operation: Operation, sentence: str) -> None:
    """The error has the field, its value and the allowed range."""
    with pytest.raises(ValueError) as caught:  # the text is compared below
        calls("kvmesh", [operation], 0)
    assert sentence in str(caught.value)


def test_a_quota_lease_is_settled_with_any_amount() -> None:
    """The same holds for a Draw; the amount of one request is bounded."""
    assert calls("kvmesh", [Settle(ACCOUNT, "lease", 2**40, used_requests=2**32)], 0)
    with pytest.raises(ValueError, match="actual_tokens is 1099511627776; 0 to"):
        calls("kvmesh", [Settle(ACCOUNT, "r", 2**40)], 0)


def test_consecutive_operations_of_one_account_are_one_call() -> None:
    """The order is kept and the number is bounded. A sweep, a renewal and another account end the call."""
    other = Account("other", ACCOUNT.scopes)
    settles = [Settle(ACCOUNT, f"r{at}", 1) for at in range(20)]
    renew = Renew(ACCOUNT, (Renewal("a", 1), Renewal("b", 1)), 15)
    operations: list[Operation] = [
        Reserve(ACCOUNT, "r", 1, 15),
        *settles,
        Sweep("acme"),
        settles[0],
        renew,
        settles[1],
    ]
    made = calls("kvmesh", [*operations, Show(other)], 0)
    names = [[word for word in words[3:] if word in NAMES] for _, words in made]
    assert names == [
        ["reserve", *["settle"] * 15],
        ["settle"] * 5,
        [],  # without scopes: the organisation's name takes their place
        ["settle", "renew"],
        ["settle"],
        ["show"],
    ]
    assert [keys_[0] for keys_, _ in made] == [*[keys("kvmesh", "acme")[0]] * 5, keys("kvmesh", "other")[0]]
    assert made[2][1][2] == "sweep"


NAMES = ("reserve", "settle", "renew", "show")


def test_the_script_keeps_to_its_keys_and_to_redis_6_2() -> None:
    """Every command names a declared key, and exists since Redis 6.2."""
    known = {"HMGET", "HGET", "HSET", "HDEL", "HINCRBY", "ZCARD", "ZADD", "ZREM", "ZRANGEBYSCORE", "ZSCORE"}
    calls = [line.strip() for line in SCRIPT.text.splitlines() if "call('" in line and "TIME" not in line]
    assert len(calls) > 10
    for line in calls:
        name, rest = line.partition("call('")[2].split("', ", 1)
        assert name in known | {"PEXPIRE", "UNLINK"}, line
        assert rest.startswith(("LEVELS", "OPEN", "LEASES", "KEYS[i]")), line
