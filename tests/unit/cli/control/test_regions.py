"""`kvmesh region`: times, tables, the forecast before a refusal, and the region that is dialled."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from kvmesh.bad_option import BadOption
from kvmesh.cli.control import region_text as text
from kvmesh.cli.control import regions as command
from kvmesh.cli.control.output import local_time
from kvmesh.cli.control.until import until_s
from kvmesh.cli.up_regions import tell_drains
from kvmesh.config import build, describe, load
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.control.v1 import region_pb2_grpc
from kvmesh.regions.plan import UTILISATION_MAX, utilisation
from tests.unit.cli.control.scripted_control import Refusal, Shell

NOW = datetime(2027, 3, 1, 14, 30, tzinfo=timezone(timedelta(hours=2)))
OUTAGE = 3
REASON = "draining eu moves 2,400 tokens/s; headroom: us: 100 tokens/s"


class Region(region_pb2_grpc.RegionServiceServicer):
    """A leader that answers as a test says, and keeps the requests."""

    def __init__(
        self,
        name: str,
        *,
        carries: bool = True,
        carries_at_once: bool = True,
        is_drained: bool = False,
        answers: int = 1000,
    ) -> None:
        """`answers`: lists until it is not there for OUTAGE lists. It then refuses them."""
        self.name = name
        self._answers = answers
        self._is_drained = is_drained
        self._carries_at_once = carries_at_once
        self.requests: list[Any] = []
        self._carries = carries

    def Federate(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        return iter(())

    def ListRegions(self, request: Any, context: Any) -> pb.ListRegionsResponse:
        self.requests.append(request)
        if len(self.requests) > self._answers:
            is_out = len(self.requests) <= self._answers + OUTAGE
            code = grpc.StatusCode.UNAVAILABLE if is_out else grpc.StatusCode.PERMISSION_DENIED
            context.abort_with_status(Refusal(code, "no", "NO").status())
        own = pb.Declared(state=pb.DECLARED_STATE_DRAINED, reason="rack move") if self._is_drained else None
        views = (
            pb.RegionView(
                region=each, is_own=each == self.name, weight=1, declared=own if each == self.name else None
            )
            for each in ("eu", "us")
        )
        return pb.ListRegionsResponse(regions=views)

    def DrainRegion(self, request: Any, context: Any) -> pb.DrainRegionResponse:
        self.requests.append(request)
        if not self._carries and not request.force:
            code = grpc.StatusCode.FAILED_PRECONDITION
            context.abort_with_status(Refusal(code, REASON, "CHANGE_REFUSED", {"can_force": "true"}).status())
        load = pb.Quantity(tokens_per_s=2400, blocks=90)
        row = pb.DrainForecast(region="us", moved=load, capacity=load, is_enough=self._carries)
        row.is_enough_at_once = self._carries_at_once
        overridden = [] if self._carries else [REASON]
        state = pb.DECLARED_STATE_DRAINED if self._is_drained else pb.DECLARED_STATE_DRAINING
        view = pb.RegionView(region=self.name, declared=pb.Declared(state=state))
        return pb.DrainRegionResponse(
            region=view, forecast=[row], ending_stream_count=3, overridden=overridden
        )

    def RestoreRegion(self, request: Any, context: Any) -> pb.RestoreRegionResponse:
        self.requests.append(request)
        return pb.RestoreRegionResponse()

    def AvoidRegion(self, request: Any, context: Any) -> pb.AvoidRegionResponse:
        self.requests.append(request)
        return pb.AvoidRegionResponse()


@contextmanager
def served(*regions: Region) -> Iterator[None]:
    """Serve each region, and write their addresses into ./kvmesh.toml, with the first one as the own one."""
    tables = {}
    with ExitStack() as stack:
        for region in regions:
            server = grpc.server(ThreadPoolExecutor(max_workers=4))
            region_pb2_grpc.add_RegionServiceServicer_to_server(region, server)
            tables[region.name] = {"control": [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"]}
            server.start()
            stack.callback(lambda server=server: server.stop(0).wait())  # type: ignore[misc]  # mypy infers no lambda with defaults
        config = build({"region": {"name": regions[0].name}, "regions": tables})
        Path("kvmesh.toml").write_text(describe(config))
        yield


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("18:00", NOW.replace(hour=18, minute=0)),
        ("14:31", NOW.replace(minute=31)),
        ("2027-03-02T09:00", NOW.replace(day=2, hour=9, minute=0)),
        ("2027-03-01T13:00+00:00", NOW.replace(hour=15, minute=0)),
    ],
)
def test_a_time_is_of_today_or_iso(given: str, expected: datetime) -> None:
    """Without a time zone it is that of this machine."""
    assert until_s(given, NOW) == expected.timestamp()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "09:00",
            r"--until = 09:00 is in the past, it is 2027-03-01 14:30 now: allowed are a later time of today",
        ),
        ("14:30", "is in the past"),
        ("2027-03-01T12:00+00:00", "is in the past"),
        ("25:00", r'--until = "25:00" is no time: allowed are a later time of today as HH:MM'),
        ("tomorrow", "is no time"),
        ("", "is no time"),
    ],
)
def test_a_time_that_is_past_or_none_is_refused(given: str, words: str) -> None:
    """With the value, the present time and the allowed forms."""
    with pytest.raises(BadOption, match=words):
        until_s(given, NOW)


def view(name: str, **fields: Any) -> pb.RegionView:
    """Return a region at 40 % load."""
    signals = pb.RegionSignals(
        load=pb.Quantity(tokens_per_s=3000, blocks=400),
        capacity=pb.Quantity(tokens_per_s=10_000, blocks=4000),
    )
    signals.guests.add(region="ap", load=pb.Quantity(tokens_per_s=1000))
    made = pb.RegionView(
        region=name,
        weight=1.0,
        health=0.875,
        signals=signals,
        headroom=pb.Quantity(tokens_per_s=4000, blocks=2800),
        limit_share=0.5,
        stable_version="kvmesh-1",
        observed=pb.OBSERVED_STATE_HEALTHY,
    )
    made.MergeFrom(pb.RegionView(**fields))
    return made


def shown(*regions: pb.RegionView, width: int = 200, now_s: float = NOW.timestamp()) -> str:
    """Return the screen of `kvmesh region list` at a width, at a Unix time."""
    console = Console(file=io.StringIO(), width=width)
    console.print(text.screen(regions, local_time, now_s))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]  # a StringIO


def test_the_list_has_states_loads_grants_and_differences() -> None:
    """The table has each region's state with its reason and age, its load and its headroom."""
    own = view(
        "eu", is_own=True, grants=[pb.Grant(region="us", quantity=pb.Quantity(tokens_per_s=1500, blocks=9))]
    )
    us = view(
        "us",
        observed=pb.OBSERVED_STATE_OUT,
        is_by_hand=True,
        is_stale=True,
        reason="by hand of me: too ill",
        spill_share=0.125,
        stable_version="kvmesh-2",
        tenants_differ=True,
    )
    us.age.FromSeconds(125)
    us.by_hand_left.FromSeconds(3600 - 125)
    us.heard_age.FromSeconds(14)
    found = shown(own, us)
    for words in (
        "eu (own)",
        "OUT by hand, stale",
        "87.5 %",
        "4,000 tok/s, 400 bl",
        "4,000 tok/s, 2,800 bl",
        "to us: 1,500 tok/s, 9 bl",
        "12.5 %",
        "kvmesh-2 (differs)",
        "us: OUT for 2 min 5 s by hand of me: too ill; the order ends in 57 min 55 s.",
        "us: not heard for 14 s; its entry is the last one that arrived.",
        "us: its tenants differ in residency, limits or disabled marks.",
        "Stable model versions differ: kvmesh-1 in eu, kvmesh-2 in us.",
        "As eu sees them.",
    ):
        assert words in found, words
    assert text.plain_line((own, us)) == (
        "eu declares SERVING, weight 100 %; us declares SERVING, is observed OUT by hand, stale, weight 100 %"
    )


