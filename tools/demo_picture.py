"""Writes docs/demo.svg: the end of `make demo` as a run of it printed it.

docs/demo.txt is the output of `COLUMNS=80 kvmesh demo`. `python tools/demo_picture.py --record` runs the demo and writes it
anew; without the option the picture is made of the recorded run, so that it is the same on every machine.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

DOCS: Final = Path(__file__).parent.parent / "docs"
RECORDED: Final = DOCS / "demo.txt"
PICTURE: Final = DOCS / "demo.svg"
COLUMNS: Final = 80
BEGIN: Final = "The same "
"""First words of the part that is shown: the answer whose processes are killed."""
TITLE: Final = re.compile(rf"^{BEGIN}.*$", re.MULTILINE)
KILL: Final = re.compile(r"^\[kill -9 of [\w-]+\]$", re.MULTILINE)
RESTART: Final = re.compile(
    r"(?:frontend|decode)-\d+ (?:ended by SIGKILL; it is started again|is ready again after [\d.]+ s)\.\n"
)
"""News of the supervisor in the middle of the text."""


def record() -> None:
    """Run the demo and keep its output. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        [Path(sys.executable).parent / "kvmesh", "demo"],
        env={**os.environ, "COLUMNS": str(COLUMNS)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    RECORDED.write_text(done.stdout, encoding="utf-8")


def shown(recorded: str) -> Text:
    """Return the part of the output that the picture has, with the colours of a terminal."""
    text = Text(RESTART.sub("", recorded[recorded.index(BEGIN) :]).rstrip())
    text.highlight_regex(TITLE, "cyan")
    text.highlight_regex(KILL, "bold red")
    return text


def picture() -> str:
    """Return the picture."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(shown(RECORDED.read_text(encoding="utf-8")), highlight=False)
    return console.export_svg(title="make demo", unique_id="demo")


if __name__ == "__main__":
    if "--record" in sys.argv[1:]:
        record()
    PICTURE.write_text(picture(), encoding="utf-8")
