"""The mesh's secret: the same at all frontends, also after Redis has lost it; and the behaviour without a secret."""

from __future__ import annotations

import logging

import pytest

from kvmesh.redis_link import RedisLink
from services.frontend.mesh_secret import MeshSecret
from services.frontend.requests import resume_token
from services.frontend.requests.resume_token import SECRET_BYTES, ResumeToken, Seal

TOKEN = ResumeToken("0" * 31 + "1", 7, 0, 99, "v1")


def seals(count: int) -> list[Seal]:
    return [Seal(bytes([number + 1]) * SECRET_BYTES) for number in range(count)]


async def test_every_frontend_takes_the_tokens_of_every_other(redis_url: str) -> None:
    """The first frontend's secret becomes the mesh's; a frontend that signed with another one still accepts that one."""
    redis = RedisLink(redis_url)
    first, second = seals(2)
    old = TOKEN.pack(second)
    for seal in (first, second):
        await MeshSecret(redis, "kvmesh", seal).renew()
    assert first.secret == second.secret
    assert resume_token.unpack(TOKEN.pack(first), second) == TOKEN
    assert resume_token.unpack(TOKEN.pack(second), first) == TOKEN
    assert resume_token.unpack(old, second) == TOKEN
    (other,) = seals(1)
    await MeshSecret(redis, "another-mesh", other).renew()
    assert await redis.execute("PTTL", "kvmesh:resume-secret") == -1
    await redis.close()


async def test_tokens_of_another_region_are_accepted_while_its_secrets_are_known(redis_url: str) -> None:
    """The leader writes one or two secrets; an invalid value, and a Redis that lost them, leave the known ones."""
    redis = RedisLink(redis_url)
    own, there, before = seals(3)
    keeper = MeshSecret(redis, "kvmesh", own, ("us",))
    await keeper.renew()
    with pytest.raises(resume_token.ResumeTokenError):
        resume_token.unpack(TOKEN.pack(there), own)
    for value in (there.secret + before.secret, b"short", None):
        if value is None:
            await redis.execute("DEL", "kvmesh:resume-secret:us")
        else:
            await redis.execute("SET", "kvmesh:resume-secret:us", value)
        await keeper.renew()
        assert [resume_token.unpack(TOKEN.pack(each), own) for each in (there, before)] == [TOKEN, TOKEN]
    await redis.execute("SET", "kvmesh:resume-secret:us", there.secret)
    await keeper.renew()
    assert resume_token.unpack(TOKEN.pack(there), own) == TOKEN
    with pytest.raises(resume_token.ResumeTokenError):
        resume_token.unpack(TOKEN.pack(before), own)
    assert own.secret == seals(1)[0].secret
    await redis.close()


async def test_the_secret_is_restored_after_redis_lost_it(redis_url: str) -> None:
    """Tokens survive the loss: the secret in memory is written again, and a new frontend gets the same secret."""
    redis = RedisLink(redis_url)
    first, second = seals(2)
    keeper = MeshSecret(redis, "kvmesh", first)
    await keeper.renew()
    before = TOKEN.pack(first)
    await redis.execute("FLUSHALL")
    await keeper.renew()
    await MeshSecret(redis, "kvmesh", second).renew()
    assert resume_token.unpack(before, second) == TOKEN
    await redis.close()


async def test_without_redis_tokens_are_local_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A frontend that never reached Redis signs with its own secret, and logs the consequence once."""
    redis = RedisLink("redis://127.0.0.1:1")
    (seal,) = seals(1)
    keeper = MeshSecret(redis, "kvmesh", seal)
    with caplog.at_level(logging.WARNING, "services.frontend.mesh_secret"):
        await keeper.renew()
        await keeper.renew()
    assert [record.message for record in caplog.records if "at this frontend only" in record.message] == [
        "Redis is unavailable: resume tokens are valid at this frontend only until Redis answers"
    ]
    assert resume_token.unpack(TOKEN.pack(seal), seal) == TOKEN
    await redis.close()


@pytest.mark.parametrize("garbage", [("SET", ""), ("SET", "short"), ("RPUSH", "list")])
async def test_an_invalid_secret_is_not_used(redis_url: str, garbage: tuple[str, str]) -> None:
    """For any other value in its key: no frontend signs with a guessable secret, and no frontend ends because of it."""
    redis = RedisLink(redis_url)
    command, value = garbage
    await redis.execute(command, "kvmesh:resume-secret", value)
    (seal,) = seals(1)
    await MeshSecret(redis, "kvmesh", seal).renew()
    assert seal.secret == bytes([1]) * SECRET_BYTES
    await redis.close()
