"""Lives of replicas in a real mesh: restarted engines, wrong tokens, a restarted service, a whole role at once."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.control.v1 import warm_up_pb2
from tests.integration.generation import Answer, token_request
from tests.integration.harness import START_S_MAX, until
from tests.integration.replicas.caller import Answers, Caller
from tests.integration.scraped import settled as settled_tokens
from tests.integration.warmup.conversations import OUTPUT_TOKENS, Conversations, ask
from tests.integration.warmup.warm_mesh import (
    BLOCK,
    BOOTS_MAX,
    PROBING,
    QUARANTINED,
    SEEDING,
    SERVING,
    STARTING,
    TENANTS,
    UNKNOWN,
    WARMING,
    WarmMesh,
    supervised,
    warm_mesh,
)

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.asyncio(loop_scope="module"),
]

HELD_S_MAX = 10.0
"""A replica that its pool needs runs golden prompts for two seconds; the rest is for a slow machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WarmMesh]:
    """One mesh for all tests. Each of them leaves every replica in service."""
    async with warm_mesh(tmp_path_factory.mktemp("lives")) as made:
        await made.until_golden()
        yield made


@pytest.mark.parametrize("replica", ["prefill-0", "decode-0"])
async def test_a_restarted_engine_is_warm_before_its_first_user(mesh: WarmMesh, replica: str) -> None:
    """Held, warmed, proved; no user meets it before SERVING.

    A prefill is seeded: its cache has what only its peer computed. A decode is not: handoffs fill its cache.
    """
    users = Conversations(mesh, seed=sum(replica.encode()))
    before, settled = await mesh.life(replica), await _settled(mesh)
    async with users.running():
        await mesh.kill_engine(replica)

        async def is_out() -> bool:
            return not await mesh.placed(replica)

        await until(is_out, 10, "the router sees the dead engine")
        first = len(users.answers)
        await until(lambda: len(users.answers) >= first + 24, START_S_MAX, "conversations at the peer alone")
        starting = asyncio.create_task(mesh.start_engine(replica))
        await _watch_warm_up(mesh, replica, before.engine_boot_id)
        await starting
    users.check()
    is_prefill = replica == "prefill-0"
    is_seeded = has_pulled if is_prefill else serves
    life = await mesh.until_life(replica, is_seeded, "its seeding, which may go on in service, is over")
    assert life.proved and not life.replayed_block_count, life
    walked = [each.state for each in life.times]
    assert {WARMING, PROBING} <= set(walked) and walked == sorted(walked)
    await _check_row(mesh, replica, life)
    if is_prefill:
        prompts = [list(prompt) for prompt in users.prompts[first : first + 12]]
        assert await _cached(mesh, replica, prompts) >= len(prompts) / 2
    await mesh.idle(10)
    assert bool((await mesh.life(replica)).pulled_block_count) == is_prefill
    assert await _settled(mesh) - settled == users.usage(), "warm-up work is no tenant's"


def serves(life: warm_up_pb2.Life) -> bool:
    """Return whether the replica is in service."""
    return life.state == SERVING


def has_pulled(life: warm_up_pb2.Life) -> bool:
    """Return whether the seeding of a replica in service has ended, with blocks of its peer."""
    return serves(life) and life.pulled_block_count > 0


async def _check_row(mesh: WarmMesh, replica: str, life: warm_up_pb2.Life) -> None:
    """`kvmesh replicas` shows the life, as a table and as JSON."""
    status, shown, errors = await mesh.command("replicas", "--json")
    assert status == 0, errors
    row = next(each for each in json.loads(shown) if each["name"] == replica)
    assert (row["state"], row["proof"], row["package"]) == ("serving", "proved", life.package)
    assert row["seeded_blocks"] == life.pulled_block_count and not row["failed_boots"]
    words = [word for word in row["steps"].split() if word.isalpha()]
    assert words[:2] == ["starting", "warming"] and "probing" in words
    assert "proved" in (await mesh.command("replicas"))[1]


async def _settled(mesh: WarmMesh) -> Counter[str]:
    """Return the tokens that were charged to tenants, by kind."""
    found = await settled_tokens(mesh)
    return Counter({kind: found[kind] for kind in ("prompt", "output")})