def test_a_drain_is_shown_with_its_reason_author_and_end() -> None:
    """Also where another region declared it."""
    declared = pb.Declared(
        state=pb.DECLARED_STATE_DRAINING,
        reason="rack move",
        author="ann",
        declared_ms=round(NOW.timestamp() * 1000),
        until_ms=round(NOW.timestamp() * 1000) + 3_600_000,
    )
    regions = (view("us", is_own=True), view("eu", declared=declared, reason="rack move"))
    for passed_s, is_late in ((3599, False), (3600, True)):
        found = shown(*regions, now_s=NOW.timestamp() + passed_s)
        line = next(line for line in found.splitlines() if line.startswith("eu: "))
        assert "DRAINING since 2027-03-01" in line and "by ann: rack move; expected to end 2027-03-01" in line
        assert line.endswith("which has passed.") == is_late
        assert found.count("rack move") == 1


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_a_narrow_terminal_keeps_states_and_weights(width: int) -> None:
    """No line is wider than the terminal, and columns that do not fit are named."""
    found = shown(view("eu", is_own=True), view("us"), width=width)
    assert all(len(line) <= width for line in found.splitlines())
    if width >= 60:
        row = next(line for line in found.splitlines() if line.startswith("│ us"))
        assert "SERVING" in row and "HEALTHY" in row and "100 %" in row
        assert width >= 140 or "Left out at" in found


