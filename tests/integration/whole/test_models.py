"""Two models in one mesh of real processes: each with its own tokenizer, chat template and pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmesh.config import ROOT, MeshConfig, build
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.tokenizer import Conversation, ModelTokenizer
from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.integration.generation import Answer, generate, token_request
from tests.integration.harness import Mesh, running_mesh, until

pytestmark = pytest.mark.mesh

FOLDER = "tests/unit/models/folders/llama-3"
OUTPUT = 24
QUESTION = "Which café is open? 你好"


def configuration() -> MeshConfig:
    """Return a mesh with the reference model in one pool and a folder of the Llama 3 shape in another one."""
    return build(
        {
            "engine": {"arithmetic": "hashed", "salt": "s1"},
            "versions": {"v1": {}, "v2": {"salt": "s2", "model": "llama-3", "model_dir": FOLDER}},
            "pools": {"stable": {"version": "v1"}, "chat": {"version": "v2"}},
        }
    )


def chat(model: str) -> pb.GenerateRequest:
    request = token_request([], max_output_tokens=OUTPUT)
    request.model = model
    request.chat.messages.add(role=pb.ChatMessage.ROLE_USER, content=QUESTION)
    return request


def expected(folder: Path, salt: str) -> tuple[int, list[int], str]:
    """Return the number of prompt tokens, the output of an engine alone, and its text."""
    tokenizer = ModelTokenizer.load(folder, text_max=1 << 20)
    prompt = tokenizer.encode_chat(Conversation([{"role": "user", "content": QUESTION}]))
    truth = Truth(salt, 4096, vocab_size=tokenizer.vocab_size)
    ids = truth.tokens(
        Stream(0, "", 0.0, tuple(prompt), OUTPUT, seed=1, temperature=0.0, top_k=0, is_plain=True, frontend=0)
    )
    detokenizer = tokenizer.detokenizer()
    return len(prompt), ids, detokenizer.feed(ids) + detokenizer.flush()


async def test_two_models_serve_beside_each_other(tmp_path: Path) -> None:
    """Each answer has tokens and text of its model. A model without a router moves no request to the other one."""
    async with running_mesh(configuration(), tmp_path) as mesh:
        await until(lambda: _serving(mesh, {"reference", "llama-3"}), 20, "both models serve")
        folders = {"": mesh.config.mesh.model_path, "llama-3": ROOT / FOLDER}
        for model, salt in (("", "s1"), ("llama-3", "s2"), ("", "s1")):
            answer = await generate(mesh.client(), chat(model))
            count, ids, text = expected(folders[model], salt)
            assert answer.error is None and answer.finished is not None
            assert (answer.finished.usage.prompt_token_count, answer.ids, answer.text) == (count, ids, text)
        await mesh.parts["chat-router-0"].end()
        await until(lambda: _serving(mesh, {"reference"}), 20, "the second model serves no more")
        lost = await generate(mesh.client(), chat("llama-3"), timeout_s=3)
        assert lost.error is not None and not lost.ids
        left: Answer = await generate(mesh.client(), chat("reference"))
        assert left.ids == expected(folders[""], "s1")[1]


async def _serving(mesh: Mesh, models: set[str]) -> bool:
    """Return whether exactly `models` serve."""
    stub: Any = mesh.client()
    found = await stub.ListModels(pb.ListModelsRequest(), timeout=20)
    return {each.model for each in found.models if each.serving} == models
