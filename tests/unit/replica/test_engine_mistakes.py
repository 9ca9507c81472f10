"""Mistakes in the engines of replicas that a start finds: another vocabulary, and one engine for two replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import pytest

from kvmesh.config import ROOT
from kvmesh.membership.member import Member
from kvmesh.replica.engine_rival import EngineRival, rival_of
from kvmesh.replica.vocabulary import largest_token_id, vocabulary_fault
from kvmesh.tokenizer_digest import tokenizer_of
from kvmesh.triton.capabilities import ModelRefused
from tests.patience import wait_for

Task: TypeAlias = asyncio.Task[None]

FOLDERS = ROOT / "tests" / "unit" / "models" / "folders"


@pytest.mark.parametrize("name", sorted(each.name for each in FOLDERS.iterdir() if each.is_dir()))
def test_the_largest_id_is_that_of_the_tokenizer(name: str) -> None:
    """Vocabularies are objects or lists; added tokens may lie above them."""
    text = tokenizer_of(FOLDERS / name)
    found: dict[str, Any] = json.loads(text)
    vocabulary = found["model"]["vocab"]
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    largest = max([*ids, *(each["id"] for each in found["added_tokens"])])
    assert largest_token_id(text) == largest
    assert vocabulary_fault(text, largest + 1) == vocabulary_fault(text, largest + 100) == ""
    assert vocabulary_fault(text, largest) == (
        f"The engine has a vocabulary of {largest} tokens, and the tokenizer of the model has token id {largest}: "
        f"allowed is an engine with {largest + 1} tokens or more."
    )


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"model": {}}', b'{"model": {"vocab": {"a": "b"}}}', b"\xff"]
)
def test_a_tokenizer_that_cannot_be_read_tells_nothing(text: bytes) -> None:
    """Frontends refuse such a folder with their own sentence."""
    assert largest_token_id(text) is None
    assert vocabulary_fault(text, 5) == ""


def test_a_rival_is_another_replica_with_the_same_boot_of_an_engine() -> None:
    """Engines without a boot id, and the own lease, are none."""

    members = [leased("decode-2", "e1"), leased("decode-1", "e1"), leased("prefill-0", "e2"), leased("x", "")]
    assert rival_of("decode-0", "e1", members) == "decode-1"
    assert rival_of("decode-1", "e1", members[1:]) == ""
    assert rival_of("decode-0", "e3", members) == ""
    assert rival_of("decode-0", "", members) == ""


def leased(name: str, boot_id: str) -> Member:
    """Return a decode replica with the boot of its engine."""
    return Member(
        process_id=name,
        role="decode",
        address="h:1",
        boot_id="b",
        model_version="v",
        block_tokens=32,
        engine_boot_id=boot_id,
    )


@asynccontextmanager
async def looking(name: str, members: list[Member] | None) -> AsyncIterator[tuple[EngineRival, Task, Task]]:
    """Yield a rival watch of the engine e1, its first look, and its watch. `members` None: no view came yet."""
    rival = EngineRival(name, rival_wait_s=0.1)
    rival.take_engine("e1")
    if members is not None:
        rival.take_members(members)
    tasks = [asyncio.create_task(work) for work in (rival.look(), rival.watch())]
    try:
        yield rival, tasks[0], tasks[1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_replica_that_looks_before_the_first_view_waits_for_it() -> None:
    """The view of the members may come after the engine's first load report."""
    async with looking("decode-1", None) as (rival, look, _):
        await asyncio.sleep(0)
        rival.take_members([leased("decode-0", "e1")])
        with pytest.raises(ModelRefused, match="engine of decode-1 is that of decode-0 too"):
            await wait_for(look, 5.0)


async def test_the_lease_of_a_dead_replica_is_outlived() -> None:
    """It ends while the replica waits."""
    async with looking("decode-1", [leased("decode-0", "e1")]) as (rival, look, watch):
        await asyncio.sleep(0)
        rival.take_members([leased("decode-1", "e1")])
        await wait_for(look, 5.0)
        assert not watch.done()


async def test_without_redis_nobody_is_a_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    """No view comes. The wait for it is bounded."""
    monkeypatch.setattr("kvmesh.replica.engine_rival.MEMBERS_S", 0.01)
    async with looking("decode-1", None) as (_, look, watch):
        await wait_for(look, 5.0)
        assert not watch.done()


async def test_of_two_that_start_at_once_the_one_with_the_greater_name_ends() -> None:
    """Neither saw the other's lease before its own. A third engine, or another boot, ends nobody."""
    both = [leased("decode-0", "e1"), leased("decode-1", "e1"), leased("decode-2", "e2")]
    async with looking("decode-0", []) as (first, look, stays), looking("decode-1", []) as (second, _, ends):
        await wait_for(look, 5.0)
        first.take_members(both)
        second.take_members(both)
        with pytest.raises(ModelRefused, match="engine of decode-1 is that of decode-0 too"):
            await wait_for(ends, 5.0)
        assert not stays.done()