def test_the_list_says_that_drained_regions_serve_while_none_has_a_weight() -> None:
    """Their callers have nowhere to go."""
    drained = pb.Declared(state=pb.DECLARED_STATE_DRAINED)
    eu = view("eu", is_own=True, declared=drained)
    us = view("us", observed=pb.OBSERVED_STATE_OUT)
    for weight in (0.0, 0.05):
        eu.weight, us.weight = 0.0, weight
        assert ("drained ones serve their own callers all the same" in shown(eu, us)) is (weight == 0)


def test_a_drain_that_waits_names_what_it_waits_for() -> None:
    """Once its weight is 0: before that, requests are what an operator expects."""
    draining = pb.Declared(state=pb.DECLARED_STATE_DRAINING)
    eu = view("eu", is_own=True, declared=draining)
    eu.busy.add(process="frontend-0", request_count=1200)
    eu.busy.add(process="router-1")
    words = "eu: DRAINED follows once these have no request: frontend-0 (1,200 open), router-1 (no report)."
    for weight in (0.3, 0.0):
        eu.weight = weight
        assert (words in shown(eu)) is (weight == 0)


async def test_a_start_names_the_regions_that_are_drained_since_an_earlier_one(shell: Shell) -> None:
    """Their frontends refuse connections, and nothing else would say why."""
    console = Console(file=io.StringIO(), width=200)
    with served(Region("eu", is_drained=True), Region("us")):
        config = load("kvmesh.toml")
        await tell_drains({"eu": config, "us": config}, console)
    told = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert told == "eu is DRAINED: rack move. `kvmesh region restore eu` ends it.\n"


