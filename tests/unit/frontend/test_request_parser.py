"""The event loop is not held by what a client may send: threads render and check what takes long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvmesh.config import MeshConfig
from kvmesh.errors import MeshError
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.models.folder import ModelFolder, read
from kvmesh.models.tokenizer import ModelTokenizer
from kvmesh.tenants.caller import ServiceClass
from services.frontend.requests.resume_token import SECRET_BYTES, Seal
from services.frontend.surface import served_versions
from services.frontend.surface.guide_check import GuideCheck
from services.frontend.surface.request_parser import RequestParser
from services.frontend.surface.served_versions import ServedVersions
from tests.unit.models.goldens import FOLDERS

CLASS = ServiceClass(name="c", runtime_max_s=60, default_deadline_s=60, max_output_tokens=77)
CONFIG = MeshConfig()


def versions(template: str = "", family: str = "mistral") -> ServedVersions:
    """Return one version, with the folder of a family and perhaps another template."""
    folder: ModelFolder = read(FOLDERS / family)
    if template:
        from dataclasses import replace

        folder = replace(folder, template=template, tool_template="")
    made = ModelTokenizer(folder, text_max=1 << 20)
    return served_versions.of(CONFIG, {CONFIG.engine.salt: (made, folder)})


async def parsed(served: ServedVersions, request: pb.GenerateRequest) -> Any:
    """Return the request as it is parsed."""
    parser = RequestParser(served, Seal(bytes(SECRET_BYTES)), GuideCheck(), message_bytes_max=1 << 20)
    return await parser.check(await parser.read(request.SerializeToString()), served.first, CLASS)


def chat(*contents: str, **fields: Any) -> pb.GenerateRequest:
    roles: Sequence[Any] = (pb.ChatMessage.ROLE_USER, pb.ChatMessage.ROLE_ASSISTANT)
    messages = [pb.ChatMessage(role=roles[at % 2], content=text) for at, text in enumerate(contents)]
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages, **fields))


async def test_a_cancelled_call_keeps_others_out_until_its_thread_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else callers that cancel at once would have many threads at work."""
    served, go, at_work, most = versions(), threading.Event(), 0, 0
    render = ModelTokenizer.render

    def slow(*args: Any) -> str:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        go.wait(10)
        at_work -= 1
        return render(*args)

    monkeypatch.setattr(ModelTokenizer, "render", slow)
    parser = RequestParser(served, Seal(bytes(SECRET_BYTES)), GuideCheck(), message_bytes_max=1 << 20)
    message = await parser.read(chat("x" * 9000).SerializeToString())
    calls = [asyncio.create_task(parser.check(message, served.first, CLASS)) for _ in range(5)]
    while not at_work:
        await asyncio.sleep(0.001)
    for each in calls[:4]:
        each.cancel()
    await asyncio.sleep(0.01)
    assert most == 1 and not calls[0].done()
    go.set()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(each, asyncio.CancelledError) for each in ended] == [True] * 4 + [False]
    assert most == 1


@pytest.mark.parametrize(("count", "is_thread"), [(1, False), (9, False), (1501, True)])
async def test_a_thread_renders_a_conversation_of_many_steps(
    count: int, is_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,501 messages have less than 8 KB, and took up to a second on the event loop."""
    served, ends = versions(), list[bool]()
    render = ModelTokenizer.render

    def watched(*args: Any) -> str:
        text = render(*args)
        ends.append(threading.current_thread() is not threading.main_thread())
        return text

    monkeypatch.setattr(ModelTokenizer, "render", watched)
    request = chat("Hi", *[""] * (count - 1))
    assert request.ByteSize() < 8192
    found = await parsed(served, request)
    assert found.prompt_tokens > count and ends == [is_thread]


@pytest.mark.parametrize(
    ("template", "reason", "said"),
    [
        ("{% for i in range(messages[0].content | length * 50) %}{% for j in range(50000) %}{% endfor %}{% endfor %}",
         "TEMPLATE_REFUSED", "more than 2000000 steps"),
        ("{{ messages[0].content * 50000 }}", "PROMPT_TOO_LONG", "allowed are 1048576"),
        ("{{ raise_exception('Never on ' ~ messages[0].content) }}", "TEMPLATE_REFUSED", "Never on Sunday"),
        ("{{ mode ** 300 }}", "TEMPLATE_REFUSED", "a number of"),
    ],
)  # fmt: skip
async def test_a_template_that_explodes_for_a_client_is_refused(
    template: str, reason: str, said: str
) -> None:
    """With the field and the reason, whatever the template did at start."""
    message = chat("Sunday" * (1 if "Never" in template else 20), template_arguments_json='{"mode": 99999}')
    with pytest.raises(MeshError, match=said) as caught:
        await parsed(versions(template), message)
    assert caught.value.reason == reason and caught.value.violations[0].field == "chat.messages"


async def test_a_rendered_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's tools may be long although its messages are short."""
    served = versions("{{ tools[0] }}", "llama-3")
    monkeypatch.setattr(ModelTokenizer, "encode_rendered", None)
    request = chat("Hi", tools_json='["' + "x" * 200_000 + '"]')
    with pytest.raises(MeshError, match="bytes long by its chat template") as caught:
        await parsed(served, request)
    assert caught.value.reason == "PROMPT_TOO_LONG"


async def test_a_guide_holds_no_other_request_up() -> None:
    """Its child process may take a second for it. A guide that cannot be met ends its own request."""
    served, entered, may_end = versions(), asyncio.Event(), asyncio.Event()

    class Held(GuideCheck):
        async def fault(self, kind: str, text: str) -> str:
            entered.set()
            await may_end.wait()
            return "no output can meet it" if text == "b" else ""

    parser = RequestParser(served, Seal(bytes(SECRET_BYTES)), Held(), message_bytes_max=1 << 20)

    async def check(regex: str = "") -> int:
        request = chat("Hi")
        if regex:
            request.sampling.guide.regex = regex
        found = await parser.check(await parser.read(request.SerializeToString()), served.first, CLASS)
        return found.prompt_tokens

    tasks = [asyncio.create_task(check(regex)) for regex in ("a+", "b")]
    await entered.wait()
    assert await check()
    may_end.set()
    good, bad = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(good, int) and isinstance(bad, MeshError)
