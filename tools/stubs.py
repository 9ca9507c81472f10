"""Writes the Python stubs of protos/ with grpc_tools and mypy-protobuf.

Package, folder and Python import are the same path:
protos/kvmesh/attach/v1/attach.proto becomes kvmesh/attach/v1/attach_pb2.py.
"""

from __future__ import annotations

import os
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"


def write_stubs(into: Path) -> None:
    """Write the stubs of every proto below `into`.

    Raises RuntimeError when protoc refuses the protos. The reason is on stderr by then.
    """
    # The mypy plugins are beside this interpreter, and that folder need not be on PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    flags = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    well_known = str(files("grpc_tools") / "_proto")
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *sources]) != 0:
        raise RuntimeError("protoc refused the protos")


if __name__ == "__main__":
    write_stubs(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