async def _watch_warm_up(mesh: WarmMesh, replica: str, boot_id: str) -> None:
    """Wait for the proof. No call of a user ends at the replica while it is held."""
    await mesh.until_life(
        replica, lambda life: life.reported in (WARMING, SEEDING, PROBING), "the warm-up began"
    )
    calls = await mesh.user_calls(replica)

    async def is_proved() -> bool:
        count = await mesh.user_calls(replica)
        is_placeable = await mesh.placed(replica)
        life = await mesh.life(replica)
        if life.state != SERVING and life.reported != SERVING:
            assert (count, is_placeable) == (calls, False), f"a user met {replica}, which is held: {life}"
        return life.state == life.reported == SERVING and life.engine_boot_id != boot_id

    await until(is_proved, START_S_MAX, f"{replica} serves")
    await mesh.until_state(replica, SERVING, not_boot=boot_id, is_proved=True)


async def _cached(mesh: WarmMesh, replica: str, prompts: list[list[int]]) -> int:
    """Return how many prompts a prefill replica finds in its cache, all but the last two blocks."""
    found = 0
    async with Caller(mesh.parts[replica].address) as caller:
        for prompt in prompts:
            slot = await caller.submit(
                prompt, pb.PHASE_CONTEXT_ONLY, block_tokens=BLOCK, model_version=mesh.config.engine.salt
            )
            answers = caller.answers[slot]
            await caller.until(partial(has_first, answers))
            assert answers.first is not None, answers.__dict__
            found += answers.first.cached_token_count >= len(prompt) - 2 * BLOCK
            await caller.send(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_COMPLETE)])
    return found


def has_first(answers: Answers) -> bool:
    """Return whether a prompt has its first token, or has failed."""
    return answers.first is not None or answers.is_over()


async def test_wrong_tokens_never_reach_a_user(mesh: WarmMesh) -> None:
    """Quarantined, alone in its role and yet not used; a restart without the fault puts it back into service."""
    replica, other = "decode-0", "decode-1"
    boot_id = (await mesh.life(replica)).engine_boot_id
    calls = await mesh.user_calls(replica)
    users = Conversations(mesh, seed=11)
    async with users.running():
        await mesh.kill_engine(replica)
        mesh.set_fault(replica, "wrong=1")
        await mesh.start_engine(replica)
        life = await mesh.until_state(replica, QUARANTINED, not_boot=boot_id)
        assert "wrong golden tokens" in life.reason
        answered = len(users.answers)
        await until(lambda: len(users.answers) > answered + 8, START_S_MAX, "users go on at the peer")
        assert not await mesh.placed(replica)
    users.check()
    began = len(users.answers)
    await mesh.kill_engine(other)
    alone = [await _ask_once(mesh, number) for number in range(3)]
    assert not any(answer.ids or answer.error is None for answer in alone), alone
    assert (await mesh.life(replica)).state == QUARANTINED
    mesh.set_fault(replica, "")
    starting = asyncio.create_task(mesh.start_engine(other))
    await mesh.restart_engine(replica)
    await starting
    await mesh.until_state(replica, SERVING, not_boot=life.engine_boot_id)
    await mesh.until_state(other, SERVING)
    users = Conversations(mesh, seed=12)
    async with users.running():
        await until(lambda: users.used(replica) > 0, START_S_MAX, f"users come back to {replica}")
    users.check()
    assert began and await mesh.user_calls(replica) > calls


async def _ask_once(mesh: WarmMesh, number: int) -> Answer:
    request = token_request([5 + number] * 40, max_output_tokens=OUTPUT_TOKENS)
    return await ask(mesh, request, TENANTS[0], timeout_s=1.5)


