"""One request at two frontends of a real mesh: the later execution continues, the earlier one ends, each token is
charged once.
"""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.client import Client, GenerationStream, RequestRefused, Superseded
from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.client.test_lost_frontends import addresses, prompts
from tests.integration.harness import Mesh, until
from tests.integration.scraped import settled

pytestmark = pytest.mark.mesh

TOKENS = 150


async def until_tokens(answer: GenerationStream, count: int) -> None:
    """Read `answer` until it has `count` tokens."""
    while len(answer.ids) < count:
        await anext(answer)


async def test_the_later_of_two_executions_continues(mesh: Mesh) -> None:
    """By key and by token: the earlier stream ends with a typed error, the later one is exact, and each token is
    charged once.
    """
    one_address, other_address = addresses(mesh)
    (prompt,) = prompts(3, 1)
    async with Client([one_address]) as one, Client([other_address]) as other:
        earlier = await settled(mesh)
        whole = await one.generate(prompt_tokens=prompt, max_output_tokens=TOKENS, seed=5).all()
        charged = earlier["prompt"] + earlier["output"] + len(prompt) + TOKENS
        # The same key, while the first execution streams.
        first = one.generate(prompt_tokens=prompt, max_output_tokens=TOKENS, seed=5, idempotency_key="a")
        await until_tokens(first, 30)
        second = other.generate(prompt_tokens=prompt, max_output_tokens=TOKENS, seed=5, idempotency_key="a")
        reading = asyncio.create_task(second.all())
        with pytest.raises(Superseded) as caught:
            await first.all()
        assert caught.value.ids == whole.ids[: len(caught.value.ids)]
        assert (await reading).ids == whole.ids and second.request_id == first.request_id
        charged += len(prompt) + TOKENS
        # The same token, twice at once: one of the two executions continues.
        third = one.generate(prompt_tokens=prompt, max_output_tokens=TOKENS, seed=5, idempotency_key="b")
        await until_tokens(third, 30)
        assert third.started is not None
        resumed = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=prompt), idempotency_key="b")
        resumed.limits.max_output_tokens, resumed.sampling.seed = TOKENS, 5
        resumed.options.resume.resume_token = third.started.resume_token
        resumed.options.resume.received_token_ids.extend(third.ids)
        rivals = await asyncio.gather(
            *(each.send(resumed).all() for each in (one, other)), return_exceptions=True
        )
        (winner,) = [each for each in rivals if isinstance(each, GenerationStream)]
        (loser,) = [each for each in rivals if not isinstance(each, GenerationStream)]
        assert winner.ids == whole.ids
        assert isinstance(loser, Superseded)
        with pytest.raises(Superseded):
            await third.all()
        charged += len(prompt) + TOKENS

        async def all_is_settled() -> bool:
            found = await settled(mesh)
            return found["prompt"] + found["output"] == charged

        await until(all_is_settled, 5, f"{charged} tokens settled: {await settled(mesh)}")
        # A finished request is executed again a limited number of times, without another charge.
        for _ in range(3):
            again = await one.generate(
                prompt_tokens=prompt, max_output_tokens=TOKENS, seed=5, idempotency_key="a"
            ).all()
            assert again.ids == whole.ids
        with pytest.raises(RequestRefused) as refused:
            await one.generate(
                prompt_tokens=prompt, max_output_tokens=TOKENS, seed=5, idempotency_key="a"
            ).all()
        assert refused.value.reason == "ALREADY_FINISHED"
        with pytest.raises(RequestRefused) as refused:
            await one.generate(prompt_tokens=prompt, max_output_tokens=5, idempotency_key="a").all()
        assert refused.value.reason == "IDEMPOTENCY_KEY_REUSED"
        assert await all_is_settled()
    await mesh.idle(5)


async def test_without_redis_streams_fail_over(mesh: Mesh) -> None:
    """Without Redis and then without a frontend, its streams are taken over all the same."""
    asked = prompts(4, 8)
    async with Client(addresses(mesh)) as client:
        whole = await asyncio.gather(
            *(
                client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at).all()
                for at, each in enumerate(asked)
            )
        )
        await mesh.parts["redis"].end()
        answers = [
            client.generate(prompt_tokens=each, max_output_tokens=TOKENS, seed=at, explain=True)
            for at, each in enumerate(asked)
        ]
        readings = [asyncio.create_task(each.all()) for each in answers]
        await until(lambda: all(len(each.ids) > 20 for each in answers), 30, "all have tokens")
        await mesh.parts["frontend-0"].end()
        await asyncio.gather(*readings)
        assert [each.ids for each in answers] == [each.ids for each in whole]
        moved = [each for each in answers if each.resumes]
        assert moved
        assert all(each.finish is not None and each.finish.explanation.adoption_count == 1 for each in moved)
