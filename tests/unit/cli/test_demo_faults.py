"""The last act of the demo: which process is killed when, and what is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvmesh.cli import demo_faults
from kvmesh.cli.demo_faults import KILL_DECODE_AT, KILL_FRONTEND_AT, OUTPUT_TOKENS, Kill


def process(name: str, role: str, address: str) -> Any:
    return SimpleNamespace(name=name, role=role, address=address, pid=1)


MESH: Any = SimpleNamespace(
    processes=[process("frontend-0", "frontend", "a:1"), process("frontend-1", "frontend", "a:2")]
)


def decodes(found: Any = None) -> Any:
    """Return decode replicas of which `found` runs the answer, or none."""

    async def busy() -> Any:
        return found

    return SimpleNamespace(busy=busy)


def test_the_request_can_be_compared_with_itself() -> None:
    """It has a seed, does not end early, and is long enough for both kills."""
    made = demo_faults.request()
    assert made.sampling.HasField("seed") and made.sampling.ignore_eos and made.options.explain
    assert made.limits.max_output_tokens == OUTPUT_TOKENS
    assert 0 < KILL_DECODE_AT < KILL_FRONTEND_AT < OUTPUT_TOKENS


async def test_the_frontend_that_serves_the_stream_is_killed_second() -> None:
    """Once, and not before its number of tokens."""
    answer: Any = SimpleNamespace(address="a:2")
    early = [(KILL_DECODE_AT - 1, 0), (KILL_FRONTEND_AT - 1, 1), (OUTPUT_TOKENS, 2)]
    for tokens, killed in early:
        assert await demo_faults._victim(MESH, answer, decodes(), tokens, killed) is None
    found = await demo_faults._victim(MESH, answer, decodes(), KILL_FRONTEND_AT, 1)
    assert found is not None and found.name == "frontend-1"


async def test_the_decode_replica_that_runs_the_answer_is_killed_first() -> None:
    """Without one none is killed, and the next token asks again."""
    answer: Any = SimpleNamespace(address="a:2")
    assert await demo_faults._victim(MESH, answer, decodes(), KILL_DECODE_AT, 0) is None
    busy = process("decode-1", "decode", "a:3")
    assert await demo_faults._victim(MESH, answer, decodes(busy), KILL_DECODE_AT, 0) is busy


def test_the_table_tells_each_kill_and_its_successor() -> None:
    """A decode replica's by the last attempt, a frontend's by the client's moves."""
    kills = [Kill("decode-0", "decode", 30, 0.0, 0.5), Kill("frontend-0", "frontend", 120, 0.0, 1.25)]
    attempts = [SimpleNamespace(decode_replica="decode-0"), SimpleNamespace(decode_replica="decode-1")]
    answer: Any = SimpleNamespace(
        moves=[SimpleNamespace(address="a:2"), SimpleNamespace(address="b:9")],
        finish=SimpleNamespace(explanation=SimpleNamespace(attempts=attempts)),
    )
    demo_faults._name_successors(kills, answer, MESH)
    assert [each.successor for each in kills] == ["decode-1", "frontend-1, b:9"]
    console = Console(width=100, record=True)
    console.print(demo_faults.kills_table(kills))
    shown = console.export_text()
    assert all(text in shown for text in ("30 tokens", "0.50 s", "120 tokens", "1.25 s", "frontend-1, b:9"))


@pytest.mark.parametrize(
    ("ids", "text", "kills", "is_proved", "told"),
    [
        ([1, 2, 3], "abc", 2, True, "3 of 3 are those of the undisturbed answer; 0 were lost."),
        ([1, 9, 3], "abc", 2, False, "2 of 3 are those of the undisturbed answer; 1 were lost."),
        ([1, 2], "ab", 2, False, "2 of 3"),
        ([1, 2, 3, 4], "abcd", 2, False, "3 of 3"),
        ([1, 2, 3], "ab", 2, False, "3 of 3"),
        ([1, 2, 3], "abc", 1, False, "Only 1 of 2 processes were killed"),
    ],
)
def test_only_an_equal_answer_behind_both_kills_proves_something(
    ids: list[int], text: str, kills: int, is_proved: bool, told: str
) -> None:
    """A demo that killed nothing has shown nothing."""
    quiet = SimpleNamespace(ids=[1, 2, 3], text="abc")
    sentence, found = demo_faults.judged(quiet, SimpleNamespace(ids=ids, text=text), kills)
    assert found is is_proved and told in sentence


def test_an_answer_without_an_end_names_no_successor() -> None:
    """The stream broke."""
    kills = [Kill("decode-0", "decode", 30, 0.0)]
    demo_faults._name_successors(kills, SimpleNamespace(moves=[], finish=None), MESH)  # type: ignore[arg-type]
    assert kills[0].successor == ""
