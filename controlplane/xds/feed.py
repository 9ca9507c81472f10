"""Joins the leases of the own region and the snapshot, and publishes each change.

Nothing is published before the first frontend is known. A process that starts before all frontends is no fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from controlplane.xds.mesh_topology import topology_of
from controlplane.xds.topology import Topology
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.published import Published

log = logging.getLogger(__name__)


class Feed:
    """See the module. `publish` gets each topology. `initial`: the content while there is no snapshot."""

    def __init__(self, mesh: str, own: str, initial: Content, publish: Callable[[Topology], object]) -> None:
        self.left_out: tuple[str, ...] = ()
        """Process ids of frontends that are not published, because their address is no IP address."""
        self._mesh = mesh
        self._own = own
        self._content = initial
        self._members: Sequence[Member] = ()
        self._has_published = False
        self._publish = publish

    def on_members(self, members: Sequence[Member]) -> None:
        """Take the leases."""
        self._members = members
        self._update()

    def on_snapshot(self, published: Published) -> None:
        """Take the snapshot in force."""
        self._content = published.content
        self._update()

    def _update(self) -> None:
        found = topology_of(self._mesh, self._own, self._members, self._content)
        if found.left_out and found.left_out != self.left_out:
            log.warning(
                "frontends are not published, because xDS needs IP addresses: %s",
                ", ".join(found.left_out),
            )
        self.left_out = found.left_out
        self._has_published = self._has_published or any(each.endpoints for each in found.topology.regions)
        if self._has_published:
            self._publish(found.topology)
