"""docs/glossary.md is in alphabetical order and names modules that exist."""

from __future__ import annotations

import re

import pytest

from kvmesh.config import ROOT

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROW = re.compile(r"(?m)^\| (?P<term>[^|`]+) \| (?P<paths>`[^|]+`) \| (?P<meaning>[^|]+) \|$")
SECTIONS = [section for section in GLOSSARY.split("\n## ")[1:] if ROW.search(section)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_the_glossary_is_in_order_and_names_files_that_exist(section: str) -> None:
    """Each row has a term, the modules or packages that do it, and one sentence or two."""
    rows = list(ROW.finditer(section))
    assert len(rows) == section.count("\n| ") - 1  # the head
    terms = [row["term"].casefold() for row in rows]
    assert terms == sorted(set(terms))
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row["paths"])]
    assert [path for path in paths if not (ROOT / path).exists()] == []
