"""Counts what the prose rule forbids in docstrings, comments, messages and documents.

    .venv/bin/python tools/prose.py [--json] [--worst N] [--show] [PATHS]

Three things are counted: pronouns of persons, sentences that open with a free relative ("What is cached ...", "Of ten
replicas ..."), and in documents sentences longer than 25 words. The figures are per file, per top-level directory and over
the tree. --show prints every finding with its line; --worst N keeps the N files with the most findings. Without PATHS all
tracked files are read. The exit status is 0: tests/unit/repo/test_prose.py holds the budget.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

PRONOUN: Final = "pronoun"
OPENING: Final = "opening"
LONG: Final = "long"

PRONOUNS: Final = frozenset(
    {"who", "whom", "whose", "whoever", "whomever", "nobody", "somebody", "anybody", "everybody"}
    | {"everyone", "someone", "anyone", "he", "she", "him", "his", "her", "hers", "himself", "herself"}
)
OPENINGS: Final = frozenset(
    {"who", "whom", "whose", "whoever", "whomever", "what", "whatever", "which", "whichever"}
)
CLAUSE: Final = frozenset(
    {"a", "all", "an", "any", "each", "every", "it", "its", "no", "nothing", "some", "the", "their"}
    | {"there", "these", "they", "this", "those", "what", "which"}
)
"""A sentence that opens with "That" and one of these has a clause for its subject; "That is why" has none."""

LONG_WORDS: Final = 25
LITERAL_WORDS: Final = 4
"""A string literal with fewer words is a name, a key or a label."""

GENERATED: Final = re.compile(r"_pb2(_grpc)?\.pyi?$")
SAMPLES: Final = frozenset({"tests/unit/repo/test_prose.py"})
"""Files that quote what is forbidden."""

CODE: Final = "CODE"
"""Stands for a code span or an address, which counts as one word."""

WORD: Final = re.compile(r"\w+(?:[-'’.,/:@=+%*]+\w+)*")
SPAN: Final = re.compile(r"``[^`]+``|`[^`]+`|\b[a-z]+://[^\s)>\]]+")
LINK: Final = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
STOP: Final = re.compile(r"(?<=[.!?])[\"'”’)\]*]*\s+(?=[\"'“‘(\[*]*[A-Z0-9])")
ABBREVIATED: Final = re.compile(r"\b(?:e\.g|i\.e|vs|cf|No)\.$")
ITEM: Final = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
SCRIPT: Final = re.compile(
    r"(?m)^\s*(?:local|import|from|def|async|class|return|function|if|for|while|end|set|echo|exec|export)\b.*[\w(){}:;\"'\]]$"
)
SCRIPT_COMMENT: Final = re.compile(r"(?:^|(?<=\s))(?:--|#)(?!\!)[-#]*")
DIRECTIVE: Final = re.compile(r"^(?:!|\s*(?:noqa|type:|pragma|fmt:|mypy:|ruff:|shellcheck|syntax=|buf:lint))")


@dataclass(frozen=True)
class Passage:
    """A run of sentences, from `line` on; its newlines are those of the file."""

    line: int
    text: str


@dataclass(frozen=True)
class Finding:
    """A sentence that breaks the rule, and how: PRONOUN, OPENING or LONG."""

    line: int
    kind: str
    sentence: str


@dataclass
class Count:
    """Figures of a file or of several."""

    words: int = 0
    pronouns: int = 0
    openings: int = 0
    long: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Count) -> None:
        """Add the figures of `other`, without its findings."""
        self.words += other.words
        self.pronouns += other.pronouns
        self.openings += other.openings
        self.long += other.long

    def rate(self, number: int) -> float:
        """Return `number` per 1,000 words."""
        return 1000 * number / self.words if self.words else 0.0

    def figures(self) -> dict[str, float]:
        """Return the row of the table by names."""
        return {
            "words": self.words,
            "pronouns": self.pronouns,
            "pronouns_per_1000": round(self.rate(self.pronouns), 2),
            "openings": self.openings,
            "openings_per_1000": round(self.rate(self.openings), 2),
            "long": self.long,
        }


def words_of(text: str) -> list[str]:
    """Return the words of `text`; a code span, an address, a path and a number are one word each."""
    return [word for word in WORD.findall(text) if any(letter.isalnum() for letter in word)]


def pronouns_in(text: str) -> int:
    """Count pronouns of persons; a possessive is one, and so are "no" and "one" together."""
    found = 0
    before = ""
    for word in words_of(text):
        bare = re.sub(r"['’]\w+$", "", word).lower()
        found += bare in PRONOUNS or (before == "no" and bare == "one")
        before = bare
    return found


def is_opening(sentence: str) -> bool:
    """Say whether `sentence` opens with a free relative, with "Of ..." or with "That <clause>"."""
    words = words_of(sentence)[:2]
    if len(words) < 2:
        return False
    first, second = words[0], words[1].lower()
    if re.sub(r"['’]\w+$", "", first).lower() in OPENINGS:
        return True
    if first == "Of":
        return second != "course"
    return first == "That" and second in CLAUSE


def plain(text: str) -> str:
    """Return `text` with code spans and addresses as one word each and links without targets, lines kept."""
    text = LINK.sub(lambda found: found[1] + "\n" * (found[0].count("\n") - found[1].count("\n")), text)
    return SPAN.sub(lambda found: CODE + "\n" * found[0].count("\n"), text)


def sentences(passage: Passage) -> Iterator[tuple[int, str]]:
    """Yield every sentence of a passage with its line."""
    text = plain(passage.text)
    start = 0
    for stop in [*STOP.finditer(text), None]:
        if stop and ABBREVIATED.search(text[start : stop.start()]):
            continue
        sentence = text[start : stop.start()] if stop else text[start:]
        lead = len(sentence) - len(sentence.lstrip())
        if words_of(sentence):
            yield passage.line + text[: start + lead].count("\n"), " ".join(sentence.split())
        start = stop.end() if stop else len(text)


def count(passages: Iterable[Passage], *, document: bool = False) -> Count:
    """Return the figures of `passages`; only a document's sentences are measured for length."""
    total = Count()
    for passage in passages:
        for line, sentence in sentences(passage):
            length, pronouns, opening = len(words_of(sentence)), pronouns_in(sentence), is_opening(sentence)
            too_long = document and length > LONG_WORDS
            total.add(Count(length, pronouns, int(opening), int(too_long)))
            kinds = [PRONOUN] * pronouns + [OPENING] * opening + [LONG] * too_long
            total.findings += [Finding(line, kind, sentence) for kind in kinds]
    return total


