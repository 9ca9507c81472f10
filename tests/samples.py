"""Code samples of the documents: fenced blocks of README.md and docs/, and the commands that no test runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmesh.config import ROOT

LANGUAGES: Final = ("sh", "python", "toml", "json", "yaml", "text")
"""Languages of fenced blocks. `text` is output, a tree or a key of Redis; every other block is run or parsed."""

NOT_RUN: Final = {
    "make setup": "fills .venv over the network",
    "make demo": "tests/integration/cli/test_real_mesh.py runs it, with the trained model",
    "make test": "runs this test",
    "make images": "needs Docker; tests/integration/images builds them",
    "docker ": "needs Docker; tests/integration/images runs the containers and the compose file",
    "sudo": "needs root",
    "kubectl ": "needs a cluster; make test-kubernetes tries the manifests on one",
    "kind ": "needs a cluster",
    "curl http://127.0.0.1:9100/": "needs a port-forward to a pod",
    "make manifests": "checks a file of the user; tests/unit/manifests checks those of the repository",
    "deploy/images/wheelhouse.sh": "fetches wheels over the network",
    ".venv/bin/kvmesh up": "stays until Ctrl-C; the mesh of all samples is started by this command",
    "kvmesh up": "stays until Ctrl-C; the mesh of all samples is started by this command",
    "kvmesh region ": "needs a mesh of regions; tests/integration/cli/test_regions.py runs them",
    "kvmesh generate --explain --regions": "needs a mesh of regions",
    "kvmesh generate --address api.example": "needs a frontend with a certificate; "
    "tests/integration/trust/test_command_line.py runs the options",
    "for n in $(seq 12); do words=": "needs a mesh of regions",
    "kvmesh engine repository": "needs weights; tests/unit/engine_tensorrt_llm runs it",
    "kvmesh conformance --triton 10.": "needs engines on GPUs; tests/integration/conformance runs it",
    "kvmesh replay bench/traces": "replays 4,812 requests: a minute of two cores",
    "kvmesh replay trace.jsonl.gz --cost-of": "needs a router that measured 128 prompts; "
    "tests/integration/cli/test_replay_of_a_mesh.py runs it",
}
"""Beginning of a command -> the reason why no test runs it. Each such command is still parsed and looked up."""

_FENCE: Final = re.compile(r"^( *)```(.*)$")
_ASSIGNMENTS: Final = re.compile(r"^(?:[A-Z_]+=\S* )+")


@dataclass(frozen=True)
class Sample:
    """One fenced block. `line` is the line of its opening fence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Return the commands of a `sh` block, one a line, continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def pages() -> list[Path]:
    """Return README.md and every page of docs/, the README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def samples(*languages: str) -> list[Sample]:
    """Return the blocks in these languages, or all, page by page."""
    found = [sample for page in pages() for sample in _blocks(page)]
    return [sample for sample in found if not languages or sample.language in languages]


def exclusion(command: str) -> str | None:
    """Return the key of `NOT_RUN` that `command` begins with; None for a command that is run."""
    bare = _ASSIGNMENTS.sub("", command)
    return next((start for start in NOT_RUN if bare.startswith(start)), None)


def _blocks(page: Path) -> Iterator[Sample]:
    name = str(page.relative_to(ROOT))
    opened: tuple[int, str] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            opened, body = (number, fence[2].strip()), []
        elif fence and opened is not None:
            yield Sample(name, *opened, "\n".join(body) + "\n")
            opened = None
        elif opened is not None:
            body.append(line)
    assert opened is None, f"{name}:{opened[0] if opened else 0}: the block is never closed"
