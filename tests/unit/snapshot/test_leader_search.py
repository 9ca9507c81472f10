"""The search for the leader: every control process gets its turn, hints are followed, and nothing is dialled in a loop."""

from __future__ import annotations

import random

from kvmesh.snapshot.leader_search import BACKOFF_MAX_S, BACKOFF_MIN_S, HOPS_MAX, STABLE_S, LeaderSearch

ADDRESSES = [f"10.0.0.{number}:7000" for number in range(3)]


def test_without_a_control_plane_nothing_is_dialled() -> None:
    """An empty list ends the search, also after a list."""
    search = LeaderSearch(lambda: 0.0)
    assert search.next_address() == ""
    search.take(ADDRESSES)
    assert search.next_address()
    search.take([])
    assert search.next_address() == ""


def test_every_process_gets_its_turn_and_the_pause_grows_to_its_bound() -> None:
    """Failures in a row go round the list, with 0.5 to 1 times a pause that doubles."""
    search, now_s = LeaderSearch(random.Random(5).random), 100.0
    search.take(ADDRESSES)
    seen = []
    for number in range(9):
        seen.append(search.next_address())
        search.on_lost(now_s, 0.0)
        pause_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2**number)
        assert pause_s / 2 <= search.next_s - now_s <= pause_s
        now_s = search.next_s
    assert set(seen[:3]) == set(ADDRESSES) and seen[:3] == seen[3:6] == seen[6:]


def test_a_leader_that_is_named_is_dialled_at_once() -> None:
    """Also an address that has no lease; when it fails, the list continues."""
    search = LeaderSearch(lambda: 0.0)
    search.take(ADDRESSES)
    first = search.next_address()
    search.on_redirected("10.9.9.9:1", 5.0)
    assert search.next_address() == "10.9.9.9:1" and search.next_s <= 5.0
    search.on_lost(5.0, 0.0)
    assert search.next_address() == first and search.next_s > 5.0


def test_processes_that_name_each_other_cause_no_busy_loop() -> None:
    """After HOPS_MAX hints the receiver pauses as after a failure, and longer each time."""
    search, now_s, dials = LeaderSearch(lambda: 0.0), 0.0, 0
    search.take(ADDRESSES[:2])
    while now_s < 60.0:
        address = search.next_address()
        dials += 1
        search.on_redirected(ADDRESSES[1] if address == ADDRESSES[0] else ADDRESSES[0], now_s)
        now_s = max(now_s, search.next_s)
    assert dials <= (HOPS_MAX + 1) * (60.0 / (BACKOFF_MAX_S / 2) + 6)


def test_an_unknown_leader_counts_as_a_failure() -> None:
    """During an election every process answers so."""
    search = LeaderSearch(lambda: 0.0)
    search.take(ADDRESSES)
    first = search.next_address()
    search.on_redirected("", 1.0)
    assert search.next_s > 1.0 and search.next_address() != first


def test_a_long_stream_resets_the_pause() -> None:
    """The pause is short again after a stream of STABLE_S, and stays long after shorter ones."""
    for led_s, longest_s in ((STABLE_S, BACKOFF_MIN_S), (STABLE_S / 2, BACKOFF_MAX_S)):
        search = LeaderSearch(lambda: 1.0)
        search.take(ADDRESSES)
        for _ in range(10):
            search.on_lost(0.0, 0.0)
        search.on_lost(0.0, led_s)
        assert search.next_s == longest_s


def test_receivers_begin_at_different_processes() -> None:
    """A mesh that starts does not dial one control process alone."""
    chance = random.Random(2)
    searches = [LeaderSearch(chance.random) for _ in range(30)]
    for search in searches:
        search.take(ADDRESSES)
    assert {search.next_address() for search in searches} == set(ADDRESSES)
