"""Code samples of the documents parse, and name commands, targets and options that exist.

`tests/integration/docs` runs them.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.core import TyperGroup

from kvmesh.cli.main import app
from kvmesh.cli.replay import PROGRAM
from kvmesh.config import ROOT, parse
from tests.samples import LANGUAGES, NOT_RUN, Sample, exclusion, pages, samples

KVMESH = re.compile(r"(?:^|[\s(])(?:\.venv/bin/)?kvmesh ([^|)>#`]+)")
MAKE = re.compile(r"\bmake ((?:[a-z][a-z-]*|[A-Z]+=\S+)(?: (?:[a-z][a-z-]*|[A-Z]+=\S+))*)")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
ROLES = {"frontend", "router", "prefill", "decode", "engine"}
"""First words after the name of an image."""


def all_of(language: str) -> pytest.MarkDecorator:
    """Return the mark that gives a test every block in `language`."""
    return pytest.mark.parametrize("sample", samples(language), ids=str)


def make_targets() -> set[str]:
    """Return the targets that `make help` explains."""
    return set(re.findall(r"(?m)^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8")))


@cache
def command_line() -> TyperGroup:
    """Return the parser of `kvmesh`. To make it takes half a second."""
    found = typer.main.get_command(app)
    assert isinstance(found, TyperGroup)
    return found


def parser_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the parser of the subcommand that `words` name, and the words behind its name."""
    command: Any = command_line()  # the types of typer's own copy of click are private
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"kvmesh has no command {name}: it has {sorted(command.commands)}"
        command = command.commands[name]
        if name == "replay":
            command = typer.main.get_command(importlib.import_module(f"{PROGRAM}.main").app)
    return command, words


def inline_commands() -> Iterator[tuple[str, str]]:
    """Yield the page and text of every inline code span."""
    for page in pages():
        text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"))
        for span in INLINE.findall(text):
            yield str(page.relative_to(ROOT)), span


def test_every_block_says_its_language() -> None:
    """A block without a language would be neither run nor parsed."""
    found = samples()
    assert {sample.language for sample in found} == set(LANGUAGES)
    assert [str(sample) for sample in found if sample.language not in LANGUAGES] == []


@all_of("sh")
def test_shell_blocks_parse(sample: Sample) -> None:
    """Bash reads the whole block; each line of it is one command."""
    done = subprocess.run(
        ["bash", "-n"], input=sample.text, capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for command in sample.commands():
        shlex.split(command, comments=True)


@all_of("sh")
def test_shell_blocks_name_what_exists(sample: Sample) -> None:
    """Targets of make, scripts of this repository, and commands of `kvmesh` with their options."""
    for command in sample.commands():
        bare = command.partition(" #")[0]
        for words in MAKE.findall(bare):
            assert {word for word in words.split() if "=" not in word} <= make_targets(), command
        for script in re.findall(r"(?:deploy|tools)/\S+", bare):
            path = ROOT / script
            if path.suffix:
                assert os.access(path, os.R_OK if path.suffix == ".yaml" else os.X_OK), command
        if bare.startswith("docker run"):
            continue  # the words behind the image's name are its entrypoint's
        for rest in KVMESH.findall(bare):
            parser, words = parser_of(shlex.split(rest))
            if not isinstance(parser, TyperGroup):
                parser.make_context("kvmesh", words)


@all_of("python")
def test_programs_are_whole_and_formatted(sample: Sample) -> None:
    """They import what they use, and look as the code of this repository does."""
    compile(sample.text, str(sample), "exec")
    for arguments in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, "--quiet", "--stdin-filename", "tests/sample.py", "-"],
            input=sample.text,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@all_of("toml")
def test_configurations_are_accepted(sample: Sample) -> None:
    """By the parser that every process reads `kvmesh.toml` with."""
    parse(sample.text)


@all_of("json")
def test_data_are_json_lines(sample: Sample) -> None:
    """One value a line."""
    for line in sample.text.splitlines():
        msgspec.json.decode(line)


def test_every_exclusion_is_of_a_command_that_is_there() -> None:
    """An exclusion of nothing would later let a command go unrun."""
    used = {exclusion(command) for sample in samples("sh") for command in sample.commands()}
    assert NOT_RUN.keys() - used == set()


def test_inline_commands_exist() -> None:
    """Sentences name targets of make, and commands and options of `kvmesh`, that exist."""
    targets, commands = make_targets(), command_line().commands
    unknown = []
    for page, span in inline_commands():
        for words in MAKE.findall(span) if span.startswith("make ") else ():
            unknown += [(page, span) for word in words.split() if "=" not in word and word not in targets]
        words = span.split()
        if len(words) < 2 or words[0] != "kvmesh" or words[1] in ROLES or not words[1].isalpha():
            continue
        if words[1] not in commands:
            unknown.append((page, span))
            continue
        nested = [word for word in words[1:3] if word.isalpha()]
        parser, _ = parser_of(nested if words[1] == "tenants" else nested[:1])
        known = {option for each in parser.params for option in each.opts}
        unknown += [
            (page, span)
            for option in re.findall(r"--[a-z-]+", span)
            if not isinstance(parser, TyperGroup) and option not in known
        ]
    assert unknown == []


def test_a_block_that_is_never_closed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the page would be a sample, and no sample behind it would be run."""
    page = tmp_path / "page.md"
    page.write_text("```sh\ntrue\n")
    monkeypatch.setattr("tests.samples.ROOT", tmp_path)
    monkeypatch.setattr("tests.samples.pages", lambda: [page])
    with pytest.raises(AssertionError, match=r"page\.md:1: the block is never closed"):
        samples()
