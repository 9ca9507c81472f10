"""Every program and command of the documents runs as it stands, in a checkout with a small mesh that `kvmesh up` started.

`tests.samples.NOT_RUN` lists the commands that are not run, with the reason. The blocks of a page share the checkout,
from its first to its last.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Final

import pytest

from kvmesh.child import bound_command
from kvmesh.cli.mesh_file import MeshFile, read_mesh
from kvmesh.config import ROOT
from tests.samples import Sample, exclusion, samples

pytestmark = pytest.mark.mesh

TRACE_REQUESTS: Final = 20
COMMAND_S_MAX: Final = 150.0

MESH: Final = """
[mesh]
name = "kvmesh"
[engine]
arithmetic = "hashed"
step_s = 0.002
[frontend]
replicas = 2
anonymous_tenant = "reports"
[control]
replicas = 1
[versions.v1]
[versions.v2]
[versions.qwen-1]
model = "small-qwen"
model_dir = "tests/unit/models/folders/qwen"
[pools.stable]
version = "v1"
[pools.stable-young]
version = "v1"
[pools.next]
version = "v2"
[pools.qwen]
version = "qwen-1"
prefill = 0
decode = 1
"""
"""The pools of docs/rollouts.md and docs/models.md, cheap steps, and callers without a key: only the samples of
docs/tenants.md bring one."""

TRAINED: Final = """
[engine]
arithmetic = "transformer"
[prefill]
replicas = 1
[decode]
replicas = 1
[control]
replicas = 0
"""
"""A mesh of the trained model, which alone has guided output."""

OF_TRAINED: Final = ("docs/sampling.md", "docs/openai.md")
"""Pages whose commands and programs run beside that mesh."""

OF_HTTP: Final = ("docs/openai.md",)
"""Pages with programs that take the HTTP addresses of the frontends."""

FIRST: Final = next(sample for sample in samples("sh") if sample.page == "docs/security.md")
"""Makes the certificates of the mesh, so it runs before the mesh does."""


def addresses(mesh: MeshFile) -> dict[str, str]:
    """Return each address that a sample gives as an example -> that of the mesh."""
    frontends = mesh.addresses_of("frontend")
    http = [each.http_address for each in mesh.processes if each.http_address]
    return {
        **({"127.0.0.1:8080": http[0], "127.0.0.1:8081": http[-1]} if http else {}),
        "127.0.0.1:7000": frontends[0],
        "127.0.0.1:7001": frontends[-1],
        "router-0.example:7000": mesh.address_of("router"),
    }


def tenants() -> str:
    """Return the tables of docs/tenants.md as the page says to write them: without keys."""
    (sample,) = (each for each in samples("toml") if each.page == "docs/tenants.md")
    return re.sub(r"(?ms)^\[keys\..*?(?=^\[|\Z)", "", sample.text)


class Checkout:
    """A folder that looks like this repository, with a `kvmesh.toml` and a mesh of its own."""

    def __init__(self, folder: Path, config: str) -> None:
        """Make the folder: everything of the repository is linked, but for what samples write."""
        self.folder = folder
        folder.mkdir()
        for entry in ROOT.iterdir():
            if entry.name not in (".git", ".kvmesh", "kvmesh.toml"):
                (folder / entry.name).symlink_to(entry)
        (folder / "kvmesh.toml").write_text(config)
        source = ROOT / "bench" / "traces" / "conversation_head.jsonl.gz"
        with gzip.open(source, "rt") as whole, gzip.open(folder / "trace.jsonl.gz", "wt") as head:
            head.writelines(islice(whole, TRACE_REQUESTS))
        programs = Path(sys.executable).parent
        (folder / ".venv").unlink(missing_ok=True)
        (folder / ".venv").symlink_to(programs.parent)
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("KVMESH_")},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "COLUMNS": "120",
        }

    @property
    def mesh(self) -> MeshFile:
        """Where its mesh is."""
        return read_mesh(self.folder / ".kvmesh")

    def logs(self) -> str:
        """Return the last lines of each process of the mesh."""
        paths = sorted((self.folder / ".kvmesh" / "logs").glob("*.log"))
        return "".join(f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in paths)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run `command` here, to its end."""
        return subprocess.run(
            bound_command(command),
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )

    def run_shell(self, sample: Sample) -> subprocess.CompletedProcess[str]:
        """Run the commands of `sample`, those apart that are excluded, until one fails."""
        script = "\n".join(command for command in sample.commands() if exclusion(command) is None)
        if (self.folder / ".kvmesh").exists():
            for shown, real in addresses(self.mesh).items():
                script = script.replace(shown, real)
        return self.run("bash", "-e", "-u", "-c", script)


