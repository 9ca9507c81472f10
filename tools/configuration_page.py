"""Writes docs/configuration.md from the annotations of kvmesh/config_sections.py."""

from __future__ import annotations

from kvmesh.config import ROOT, MeshConfig, describe

PAGE = """\
# Configuration

One strict file, `kvmesh.toml`. A missing key takes the default shown here. An unknown key, a value out of range or an
impossible combination stops the start with one sentence. It names the key, the value and the allowed range.
`kvmesh config` prints the configuration in force. Written by `make docs`.

Keys of `[engine]` that are comments here are [facts of an engine](deploying.md#facts-of-an-engine). A key in the file
must agree with the engine.

```toml
{text}```
"""


def main() -> None:
    """Write the page."""
    page = PAGE.format(text=describe(MeshConfig()).rstrip("\n") + "\n")
    (ROOT / "docs" / "configuration.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
