"""Refuses members with addresses outside `trust.networks`, which may not be dialled. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from kvmesh.membership.member import Member
from kvmesh.trust.networks import Networks

log = logging.getLogger(__name__)

LOGGED_MAX: Final = 256
"""Refused members at one time that are logged. Further ones are only counted."""


class AddressFilter:
    """Filters the members of each poll by their address and the address of their KV blocks.

    With `trust.networks`, a KV address must be an IP address and not a name, because engines resolve names themselves.
    """

    def __init__(self, networks: Networks) -> None:
        self.refused_total = 0
        """Refused members. Each counts once while it stays registered."""
        self._networks = networks
        self._refused: set[tuple[str, str, str]] = set()

    def take(self, members: Iterable[Member]) -> list[Member]:
        """Return the members that may be dialled."""
        if self._networks.is_any:
            return list(members)
        admitted, refused = [], set()
        for member in members:
            fault = self._networks.fault(member.address) or self._networks.fault(
                member.kv_address, may_be_name=False
            )
            if not fault:
                admitted.append(member)
                continue
            what = (member.process_id, member.address, member.kv_address)
            refused.add(what)
            if what not in self._refused:
                self.refused_total += 1
                if max(len(self._refused), len(refused)) <= LOGGED_MAX:
                    log.warning("member refused", extra={"member": member.process_id, "why": fault})
        self._refused = refused
        return admitted
