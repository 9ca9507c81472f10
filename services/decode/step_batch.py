"""Step batching: coalesces the tokens of one engine step into one step frame. Pure.

One engine step arrives as one message per slot, spread over milliseconds. A frame is flushed when every live slot has
reported. It is flushed at the latest half a measured step, at most `max_s`, after the step's first report: the coalescing
window. A longer window would delay the first slot without gain: after half a step a straggler is as likely to belong to the
next step.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

SMOOTHING: Final = 0.1
STEP_S_MAX: Final = 5.0
"""A longer interval is a pause (admissions, transfers), not a step."""
STEP_FRESH_S: Final = 2.0
"""An older measurement belongs to another batch. A stale one that refuses every submit could never be corrected."""


class StepBatch(Generic[Key]):
    """Collects the reports of one step.

    INVARIANT: reported is a subset of live. A slot joins with its first token and leaves when its engine call ends.
    """

    __slots__ = ("_first_s", "_leader", "_leader_s", "_live", "_max_s", "_reported", "_stepped_s", "step_s")

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._live: set[Key] = set()
        self._reported: dict[Key, None] = {}
        self._first_s = 0.0
        self._leader: Key | None = None
        """The slot by which the step is measured; all slots of a batch advance together."""
        self._leader_s = 0.0
        self.step_s = 0.0
        """Smoothed seconds of a step. 0: not measured yet."""
        self._stepped_s = float("-inf")
        """Time of the last measurement."""

    @property
    def live_count(self) -> int:
        """Slots that report each step."""
        return len(self._live)

    def join(self, key: Key) -> None:
        """Expect reports of `key` from the next step on."""
        self._live.add(key)

    def leave(self, key: Key) -> None:
        """Expect no more reports of `key`; its collected report is dropped. Unknown keys are ignored."""
        self._live.discard(key)
        self._reported.pop(key, None)
        if key == self._leader:
            self._leader = None

    def starts_step(self, key: Key) -> bool:
        """True if a report of `key` would belong to a later step than the collected reports: flush those first."""
        return key in self._reported

    def report(self, key: Key, now_s: float, tokens: int = 1, *, is_measured: bool = True) -> None:
        """Collect a report of `key` with `tokens` tokens. `is_measured`: the step may be measured by it."""
        if not self._reported:
            self._first_s = now_s
        self._reported[key] = None
        if not is_measured:
            return
        if self._leader is None:
            self._leader, self._leader_s = key, now_s
        elif key == self._leader:
            step_s, self._leader_s = (now_s - self._leader_s) / tokens, now_s
            if step_s < STEP_S_MAX:
                self.step_s += (step_s - self.step_s) * (SMOOTHING if self.step_s else 1.0)
                self._stepped_s = now_s

    def fresh_step_s(self, now_s: float) -> float:
        """Return the smoothed seconds of a step if it was measured within STEP_FRESH_S. 0: unknown."""
        return self.step_s if now_s - self._stepped_s <= STEP_FRESH_S else 0.0

    def is_complete(self) -> bool:
        """True if every live slot has reported and at least one report is collected."""
        return bool(self._reported) and len(self._reported) >= len(self._live)

    def due_s(self) -> float | None:
        """Return the flush time of the collected reports, or None without one."""
        if not self._reported:
            return None
        wait_s = min(self._max_s, self.step_s / 2) if self.step_s else self._max_s
        return self._first_s + wait_s

    def take(self) -> list[Key]:
        """Return the slots that reported, in that order, and reset."""
        keys = list(self._reported)
        self._reported.clear()
        return keys
