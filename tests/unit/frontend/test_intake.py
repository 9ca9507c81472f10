"""Readings of one call: the region that an idempotency key claimed, and what a later reading knows of the earlier one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.tenants.caller import Tenant
from services.frontend.requests.pool_choice import ChosenPool
from services.frontend.requests.request_spec import NOBODY
from services.frontend.surface.intake import Arrival, Intake
from tests.unit.frontend.fake_mesh import FakeMesh
from tests.unit.frontend.test_region_choice import content, entry, mesh_of
from tests.unit.frontend.test_regions import begin

HOME = ChosenPool("default", "v1")


class Owners:
    """Names of executions."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def new_owner(self) -> str:
        """Return a name."""
        return "second"

    def forget(self, owner: str) -> None:
        """Forget it."""
        self.forgotten.append(owner)


def intake_of(mesh: FakeMesh, executions: Any = None) -> Intake:
    """Return the intake of a frontend that serves v1. The parser, the seal and the clock are not used."""
    unused: Any = None
    versions: Any = {"v1": 1}
    return Intake(mesh.core, versions, unused, executions, unused, unused)


def arrival_of(*regions: str, left: frozenset[str] = frozenset()) -> Arrival:
    """Return a call of a tenant that is pinned to `regions`; none: not pinned."""
    caller = replace(NOBODY, tenant=Tenant(name="t", regions=regions))
    return Arrival(caller, 0.0, 10.0, "first", can_move=False, traceparent="", home="eu", left_regions=left)


@pytest.mark.parametrize(
    ("weight", "regions", "left", "is_kept"),
    [
        (100, (), frozenset(), True),
        (100, ("eu", "us"), frozenset(), True),
        (0, (), frozenset(), False),
        (100, ("eu",), frozenset(), False),
        (100, (), frozenset({"us"}), False),
    ],
)
def test_a_claimed_region_serves_a_resend_while_it_may(
    weight: int, regions: tuple[str, ...], left: frozenset[str], is_kept: bool
) -> None:
    """A drained region, a tenant that is pinned elsewhere, and a region that refused it a moment ago replace the claim."""
    mesh = mesh_of(entry("us"))
    mesh.core.take_snapshot(content(entry("us", weight)))
    message: Any = SimpleNamespace(request=pb.GenerateRequest(session_id="s"))
    arrival = arrival_of(*regions, left=left)
    chosen, replaced = intake_of(mesh)._claimed("us/default", HOME, "r" * 32, message, arrival)
    assert (chosen.pool, replaced) == (("us/default", "") if is_kept else ("default", "us/default"))


def test_a_later_reading_knows_which_regions_the_earlier_one_left() -> None:
    """So a region with another tokenizer, which refuses the request, does not get it for ever."""
    mesh = mesh_of(entry("us"))
    owners = Owners()
    request = begin(mesh, pool="us/default", moves=2, left_regions=frozenset({"ap"})).request
    request.refused_regions.add("us")
    again = intake_of(mesh, owners).again(arrival_of(), request)
    assert (again.owner, again.moves) == ("second", 2) and again.left_regions == frozenset(("us", "ap"))
    assert owners.forgotten == ["first"]
