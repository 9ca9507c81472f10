"""`python -m tools.manifests check FILE...` checks manifests ("-": stdin); `render` writes deploy/kubernetes/rendered.

Exit status: 0; 1 for faults, one sentence each on stderr; 2 for a file that cannot be read, or without kubectl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmesh.roles import SERVERS
from tools.manifests import (
    arguments,
    documents,
    kubectl,
    references,
    rendered,
    role_rules,
    schemas,
    sources,
    ways,
)
from tools.manifests.documents import Manifest

UNREADABLE: Final = 2
"""Exit status for a file that cannot be read."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Choices of the user."""

    versions: Sequence[str] = schemas.VERSIONS
    accepted: Sequence[str] = ()
    """Kinds that may lack a schema."""
    present: Sequence[str] = ()
    """Objects that the cluster has already, as KIND/NAME."""


def faults(manifests: Sequence[Manifest], choice: Choice = Choice()) -> Iterator[str]:  # frozen
    """Yield each fault once, a sentence each, causes first. Objects that a schema refuses are reported alone."""
    refused = list(dict.fromkeys(schemas.refused(manifests, choice.versions)))
    yield from refused
    if refused:
        return
    yield from dict.fromkeys(schemas.unknown(manifests, choice.versions, choice.accepted))
    if not roles_of(manifests):
        yield "No container runs a role of a mesh: allowed are images whose name ends with kvmesh, and a role in args."
    for space in dict.fromkeys(each.namespace for each in manifests if each.namespace) or ("",):
        # Objects without a namespace are a fault of their own, and meant to be beside the others.
        inside = [each for each in manifests if each.namespace in (space, "")]
        found = (
            *role_rules.faults(inside),
            *references.faults(inside),
            *sources.faults(inside, choice.present),
            *ways.faults(inside),
            *arguments.faults(inside, choice.present),
        )
        yield from dict.fromkeys(found)


def roles_of(manifests: Sequence[Manifest]) -> list[str]:
    """Return the services among the roles that the manifests run."""
    found = {role_rules.role_of(container) for pod in documents.pods(manifests) for container in pod.main}
    return sorted(found & set(SERVERS))


def check(files: Sequence[str], choice: Choice) -> int:
    """Check each file by itself, and return the exit status."""
    status = 0
    for file in files:
        shown = "stdin" if file == "-" else file
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
            manifests = documents.read(text, shown)
        except (OSError, UnicodeDecodeError, documents.Unreadable) as error:
            why = f"{shown} cannot be read: {error.strerror}." if isinstance(error, OSError) else f"{error}"
            sys.stderr.write(f"{why}\n")
            status = UNREADABLE
            continue
        found = list(faults(manifests, choice))
        for fault in found:
            sys.stderr.write(f"{shown}: {fault}\n")
        if found:
            status = status or 1
        else:
            roles, versions = ", ".join(roles_of(manifests)), ", ".join(choice.versions)
            sys.stdout.write(
                f"{shown}: {len(manifests)} objects, no fault. Roles: {roles}. Kubernetes: {versions}.\n"
            )
    return status


def render() -> int:
    """Render every overlay, write the files, and check them. Returns the exit status."""
    try:
        program = kubectl.fetch()
        for overlay in rendered.OVERLAYS:
            text = kubectl.kustomize(program, rendered.FOLDER / "overlays" / overlay)
            rendered.path_of(overlay).write_text(rendered.text_of(overlay, text), "utf-8")
    except kubectl.NoKubectl as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return check([str(rendered.path_of(overlay)) for overlay in rendered.OVERLAYS], Choice())


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.manifests", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    checked = commands.add_parser(
        "check", help="check rendered manifests against schemas, each other and the roles"
    )
    checked.add_argument("files", nargs="+", metavar="FILE", help='rendered manifests; "-" reads stdin')
    known = schemas.known_versions()
    checked.add_argument(
        "--kubernetes",
        action="append",
        choices=known,
        metavar="VERSION",
        help=f"version of the schemas, {known[0]} to {known[-1]}; default: {', '.join(schemas.VERSIONS)}",
    )
    checked.add_argument(
        "--accept", action="append", default=[], metavar="KIND", help="a kind that may lack a schema"
    )
    checked.add_argument(
        "--have",
        action="append",
        default=[],
        metavar="KIND/NAME",
        help="an object that the cluster has already",
    )
    commands.add_parser("render", help="render the overlays of deploy/kubernetes, and check them")
    commands.add_parser("kubectl", help="print the path of kubectl, fetched if there is none")
    given = parser.parse_args(words)
    if given.command == "render":
        return render()
    if given.command == "kubectl":
        try:
            sys.stdout.write(f"{kubectl.fetch()}\n")
        except kubectl.NoKubectl as error:
            sys.stderr.write(f"{error}\n")
            return 2
        return 0
    return check(given.files, Choice(tuple(given.kubernetes or schemas.VERSIONS), given.accept, given.have))


if __name__ == "__main__":
    sys.exit(main())
