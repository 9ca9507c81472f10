"""The order of the prefill queue."""

from __future__ import annotations

import random

import pytest

from services.prefill.queue import PrefillQueue
from services.prefill.slot import Slot


def slot(
    name: str, *, priority: int = 0, resumed: bool = False, shadow: bool = False, tokens: int = 8
) -> Slot:
    """Return a queued slot."""
    return Slot(name, 1, 0, tokens, 1, priority, shadow, resumed, 0.0, 1e9, 0.0, "", None)


def drained(queue: PrefillQueue) -> list[str]:
    """Take everything out and return the names in order."""
    names = []
    while (head := queue.head()) is not None:
        names.append(head.request_id)
        queue.remove(head)
    return names


def test_bands_go_first_then_resumed_then_first_come() -> None:
    """Higher priority first, resumed at the head of their band, shadows behind all."""
    queue = PrefillQueue(16)
    for one in (
        slot("late", priority=-5),
        slot("shadow", priority=100, shadow=True),
        slot("a"),
        slot("b"),
        slot("resumed", resumed=True),
        slot("high", priority=5),
    ):
        queue.push(one)
    assert drained(queue) == ["high", "resumed", "a", "b", "late", "shadow"]


def test_full_queue_refuses() -> None:
    """The bound holds, and a place is free again when one leaves."""
    queue = PrefillQueue(2)
    first = slot("a")
    queue.push(first)
    queue.push(slot("b"))
    assert queue.is_full()
    with pytest.raises(ValueError, match="2/2"):
        queue.push(slot("c"))
    queue.remove(first)
    queue.remove(first)
    assert not queue.is_full() and queue.tokens == 8


@pytest.mark.parametrize("seed", range(10))
def test_queue_agrees_with_a_sorted_list(seed: int) -> None:
    """Under random pushes and removals the head is always the smallest, and the heap does not grow with the dead."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    queue = PrefillQueue(50)
    twin: list[tuple[tuple[bool, int, bool, int], Slot]] = []
    for arrival in range(3000):
        if rng.random() < 0.5 and not queue.is_full():
            one = slot(str(arrival), priority=rng.randrange(3), resumed=rng.random() < 0.2, tokens=arrival)
            queue.push(one)
            twin.append(((False, -one.priority, not one.is_resumed, arrival), one))
        elif twin:
            entry = rng.choice(twin) if rng.random() < 0.7 else min(twin, key=lambda both: both[0])
            twin.remove(entry)
            queue.remove(entry[1])
        assert queue.head() is (min(twin, key=lambda both: both[0])[1] if twin else None)
        assert len(queue) == len(twin) and queue.tokens == sum(one.prompt_tokens for _, one in twin)
    assert len(queue._heap) <= 64 + 4 * 51 + 1
