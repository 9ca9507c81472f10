"""Facts of an engine, compared at each of its boots."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvmesh.replica import engine_facts
from kvmesh.replica.engine_facts import EngineFacts
from kvmesh.triton.capabilities import ModelFacts, ModelRefused
from kvmesh.triton.errors import EngineLost
from tests.unit.triton.fake_engine import facts

KNOWN = facts()


class Rig:
    """An engine that gives `answers`, one at each read. The last one counts for all further reads."""

    def __init__(self, *answers: ModelFacts | Exception) -> None:
        self.answers, self.reads = list(answers), 0
        self.facts = EngineFacts(KNOWN, self._read)

    async def _read(self) -> ModelFacts:
        self.reads += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def after(self, *boots: str) -> str:
        """Run and tell the boots; return the error that ended the run, or an empty text."""
        task = asyncio.create_task(self.facts.run())
        for boot in boots:
            self.facts.on_engine(boot)
            for _ in range(20):  # reads take no time here, also one that nobody asked for
                await asyncio.sleep(0)
        if task.done():
            return str(task.exception())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return ""


async def test_an_engine_of_the_same_build_goes_on() -> None:
    """Each boot is read once, and no read follows without one."""
    rig = Rig(KNOWN)
    assert await rig.after("e1", "e2", "e2", "") == ""
    assert rig.reads == 2


async def test_another_build_ends_the_process() -> None:
    """With the facts that differ."""
    rig = Rig(KNOWN, replace(KNOWN, digest="other", kv_blocks=7))
    text = await rig.after("e1", "e2", "e3")
    assert f"kv_blocks was {KNOWN.kv_blocks}, is 7; digest was , is other" in text and rig.reads == 2


async def test_a_model_that_the_role_refuses_ends_the_process() -> None:
    """As at the start of the process."""
    assert await Rig(ModelRefused("it lacks all")).after("e1") == "it lacks all"


async def test_facts_that_cannot_be_read_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may be lost again, or slow. What it says then counts."""
    monkeypatch.setattr(engine_facts, "RETRY_S", 0.0)
    rig = Rig(EngineLost("gone"), EngineLost("gone"), replace(KNOWN, kv_address="elsewhere:1"))
    assert "kv_address was" in await rig.after("e1")
