"""`python -m tools.manifests check FILE...` checks manifests ("-": stdin); `render` writes deploy/kubernetes/rendered.

Exit status: 0; 1 for faults, one sentence each on stderr; 2 for a file that cannot be read, or without kubectl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.manifests import arguments, documents, kubectl, references, rendered, role_rules, schemas
from tools.manifests.documents import Manifest


def faults(manifests: Sequence[Manifest], versions: Sequence[str] = schemas.VERSIONS) -> Iterator[str]:
    """Yield each fault once, a sentence each, causes before consequences. Faults of schemas are reported alone."""
    refused = list(dict.fromkeys(schemas.faults(manifests, versions)))
    yield from refused
    if not refused:
        found = (*role_rules.faults(manifests), *references.faults(manifests), *arguments.faults(manifests))
        yield from dict.fromkeys(found)


def check(files: Sequence[str], versions: Sequence[str]) -> int:
    """Check each file by itself, and return the exit status."""
    status = 0
    for file in files:
        shown = "stdin" if file == "-" else file
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
            manifests = documents.read(text, shown)
        except (OSError, UnicodeDecodeError, documents.Unreadable) as error:
            sys.stderr.write(f"{error}\n")
            return 2
        found = list(faults(manifests, versions))
        for fault in found:
            sys.stderr.write(f"{shown}: {fault}\n")
        if found:
            status = 1
        else:
            sys.stdout.write(
                f"{shown}: {len(manifests)} objects, no fault (Kubernetes {', '.join(versions)})\n"
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
    return check([str(rendered.path_of(overlay)) for overlay in rendered.OVERLAYS], schemas.VERSIONS)


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.manifests", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    checked = commands.add_parser(
        "check", help="check rendered manifests against schemas, each other and the roles"
    )
    checked.add_argument("files", nargs="+", metavar="FILE", help='rendered manifests; "-" reads stdin')
    checked.add_argument(
        "--kubernetes", action="append", metavar="VERSION", help="version of the schemas, such as 1.33"
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
    return check(given.files, tuple(given.kubernetes or schemas.VERSIONS))


if __name__ == "__main__":
    sys.exit(main())
