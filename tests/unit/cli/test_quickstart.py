"""The quickstart does what it says."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvmesh.child import bound_command
from kvmesh.cli.mesh_file import Member, MeshFile, write_mesh
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.inference.v1 import inference_pb2_grpc as inference_grpc
from kvmesh.server import MeshServer

QUICKSTART = Path(__file__).parents[3] / "docs" / "quickstart.md"


class Echo(inference_grpc.InferenceServiceServicer):
    """Answers with the prompt."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference.GenerateResponse]:
        yield inference.GenerateResponse(tokens=inference.Tokens(text=request.text))


async def test_the_snippet_finds_the_mesh_and_streams(tmp_path: Path) -> None:
    """Copied as it stands and run beside a mesh, it prints the answer."""
    snippets = re.findall(r"```python\n(.*?)```", QUICKSTART.read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) == 1
    server = MeshServer("frontend", "frontend-0", ["kvmesh.inference.v1.InferenceService"])
    inference_grpc.add_InferenceServiceServicer_to_server(Echo(), server.grpc)
    address = await server.listen("127.0.0.1:0")
    try:
        folder = tmp_path / ".kvmesh"
        folder.mkdir()
        member = Member(name="f", role="frontend", pid=1, address=address, metrics_address="", log="")
        write_mesh(folder, MeshFile(pid=os.getpid(), config="", processes=(member,)))
        process = await asyncio.create_subprocess_exec(
            *bound_command([sys.executable, "-c", snippets[0]]),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
    finally:
        await server.grpc.stop(0)
    assert (process.returncode, out.decode()) == (0, "It was a dark"), err.decode()
