"""Failure detector of an engine. Pure.

An engine that is stopped or cut off breaks no connection. So two sources of heartbeats are watched:

- The server answers probes even while the model is busy. No answer at all for `SERVER_TIMEOUT_S` means that the server or
  the network is lost.
- The model reports its load each second, if it can. A model without a message for `MODEL_TIMEOUT_S` is lost, even if its
  server answers.

One slow answer is no loss: MISSED_PROBES probes in a row must be missed.
"""

from __future__ import annotations

from typing import Final

from kvmesh.failure_detector import FailureDetector

SERVER_TIMEOUT_S: Final = 3.0
MODEL_TIMEOUT_S: Final = 6.0
"""Longer than SERVER_TIMEOUT_S: behind a server that answers, a silent model may only be short of CPU."""

PROBE_AFTER_S: Final = 1.2
"""Silence of the server after which it is probed, longer than the time between two load reports."""

PROBE_TIMEOUT_S: Final = 0.75
"""Timeout of a probe. Two consecutive probes fit into SERVER_TIMEOUT_S."""

MISSED_PROBES: Final = 2
PROBE_PAUSE_S: Final = 1.0
"""Pause between two answered probes of an engine without load reports."""


class EngineLiveness:
    """Detects the loss of one engine. Call `check` every CHECK_INTERVAL_S.

    `is_lost`: True from a loss until `on_recovery`.
    """

    def __init__(self, now_s: float, *, has_load_report: bool) -> None:
        self.is_lost = False
        self._missed = 0
        """Missed probes since the last message."""
        self._server = FailureDetector(SERVER_TIMEOUT_S, now_s)
        self._model = FailureDetector(MODEL_TIMEOUT_S if has_load_report else float("inf"), now_s)

    def on_model(self, now_s: float) -> None:
        """Take a message of the model: a load report or an answer."""
        self.on_server(now_s)
        self._model.heartbeat(now_s)

    def on_server(self, now_s: float) -> None:
        """Take the answer of the server to a probe."""
        self._missed = 0
        self._server.heartbeat(now_s)

    def on_missed_probe(self) -> None:
        """Count a probe that was not answered in time."""
        self._missed += 1

    def on_recovery(self, now_s: float) -> None:
        """Note that the engine serves again."""
        self.is_lost = False
        self.on_model(now_s)

    def check(self, now_s: float) -> str:
        """Return the reason at the moment of a loss, otherwise an empty text."""
        lost = [detector for detector in (self._server, self._model) if detector.check(now_s)]
        if self._missed < MISSED_PROBES and self._server in lost:
            lost.remove(self._server)
        if self.is_lost or not lost:
            return ""
        self.is_lost = True
        source = "engine" if lost[0] is self._server else "model"
        return f"no message from the {source} for {lost[0].silent_s(now_s):.1f} s"

    def wants_probe(self, now_s: float) -> bool:
        """Return True if the server should be probed now."""
        return not self.is_lost and self._server.silent_s(now_s) >= PROBE_AFTER_S
