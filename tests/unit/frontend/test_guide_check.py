"""Guides that no output can meet, or that take too much to read, are refused in bounded time and memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2
from kvmesh.config import ROOT
from kvmesh.errors import MeshError
from services.frontend.requests.sampling import Guide
from services.frontend.surface import guide_check
from services.frontend.surface.guide_check import GuideCheck, in_a_line
from tests.patience import wait_for

INTEGER = {"type": "integer"}
SLOW = json.dumps({**INTEGER, "allOf": [{"multipleOf": each} for each in (97, 89, 83)]})
TOO_MUCH = "it takes more than 1 s of CPU time or 256 MB of memory"
HUGE = json.dumps({**INTEGER, "multipleOf": 99_999_989})


@pytest.fixture
async def guides() -> AsyncIterator[GuideCheck]:
    """A check without a child yet."""
    made = GuideCheck()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("kind", "text", "fault"),
    [
        ("regex", "1[78][0-9]{2}", ""),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"ab[^\s\S]", "no output can meet it"),
        ("json_schema", json.dumps(INTEGER), ""),
        ("json_schema", "true", "Expecting object schema"),
        ("json_schema", '{"uniqueItems": true}', "Unimplemented keys"),
        ("json_schema", '{"enum": []}', "Unsatisfiable schema"),
        ("json_schema", json.dumps({**INTEGER, "multipleOf": 99991, "minimum": 3}), "fuel exhausted"),
        ("json_schema", SLOW, "takes more than 1 s of CPU time or 256 MB"),
    ],
)
async def test_a_guide_is_read_with_bounded_effort(
    guides: GuideCheck, kind: str, text: str, fault: str
) -> None:
    """An empty fault: an output can meet it. The next guide finds a new child where one was ended."""
    found = await guides.fault(kind, text)
    assert fault in found and bool(found) == bool(fault), found
    assert await guides.fault("regex", "a+") == ""


async def test_a_guide_that_takes_all_memory_or_all_time_ends_its_child_alone(guides: GuideCheck) -> None:
    """39 bytes that would take gigabytes."""
    assert await guides.fault("json_schema", HUGE) == TOO_MUCH
    assert await guides.fault("regex", "a") == ""


async def test_a_cancelled_caller_leaves_no_guide_that_others_wait_for(guides: GuideCheck) -> None:
    """The child that reads its guide is killed."""
    assert await guides.fault("regex", "a") == ""
    first = guides._child
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    asked = asyncio.create_task(guides.fault("json_schema", SLOW))
    waiting = asyncio.create_task(guides.fault("regex", "b"))
    while not guides._lock.locked():
        await asyncio.sleep(0)
    asked.cancel()
    assert await waiting == ""
    assert first.returncode is not None, "it was killed"


async def test_a_child_that_died_by_itself_says_nothing_of_the_next_guide(guides: GuideCheck) -> None:
    """The system may kill it between two guides."""
    assert await guides.fault("regex", "a") == ""
    first = guides._child
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    assert await guides.fault("regex", "b") == ""
    assert guides._child is not first


async def test_a_child_that_does_not_start_is_no_fault_of_a_guide(
    guides: GuideCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mesh has a bug then, and no guide is remembered as wrong."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="does not start"):
        await guides.fault("regex", "a")
    monkeypatch.undo()
    assert await guides.fault("regex", "a") == ""


async def test_a_machine_that_stands_still_is_no_fault_of_a_guide(
    guides: GuideCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is not remembered."""
    monkeypatch.setattr(guide_check, "WALL_S", 0.0)
    assert "not read within" in await guides.fault("regex", "a")
    monkeypatch.undo()
    assert await guides.fault("regex", "a") == ""


async def test_answers_are_remembered(guides: GuideCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same guide comes with every request of a program."""
    assert await guides.fault("regex", "(") == await guides.fault("regex", "(") != ""

    async def asked(*_: Any) -> str:
        return "asked again"

    monkeypatch.setattr(guides, "_asked", asked)
    assert "unclosed" in await guides.fault("regex", "(")
    assert await guides.fault("json_schema", "(") == "asked again"


async def test_a_refusal_names_the_field(guides: GuideCheck) -> None:
    """A guide without text asks for any JSON."""
    await guides.check(None)
    await guides.check(Guide(attach_pb2.Guide.KIND_JSON))
    await guides.check(Guide(attach_pb2.Guide.KIND_REGEX, "a"))
    with pytest.raises(MeshError) as caught:
        await guides.check(Guide(attach_pb2.Guide.KIND_JSON_SCHEMA, '{"not": {}}'))
    (violation,) = caught.value.violations
    assert (caught.value.reason, violation.field) == ("FIELD_OUT_OF_RANGE", "sampling.guide.json_schema")
    assert violation.value == 'refused: Unimplemented keys: ["not"]'


async def test_the_child_ends_with_the_frontend(guides: GuideCheck) -> None:
    """Its stdin ends, whatever ended the frontend."""
    assert await guides.fault("regex", "a") == ""
    child = guides._child
    assert child is not None and child.stdin is not None
    child.stdin.close()
    assert await wait_for(child.wait(), 10) == 0
    assert not Path(f"/proc/{child.pid}/fd").exists()
    assert await guides.fault("regex", "b") == ""


@pytest.mark.parametrize(("text", "number"), [(SLOW, signal.SIGPROF), (HUGE, signal.SIGABRT)])
def test_time_and_memory_of_the_child_have_bounds_of_their_own(text: str, number: signal.Signals) -> None:
    """One guide meets that of time first. The other one aborts the library, with time enough for it."""
    code = "from services.frontend.surface import guide_worker as g; g.SECONDS_MAX *= {}; g.main()"
    command = [sys.executable, "-c", code.format(1 if number == signal.SIGPROF else 60)]
    line = json.dumps(["json_schema", text]).encode() + b"\n"
    done = subprocess.run(command, input=line, capture_output=True, check=False, timeout=60, cwd=ROOT)
    assert done.returncode == -number


def test_the_fault_stands_in_one_line() -> None:
    """The library draws its place below it."""
    drawn = "at 1(2): regex parse error:\n    (\n    ^\nerror: unclosed group\n1 | start: /(/\n   ^"
    assert in_a_line(drawn) == "unclosed group"
    assert in_a_line("Unimplemented keys: [\n  1]") == "Unimplemented keys: [ 1]"