def test_a_watch_says_once_that_it_does_not_know_whether_regions_serve(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last answer stays, with its time. Nothing is said of a mesh that serves on."""
    monkeypatch.setattr(command, "FOLLOW_S", 0.0)
    eu = Region("eu", answers=2)
    with served(eu, Region("us")):
        status, found, errors = shell.run("region", "list", "--watch")
    assert status == 1 and len(eu.requests) == 2 + OUTAGE + 1 and found.count("eu declares SERVING") == 1
    assert errors.count("so it is unknown whether the regions serve. Last answer: ") == 1


def test_a_region_without_measured_capacity_has_no_headroom() -> None:
    """Unknown is not zero."""
    fresh = view("us")
    fresh.signals.capacity.Clear()
    fresh.ClearField("health")
    row = next(line for line in shown(fresh).splitlines() if line.startswith("│ us"))
    assert row.count("unknown") == 2


def test_a_drain_that_fits_prints_its_forecast_and_dials_the_region(shell: Shell) -> None:
    """The request goes to the named region, not to the own one. A trial for the forecast comes first."""
    eu, us = Region("eu"), Region("us")
    with served(us, eu):
        status, found, errors = shell.run("region", "drain", "eu", "--reason", "rack move")
    assert (status, errors, us.requests) == (0, "", [])
    trial, order = eu.requests
    assert trial.validate_only and trial.force and not order.validate_only and not order.force
    assert order.reason == "rack move"
    assert "2,400 tok/s, 90 bl" in found and "yes" in found
    assert "3 open streams of eu end if a frontend stops" in found
    assert "Draining eu: its weight falls to 0 within 15 s" in found


def test_a_second_drain_says_that_the_region_stays_drained(shell: Shell) -> None:
    """Its weight is 0 already."""
    with served(Region("eu", is_drained=True), Region("us")):
        status, found, _ = shell.run("region", "drain", "eu", "--reason", "takes longer")
    assert status == 0 and "eu stays drained, with the new reason." in found and "falls" not in found


def test_a_drain_that_fits_with_warm_caches_says_so(shell: Shell) -> None:
    """Its survivors carry it once their caches know the conversations."""
    eu = Region("eu", carries_at_once=False)
    with served(eu, Region("us")):
        status, found, _ = shell.run("region", "drain", "eu", "--reason", "rack move")
    assert status == 0 and "once warm" in found and "yes" not in found


def test_a_drain_that_does_not_fit_is_refused_with_the_numbers(shell: Shell) -> None:
    """The table first, then the sentence and what --force would override; programs get the rows."""
    eu = Region("eu", carries=False)
    with served(eu, Region("us")):
        words = ("region", "drain", "eu", "--reason", "rack move")
        status, found, errors = shell.run(*words)
        assert status == 1 and " no " in found
        assert errors == f"Refused: the command needs --force.\n--force would override: {REASON}.\n"
        status, found, errors = shell.run(*words, "--dry-run")
        assert status == 1 and "--force would override" in errors
        assert all(each.validate_only for each in eu.requests[-3:])
        assert shell.json(*words)["error"]["forecast"][0]["region"] == "us"
        status, found, errors = shell.run(*words, "--force")
        assert (status, errors) == (0, f"Overridden by --force: {REASON}.\n")


def test_restore_dials_the_region_and_avoid_the_own_one(shell: Shell) -> None:
    """A region decides about others for its own callers alone; --from asks another one."""
    eu, us = Region("eu"), Region("us")
    with served(us, eu):
        status, found, _ = shell.run("region", "restore", "eu")
        assert (status, found.splitlines()[0]) == (0, "Restored eu.")
        words = ("region", "avoid", "eu", "--ttl", "1h", "--reason", "ill")
        status, found, _ = shell.run(*words)
        assert (status, found) == (0, "us takes eu for OUT, for its own callers, for 1 h.\n")
        status, _, errors = shell.run(*words, "--from", "eu")
        assert status == 2 and errors.startswith(
            "REGION = eu is the region that is asked: allowed are us, or another region by --from."
        )
        assert (
            shell.run("region", "avoid", "us", "--from", "eu", "--ttl", "10s", "--reason", "x", "--ok")[0]
            == 0
        )
        assert json.loads(shell.run("region", "list", "--json", "--from", "eu")[1])["regions"][0]["is_own"]
    assert [type(each).__name__ for each in us.requests] == ["AvoidRegionRequest"]
    assert us.requests[0].ttl.seconds == 3600 and not us.requests[0].is_ok
    assert eu.requests[1].is_ok


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("drain", "ap", "--reason", "x"), 'REGION = "ap" is unknown: allowed are eu, us.'),
        (("list", "--from", "ap"), '--from = "ap" is unknown: allowed are eu, us.'),
        (("drain", "eu"), "--reason is missing: 1 to 200 characters are needed."),
        (("restore", "eu", "--reason", "  "), "--reason is missing: 1 to 200 characters are needed."),
        (("drain", "eu", "--reason", "x" * 201), "--reason has 201 characters: allowed are 1 to 200."),
        (
            ("avoid", "us", "--ttl", "5s", "--reason", "x"),
            "--ttl = 5s is out of range: allowed are 10s to 24h",
        ),
        (
            ("avoid", "us", "--ttl", "25h", "--reason", "x"),
            "--ttl = 25h is out of range: allowed are 10s to 24h",
        ),
        (("plan", "--regions", "1"), "--regions = 1 is out of range: allowed are 2 to 10."),
        (("plan", "--hit-ratio", "1"), "--hit-ratio = 1.0 is out of range: allowed are 0 to 0.99."),
        (("plan", "--seeded", "nan"), "--seeded = nan is out of range: allowed are 0 to 1."),
        (("plan", "--utilisation-max", "0"), "--utilisation-max = 0.0 is out of range"),
    ],
)
def test_a_mistake_is_one_sentence_with_value_and_range(
    shell: Shell, words: tuple[str, ...], sentence: str
) -> None:
    """Status 2, before any region is asked."""
    with served(Region("eu"), Region("us")):
        status, _, errors = shell.run("region", *words)
    assert status == 2 and errors.startswith(sentence)


def test_a_region_that_does_not_answer_is_named(shell: Shell) -> None:
    """With the command that asks another one. Nothing is said of a mesh that serves on: it may be dead."""
    with served(Region("eu"), Region("us")):
        pass  # both are gone behind it, and their addresses stay in kvmesh.toml
    for words in (("list",), ("drain", "eu", "--reason", "x"), ("restore", "eu")):
        status, _, errors = shell.run("region", *words)
        assert status == 1 and errors.startswith("No control process of region eu answers: ")
        assert "Another region shows how it observes eu: `kvmesh region list --from us`." in errors
        assert "`kvmesh region avoid eu --from us --ttl 1h --reason TEXT`" in errors


def test_a_mesh_without_regions_is_said(shell: Shell) -> None:
    """With what to do."""
    status, _, errors = shell.run("region", "list")
    assert status == 2 and errors.startswith("No mesh with regions runs in this folder: start one with")


def test_the_plan_is_a_table_of_the_formula(shell: Shell) -> None:
    """One figure for given options, all usual ones without; it needs no mesh."""
    status, found, _ = shell.run("region", "plan", "--regions", "3", "--hit-ratio", ".8", "--seeded", ".5")
    assert status == 0 and "3 regions" in found and "28%" in found
    status, found, _ = shell.run("region", "plan")
    assert found.count("hit ratio") == 3 and found.count("%") >= 36
    rows = shell.json("region", "plan", "--regions", "2")["plan"]
    assert rows[-1]["utilisation"] == utilisation(2, 0.9, 1.0, UTILISATION_MAX)
    assert len(rows) == 12 and {row["regions"] for row in rows} == {2}
    assert rows[-1]["utilisation"] == pytest.approx(0.7 / 2) and rows[-1]["move_cost"] == pytest.approx(1)