@contextmanager
def up(made: Checkout) -> Iterator[Checkout]:
    """Keep `kvmesh up` running in a checkout."""
    command = bound_command([".venv/bin/kvmesh", "up"])
    with subprocess.Popen(
        command, cwd=made.folder, env=made.environment, stdout=subprocess.PIPE, text=True
    ) as mesh:
        assert mesh.stdout is not None
        try:
            shown = []
            for line in mesh.stdout:
                shown.append(line)
                if "The mesh is up" in line:
                    break
            else:
                pytest.fail("".join(shown))
            yield made
            mesh.send_signal(signal.SIGINT)
            shown += mesh.communicate(timeout=40)[0]
            assert mesh.returncode == 0, "".join(shown) + made.logs()
        finally:
            mesh.kill()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A checkout in which `kvmesh up` runs, with the certificates of docs/security.md."""
    made = Checkout(tmp_path_factory.mktemp("samples") / "kvmesh", MESH + tenants())
    done = made.run_shell(FIRST)
    assert done.returncode == 0, done.stderr
    with up(made):
        yield made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A checkout in which a mesh of the trained model runs."""
    with up(Checkout(tmp_path_factory.mktemp("trained") / "kvmesh", TRAINED)) as made:
        yield made


def commands(*, is_trained: bool) -> list[list[Sample]]:
    """Return the commands of the pages that need the trained model, or of all others; those of a page together."""
    found = (sample for sample in samples("sh") if sample != FIRST)
    pages = [list(page) for _, page in groupby(found, lambda sample: sample.page)]
    return [page for page in pages if (page[0].page in OF_TRAINED) == is_trained]


def programs(*, is_trained: bool) -> list[Sample]:
    """Return the programs of the pages that need the trained model, or of all others."""
    return [sample for sample in samples("python") if (sample.page in OF_TRAINED) == is_trained]


@pytest.mark.parametrize("page", commands(is_trained=False), ids=lambda page: page[0].page)
def test_commands_run(checkout: Checkout, page: list[Sample]) -> None:
    """Each command of the page ends with status 0."""
    run_commands(checkout, page)


@pytest.mark.parametrize("page", commands(is_trained=True), ids=lambda page: page[0].page)
def test_commands_of_the_trained_model_run(trained: Checkout, page: list[Sample]) -> None:
    """Guided output."""
    run_commands(trained, page)


@pytest.mark.parametrize("sample", programs(is_trained=False), ids=str)
def test_programs_run(checkout: Checkout, sample: Sample) -> None:
    """With the addresses of the frontends as arguments, each prints what the mesh answers."""
    run_program(checkout, sample)


@pytest.mark.parametrize("sample", programs(is_trained=True), ids=str)
def test_programs_of_the_trained_model_run(trained: Checkout, sample: Sample) -> None:
    """Guided output and log-probabilities."""
    run_program(trained, sample)


def run_commands(checkout: Checkout, page: list[Sample]) -> None:
    for sample in page:
        done = checkout.run_shell(sample)
        assert done.returncode == 0, f"{sample}: status {done.returncode}\n{done.stdout}{done.stderr}"


def run_program(checkout: Checkout, sample: Sample) -> None:
    mesh = checkout.mesh
    http = [each.http_address for each in mesh.processes if each.http_address]
    given = http if sample.page in OF_HTTP else mesh.addresses_of("frontend")
    done = checkout.run(sys.executable, "-c", sample.text, *given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
