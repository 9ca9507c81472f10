"""The checks on reference engines in real tritonservers: sound ones, and with options that make them misbehave."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.conformance import Run, conformance
from kvmesh.conformance.trial import Settings
from tests.integration.engine.servers import Client, Server, launch
from tests.patience import Patience, patience

PATIENT = Settings(cancels=100, is_hostile=True, free_s=5.0, call_s=60.0)
"""Times that a busy machine keeps. `test_defects` shows that the real ones are kept."""

GUIDED = {"guided_output", "guided_resume"}
"""Capabilities that hashed arithmetic lacks."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Two sound engines, one that hides and forgets, and one that lies."""
    folder = tmp_path_factory.mktemp("engines")
    options = {
        "a": ("--step-s=0.001",),
        "b": (),
        "forgets": ("--hide-end-token", "--no-prefix-reuse", "--cancellation-check-s=600", "--step-s=0.004"),
        "lies": ("--lie=tokens", "--lie-after=3", "--salt=other"),
    }
    started = {name: launch(folder / name, *each) for name, each in options.items()}
    try:
        for server in started.values():
            server.wait_ready()
        yield started
    finally:
        for server in started.values():
            server.kill()


async def _record(
    capsys: pytest.CaptureFixture[str], settings: Settings, triton: str, pair: str = "", status: int = 0
) -> dict[str, Any]:
    """Run the command, and return what it printed as JSON."""
    run = Run(triton=triton, pair=pair, model="tensorrt_llm", sizes={}, settings=settings)
    assert await conformance(run, as_json=True) == status
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def _by_result(record: dict[str, Any], result: str) -> dict[str, str]:
    found = [each for each in record["checks"] if each["result"] == result]
    return {f"{each['capability']}: {each['check']}": each["why"] for each in found}


async def test_a_sound_pair_passes(servers: dict[str, Server], capsys: pytest.CaptureFixture[str]) -> None:
    """Every check passes but those of guides, each of which names its fallback; nothing is left in the engines."""
    addresses = servers["a"].grpc, servers["b"].grpc
    record = await _record(capsys, PATIENT, *addresses)
    assert _by_result(record, "fail") == {}
    lacking = _by_result(record, "not offered")
    assert {name.partition(":")[0] for name in lacking} == GUIDED
    assert all("; fallback: " in why for why in lacking.values())
    assert set(_by_result(record, "not judged").values()) <= {"other requests ran"}  # a busy machine
    for address in addresses:
        await _wait_idle(address)


async def test_an_engine_alone_is_safe_by_default(
    servers: dict[str, Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --pair and --hostile those checks are not judged, and say what they need."""
    record = await _record(capsys, Settings(cancels=0, free_s=5.0, call_s=60.0), servers["b"].grpc)
    assert _by_result(record, "fail") == {}
    reasons = set(_by_result(record, "not judged").values())
    assert any("--pair" in why for why in reasons) and any("--hostile" in why for why in reasons)


async def test_an_engine_that_forgets_is_found(
    servers: dict[str, Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """No reuse, no events, late cancels; and a hidden end token, which is a capability alone."""
    settings = Settings(cancels=0, free_s=0.5, call_s=60.0)
    record = await _record(capsys, settings, servers["forgets"].grpc, status=1)
    assert set(_by_result(record, "fail")) == {
        "cancel: a cancelled stream frees its blocks",
        "reuse: a long prompt, asked twice",
        "kv_events: the blocks of a new prompt",
        "kv_events: after resumes",
    }
    assert "end_token: end token in the output" in _by_result(record, "not offered")


async def test_an_engine_that_lies_is_found(
    servers: dict[str, Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """Token ids outside the vocabulary, from the fourth token on."""
    record = await _record(
        capsys, Settings(cancels=0, free_s=5.0, call_s=60.0), servers["lies"].grpc, status=1
    )
    why = _by_result(record, "fail")["streaming: deltas make up the one answer, without the prompt"]
    assert "is outside the vocabulary: allowed are 0..4095" in why


async def test_ctrl_c_ends_what_was_started(servers: dict[str, Server], tmp_path: Path) -> None:
    """In the middle of the cancels: exit status 130, and the engine is idle."""
    address = servers["a"].grpc
    command = [sys.executable, "-m", "kvmesh.cli.main", "conformance", "--triton", address]
    with (tmp_path / "out").open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220  the test waits for it
            [*command, "--cancels", "100000"], stdout=output, stderr=output
        )
    client = Client(address)
    try:
        running = 0
        async with patience(30.0):
            async for report in client.subscribe("load_report"):
                running += report["sequences_running"] > 1  # only the random cancels have several calls
                if running > 3:
                    break
        process.send_signal(signal.SIGINT)
        bound = Patience(20.0)
        while process.poll() is None and not bound.is_over:
            await asyncio.sleep(0.05)
        assert process.returncode == 130, (tmp_path / "out").read_text()
    finally:
        process.kill()
        process.wait()
        await client.close()
    await _wait_idle(address)


async def _wait_idle(address: str) -> None:
    """Wait until the engine runs nothing, and all its blocks are free or can be evicted."""
    client = Client(address)
    try:
        async with patience(10.0):
            async for report in client.subscribe("load_report"):
                held = report["sequences_running"] + report["sequences_waiting"] + report["handoffs_held"]
                if not held and report["blocks_free"] == report["blocks_total"]:
                    return
    finally:
        await client.close()
    raise AssertionError("subscription ended")
