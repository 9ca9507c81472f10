"""The content and the term of `kvmesh snapshot stable --direct`: all to stable, above every term that is found. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from kvmesh.snapshot.content import ENDED_MAX, WEIGHT_SUM_PERCENT, Content, PoolTrack, RolloutState, Track
from kvmesh.snapshot.published import JUMP_MAX, NO_NAME, NO_TERM, TERM_MAX, Published, Term, publish

LEADER_PREFIX = "operator:"
"""Beginning of the leader's name in a term that an operator took."""

VERSION_DIGITS_MAX: Final = 20
"""Digits of the largest version of a snapshot."""


def all_to_stable(content: Content, now_ms: int) -> Content:
    """Return `content` with all weight on its stable pool. Its rollout, if one runs, counts as taken back.

    Canary and baseline are closed: their routers report that they place nothing new. Shadows are off. Cordons stay.
    """
    return replace(
        content,
        pools=tuple(_pool(pool) for pool in content.pools),
        rollout="",
        rollout_state=RolloutState.NONE,
        step=0,
        only_tenants=frozenset(),
        never_tenants=frozenset(),
        ended_rollouts=_ended(content),
        published_ms=now_ms,
        shadows=(),
    )


def is_believed(number: int, known: int) -> bool:
    """True if a term's `number` is no junk: at most JUMP_MAX above `known`, as control processes check."""
    return number <= known + JUMP_MAX


def next_term(known: int, numbers: Iterable[int], operator: str) -> Term:
    """Return a term of the operator above `known`, the one on the board, and above all `numbers`.

    Junk numbers are left out.
    """
    believed = (number for number in numbers if is_believed(number, known))
    return Term(min(max((known, *believed)) + 1, TERM_MAX), f"{LEADER_PREFIX}{operator}")


def stable_snapshot(board: Published, numbers: Iterable[int], operator: str, now_ms: int) -> Published:
    """Return the snapshot to write. `numbers`: of the terms in Redis and at receivers. Raises SnapshotError."""
    term = next_term(board.name.term.number, numbers, operator)
    return publish(term, 1, all_to_stable(board.content, now_ms))


def term_number(name: str) -> int:
    """Return the number of the term in a snapshot's name, for example 7 of "7.control-0/3"; 0 if there is none."""
    head = name.partition(".")[0]
    is_number = head.isascii() and head.isdecimal() and len(head) <= len(str(TERM_MAX))
    return min(int(head), TERM_MAX) if is_number else NO_TERM.number


def name_order(name: str) -> tuple[Term, int]:
    """Return the order of a snapshot's name, for example "7.control-0/3"; that of NO_NAME if it is no name."""
    term, _, version = name.rpartition("/")
    is_number = version.isascii() and version.isdecimal() and len(version) <= VERSION_DIGITS_MAX
    if not is_number or not term_number(term):
        return NO_NAME.order
    return Term(term_number(term), term.partition(".")[2]), int(version)


def _pool(pool: PoolTrack) -> PoolTrack:
    if pool.track is Track.STABLE:
        return replace(pool, weight_percent=WEIGHT_SUM_PERCENT, is_closed=False)
    is_of_rollout = pool.track in (Track.CANARY, Track.BASELINE)
    return replace(pool, track=Track.IDLE, weight_percent=0, is_closed=pool.is_closed or is_of_rollout)


def _ended(content: Content) -> tuple[str, ...]:
    """Return the rollouts that were taken back, the one under way last. A promoted one stays promoted."""
    is_under_way = content.rollout and content.rollout_state is not RolloutState.PROMOTING
    if not is_under_way or content.rollout_state is RolloutState.COMPLETED:
        return content.ended_rollouts
    kept = [each for each in content.ended_rollouts if each != content.rollout]
    return (*kept, content.rollout)[-ENDED_MAX:]
