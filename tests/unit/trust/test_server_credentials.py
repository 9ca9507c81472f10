"""The configurations that gRPC gets at new connections: only new ones, and none while a handshake may take the last."""

from __future__ import annotations

import pytest

from kvmesh.clock import VirtualClock
from kvmesh.trust import server_credentials
from kvmesh.trust.server_credentials import PAUSE_S, REFRESH_S, ServerMaterial


def test_each_answer_waits_for_the_handshake_of_the_last_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind an answer that waited itself: its handshake begins after the pause."""
    clock, pauses = VirtualClock(), list[float]()
    material = [ServerMaterial(b"key", b"first", b"authority")]

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(seconds)

    monkeypatch.setattr("time.sleep", sleep)
    source = server_credentials._Source(lambda: material[0], clock)
    assert source() is None and not pauses
    for name in (b"second", b"third"):
        material[0] = ServerMaterial(b"key", name, b"authority")
        assert source() is not None
    assert pauses == pytest.approx([PAUSE_S, PAUSE_S])
    assert source() is None
    clock.advance(REFRESH_S)
    assert source() is not None
    assert pauses[2:] == [0.0]
    assert "b'key'" not in repr(material[0])
