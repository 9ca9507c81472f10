"""Dials for all links of a process: inside the allowed networks, and rate limited.

There are two token buckets. One is for new peers, and for peers with streams that end soon after they began. The other
is for known peers. It suffices for 128 members that were cut off: its rate for their retries, its burst to attach all of
them again.

INVARIANT: a dial of a peer takes from one of the buckets, and an attempt opens at most CONNECTIONS.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from kvmesh.attach.dial_budget import DialBudget
from kvmesh.attach.dial_queue import DialQueue
from kvmesh.clock import Clock
from kvmesh.metrics import Metrics
from kvmesh.trust.networks import KEY, Networks, host_of, ip_of

KNOWN_RATE_PER_S: Final = 64.0
KNOWN_BURST: Final = 256.0

RESOLVE_S = 2.0


class DialRefused(Exception):
    """The address may not be dialled. The text states the reason."""


class PeerUnreachable(Exception):
    """The address takes no connections, or its host name does not resolve."""


class Dialer:
    """The dialer of a process, shared by its links."""

    def __init__(self, clock: Clock, networks: Networks | None = None) -> None:
        self.refused_total = 0
        """Dials of host names that resolve to no address inside the networks."""
        self._networks = networks or Networks()
        self._new = DialQueue(clock, DialBudget(clock.now_s()))
        self._known = DialQueue(clock, DialBudget(clock.now_s(), KNOWN_RATE_PER_S, KNOWN_BURST))

    @property
    def waiting_count(self) -> int:
        """Attempts that wait for connections."""
        return len(self._new) + len(self._known)

    def queue(self, *, is_known: bool) -> DialQueue:
        """Return the queue for the next dial of a peer."""
        return self._known if is_known else self._new

    async def resolve(self, address: str, attempt: int = 0) -> str:
        """Return the "host:port" to dial.

        Raises DialRefused if no address is allowed, and PeerUnreachable if the name has no address.

        With `trust.networks`, a name is resolved here, and an address inside the networks is dialled. gRPC would resolve
        the name again, perhaps to another address. Successive attempts take the addresses in rotation.
        """
        if fault := self._networks.fault(address):
            raise DialRefused(fault)
        host = host_of(address)
        if self._networks.is_any or ip_of(host) is not None:
            return address
        port = address.rpartition(":")[2]
        found = await _look_up(host, int(port))
        inside = self._networks.inside(found)
        if not inside:
            self.refused_total += 1
            raise DialRefused(f"{address} resolves to {', '.join(found)}; an address inside {KEY} is needed")
        chosen = inside[attempt % len(inside)]
        return f"[{chosen}]:{port}" if ":" in chosen else f"{chosen}:{port}"

    def export(self, metrics: Metrics) -> None:
        """Export the counts of this dialer, read at each scrape."""
        metrics.gauge(
            "waiting_dials",
            "Dials that wait for the rate limit of new connections.",
            lambda: self.waiting_count,
        )
        metrics.total(
            "refused_names", "Dials of host names outside trust.networks.", lambda: self.refused_total
        )


async def _look_up(host: str, port: int) -> list[str]:
    """Return the addresses of `host`, at least one. Raises PeerUnreachable."""
    try:
        async with asyncio.timeout(RESOLVE_S):
            loop = asyncio.get_running_loop()
            answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError as error:
        raise PeerUnreachable(f"host name {host} was not resolved within {RESOLVE_S:g} s") from error
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise PeerUnreachable(f"host name {host} does not resolve: {why}") from error
    found = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    if not found:
        raise PeerUnreachable(f"host name {host} has no address")
    return found
