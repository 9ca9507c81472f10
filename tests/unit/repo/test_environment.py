"""`make setup` says how far it is, stays short without a terminal, and shows the output of pip only if pip fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import environment

NOISE = "WARNING: Location 'file:///opt/simple/idna/' is ignored: it is neither a file nor a directory."
LOCK = "# a comment\nattrs==26.1.0\nidna==3.19\nredis==7.0.1\n"
OUTPUT = [
    "Looking in indexes: https://pypi.org/simple",
    NOISE,
    "Collecting attrs==26.1.0 (from -r requirements.lock (line 2))",
    "  Downloading attrs-26.1.0-py3-none-any.whl (500 kB)",
    "Requirement already satisfied: idna==3.19 in ./lib (from -r requirements.lock (line 3)) (3.19)",
    "Processing /opt/wheels/redis-7.0.1-py3-none-any.whl (from -r requirements.lock (line 4))",
    "Downloading redis-7.0.1-py3-none-any.whl (1.5 MB)",
    "Installing collected packages: redis, attrs",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An environment with a pip that prints OUTPUT and fails if it is asked for a project."""
    pip = tmp_path / "venv" / "bin" / "pip"
    pip.parent.mkdir(parents=True)
    lines = "\n".join(OUTPUT)
    pip.write_text(
        f"#!/bin/sh\ncat <<'END'\n{lines}\nEND\ncase \"$*\" in *broken*) echo no room >&2; exit 3;; esac\n"
    )
    pip.chmod(0o755)
    (tmp_path / "packages.lock").write_text(LOCK)
    return tmp_path


def made(folder: Path, *options: str) -> int:
    """Run the tool in `folder`."""
    return environment.main([str(folder / "venv"), str(folder / "packages.lock"), *options])


def test_the_progress_counts_packages_and_downloads() -> None:
    """Packages of a local folder and those that are there already count, too."""
    shown = [environment.progress("\n".join(OUTPUT[:end]), 3) for end in range(len(OUTPUT) + 1)]
    assert shown[0] == "package 0 of 3, 0 MB downloaded"
    assert shown[3] == "package 1 of 3, 0 MB downloaded"
    assert shown[-2] == "package 3 of 3, 2 MB downloaded"
    assert shown[-1] == "installing 3 packages"


@given(st.lists(st.sampled_from(OUTPUT[:-1])))
def test_the_progress_never_exceeds_the_lock(lines: list[str]) -> None:
    """pip may name a package twice."""
    at = int(environment.progress("\n".join(lines), 3).split()[1])
    assert at == min(3, sum(line.startswith(("Collecting", "Requirement", "Processing")) for line in lines))


def test_a_setup_without_a_terminal_is_five_lines_at_most(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps, the size of the download beforehand and the size on disk afterwards; nothing of pip."""
    assert made(folder, "--project", str(folder), "--download", "about 2 MB") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert not err and len(lines) == 4
    assert lines[1].startswith("Step 2 of 3: 3 packages of ") and "about 2 MB to download" in lines[1]
    assert lines[-1].startswith("Done in ") and lines[-1].endswith("MB of disk.")
    assert NOISE not in out and NOISE in (folder / "venv" / environment.LOG).read_text()


def test_a_terminal_shows_one_line_that_is_removed(folder: Path) -> None:
    """The next step starts at an empty line."""

    class Terminal:
        def __init__(self) -> None:
            self.shown = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.shown += text
            return len(text)

        def flush(self) -> None:
            return None

    terminal = Terminal()
    screen = environment.Screen(terminal)  # type: ignore[arg-type]  # what it uses of a stream
    screen.show("package 1 of 3")
    screen.show("package 2 of 3")
    screen.clear()
    assert "\n" not in terminal.shown and terminal.shown.endswith("\r\x1b[K")
    assert [part.partition(",")[0] for part in terminal.shown.split("\r\x1b[K")] == [
        *("", "  package 1 of 3", "  package 2 of 3", "")
    ]


def test_a_pip_that_fails_is_shown_without_its_noise(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines of pip, its status and its log."""
    assert made(folder, "--project", "broken") == 1
    out, err = capsys.readouterr()
    assert "Done" not in out and NOISE not in err
    log = folder / "venv" / environment.LOG
    assert err.endswith(f"no room\npip ended with status 3; its output is in {log}.\n")


def test_a_python_without_venv_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian has the module in a package of its own."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert environment.main([str(folder / "other"), str(folder / "packages.lock")]) == 1
    assert capsys.readouterr().err.endswith("on Debian: apt-get install python3-venv.\n")


def test_a_file_with_two_names_takes_its_size_once(tmp_path: Path) -> None:
    """pip may link files."""
    (tmp_path / "one").write_bytes(bytes(1 << 20))
    once_mb = environment.size_mb(tmp_path)
    (tmp_path / "two").hardlink_to(tmp_path / "one")
    assert environment.size_mb(tmp_path) == once_mb > 1
