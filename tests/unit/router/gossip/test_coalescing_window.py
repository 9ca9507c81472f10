"""When waiting gossip messages are written together."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.gossip.coalescing_window import COALESCE_S
from services.router.gossip.exchange import Exchange
from services.router.gossip.peer_routers import PeerRouters
from services.router.placement.policy import Dispatched, DispatchEvent, Finished, Started

STEPS = st.lists(
    st.tuples(st.sampled_from(("dispatch", "start", "finish", "write", "drop")), st.floats(0.0, 0.02)),
    max_size=40,
)


@settings(max_examples=30)
@given(STEPS)
def test_dispatches_go_at_once_and_other_messages_within_the_window(
    steps: list[tuple[str, float]],
) -> None:
    """An entry is due at once with a dispatch, else COALESCE_S after its first message. It has all messages in order."""
    exchange = Exchange("r0", "boot-0", PeerRouters("r0", "boot-0", print, lambda _: {}, lambda _: True))
    exchange.set_routers([("r0", "boot-0"), ("r1", "boot-1")], 0.0)
    assert exchange.next_entry(0.0) is not None  # the digest for the new router
    now_s, due_s, waiting = 0.0, inf, list[object]()
    for number, (what, pause_s) in enumerate(steps):
        now_s += pause_s
        request_id = f"{number:032x}"
        if what == "write" or (due_s <= now_s and what != "drop"):
            assert (exchange.due_s(now_s) <= now_s) == (due_s <= now_s)
            entry = exchange.next_entry(now_s)
            assert (list(entry.messages) if entry else []) == waiting
            due_s, waiting = inf, []
        elif what == "drop":
            exchange.drop(None)
            assert exchange.due_s(now_s) <= now_s, "the digest after a loss waits for nothing"
            assert exchange.next_entry(now_s) is not None
            due_s, waiting = inf, []
        else:
            events: dict[str, DispatchEvent] = {
                "dispatch": Dispatched("r0", request_id, "p0", (1,), 0.1, now_s, now_s + 60),
                "start": Started("r0", request_id, now_s),
                "finish": Finished("r0", request_id, now_s),
            }
            assert exchange.publish(events[what], now_s)
            waiting.append(events[what])
            due_s = min(due_s, now_s if what == "dispatch" else now_s + COALESCE_S)
        assert exchange.due_s(now_s) == due_s
