"""The child that checks a template: it never outlives its owner, and always says something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvmesh.models import template_check
from kvmesh.models.template_check import TemplateCheck

STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True)\n"
    "while True: signal.pause()"
)


def child(code: str) -> TemplateCheck:
    """Return a check whose child runs `code`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return TemplateCheck(subprocess.Popen([sys.executable, "-c", code], text=True, **pipes), "[]")  # type: ignore[call-overload]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_child_that_ignores_sigterm_is_ended_with_its_check() -> None:
    """And waited for, so that no zombie stays. Closing twice is fine."""
    check = child(STUBBORN)
    process = check._process
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    with pytest.raises(KeyError), check:
        raise KeyError
    assert process.returncode == -signal.SIGKILL and not is_alive(process.pid)
    check.close()


def test_a_child_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says how long it was waited for."""
    monkeypatch.setattr(template_check, "_WALL_S", 0.1)
    check = child(STUBBORN)
    assert check.result() == "it was not rendered in 0.1 s"
    assert not is_alive(check._process.pid)


def test_a_child_that_dies_is_told_by_its_status() -> None:
    """With the status of the process."""
    assert child("raise SystemExit(7)").result() == "rendering it ended the process with status 7"
    code = "import os, signal; os.kill(os.getpid(), signal.SIGVTALRM)"
    assert "more than 2 s of CPU time" in child(code).result()
