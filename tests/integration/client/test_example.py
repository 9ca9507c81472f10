"""The examples of docs/client.md run as they stand."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvmesh.client import Client
from kvmesh.config import ROOT
from tests.integration.client.scripted_frontend import scripted, well


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "client.md").read_text(), re.DOTALL)


async def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    """It prints the answer and its count."""
    code, _ = examples()
    example = tmp_path / "example.py"
    example.write_text(code)
    async with scripted(well) as one, scripted(well) as other:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(example), one.address, other.address),
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
        )
        shown, _ = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, shown.decode()) == (0, f"{'x' * 10}\n10 tokens, 0 resumes\n")


async def test_the_conversation_of_the_page_sends_all_that_was_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each turn has the questions and answers before it."""
    _, code = examples()
    page: dict[str, Any] = {}
    exec(code, page)
    async with scripted(well) as frontend, Client([frontend.address]) as client:
        await page["talk"](client, ["Who are you?", "And where do you live?"])
    assert capfd.readouterr().out == f"{'x' * 10}\n" * 2
    contents = [[each.content for each in request.chat.messages] for request in frontend.requests]
    assert contents == [["Who are you?"], ["Who are you?", "x" * 10, "And where do you live?"]]
    assert {request.session_id for request in frontend.requests} == {"sailor-7"}
