"""Phases of a run: each has a time limit, and its result is written before the next one begins."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

TOTAL_S_MAX: Final = 590.0
AGAIN_S: Final = 5.0


class OutOfTime(BaseException):
    """A phase took too long. Not an Exception: code inside of a phase that survives errors must not swallow it."""


class Phases:
    """Runs phases one after the other, and keeps their record in a file."""

    def __init__(self, file: Path, record: dict[str, Any], total_s: float = TOTAL_S_MAX) -> None:
        """`record`: what is known before the first phase; the phases add to it."""
        self._file = file
        self.record = {**record, "phases": {}}
        self._end_s = time.monotonic() + total_s
        self._write()

    def run(self, name: str, limit_s: float, work: Callable[[dict[str, Any]], None]) -> bool:
        """Run `work` with the result of the phase, a dictionary to fill. Return whether it passed.

        What `work` filled in before it failed or ran out of time stays. Ctrl-C ends the whole run.
        """
        limit_s = min(limit_s, self._end_s - time.monotonic())
        result: dict[str, Any] = {}
        state: dict[str, Any] = {"passed": False, "reason": "", "seconds": 0.0, "result": result}
        self.record["phases"][name] = state
        sys.stderr.write(f"{name}, at most {max(0.0, limit_s):.0f} s ... ")
        sys.stderr.flush()
        began_s = time.monotonic()
        try:
            if limit_s < 1.0:
                raise OutOfTime
            with _limited(limit_s):
                work(result)
            state["passed"] = True
        except OutOfTime:
            state["reason"] = f"not done within {max(0.0, limit_s):.0f} s"
        except Exception as error:  # noqa: BLE001  # the other phases still tell something
            state["reason"] = f"{type(error).__name__}: {error}"
        state["seconds"] = round(time.monotonic() - began_s, 1)
        self._write()
        sys.stderr.write(
            f"{'passed' if state['passed'] else 'FAILED: ' + state['reason']} ({state['seconds']} s)\n"
        )
        return bool(state["passed"])

    def _write(self) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.record, indent=1), encoding="utf-8")
        part.replace(self._file)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread after `seconds`, and again each AGAIN_S: a task may have taken the first one."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
