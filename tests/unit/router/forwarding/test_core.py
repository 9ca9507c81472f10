"""The core takes messages of frontends, and dispatches once for each."""

from __future__ import annotations

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import Desk


def test_the_core_dispatches_once_per_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """AttachService calls `after_event` after each message and at the end.

    A session that did so too would dispatch twice.
    """
    desk = Desk()
    passes: list[float] = []
    monkeypatch.setattr(desk.core.dispatcher, "dispatch_waiting", passes.append)
    desk.session.on_request(pb.AttachRequest(cancels=[pb.Cancel(slot=1)]), 70.0)
    desk.core.after_event()
    assert passes == [70.0]
    desk.session.on_closed(80.0)
    desk.core.after_event()
    assert passes == [70.0, 80.0]
