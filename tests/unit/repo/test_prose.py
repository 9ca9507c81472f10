"""The prose rule over the tree: few pronouns of persons, few free-relative openings, short sentences in documents."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType
from typing import Final

import pytest

from kvmesh.config import ROOT

TOOL: Final = ROOT / "tools" / "prose.py"

# The budget of the whole tree: findings per 1,000 words, and sentences over 25 words in documents.
BUDGET: Final = {"pronouns_per_1000": 0.5, "openings_per_1000": 0.5, "long": 0}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module
    spec.loader.exec_module(module)
    return module


prose = _load()


def kinds(path: str, text: str) -> list[tuple[int, str]]:
    """Return line and kind of every finding of a file at `path` with this text."""
    found = prose.count(prose.passages_of(path, text), document=path.endswith(".md")).findings
    return [(each.line, each.kind) for each in found]


def test_the_tree_keeps_to_the_budget() -> None:
    """`python tools/prose.py --show` prints every finding."""
    figures = prose.groups(prose.tree(["."]))["all"].figures()
    assert {name: figures[name] for name, most in BUDGET.items() if figures[name] > most} == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the request of somebody's tenant", 1),
        ("Who waits tells nobody.", 2),
        ("the one whose turn it is", 1),
        ("no one takes it", 1),
        ("she and he, him and his and her and hers", 6),
        ("whoever comes, everybody, anyone", 3),
        ("no client takes the one slot", 0),
        ("shell, the, this, here, history, whole, where", 0),
        ("who_waits, WhoWaits, kvmesh/who.py and is_nobody()", 0),
        ("they, it, its, them, we", 0),
    ],
)
def test_pronouns_of_persons(text: str, number: int) -> None:
    """Each pronoun counts, in any case and with an apostrophe; parts of names do not."""
    assert prose.pronouns_in(text) == number


@pytest.mark.parametrize(
    "sentence",
    [
        "Who waits longest.",
        "What is cached where.",
        "what is cached where",
        "**What** holds.",
        "What's cached.",
        "Whatever comes first.",
        "Whoever asks gets it.",
        "Whose turn it is.",
        "Which of them waits.",
        "Whichever is less.",
        "What is it?",
        "Of ten replicas one takes it.",
        "That the row exists is known.",
        "That which waits is counted.",
    ],
)
def test_openings(sentence: str) -> None:
    """A sentence that opens with a free relative."""
    assert prose.is_opening(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "The replica, which waits, is counted.",
        "Returns what is cached.",
        "That is why it waits.",
        "That request waits.",
        "That one waits.",
        "Of course it waits.",
        "of the tenant",
        "CODE is what it says.",
        "Whether it waits is known.",
        "What",
    ],
)
def test_no_openings(sentence: str) -> None:
    """The same words inside a sentence, and "That" before a noun or a verb."""
    assert not prose.is_opening(sentence)


def test_sentences_end_at_a_stop_before_a_capital() -> None:
    """Numbers, abbreviations and code spans do not end one; each has the line on which it begins."""
    text = "It takes 2.5 s, e.g. Redis does. `Which.of them`\nis one. Then\nWhat follows (it does). 3 more."
    found = list(prose.sentences(prose.Passage(7, text)))
    assert found == [
        (7, "It takes 2.5 s, e.g. Redis does."),
        (7, "CODE is one."),
        (8, "Then What follows (it does)."),
        (9, "3 more."),
    ]


def test_words_are_counted_as_a_reader_counts() -> None:
    """Code spans, addresses, numbers and paths are one word each, marks none."""
    text = prose.plain(
        "It is `a b c`, see [the page](docs/a.md) or https://a.b/c d: 1,000.5 - services/router, e.g. x_y."
    )
    assert prose.words_of(text) == (
        [
            "It",
            "is",
            "CODE",
            "see",
            "the",
            "page",
            "or",
            "CODE",
            "d",
            "1,000.5",
            "services/router",
            "e.g",
            "x_y",
        ]
    )


def test_prose_of_python() -> None:
    """Docstrings, attribute docstrings, comments, messages and f-strings count; names and short literals do not."""
    text = '''"""What it does.

`who` it is.
"""

LIMIT = 3
"""Of ten."""


def nobody(who: str) -> str:
    """Waits."""
    # Who waits
    # for nobody.
    names = ["who", "her", "what it is"]  # his
    raise ValueError(f"nobody waits for {names[0]} or {who}")
'''
    assert kinds("kvmesh/a.py", text) == [
        (1, "opening"),
        (7, "opening"),
        (12, "pronoun"),
        (12, "pronoun"),
        (12, "opening"),
        (14, "pronoun"),
        (15, "pronoun"),
    ]


def test_of_a_program_in_a_string_only_comments_count() -> None:
    """Its words would be names and values."""
    text = 'SCRIPT = """\nlocal who = ARGV[1]  -- who waits\nreturn nobody(who, her, his)\n"""\n'
    assert kinds("kvmesh/a.py", text) == [(2, "pronoun"), (2, "opening")]


def test_prose_of_documents() -> None:
    """Headings, items and cells are sentences of their own; fenced code and addresses are no prose."""
    text = """# Who is it?

- what it is
  for somebody
- [nobody](who/her.md) and `his`

```
Who is nobody
```

| a | `who|her` what |
|---|---|
| Of it | no one |
"""
    assert kinds("docs/a.md", text) == [
        (1, "pronoun"),
        (1, "opening"),
        (3, "pronoun"),
        (3, "opening"),
        (5, "pronoun"),
        (13, "opening"),
        (13, "pronoun"),
    ]


def test_only_documents_are_measured_for_length() -> None:
    """25 words are allowed, 26 are long; a list's items are apart."""
    allowed = " ".join(["word"] * 25)
    assert kinds("docs/a.md", f"{allowed}.\n\n- {allowed}\n- {allowed}\n") == []
    assert kinds("docs/a.md", f"First {allowed}.\n") == [(1, "long")]
    assert kinds("kvmesh/a.py", f'"""First {allowed}."""\n') == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("protos/a.proto", "// Who waits.\nmessage Who { string his = 1; }\n"),
        ("kvmesh/a.lua", "-- Who waits.\nlocal who = 'nobody -- his'\n"),
        ("deploy/a.sh", "# Who waits.\nwho='# his'; echo \"nobody # her\" ${her#his}\n"),
        ("deploy/a.yaml", "# Who waits.\nwho: her\n"),
        ("pyproject.toml", "# Who waits.\nwho = 'her'\n"),
        ("Makefile", "# Who waits.\nwho: her\n"),
        ("deploy/a", "#!/bin/sh\n# Who waits.\nwho\n"),
    ],
)
def test_of_other_files_comments_count(path: str, text: str) -> None:
    """Once each, at their line."""
    line = 1 + text.startswith("#!")
    assert kinds(path, text) == [(line, "pronoun"), (line, "opening")]


def test_generated_and_other_files_have_no_prose() -> None:
    """Stubs, locks and data are left out."""
    paths = ("kvmesh/a_pb2.py", "kvmesh/a_pb2_grpc.pyi", "requirements.lock", "a.json", "LICENSE")
    assert [prose.passages_of(path, "# Who waits.") for path in paths] == [None] * 5


def test_command_prints_table_findings_and_json() -> None:
    """All with exit status 0."""
    page = "docs/glossary.md" if (ROOT / "docs" / "glossary.md").exists() else "README.md"
    command = [sys.executable, str(TOOL)]
    shown = subprocess.run(
        [*command, "--show", page], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert "openings" in shown
    answer = subprocess.run(
        [*command, "--json", page], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert json.loads(answer)["files"][page]["words"] > 0