def paragraphs(line: int, text: str) -> list[Passage]:
    """Split `text` at empty lines and before items of lists; drop the marks of the items."""
    found: list[Passage] = []
    fresh = True
    for number, row in enumerate(text.split("\n"), line):
        item = ITEM.match(row)
        if not row.strip():
            fresh = True
        elif fresh or item:
            found.append(Passage(number, row[item.end() :] if item else row))
            fresh = False
        else:
            found[-1] = Passage(found[-1].line, f"{found[-1].text}\n{row}")
    return found


def comment_lines(text: str, mark: str) -> Iterator[tuple[int, int, str]]:
    """Yield line, column and text of each comment that runs from `mark` to the end of its line, outside quotes."""
    opener = re.compile(rf"(?:^|(?<=[\s;{{}}])){re.escape(mark)}")
    for number, row in enumerate(text.split("\n"), 1):
        for found in opener.finditer(row):
            before = row[: found.start()]
            if before.count('"') % 2 or (before.count("'") % 2 and before.strip()):
                continue
            yield number, found.start(), row[found.end() :]
            break


def joined(comments: Iterable[tuple[int, int, str]]) -> list[Passage]:
    """Make passages of comments: those of consecutive lines in one column belong together."""
    blocks: list[tuple[int, list[str], int]] = []
    for line, column, raw in comments:
        text = raw.lstrip("#/-!") if not DIRECTIVE.match(raw) else ""
        if blocks and blocks[-1][2] == column and line == blocks[-1][0] + len(blocks[-1][1]):
            blocks[-1][1].append(text)
        else:
            blocks.append((line, [text], column))
    return [passage for line, rows, _ in blocks for passage in paragraphs(line, "\n".join(rows))]


