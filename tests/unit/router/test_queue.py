"""The release queue against a sorted list."""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.router.queue import LOOK_AHEAD, ReleaseQueue, band_of, lane_of


@dataclass(eq=False)
class Item:
    name: int
    priority: int
    is_resumed: bool = False
    ticket: int = 0


def test_bands_are_strict_and_first_come_first_served_inside() -> None:
    """Under random adds, returns to the head and removals, the order is that of a plain list per band and lane."""
    for seed in range(50):
        rng = random.Random(seed)
        queue: ReleaseQueue[Item] = ReleaseQueue(1000)
        twin: dict[tuple[int, bool], list[Item]] = {}
        outside: list[Item] = []
        for name in range(300):
            kind = rng.random()
            if kind < 0.5:
                item = Item(name, rng.choice((-500, -1, 0, 0, 0, 7, 100, 400)), rng.random() < 0.3)
                queue.add(item)
                twin.setdefault(lane_of(item), []).append(item)
            elif kind < 0.6 and outside:
                item = outside.pop(rng.randrange(len(outside)))
                queue.add(item, at_head=True)
                twin.setdefault(lane_of(item), []).insert(0, item)
            elif any(twin.values()):
                band = rng.choice([band for band, items in twin.items() if items])
                item = rng.choice(twin[band]) if rng.random() < 0.5 else twin[band][0]
                twin[band].remove(item)
                assert queue.remove(item)
                assert not queue.remove(item)
                outside.append(item)
            expected = [item for band in sorted(twin, reverse=True) for item in twin[band]]
            assert list(queue) == expected, f"{seed=}"
            highest = [item for item in expected if band_of(item.priority) == band_of(expected[0].priority)]
            assert list(queue.heads()) == highest[:LOOK_AHEAD], f"{seed=}"
            assert len(queue) == len(expected)
            queue.assert_consistent()


def test_a_full_queue_says_so_and_still_takes_back() -> None:
    """The bound is for what is new."""
    queue: ReleaseQueue[Item] = ReleaseQueue(2)
    items = [Item(index, 0) for index in range(3)]
    queue.add(items[0])
    assert not queue.is_full()
    queue.add(items[1])
    assert queue.is_full()
    queue.add(items[2], at_head=True)
    assert list(queue) == [items[2], items[0], items[1]]


def test_resumed_ones_go_ahead_in_their_order_and_have_as_many_places() -> None:
    """Neither kind takes the places of the other."""
    queue: ReleaseQueue[Item] = ReleaseQueue(2)
    new = [Item(index, 0) for index in range(2)]
    resumed = [Item(index, 0, is_resumed=True) for index in range(2)]
    for item in (resumed[0], new[0], resumed[1]):
        queue.add(item)
    assert queue.is_full(is_resumed=True) and not queue.is_full()
    queue.add(new[1])
    assert queue.is_full() and len(queue) == 4
    assert list(queue) == [*resumed, *new]
