"""The programs of docs/client.md print the output that the page shows, with frontends that record their calls."""

from __future__ import annotations

import asyncio
import sys

from kvmesh.child import bound_command
from kvmesh.config import ROOT
from tests.integration.client.scripted_frontend import IDS, scripted, well
from tests.patience import wait_for
from tests.samples import samples

FIRST, CONVERSATION, REGIONS = (sample for sample in samples("python") if sample.page == "docs/client.md")


async def shown(program: str, *frontends: str) -> str:
    """Run `program` with `frontends` as arguments; return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *bound_command([sys.executable, "-c", program, *frontends]),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await wait_for(process.communicate(), 30)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_example_of_the_page_runs() -> None:
    """The program prints the answer and its token count."""
    async with scripted(well) as one, scripted(well) as other:
        out = await shown(FIRST.text, one.address, other.address)
    assert out == f"{'x' * 10}\n10 tokens, 0 resumes\n"


async def test_the_regions_of_the_page_are_home_and_another_one() -> None:
    """The program asks the frontends of its home region."""
    async with scripted(well) as home, scripted(well) as other:
        out = await shown(REGIONS.text, home.address, other.address)
    assert out == f"{len(IDS)} tokens from region \n"
    assert home.requests and not other.requests


async def test_the_conversation_of_the_page_sends_all_messages_again() -> None:
    """Each turn contains the questions and answers before it."""
    async with scripted(well) as frontend:
        out = await shown(CONVERSATION.text, frontend.address)
    assert out == f"{'x' * 10}\n" * 2
    contents = [[each.content for each in request.chat.messages] for request in frontend.requests]
    assert contents == [["Who are you?"], ["Who are you?", "x" * 10, "And where do you live?"]]
    assert {request.session_id for request in frontend.requests} == {"sailor-7"}
