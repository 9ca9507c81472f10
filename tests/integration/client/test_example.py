"""The example of docs/client.md runs as it stands."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from kvmesh.config import ROOT
from tests.integration.client.scripted_frontend import scripted, well


async def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    """It prints the answer and its count."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "client.md").read_text(), re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code)
    async with scripted(well) as one, scripted(well) as other:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(example), one.address, other.address),
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
        )
        shown, _ = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, shown.decode()) == (0, f"{'x' * 10}\n10 tokens, 0 resumes\n")
