"""Makes a Python environment with locked packages and shows how far it is: `python tools/environment.py FOLDER LOCK`.

Runs before any package is installed, so it needs the standard library alone. pip writes to FOLDER/setup.log. Its last lines
are shown if it fails. On a terminal the last line is renewed; elsewhere each step is one line.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TextIO

LOG: Final = "setup.log"
POLL_S: Final = 0.2
TAIL_LINES: Final = 20

_FOUND: Final = re.compile(r"^(?:Collecting|Processing|Requirement already satisfied:) ", re.MULTILINE)
_FETCHED: Final = re.compile(r"^ *Downloading [^ ]+ \(([0-9.]+) (kB|MB)\)", re.MULTILINE)
_NOISE: Final = re.compile(r"^(?:WARNING|DEPRECATION|\[notice\])")
_MB: Final = {"kB": 1e-3, "MB": 1.0}


class SetupFailed(RuntimeError):
    """A step failed. The text has the last lines of its output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environment, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the environment")
    parser.add_argument("lock", type=Path, help="file with a line NAME==VERSION for each package")
    parser.add_argument("--project", type=Path, help="install the project of this folder, too, to be edited")
    parser.add_argument("--download", default="", help="size of the downloads in words")
    options = parser.parse_args(arguments)
    steps = 3 if options.project else 2
    began_s = time.monotonic()
    try:
        print(f"Step 1 of {steps}: environment {options.folder}.", flush=True)
        make(options.folder)
        screen = Screen(sys.stdout)
        count = len(pins(options.lock.read_text(encoding="utf-8")))
        size = f", {options.download} to download unless pip has them" if options.download else ""
        print(f"Step 2 of {steps}: {count} packages of {options.lock}{size}.", flush=True)
        install(options.folder, ["-r", str(options.lock)], lambda text: screen.show(progress(text, count)))
        screen.clear()
        if options.project:
            print(f"Step 3 of {steps}: kvmesh itself.", flush=True)
            own = ["--no-deps", "--no-build-isolation", "-e", str(options.project)]
            install(options.folder, own, lambda _: None)
    except SetupFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    took_s = time.monotonic() - began_s
    print(
        f"Done in {took_s:.0f} s: {options.folder} takes {size_mb(options.folder):,.0f} MB of disk.",
        flush=True,
    )
    return 0


def pins(lock: str) -> list[str]:
    """Return the pins of a lock: its lines without comments."""
    return [line for line in map(str.strip, lock.splitlines()) if line and not line.startswith("#")]


def progress(text: str, count: int) -> str:
    """Return how far pip is, from its output so far, with `count` packages to install."""
    if "Installing collected packages:" in text:
        return f"installing {count} packages"
    fetched_mb = sum(float(number) * _MB[unit] for number, unit in _FETCHED.findall(text))
    return f"package {min(count, len(_FOUND.findall(text)))} of {count}, {fetched_mb:.0f} MB downloaded"


def size_mb(folder: Path) -> float:
    """Return the size of `folder` on disk. A file with several names counts once."""
    blocks = {}
    for parent, _, files in os.walk(folder):
        for name in files:
            found = (Path(parent) / name).lstat()
            blocks[found.st_dev, found.st_ino] = found.st_blocks
    return sum(blocks.values()) * 512 / 1e6


def make(folder: Path) -> None:
    """Make the environment if it has no pip. Raises SetupFailed."""
    if not (folder / "bin" / "pip").exists():
        done = subprocess.run(
            [sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SetupFailed(
                f"{done.stdout}{done.stderr}"
                "Python's venv module is missing or does not work; on Debian: apt-get install python3-venv."
            )


def install(folder: Path, what: Sequence[str], on_output: Callable[[str], None]) -> None:
    """Let pip install `what`, and give all of its output so far to `on_output`. Raises SetupFailed."""
    log = folder / LOG
    pip = [str(folder / "bin" / "pip"), "install", "--no-color", "--disable-pip-version-check", "--no-input"]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*pip, "--progress-bar", "off", *what], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while True:
                try:
                    status = child.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    on_output(log.read_text(encoding="utf-8", errors="replace"))
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join([line for line in lines if not _NOISE.match(line)][-TAIL_LINES:])
        raise SetupFailed(f"{tail}\npip ended with status {status}; its output is in {log}.")


class Screen:
    """The last line of a terminal. Writes nothing elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = ""
        self._began_s = time.monotonic()

    def show(self, text: str) -> None:
        """Show `text` and the time so far in place of the line before."""
        if self._out.isatty():
            self._shown = f"  {text}, {time.monotonic() - self._began_s:.0f} s"
            self._out.write(f"\r\x1b[K{self._shown}")
            self._out.flush()

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted. The next run goes on where this one stopped.\n")
        sys.exit(130)
