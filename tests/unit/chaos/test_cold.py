"""The cold form: its cells and targets, its judge, and its section of the page."""

from __future__ import annotations

import msgspec
import pytest

from tests.chaos.cells import COLD, Cell, CellError, Run, cold_form
from tests.chaos.cold_page import cold_section
from tests.chaos.judge import LIMITS, judge_cold
from tests.chaos.plan import members_of, plan_of, replica_of
from tests.chaos.records import ColdReturn, Moments, Record, Violation

GOOD = ColdReturn(boot_s=1.0, in_service_s=1.5, bound_s=41.0, held_looks=12, proved=True)


def judged(part: str, fault: str, cold: ColdReturn = GOOD, used_s: float | None = 1.6) -> set[str]:
    moments = Moments(3.0, 3.0, 5.0, 7.0, None if used_s is None else 7.0 + used_s)
    plan = plan_of(Run(Cell(part, fault), 1))
    return {violation.kind for violation in judge_cold(plan, cold, moments, LIMITS)}


@pytest.mark.parametrize(("part", "fault"), COLD)
def test_a_good_return_breaks_nothing(part: str, fault: str) -> None:
    assert not judged(part, fault)


@pytest.mark.parametrize(("part", "fault"), COLD)
def test_a_request_at_a_held_replica_is_a_violation(part: str, fault: str) -> None:
    placed = msgspec.structs.replace(GOOD, placed=["router-0 placed 1 requests on prefill-0"])
    assert judged(part, fault, placed) == {"PLACED"}


@pytest.mark.parametrize(
    ("part", "fault", "bound_s"),
    [("prefill-engine", "kill", 42.0), ("decode-machine", "kill", 42.0), ("decode", "kill", 3.0)],
)
def test_a_late_return_is_a_violation(part: str, fault: str, bound_s: float) -> None:
    """The warm-up has its bounds, a service alone two seconds; a second more until a request is served."""
    assert not judged(part, fault, used_s=bound_s - 0.1)
    assert judged(part, fault, used_s=bound_s + 0.1) == {"LATE"}


def test_a_fresh_engine_must_be_held() -> None:
    """Else the run proves nothing. A pause and a restarted service need no warm-up."""
    at_once = msgspec.structs.replace(GOOD, held_looks=0)
    assert judged("prefill-engine", "kill", at_once) == {"NOT_HELD"}
    assert judged("prefill-machine", "kill", at_once) == {"NOT_HELD"}
    assert not judged("prefill-engine", "pause", at_once)


def test_a_machine_is_an_engine_and_a_service() -> None:
    plan = plan_of(Run(Cell("decode-machine", "kill"), 1))
    replica = replica_of(plan.target)
    assert replica in ("decode-0", "decode-1")
    assert members_of(plan.target) == (f"{replica}-engine", replica)
    assert members_of(f"{replica}-engine") == (f"{replica}-engine",)


def test_only_cells_of_the_form_are_run() -> None:
    assert [(run.cell.part, run.cell.fault) for run in cold_form("")] == list(COLD)
    assert cold_form("decode:kill, decode:kill", 3) == [Run(Cell("decode", "kill"), 3)]
    with pytest.raises(
        CellError, match="'redis:kill' is no cell of the cold form; allowed are prefill-engine:kill"
    ):
        cold_form("redis:kill")


def test_the_page_tells_each_run_and_each_violation() -> None:
    first = Record(
        part="prefill-engine",
        fault="kill",
        seed=1,
        target="prefill-0-engine",
        commit="c",
        machine="M",
        began="2026-01-02T03:04:05",
        seconds=60.0,
        streams=20,
        first_served_s=1.6,
        cold=msgspec.structs.replace(GOOD, states_s={"starting": 0.1, "warming": 1.2, "probing": 0.2}),
    )
    broken = msgspec.structs.replace(
        first, part="decode", first_served_s=None, violations=[Violation("PLACED", "one too many")]
    )
    text = "\n".join(cold_section([first, broken]))
    assert "| 1.6 | 0.1 / 1.2 / - / 0.2 | 0 |" in text
    assert "- decode:kill, seed 1: PLACED: one too many" in text
    assert "violations in 1 of 2 runs" in text
    assert not cold_section([])
