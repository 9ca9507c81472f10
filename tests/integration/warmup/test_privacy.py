"""No prompt that fewer than five tenants sent is in Redis, on disk or in a log after a warm-up: each is searched for."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from kvmesh.attach.frames import pack_ids
from kvmesh.redis_link import RedisLink
from tests.integration.generation import token_request
from tests.integration.harness import START_S_MAX, until
from tests.integration.warmup.conversations import OUTPUT_TOKENS, ask, tokens
from tests.integration.warmup.warm_mesh import BLOCK, SERVING, TENANTS, WarmMesh, config, warm_mesh

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.asyncio(loop_scope="module"),
]

WINDOW = 8
"""Tokens in a row that are searched for. Eight random ones are no chance."""

BLOCKS = 6
SHARED = 5
"""Tenants that may share a prefix in a package."""

SENTENCE = (
    "the quiet harbour of {} keeps seven copper lanterns for {} and never lends a single one to {} again"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[WarmMesh]:
    """A mesh that makes packages every second. Its temporary files are in a folder of its own."""
    folder = tmp_path_factory.mktemp("privacy")
    with pytest.MonkeyPatch.context() as patch:
        (folder / "tmp").mkdir()
        patch.setenv("TMPDIR", str(folder / "tmp"))
        async with warm_mesh(folder, config(control={"replicas": 2})) as made:
            yield made


class Haystack:
    """All bytes that Redis and the disk hold, by place."""

    def __init__(self, places: dict[str, bytes]) -> None:
        self.places = places

    def has(self, needles: Sequence[bytes]) -> list[str]:
        """Return the places with one of `needles`."""
        return [place for place, data in self.places.items() if any(needle in data for needle in needles)]


async def gathered(mesh: WarmMesh, *, logs: bool = True) -> Haystack:
    """Return every value in Redis, and every file of the mesh. `logs`: those of the processes as well."""
    places = dict(await _of_redis(mesh))
    for path in mesh.folder.rglob("*"):
        if path.is_file() and (logs or path.suffix != ".log"):
            places[str(path.relative_to(mesh.folder))] = path.read_bytes()
    return Haystack(places)


async def _of_redis(mesh: WarmMesh) -> list[tuple[str, bytes]]:
    link = mesh.redis()
    found = [("keys", b"\0".join(await link.execute("KEYS", "*")))]
    for name in await link.execute("KEYS", "*"):
        kind = (await link.execute("TYPE", name)).decode()
        found.append((f"{kind} {name.decode()}", b"\0".join(_flat(await _value(link, name, kind)))))
    await link.close()
    return found


async def _value(link: RedisLink, name: bytes, kind: str) -> object:
    match kind:
        case "string":
            return await link.execute("GET", name)
        case "hash":
            return await link.execute("HGETALL", name)
        case "set":
            return await link.execute("SMEMBERS", name)
        case "zset":
            return await link.execute("ZRANGE", name, 0, -1, "WITHSCORES")
        case "list":
            return await link.execute("LRANGE", name, 0, -1)
        case "stream":
            return await link.execute("XRANGE", name, "-", "+")
    raise AssertionError(f"{name!r} is a {kind}: this search knows no such type")


def _flat(value: object) -> Iterator[bytes]:
    """Yield all bytes in a reply."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, dict):
        for each in value.items():
            yield from _flat(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _flat(each)
    else:
        yield str(value).encode()


def needles(ids: Sequence[int], text: str = "") -> list[bytes]:
    """Return each window of a prompt in all forms: 32-bit and 64-bit integers, numbers, text."""
    found = []
    for at in range(len(ids) - WINDOW + 1):
        window = ids[at : at + WINDOW]
        found.append(pack_ids(window))
        found.append(b"".join(each.to_bytes(8, "little") for each in window))
        found += [separator.join(map(str, window)).encode() for separator in (",", ", ", "-", " ")]
    words = text.split()
    for at in range(len(words) - WINDOW + 1 if words else 0):
        found.append(" ".join(words[at : at + WINDOW]).encode())
    return found


async def _send(mesh: WarmMesh, prompt: Sequence[int], tenants: Sequence[str]) -> None:
    for tenant in tenants:
        request = token_request(prompt, max_output_tokens=OUTPUT_TOKENS)
        answer = await ask(mesh, request, tenant)
        assert answer.error is None, answer.error


async def test_only_what_five_tenants_sent_is_written_down(mesh: WarmMesh) -> None:
    """After packages, a seeding and a new leader: the shared prefix is found, no other prompt is."""
    chance = random.Random()
    secrets = {count: tokens(chance, BLOCKS * BLOCK) for count in range(1, SHARED)}
    shared = tokens(chance, BLOCKS * BLOCK)
    tails = {tenant: tokens(chance, BLOCKS * BLOCK) for tenant in TENANTS[:SHARED]}
    words = SENTENCE.format(*(f"w{chance.getrandbits(48):012x}" for _ in range(3)))
    for _ in range(2):
        for count, prompt in secrets.items():
            await _send(mesh, prompt, TENANTS[:count])
        for tenant in TENANTS[:SHARED]:
            await _send(mesh, [*shared, *tails[tenant]], [tenant])
        await _send_text(mesh, words)

    async def is_packed() -> bool:
        found = (await mesh.profiles()).profiles
        return {each.role for each in found if each.prefix_count} == {"prefill", "decode"}

    await until(is_packed, START_S_MAX, "packages with the shared prefix", every_s=0.1)
    for replica in ("prefill-0", "decode-0"):
        boot_id = (await mesh.life(replica)).engine_boot_id
        await mesh.restart_engine(replica)
        await mesh.until_state(replica, SERVING, not_boot=boot_id)
    await mesh.until_life(
        "prefill-0",
        lambda life: life.pulled_block_count + life.replayed_block_count >= BLOCKS,
        "prefill-0 is seeded",
    )
    found = await gathered(mesh)
    assert any("kvmesh:control:packages" in place for place in found.has(needles(shared)))
    assert any(place.startswith("state/") for place in found.has(needles(shared)))
    assert not [place for place in found.has(needles(shared)) if place.endswith(".log")]
    for count, prompt in secrets.items():
        assert not found.has(needles(prompt)), f"a prompt of {count} tenants"
    for tail in tails.values():
        assert not found.has(needles(tail)), "a prompt behind a shared prefix"
    assert not found.has(needles((), words)), "the text of a prompt"


async def _send_text(mesh: WarmMesh, text: str) -> None:
    request = token_request([1], max_output_tokens=OUTPUT_TOKENS)
    request.ClearField("tokens")
    request.text = text
    answer = await ask(mesh, request, TENANTS[0])
    assert answer.error is None, answer.error


async def test_a_registered_prefix_is_gone_once_it_is_deleted(mesh: WarmMesh, tmp_path: Path) -> None:
    """Found in Redis and a state folder after `add`; nowhere after `delete`, whichever process led before."""
    prefix = tokens(random.Random(), BLOCKS * BLOCK)
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(prefix))
    status, _, errors = await mesh.command("profile", "prefix", "add", "greeting", "--token-ids", str(file))
    assert (status, errors) == (0, ""), errors
    file.unlink()

    async def is_everywhere() -> bool:
        places = (await gathered(mesh)).has(needles(prefix))
        packed = {each.role for each in (await mesh.profiles()).profiles if each.prefix_count}
        return (
            any("prefixes" in each for each in places)
            and any("packages" in each for each in places)
            and (packed == {"prefill", "decode"})
        )

    await until(is_everywhere, START_S_MAX, "the prefix is in Redis and in packages", every_s=0.1)
    found = await gathered(mesh)
    assert any(place.startswith("state/") for place in found.has(needles(prefix)))
    await _change_leader(mesh)
    assert (await mesh.command("profile", "prefix", "delete", "greeting"))[0] == 0
    last: list[str] = []

    async def is_gone() -> bool:
        last[:] = (await gathered(mesh)).has(needles(prefix))
        return not last

    try:
        await until(is_gone, START_S_MAX / 3, "the prefix is gone", every_s=0.1)
    except AssertionError as error:
        raise AssertionError(f"{error}, but is in {last}") from None


async def _change_leader(mesh: WarmMesh) -> None:
    """End the leader, wait for the next one, and start the earlier one again."""
    leader = await _leader(mesh)
    await mesh.parts[leader].end()

    async def has_changed() -> bool:
        return await _leader(mesh) not in ("", leader)

    await until(has_changed, START_S_MAX, "another leader", every_s=0.1)
    await mesh.start(leader)


async def _leader(mesh: WarmMesh) -> str:
    link = mesh.redis()
    held = await link.execute("GET", "kvmesh:control:leader")
    await link.close()
    return str(json.loads(held)["process_id"]) if held else ""
