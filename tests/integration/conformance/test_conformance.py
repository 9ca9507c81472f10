"""The checks on reference engines in real tritonservers: sound ones, and with options that make them misbehave."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.conformance import Run, conformance, run_all
from kvmesh.conformance.trial import Settings
from kvmesh.conformance.verdict import Outcome, Row
from tests.integration.engine.servers import Client, Server, launch
from tests.patience import Patience, patience

GUIDED = {"guided_output", "guided_resume"}
"""Capabilities that hashed arithmetic lacks."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Two sound engines, one that hides and forgets, and one that lies."""
    folder = tmp_path_factory.mktemp("engines")
    options = {
        "a": ("--step-s=0.001",),
        "b": (),
        "forgets": ("--hide-end-token", "--no-prefix-reuse", "--cancellation-check-s=600", "--step-s=0.002"),
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


def _run(triton: str, pair: str = "", only: Sequence[str] = (), **settings: Any) -> Run:
    """Return a run. Its times are those that a busy machine keeps; `test_defects` shows that the real ones are kept."""
    options = Settings(**{"cancels": 0, "free_s": 5.0, "call_s": 60.0, **settings})
    return Run(triton=triton, pair=pair, model="tensorrt_llm", sizes={}, settings=options, only=only)


def _by_result(rows: Sequence[Row], outcome: Outcome) -> dict[str, str]:
    found = [row for row in rows if row.verdict.outcome is outcome]
    return {f"{row.capability}: {row.check}": row.verdict.why for row in found}


async def test_a_sound_pair_passes(servers: dict[str, Server], capsys: pytest.CaptureFixture[str]) -> None:
    """Every check passes but those of guides, each of which names its fallback; nothing is left in the engines."""
    addresses = servers["a"].grpc, servers["b"].grpc
    assert await conformance(_run(*addresses, cancels=100, is_hostile=True), as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["failed"] == 0 and record["sizes"]["vocab_size"] == 4096
    results = {each["capability"]: each["result"] for each in record["checks"]}
    assert {name for name, result in results.items() if result == "not offered"} == GUIDED
    for each in record["checks"]:
        assert each["result"] != "not offered" or "; fallback: " in each["why"]
        # On a busy machine cancelled calls may be seen for so long that they look like those of others.
        assert each["result"] != "not judged" or each["why"] == "other requests ran"
    for address in addresses:
        await _wait_idle(address)


async def test_engines_that_misbehave_are_found(servers: dict[str, Server]) -> None:
    """One forgets blocks and cancels, one lies, and a sound one is alone; all at the same time."""
    runs = (
        _run(
            servers["forgets"].grpc, only=("cancel", "reuse", "kv_events", "end_token", "finish"), free_s=0.3
        ),
        _run(servers["lies"].grpc),
        _run(servers["b"].grpc),
    )
    (_, forgets), (_, lies), (_, alone) = await asyncio.gather(*map(run_all, runs))
    assert set(_by_result(forgets, Outcome.FAIL)) == {
        "cancel: a cancelled stream frees its blocks",
        "reuse: a long prompt, asked twice",
        "kv_events: the blocks of a new prompt",
        "kv_events: after resumes",
    }
    assert "end_token: end token in the output" in _by_result(forgets, Outcome.NOT_OFFERED)

    why = _by_result(lies, Outcome.FAIL)["streaming: deltas make up the one answer, without the prompt"]
    assert "is outside the vocabulary: allowed are 0..4095" in why

    assert _by_result(alone, Outcome.FAIL) == {}
    reasons = set(_by_result(alone, Outcome.NOT_JUDGED).values())
    assert any("--pair" in each for each in reasons) and any("--hostile" in each for each in reasons)


async def test_ctrl_c_ends_what_was_started(servers: dict[str, Server], tmp_path: Path) -> None:
    """In the middle of the cancels: exit status 130, and the engine is idle."""
    address = servers["a"].grpc
    command = [sys.executable, "-m", "kvmesh.cli.main", "conformance", "--triton", address]
    with (tmp_path / "out").open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220  the test waits for it
            [*command, "--only", "cancel", "--cancels", "100000"], stdout=output, stderr=output
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
