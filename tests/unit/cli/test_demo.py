"""The demo's dialogue: long enough for several blocks, and continued in the same session with all earlier messages."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from bench.generate_only import GenerateOnly
from kvmesh.cli.demo import CONTINUATION, OPENING, SCENE, SESSION, dialogue
from kvmesh.cli.screen import ExplanationTable
from kvmesh.config import MeshConfig
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.inference.v1 import inference_pb2_grpc as inference_grpc
from kvmesh.server import MeshServer


class Echo(GenerateOnly):
    """Answers every turn with two words."""

    def __init__(self) -> None:
        self.seen: list[inference.GenerateRequest] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference.GenerateResponse]:
        self.seen.append(request)
        yield inference.GenerateResponse(started=inference.Started(request_id="ab"))
        yield inference.GenerateResponse(tokens=inference.Tokens(text="Dear ", ids=[7], position=0))
        yield inference.GenerateResponse(tokens=inference.Tokens(text="sister", ids=[8], position=1))
        finished = inference.Finished(finish_reason=inference.FINISH_REASON_END_TOKEN)
        finished.usage.output_token_count = 2
        finished.explanation.attempts.add(matched_block_count=len(self.seen), prompt_block_count=12)
        yield inference.GenerateResponse(finished=finished)


async def test_the_second_turn_repeats_all_messages() -> None:
    """The mesh keeps no history, so the second turn carries the first answer."""
    server, servicer = MeshServer("frontend", "frontend-0", []), Echo()
    inference_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc)
    screen = Console(file=io.StringIO(), width=120)
    turns = await dialogue(screen, [await server.listen("127.0.0.1:0")])
    await server.grpc.stop(0)
    opened, continued = servicer.seen
    assert [message.content for message in opened.chat.messages] == [SCENE, OPENING]
    assert [message.content for message in continued.chat.messages] == [
        SCENE,
        OPENING,
        "Dear sister",
        CONTINUATION,
    ]
    assert {request.session_id for request in servicer.seen} == {SESSION}
    screen.print(ExplanationTable(turns))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "1 of 12" in shown
    assert "2 of 12" in shown


def test_the_opening_fills_several_blocks() -> None:
    """The prefix cache works in blocks: an opening of a few words would have no effect."""
    config = MeshConfig()
    tokenizer = Tokenizer.from_file(str(config.mesh.model_path / "tokenizer.json"))
    tokens = len(tokenizer.encode(SCENE).ids) + len(tokenizer.encode(OPENING).ids)
    assert 300 <= tokens <= 450
    assert tokens // config.engine.block_tokens >= 9


def test_the_explanation_shows_the_region_of_every_attempt_between_regions_alone() -> None:
    """A mesh without regions has no such row; an attempt of a release without regions shows a dash."""
    shown = []
    for regions in (["local", "local"], ["eu", "us", ""]):
        finished = inference.Finished()
        for region in regions:
            finished.explanation.attempts.add(region=region)
        screen = Console(file=io.StringIO(), width=120)
        screen.print(ExplanationTable([("this request", finished)]))
        assert isinstance(screen.file, io.StringIO)
        shown.append(screen.file.getvalue())
    assert "regions" not in shown[0] and "eu, us, -" in shown[1]