def python_passages(source: str) -> list[Passage]:
    """Return docstrings, other bare strings, comments, and literals of LITERAL_WORDS words or more."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = joined(
        (token.start[0], token.start[1], token.string[1:])
        for token in tokens
        if token.type == tokenize.COMMENT
    )
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found += paragraphs(node.lineno, node.value.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += literal(node.lineno, node.value)
        elif isinstance(node, ast.JoinedStr):
            found += literal(node.lineno, "".join(_piece(part) for part in node.values))
            waiting += [part for part in node.values if isinstance(part, ast.FormattedValue)]
        else:
            waiting += ast.iter_child_nodes(node)
    return sorted(found, key=lambda passage: passage.line)


def _piece(part: ast.expr) -> str:
    """Return a part of an f-string as text; a value is one word."""
    return str(part.value) if isinstance(part, ast.Constant) else CODE


def literal(line: int, text: str) -> list[Passage]:
    """Return a message of LITERAL_WORDS words or more; of a program in a string, its comments."""
    if "\n" in text and SCRIPT.search(text):
        rows = enumerate(text.split("\n"), line)
        marks = ((number, row, SCRIPT_COMMENT.search(row)) for number, row in rows)
        return joined((number, mark.start(), row[mark.end() :]) for number, row, mark in marks if mark)
    return paragraphs(line, text) if len(words_of(text)) >= LITERAL_WORDS else []


def markdown_passages(text: str) -> list[Passage]:
    """Return a document's prose: no fenced code, no comments; headings, items and cells of tables stand alone."""
    found: list[Passage] = []
    run: list[tuple[int, str]] = []
    fenced = False

    def end() -> None:
        if run:
            found.extend(paragraphs(run[0][0], "\n".join(row for _, row in run)))
            run.clear()

    text = re.sub(r"<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL)
    for number, raw in enumerate(text.split("\n"), 1):
        row = re.sub(r"^\s*>\s?", "", raw)
        if row.lstrip().startswith(("```", "~~~")):
            end()
            fenced = not fenced
        elif fenced:
            continue
        elif row.lstrip().startswith("|"):
            end()
            found += [
                Passage(number, cell) for cell in re.split(r"(?<!\\)\|", _masked(row)) if words_of(cell)
            ]
        elif row.startswith("#"):
            end()
            found.append(Passage(number, row.lstrip("# ")))
        else:
            run.append((number, row))
    end()
    return found


def _masked(row: str) -> str:
    """Return a row of a table with its code spans replaced: they may hold bars."""
    return re.sub(r"`[^`]+`", CODE, row)


def passages_of(path: str, text: str) -> list[Passage] | None:
    """Return the prose of the file at `path`, or None for a kind of file without prose."""
    name, suffix = Path(path).name, Path(path).suffix
    if GENERATED.search(name) or path in SAMPLES:
        return None
    if suffix == ".py":
        return python_passages(text)
    if suffix == ".md":
        return markdown_passages(text)
    if suffix == ".proto":
        return joined(comment_lines(text, "//"))
    if suffix == ".lua":
        return joined(comment_lines(text, "--"))
    if (
        suffix in {".sh", ".toml", ".yaml", ".yml"}
        or name in {"Makefile", "Dockerfile"}
        or _is_shell(suffix, text)
    ):
        return joined(comment_lines(text, "#"))
    return None


def _is_shell(suffix: str, text: str) -> bool:
    return not suffix and re.match(r"#!\S*/(?:env )?(?:ba)?sh\b", text) is not None


def tree(paths: Sequence[str], root: Path = ROOT) -> dict[str, Count]:
    """Return the figures of every tracked file under `paths` that has prose."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], check=True, capture_output=True, text=True, cwd=root
    ).stdout
    found: dict[str, Count] = {}
    for path in filter(None, listed.split("\0")):
        full = root / path
        if not full.is_file() or full.is_symlink():
            continue
        try:
            text = full.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        passages = passages_of(path, text)
        if passages is not None:
            found[path] = count(passages, document=path.endswith(".md"))
    return found


def groups(files: dict[str, Count]) -> dict[str, Count]:
    """Return the figures of every top-level directory and file, of sums of them that are quoted, and of all."""
    tops: dict[str, Count] = {}
    for path, figures in sorted(files.items()):
        tops.setdefault(path.partition("/")[0], Count()).add(figures)
    documents = [figures for path, figures in files.items() if path.endswith(".md")]
    code = [figures for path, figures in files.items() if not path.endswith(".md")]
    sums = {
        "services + kvmesh": [tops[top] for top in ("services", "kvmesh") if top in tops],
        "all documents": documents,
        "all code": code,
        "all": list(files.values()),
    }
    for name, parts in sums.items():
        tops[name] = Count()
        for part in parts:
            tops[name].add(part)
    return tops


def table(rows: dict[str, Count]) -> str:
    """Return one line per row: words, pronouns and openings with their rates, long sentences."""
    head = f"{'words':>8} {'pronouns':>9} {'/1,000':>7} {'openings':>9} {'/1,000':>7} {'long':>6}  where"
    lines = [
        f"{one.words:>8} {one.pronouns:>9} {one.rate(one.pronouns):>7.2f} {one.openings:>9} "
        f"{one.rate(one.openings):>7.2f} {one.long:>6}  {name}"
        for name, one in rows.items()
    ]
    return "\n".join([head, *lines]) + "\n"


def main(words: Sequence[str]) -> int:
    """Print the figures and, if asked, the findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--worst", type=int, default=None, metavar="N", help="only the N files with most findings"
    )
    parser.add_argument("--show", action="store_true", help="print the findings: file:line: kind: sentence")
    parser.add_argument("paths", nargs="*", metavar="PATHS", help="files or directories (all tracked files)")
    options = parser.parse_args(words)
    paths = [str(Path(path).resolve().relative_to(ROOT)) for path in options.paths]
    files = tree(paths or ["."])
    tops = groups(files)
    worst = dict(sorted(files.items(), key=lambda item: -len(item[1].findings))[: options.worst])
    if options.json:
        shown = {"groups": tops, "files": worst}
        figures = {name: {at: one.figures() for at, one in rows.items()} for name, rows in shown.items()}
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
        return 0
    if options.show:
        for path, one in sorted(worst.items()):
            sys.stdout.writelines(
                f"{path}:{each.line}: {each.kind}: {each.sentence}\n" for each in one.findings
            )
    sys.stdout.write(table(tops) + "\n" + table({at: one for at, one in worst.items() if one.findings}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
