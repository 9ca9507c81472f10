"""The tool that makes a machine seem busy: stops what a command started, lets it go on, and tells its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.integration.harness import ROOT

TOOL = ROOT / "tools" / "stalls.py"

# Ends when its child has stood still: a parent is told of that, and of nothing else here.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
_, status = os.waitpid(child.pid, os.WUNTRACED)
assert os.WIFSTOPPED(status), status
_, status = os.waitpid(child.pid, os.WCONTINUED)
assert os.WIFCONTINUED(status), status
child.kill()
child.wait()
sys.exit(7)
"""


def test_what_a_command_started_stands_still_and_goes_on(tmp_path: Path) -> None:
    """Its child is stopped and continued; the exit status is the command's."""
    ended = subprocess.run(
        [sys.executable, str(TOOL), sys.executable, "-c", PARENT], check=False, cwd=tmp_path, timeout=60
    )
    assert ended.returncode == 7
    assert " ms: python" in (tmp_path / ".kvmesh" / "stalls.log").read_text()
