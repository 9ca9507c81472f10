"""The resources in force, by the caller's region. Pure.

A topology that breaks a rule is refused. The last good one stays in force.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import Final

from controlplane.xds.checks import resource_faults, topology_faults
from controlplane.xds.resource_set import ResourceSet
from controlplane.xds.resources import resources_of
from controlplane.xds.schema import Schema
from controlplane.xds.topology import Topology

log = logging.getLogger(__name__)

FAULTS_SHOWN: Final = 3
"""Faults of a topology that its log line names."""


class Publication:
    """See the module.

    INVARIANT: each resource in force has passed the checks.
    """

    def __init__(self, schema: Schema, own: str) -> None:
        """Start with nothing in force. `own`: the region of callers that name no known region."""
        self.refused_total = 0
        """Topologies that were refused. A topology that is offered again and again counts once."""
        self.fault = ""
        """Why the topology that was offered last is refused. Empty: it is in force."""
        self.topology: Topology | None = None
        """The topology in force. None: none was ever good."""
        self._schema = schema
        self._own = own
        self._by_region: dict[str, ResourceSet] = {}
        self._refused: Topology | None = None

    def offer(self, topology: Topology) -> bool:
        """Put `topology` in force if it is good. Return True if the resources in force may have changed."""
        if topology == self.topology:
            self.fault, self._refused = "", None
            return False
        if topology == self._refused:
            return False
        made, faults = self._made(topology)
        if faults:
            self.fault, self._refused = "; ".join(faults), topology
            self.refused_total += 1
            log.error("the frontends cannot be published, the last good ones stay: %s", self.fault)
            return False
        self.fault, self._refused = "", None
        self.topology, self._by_region = topology, made
        return True

    def of(self, caller_region: str) -> ResourceSet | None:
        """Return the resources for callers of `caller_region`. None: no topology was ever good."""
        return self._by_region.get(caller_region) or self._by_region.get(self._own)

    def _made(self, topology: Topology) -> tuple[dict[str, ResourceSet], list[str]]:
        made: dict[str, ResourceSet] = {}
        faults = list(islice(topology_faults(topology), FAULTS_SHOWN))
        for region in () if faults else topology.regions:
            try:
                messages = resources_of(topology, region.name, self._schema)
                faults = list(islice(resource_faults(messages, self._schema), FAULTS_SHOWN))
            except Exception as error:  # a bug here must not reach clients, nor end the process
                log.exception("bug in the resources of region %s", region.name)
                faults = [f"no resources can be made: {type(error).__name__}"]
            if faults:
                break
            made[region.name] = messages.serialized()
        return made, faults
