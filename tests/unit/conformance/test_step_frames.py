"""The checks of step frames on a fake server that offers them, and the defects that they find."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engines.contract.outputs import RequestOutput
from engines.contract.request import ControlRequest
from engines.contract.step_streams import SlotStream
from kvmesh.conformance.checks import step_checks
from kvmesh.conformance.verdict import Outcome
from kvmesh.triton import capabilities
from tests.unit.conformance.fake_server import FakeServer, Stream
from tests.unit.conformance.framed_server import FramedServer
from tests.unit.conformance.runs import by_outcome, failed, run

TOKENS, CANCEL = "step_frames: calls on one stream", "step_frames: the cancel of a slot frees its blocks"


def test_a_sound_engine_with_step_frames_passes_all_checks() -> None:
    """Each check is judged, and nothing is left in the engine."""
    rows, server = run(FramedServer, pair=FramedServer)
    assert set(by_outcome(rows, Outcome.PASS)) == {f"{row.capability}: {row.check}" for row in rows}
    assert {TOKENS, CANCEL} <= set(by_outcome(rows, Outcome.PASS)) and server.is_empty()
    assert isinstance(server, FramedServer) and not server.step_streams.live()


class OtherTokens(FramedServer):
    """Tokens of a step stream differ from those of a stream for each call."""

    def send_row(self, slot: SlotStream, output: RequestOutput) -> None:
        super().send_row(slot, replace(output, tokens=[token ^ 1 for token in output.tokens]))


class LosesARow(FramedServer):
    """A row is lost, so the next one has a gap."""

    def send_row(self, slot: SlotStream, output: RequestOutput) -> None:
        if slot.progress.position == 1 and slot.progress.slot == 1:
            slot.progress.position += 1
        super().send_row(slot, output)


class SendsNoFrames(FramedServer):
    """Takes the calls, and sends nothing."""

    def send_row(self, slot: SlotStream, output: RequestOutput) -> None:
        pass


class IgnoresCancels(FramedServer):
    """A cancelled slot runs on, until its step stream is cancelled."""

    def serve(self, kind: ControlRequest, stream: Stream) -> None:
        if kind is not ControlRequest.STEP_CANCEL:
            super().serve(kind, stream)


FOUND = {
    OtherTokens: {TOKENS},
    LosesARow: {TOKENS, CANCEL},
    SendsNoFrames: {TOKENS, CANCEL},
    IgnoresCancels: {CANCEL},
}


@pytest.mark.parametrize("defect", FOUND, ids=lambda defect: defect.__name__)
def test_a_defect_of_step_frames_is_found(defect: type[FramedServer]) -> None:
    """Exactly its checks fail."""
    rows, _ = run(defect, checks=step_checks.CHECKS)
    assert set(failed(rows)) == FOUND[defect], failed(rows)


@pytest.mark.parametrize("version", ["2", "", "x", "1.0", "01"])
def test_another_version_of_step_frames_is_not_offered(version: str) -> None:
    """It is served by a stream for each call."""

    def changed(server: FakeServer) -> None:
        server.parameters["step_frames"] = version

    rows, server = run(FramedServer, changed=changed, checks=step_checks.CHECKS)
    assert set(by_outcome(rows, Outcome.NOT_OFFERED)) == {TOKENS, CANCEL}
    metadata, config = asyncio.run(server.describe())
    facts = capabilities.derive(metadata, config, role="decode", model_version="v1", block_tokens=8)
    assert not facts.step_frames
