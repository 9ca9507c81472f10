"""The impersonated stock backend has the habits of the real one, by its sources."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvmesh.triton.errors import EngineError, InvalidRequest, NoHandoff, of_text
from tests.fakes.stock_backend import tensors
from tests.integration.engine.servers import Answer, Client, request
from tests.integration.harness import until
from tests.integration.stock.conftest import END_TOKEN, LONGEST, Servers

pytestmark = pytest.mark.mesh
RNG = random.Random(7)


@pytest_asyncio.fixture
async def reference(servers: Servers) -> AsyncIterator[Client]:
    """A client of the reference engine."""
    client = Client(servers.reference.grpc)
    yield client
    await client.close()


@pytest_asyncio.fixture
async def stock(servers: Servers) -> AsyncIterator[Client]:
    """A client of the impersonation."""
    client = Client(servers.decode.grpc)
    yield client
    await client.close()


def prompt() -> list[int]:
    """Return a random prompt."""
    return [RNG.randrange(16, 4096) for _ in range(RNG.randrange(1, 60))]


async def test_the_model_lists_stock_tensors_and_parameters_alone(stock: Client) -> None:
    """None of those that kvmesh adds."""
    metadata, parameters = await stock.metadata(), await stock.parameters()
    for kind, expected in (("inputs", tensors.INPUTS), ("outputs", tensors.OUTPUTS)):
        shapes = {
            one["name"]: (one["datatype"], [int(each) for each in one["shape"]]) for one in metadata[kind]
        }
        names = {"STRING": "BYTES"}
        assert shapes == {
            one.name: (names.get(one.data_type, one.data_type), [-1, *one.dims]) for one in expected
        }
    assert not parameters.keys() & {
        "tokens_per_block",
        "kv_blocks",
        "vocab_size",
        "model_version",
        "end_token",
    }


async def test_answers_lack_their_end_token_and_are_else_those_of_the_reference(
    reference: Client, stock: Client
) -> None:
    """The last delta is empty where the output ends by itself."""
    ended = 0
    for _ in range(12):
        tokens = prompt()
        expected = await reference.run(tokens, 40, end_id=END_TOKEN)
        found = await stock.run(tokens, 40, end_id=END_TOKEN, return_log_probs=True)
        is_ended = expected.tokens[-1] == END_TOKEN
        ended += is_ended
        assert found.tokens == (expected.tokens[:-1] if is_ended else expected.tokens)
        assert found.is_final and found.error is None
    assert ended >= 3


async def test_types_and_lengths_are_never_refused(stock: Client) -> None:
    """An unknown type generates, a long output is shortened, and a whole answer has its prompt if it is asked for."""
    tokens = prompt()
    plain = await stock.run(tokens, 6)
    assert (await stock.run(tokens, 6, "kv_events")).tokens == plain.tokens
    whole = await stock.run(tokens, 6, streaming=False, exclude_input_in_output=False)
    assert whole.tokens == [*tokens, *plain.tokens] and whole.messages == 1
    assert len((await stock.run([20] * (LONGEST - 5), 100)).tokens) == 5


async def test_errors_have_stock_texts_and_types(stock: Client) -> None:
    """Each becomes a typed error, and nothing that is unknown is more than a failure of this engine."""
    too_long = await stock.run([20] * (LONGEST + 1), 6)
    assert "Executor failed process requestId" in (too_long.error or "")
    assert type(of_text(too_long.error or "")) is InvalidRequest
    bad = await stock.run([20], 6, runtime_top_p=3.0)
    assert "Assertion failed" in (bad.error or "") and type(of_text(bad.error or "")) is EngineError


async def test_a_handoff_works_at_home_only(servers: Servers, stock: Client) -> None:
    """The stream repeats the first token. Elsewhere the request fails or hangs until its client cancels."""
    tokens = prompt()
    plain = await stock.run(tokens, 6)
    given = await stock.run(tokens, 6, "context_only")
    assert given.handoff is not None and given.tokens == plain.tokens[:1]
    at_home = await stock.run(tokens, 6, "generation_only", handoff=given.handoff)
    assert at_home.tokens == plain.tokens

    given = await stock.run(tokens, 6, "context_only")
    other = Client(servers.prefill.grpc)
    foreign = await other.run(tokens, 6, "context_only")
    failed = await stock.run(tokens, 6, "generation_only", handoff=foreign.handoff)
    assert type(of_text(failed.error or "")) is EngineError
    call = other.stream(request(tokens, 6, "generation_only", handoff=given.handoff))
    answers: list[object] = []

    async def read() -> None:
        answers.extend([each async for each in call])

    reading = asyncio.create_task(read())
    assert (await other.run(tokens, 6)).tokens == plain.tokens
    assert not answers and not reading.done()
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await other.close()


async def test_a_prompt_whose_first_token_ends_it_has_no_handoff(reference: Client, stock: Client) -> None:
    """The call fails, by the sources."""
    for _ in range(400):
        tokens = prompt()
        first = await reference.run(tokens, 1)
        if first.tokens != [END_TOKEN]:
            continue
        found = await stock.run(tokens, 4, "context_only", end_id=END_TOKEN)
        assert type(of_text(found.error or "")) is NoHandoff
        return
    raise AssertionError("no prompt ended at once")


async def test_a_stop_ends_the_request_of_its_id(stock: Client) -> None:
    """It is answered for unknown ids, too, with an empty final response."""
    running = asyncio.create_task(stock.run([21] * 9, 400, request_id="long"))

    async def is_over() -> bool:
        stopped = stock.stream(request([1], 1, stop=True, request_id="long"))
        assert [error async for _, error in stopped if error is not None] == []
        return running.done()

    await until(is_over, 10.0, "the request is over")
    answer: Answer = await running
    assert answer.error is None and len(answer.tokens) < 400
