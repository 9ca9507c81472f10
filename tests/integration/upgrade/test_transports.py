"""Processes of the last release beside those of this one with batched transports, in one mesh of processes.

The last release runs from its commit, without containers. It knows neither the transports' keys nor step frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.server import BATCHED
from tests.chaos.truth import Truth
from tests.drawn_transports import DRAW
from tests.integration.generation import generate_all
from tests.integration.harness import Mesh, configure
from tests.integration.live_mesh import accepts
from tests.integration.upgrade.load import request_of, streams
from tests.integration.upgrade.test_rolling import written

pytestmark = pytest.mark.mesh

OLD: Final = ("frontend-0", "router-0", "prefill-0", "decode-0", "prefill-0-engine", "decode-1-engine")
"""Parts of the last release. One of each role is new, and one new decode has an old engine, one old decode a new one."""

ROUTED: Final = ("router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1")


async def test_both_releases_serve_beside_batched_transports(
    tmp_path: Path, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each link between two roles has all four pairs of releases. Each frontend gives the right tokens."""
    config = configure(
        engine={"arithmetic": "hashed", "step_s": 0.002},
        **{role: {"replicas": 2} for role in ("frontend", "router", "prefill", "decode")},
    )
    for choice, value in (("edge", BATCHED), ("hops", BATCHED), ("step_frames", "on")):
        monkeypatch.setattr(DRAW, choice, value)
    mesh = Mesh(config, tmp_path)
    old_file = written(config, tmp_path / "old.toml")
    for name in OLD:
        part = mesh.parts[name]
        command = [str(old_file) if word == str(tmp_path / "kvmesh.toml") else word for word in part.command]
        if name.startswith("frontend"):
            at = command.index("--http-port")
            del command[at : at + 2]  # the last release serves no HTTP
        part.command = ["env", "-C", str(release), f"PYTHONPATH={release}", *command]
    plan = streams(11)
    attempts: list[pb.AttemptExplanation] = []
    truth = Truth(config.engine.salt, config.engine.max_sequence_tokens)
    try:
        await mesh.start()
        assert not mesh.parts["frontend-0"].http_address and await accepts(
            mesh.parts["frontend-1"].http_address
        )
        for frontend in ("frontend-0", "frontend-1"):
            requests = [request_of(one) for one in plan]
            for request in requests:
                request.options.explain = True
            answers = await generate_all(mesh.client(frontend), requests, concurrency=8, timeout_s=60)
            assert [answer.error for answer in answers] == [None] * len(plan)
            assert [answer.ids for answer in answers] == [truth.tokens(one) for one in plan]
            attempts += [
                attempt
                for answer in answers
                if answer.finished is not None
                for attempt in answer.finished.explanation.attempts
            ]
        assert {one.decode_replica for one in attempts} == {"decode-0", "decode-1"}
        assert {one.prefill_replica for one in attempts} >= {"prefill-0", "prefill-1"}
        for name in ROUTED:
            assert (await mesh.status(name)).stream_count == 2, f"{name} has a stream of each caller"
        await mesh.idle(10)
    finally:
        await mesh.stop()
