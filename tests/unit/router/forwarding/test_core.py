"""The session of an attached frontend applies messages; the shell around it lets the relay act, once for each."""

from __future__ import annotations

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import Desk


def test_the_relay_releases_once_per_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """AttachService calls `after_event` behind each message and at the end; a session that does so too releases twice."""
    desk = Desk()
    passes: list[float] = []
    monkeypatch.setattr(desk.core.dispatcher, "dispatch_waiting", passes.append)
    desk.session.on_request(pb.AttachRequest(cancels=[pb.Cancel(slot=1)]), 70.0)
    desk.core.after_event()
    assert passes == [70.0]
    desk.session.on_closed(80.0)
    desk.core.after_event()
    assert passes == [70.0, 80.0]
