"""The pages name metrics that the services export and files that exist, and link to sections that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from kvmesh.config import ROOT
from tests.samples import samples

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\((?!\w+://)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"(?m)^#{1,6} (.+)$")
ANCHOR = re.compile(r'<a id="([^"]+)">')
FILE = re.compile(
    r"`((?:bench|controlplane|deploy|docs|engines|kvmesh|protos|services|simulator|tests|tools)/[\w./-]+)`"
)
FENCED = re.compile(r"(?ms)^\s*```.*?^\s*```")

ROLES = ("frontend", "router", "prefill", "decode")
SHARED = {"kvmesh/prefix_index/": ("prefill", "decode"), "kvmesh/replica/": ("prefill", "decode")}
"""Shared packages that only some roles load; all other shared code is every role's."""
KINDS = {"counter": "_total", "total": "_total", "gauge": "", "histogram": ""}
"""Methods of `Metrics` that export a series, and the ending that Prometheus adds to its name."""
SERIES = re.compile(r"`([a-z][a-z0-9_]*)(?:\{([a-z_]+)\})?`(?: by `([a-z_]+)`)?")


def exported() -> dict[tuple[str, str], set[str]]:
    """Return the labels of each exported metric by role and name without prefix, read from the source."""
    found: dict[tuple[str, str], set[str]] = {}
    folders = ("kvmesh", "services", "controlplane")
    for path in (path for folder in folders for path in sorted(ROOT.glob(f"{folder}/**/*.py"))):
        place = path.relative_to(ROOT).as_posix()
        roles: tuple[str, ...] = next(
            (each for folder, each in SHARED.items() if place.startswith(folder)), (*ROLES, "control", "xds")
        )
        if place.startswith("services/"):
            roles = (path.relative_to(ROOT).parts[1],)
        elif place.startswith("controlplane/xds/"):
            roles = ("xds",)
        elif place.startswith("controlplane/"):
            roles = ("control",)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                continue
            name = node.args[0]
            if node.func.attr in KINDS and isinstance(name, ast.Constant) and isinstance(name.value, str):
                labels = {keyword.arg for keyword in node.keywords if keyword.arg}
                for role in roles:
                    found.setdefault((role, name.value + KINDS[node.func.attr]), set()).update(labels)
    return found


def test_the_autoscaler_reads_metrics_that_exist() -> None:
    """A misspelt metric would never scale anything."""
    text = (ROOT / "deploy/kubernetes/components/autoscaling/autoscaling.yaml").read_text("utf-8")
    named = re.findall(r"name: kvmesh_([a-z]+)_([a-z_]+)", text)
    assert named
    assert [each for each in named if each not in exported()] == []


def rows() -> list[tuple[list[tuple[str, str]], tuple[str, ...]]]:
    """Return each row of the tables of metrics in docs/operating.md: names with a label or none, and roles."""
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    found, is_metrics = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_metrics = False
        elif cells[:2] == ["metric", "role"]:
            is_metrics = True
        elif is_metrics and not line.startswith("|--"):
            series = [(name, inside or after) for name, inside, after in SERIES.findall(cells[0])]
            roles = ROLES if cells[1] == "all" else tuple(role.strip() for role in cells[1].split(","))
            found.append((series, roles))
    return found


def test_each_metric_of_the_page_is_exported() -> None:
    """A name or a label that no role exports would leave a dashboard empty."""
    known = exported()
    table = rows()
    assert len(table) > 30, "the tables of metrics were not found"
    missing = [
        f"kvmesh_{role}_{name} {label}"
        for series, roles in table
        for name, label in series
        for role in roles
        if (role, name) not in known or label not in {"", *known[role, name]}
    ]
    assert missing == []


def test_each_metric_of_the_alert_rules_is_exported() -> None:
    """A rule about a name that no process exports would never fire."""
    known = {f"kvmesh_{role}_{name}" for role, name in exported()}
    rules = [
        rule
        for sample in samples("yaml")
        for group in yaml.safe_load(sample.text).get("groups", ())
        for rule in group["rules"]
    ]
    assert len(rules) >= 3
    for rule in rules:
        named = set(re.findall(r"kvmesh_\w+", rule["expr"]))
        assert named and named <= known, rule


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page as GitHub makes them of its headings, and those set by hand."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(text))
    slugs = [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in shown]
    return {*slugs, *ANCHOR.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_sections_that_exist(page: Path) -> None:
    """A link with an anchor that no heading has opens the page at its top."""
    lost = []
    for target, anchor in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        other = (page.parent / target).resolve() if target else page
        if other.suffix == ".md" and anchor not in anchors(other):
            lost.append(f"{target}#{anchor}")
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A path of a module that has moved leads nowhere."""
    named = FILE.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def quoted() -> list[str]:
    """Return the fixed parts of the log texts that the pages quote."""
    security = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = security.partition("| logged reason | meaning |")[2].partition("\n\n")[0].splitlines()[2:]
    reasons = [line.split(" | ")[0].strip("| ") for line in table]
    parts = [
        part
        for reason in reasons
        for part in re.split(
            r"PERMISSION_DENIED|\.{3}|\w+\.kvmesh\.internal|\[trust\]|trust\.certificate", reason
        )
    ]
    return [
        *(part.strip(" :") for part in parts),
        "cannot attach",
        "member refused",
        "superseded: another process named",
    ]


def test_quoted_log_texts_are_those_of_the_code() -> None:
    """An operator searches the page for the text that the log shows."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("kvmesh/**/*.py")))
    texts = list(filter(None, quoted()))
    assert len(texts) >= 9, "the table of reasons was not found"
    assert [text for text in texts if text not in source] == []
