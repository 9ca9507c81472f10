"""The weights of each state, and that receivers accept them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.weights import baseline_target, weights
from kvmesh.snapshot import content as contents
from kvmesh.snapshot.content import Content, PoolTrack, Track
from services.frontend.requests.pool_choice import PoolChoice
from services.frontend.requests.router_peers import Peers
from tests.unit.controlplane.rollouts.facts import POOLS, SETTINGS, in_state

WITH_BASELINE = structs.replace(SETTINGS, baseline_pool="young")
Row = tuple[Track, int, bool]
IDLE: Row = (Track.IDLE, 0, False)
SHUT: Row = (Track.IDLE, 0, True)

TABLE: dict[str, tuple[Row, Row, Row]] = {
    "PENDING": ((Track.STABLE, 100, False), (Track.CANARY, 0, False), (Track.BASELINE, 0, False)),
    "PREPARING": ((Track.STABLE, 100, False), (Track.CANARY, 0, False), (Track.BASELINE, 0, False)),
    "BAKING": ((Track.STABLE, 80, False), (Track.CANARY, 10, False), (Track.BASELINE, 10, False)),
    "PAUSED": ((Track.STABLE, 80, False), (Track.CANARY, 10, False), (Track.BASELINE, 10, False)),
    "PROMOTING": (IDLE, (Track.STABLE, 100, False), IDLE),
    "COMPLETED": (SHUT, (Track.STABLE, 100, False), IDLE),
    "ROLLING_BACK": ((Track.STABLE, 100, False), (Track.CANARY, 0, True), IDLE),
    "ROLLED_BACK": ((Track.STABLE, 100, False), SHUT, IDLE),
    "ABORTED": ((Track.STABLE, 100, False), SHUT, IDLE),
}
"""State -> stable, next, young."""


def by_name(document: RolloutDocument) -> dict[str, PoolTrack]:
    """Return the pools of `document` by name."""
    return {pool.pool: pool for pool in weights(document, POOLS)}


@pytest.mark.parametrize("state", TABLE)
def test_each_state_has_its_weights(state: str) -> None:
    """Pools that have no part in the rollout are idle and open."""
    found = by_name(in_state(state, WITH_BASELINE))
    rows = [
        (found[name].track, found[name].weight_percent, found[name].is_closed)
        for name in ("stable", "next", "young")
    ]
    assert tuple(rows) == TABLE[state]
    assert found["other"] == PoolTrack("other", "v0")


@pytest.mark.parametrize("state", TABLE)
def test_receivers_accept_the_weights(state: str) -> None:
    """A content with them passes the check, with the id among the ended ones if it was taken back."""
    document = in_state(state, WITH_BASELINE)
    ended = (document.id,) if document.is_taken_back else ()
    contents.check(
        Content(
            weights(document, POOLS),
            rollout=document.id,
            rollout_state=document.state,
            step=document.step,
            ended_rollouts=ended,
        )
    )


def test_pools_that_left_the_file_keep_their_part() -> None:
    """The document names its pools; a mesh whose file lost one still serves by it."""
    found = {pool.pool: pool for pool in weights(in_state("BAKING", WITH_BASELINE), {})}
    assert sum(pool.weight_percent for pool in found.values()) == 100
    assert found["young"].model_version == "v1" and found["next"].model_version == "v2"


@pytest.mark.parametrize("is_open", [True, False])
def test_frontends_use_an_open_canary_that_was_taken_back(is_open: bool) -> None:
    """Stable has no router. A request goes to the canary if that is open, and waits for stable otherwise."""
    back = structs.replace(in_state("ROLLING_BACK"), is_canary_open=is_open)
    content = Content(weights(back, POOLS), rollout=back.id, ended_rollouts=(back.id,))
    peers: Peers[Any] = Peers()
    peers.add(SimpleNamespace(name="next-router-0", is_up=True, outbox=None), "next", "v2").can_place = True
    chosen = PoolChoice(peers, content).choose("tenant", "session")
    assert (chosen.pool, chosen.is_diverted) == (("next", True) if is_open else ("stable", False))


@pytest.mark.parametrize("state", TABLE)
def test_the_configured_version_of_a_pool_counts_behind_the_end(state: str) -> None:
    """Until then the rollout goes on with the versions of its start. Routers of the pool report the configured one."""
    document = in_state(state, WITH_BASELINE)
    pool = next(each for each in weights(document, {**POOLS, "stable": "v3"}) if each.pool == "stable")
    assert pool.model_version == ("v3" if document.is_final else "v1")


@pytest.mark.parametrize(("steps", "baseline"), [((25, 100), 25), ((26, 100), 0), ((1, 100), 1), ((100,), 0)])
def test_the_baseline_has_at_most_25_percent(steps: tuple[int, ...], baseline: int) -> None:
    """Above, the comparison is with stable."""
    document = structs.replace(
        in_state("BAKING"), settings=structs.replace(WITH_BASELINE, steps_percent=steps), step=1
    )
    assert baseline_target(document) == baseline