@pytest.mark.parametrize("replica", ["prefill-1", "decode-1"])
async def test_a_service_restarted_alone_skips_the_warm_up(mesh: WarmMesh, replica: str) -> None:
    """Its engine served before: golden prompts and service, and no request is lost."""
    before = await mesh.life(replica)
    users = Conversations(mesh, seed=21)
    async with users.running():
        part = mesh.parts[replica]
        await part.end(signal.SIGTERM)
        await mesh.start(replica)

        def is_back(life: warm_up_pb2.Life) -> bool:
            return life.state == life.reported == SERVING and life.age.ToSeconds() < before.age.ToSeconds()

        life = await mesh.until_life(replica, is_back, f"{replica} serves again")
        assert life.engine_boot_id == before.engine_boot_id
        assert {each.state for each in life.times} <= {UNKNOWN, STARTING, PROBING}, life
        used = users.used(replica)
        await until(lambda: users.used(replica) > used, START_S_MAX, f"users come back to {replica}")
    users.check()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_role_restarted_at_once_serves_at_once(mesh: WarmMesh, role: str) -> None:
    """No replica waits for a peer that waits for it: users are answered, and the warm-up follows in service."""
    replicas = [f"{role}-{number}" for number in range(2)]
    boots = {name: (await mesh.life(name)).engine_boot_id for name in replicas}
    for name in replicas:
        await mesh.kill_engine(name)
    await asyncio.gather(*(mesh.start_engine(name) for name in replicas))
    for name in replicas:
        life = await mesh.until_state(name, SERVING, not_boot=boots[name])
        assert all(each.time.ToTimedelta().total_seconds() < HELD_S_MAX for each in life.times), life
    users = Conversations(mesh, seed=31)
    async with users.running():
        await until(lambda: all(map(users.used, replicas)), START_S_MAX, "users at both replicas")
    users.check()


async def test_a_package_that_crashes_engines_is_quarantined(mesh: WarmMesh, tmp_path: Path) -> None:
    """Each replica serves by its third boot; boots of two replicas quarantine the package, and `--lift` ends that."""
    prefix = list(range(40, 40 + 4 * BLOCK))
    await _register(mesh, tmp_path, "fatal", prefix)

    async def package() -> warm_up_pb2.Profile:
        return next(each for each in (await mesh.profiles()).profiles if each.role == "prefill")

    replicas, boots = ("prefill-0", "prefill-1"), {}
    for replica in replicas:
        mesh.set_fault(replica, f"die={'-'.join(map(str, prefix[:40]))}")
    for replica in replicas:
        boot_id = (await mesh.life(replica)).engine_boot_id
        async with supervised(mesh, replica) as starts:
            await mesh.parts[f"{replica}-engine"].end()
            mesh.parts[f"{replica}-engine"].start()
            life = await mesh.until_state(replica, SERVING, not_boot=boot_id)
            boots[replica] = 1 + starts[replica]
        assert not life.package
    assert all(2 <= each <= BOOTS_MAX for each in boots.values()), boots
    assert (await package()).quarantined == "boots of two replicas ended with it"
    name = (await package()).name
    assert "boots of two replicas ended with it" in (await mesh.command("profile", "list"))[1]
    assert (await mesh.command("profile", "quarantine", name, "--lift"))[0] == 0
    for replica in replicas:
        mesh.set_fault(replica, "")
    boot_id = (await mesh.life("prefill-1")).engine_boot_id
    await mesh.restart_engine("prefill-1")
    life = await mesh.until_life("prefill-1", partial(has_computed, boot_id), "the prefix is computed")
    assert life.package == name


async def test_a_registered_prefix_is_computed_after_a_power_cut(mesh: WarmMesh, tmp_path: Path) -> None:
    """No replica of the role holds it then. Both serve at once, and compute it behind the start of service."""
    await _register(mesh, tmp_path, "greeting", list(range(400, 400 + 4 * BLOCK)))
    replicas = ("prefill-0", "prefill-1")
    boots = {name: (await mesh.life(name)).engine_boot_id for name in replicas}
    for name in replicas:
        await mesh.kill_engine(name)
    await asyncio.gather(*(mesh.start_engine(name) for name in replicas))
    for name in replicas:
        await mesh.until_life(name, partial(has_computed, boots[name]), f"{name} computes the prefix")


def has_computed(boot_id: str, life: warm_up_pb2.Life) -> bool:
    """Return whether another engine than that of `boot_id` has computed the prefix."""
    return life.engine_boot_id != boot_id and life.replayed_block_count >= 4


async def _register(mesh: WarmMesh, folder: Path, name: str, prefix: list[int]) -> None:
    """Register a prefix, and wait until the package of prefill replicas has its tokens, too."""

    async def count() -> int:
        found = (await mesh.profiles()).profiles
        return sum(each.prefix_token_count for each in found if each.role == "prefill")

    before = await count()
    file = folder / "ids.json"
    file.write_text(json.dumps(prefix))
    status, _, errors = await mesh.command("profile", "prefix", "add", name, "--token-ids", str(file))
    assert status == 0, errors

    async def is_packed() -> bool:
        return await count() >= before + len(prefix)

    await until(is_packed, 15, f"a package with the prefix {name}", every_s=0.1)
