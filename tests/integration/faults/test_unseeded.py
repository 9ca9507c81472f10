"""Engines without `seeded_resume`: a stream goes on behind a lost decode replica, and its end tells that it was resumed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.generation import Answer, generate, token_request
from tests.integration.harness import Mesh, Part, configure, running_mesh

pytestmark = pytest.mark.mesh

CONFIG = configure(
    engine={"arithmetic": "hashed", "step_s": 0.004}, prefill={"replicas": 1}, decode={"replicas": 2}
)
TORCH = ("--arithmetic=torch", "--torch-shape=test", "--device=cpu", "--dtype=float32")
OUTPUT, AT = 120, 30


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--no-seeded-resume",), id="hashed"),
        pytest.param(
            TORCH,
            id="torch",
            marks=pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
        ),
    ],
)
async def test_a_resumed_stream_is_whole_and_told(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Every position comes once, up to the limit; only the answer that was resumed says so."""
    async with running_mesh(CONFIG, tmp_path, options) as mesh:
        request = token_request(
            list(range(100, 180)), max_output_tokens=OUTPUT, temperature=0.0, explain=True
        )
        quiet = await generate(mesh.client(), request)
        assert quiet.error is None and len(quiet.ids) == OUTPUT
        assert quiet.finished is not None and not quiet.finished.resumed
        answer = await _broken(mesh, request)
        assert answer.error is None and len(answer.ids) == OUTPUT
        assert answer.ids[:AT] == quiet.ids[:AT]
        assert answer.finished is not None and answer.finished.resumed
        assert "stream resumed" in mesh.parts["frontend-0"].log.read_text()


async def _broken(mesh: Mesh, request: pb.GenerateRequest) -> Answer:
    """Return the answer to `request`, whose decode replica is killed once AT tokens came."""
    for name in ("decode-0", "decode-1"):
        part, is_dead = mesh.parts[name], False

        def kill(answer: Answer, part: Part = part) -> None:
            nonlocal is_dead
            if not is_dead and len(answer.ids) >= AT:
                is_dead = True
                assert part.process is not None
                part.process.kill()  # at once: the answer goes on meanwhile

        answer = await generate(mesh.client(), request, on_tokens=kill)
        if answer.finished is not None and len(answer.finished.explanation.attempts) > 1:
            return answer
        await part.end()
        await mesh.start(name)
    raise AssertionError("no decode replica was killed in the middle of the stream")
