"""The states of a replica's life, as its lease in Redis says: when each began, and how long it lasted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple

import redis

from kvmesh.membership.member import read
from kvmesh.redis_link import key

SERVING: Final = "serving"


class LeaseState(NamedTuple):
    """A state, and the seconds since the engine was ready at which it was first seen."""

    state: str
    at_s: float


class LeaseStates:
    """Follows the lease of one replica. A context manager; `poll` reads the lease once."""

    def __init__(self, redis_url: str, mesh: str, replica: str) -> None:
        self.seen: list[LeaseState] = []
        """Oldest first. A lease without a state adds nothing."""
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=1.0)
        self._key = key(mesh, "proc", replica)
        self._replica = replica

    def __enter__(self) -> LeaseStates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._redis.close()

    def poll(self, at_s: float) -> None:
        """Read the lease. A Redis that does not answer, and an absent lease, leave the state as it is."""
        try:
            lease = self._redis.get(self._key)
        except redis.RedisError:
            return
        member = read(self._replica, lease) if isinstance(lease, bytes) else None
        if member is not None and member.state and (not self.seen or self.seen[-1].state != member.state):
            self.seen.append(LeaseState(member.state, at_s))


def durations_s(states: Sequence[LeaseState]) -> dict[str, float]:
    """Return the seconds in each state but the last, which has no end. Pure.

    A first state SERVING is that of the engine before the restart, and does not count.
    """
    found: dict[str, float] = {}
    states = states[1:] if states and states[0].state == SERVING else states
    for state, following in itertools.pairwise(states):
        found[state.state] = found.get(state.state, 0.0) + following.at_s - state.at_s
    return found
