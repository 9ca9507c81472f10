"""Triton's load tool `perf_analyzer` at a frontend, in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from typing import Any, Final

from bench.environments import Unavailable, environment
from tests.clients.site import Site
from tests.patience import wait_for

CLIENT_VERSION: Final = "2.41.0"
"""The last release of tritonclient with the program in its wheel."""
CUDA_VERSION: Final = "12.9.79"
REQUESTS: Final = 40
OUTPUT_TOKENS: Final = 16
RUN_S_MAX: Final = 120.0
_MISSING: Final = re.compile(r"error while loading shared libraries: (\S+):")


async def perf_analyzer(site: Site) -> str:
    """It measures streams of both models, each response of which it counts, and answers of one response."""
    program, libraries = await asyncio.to_thread(installed)
    seen = []
    runs: list[tuple[str, dict[str, list[Any]], bool]] = [
        ("ensemble", {"text_input": ["Hello, mesh."], "max_tokens": [OUTPUT_TOKENS], "stream": [True]}, True),
        (
            "tensorrt_llm",
            {
                "input_ids": [70, 71, 72, 73],
                "input_lengths": [4],
                "request_output_len": [OUTPUT_TOKENS],
                "streaming": [True],
                "end_id": [-1],
            },
            True,
        ),
        ("ensemble", {"text_input": ["Hello, mesh."], "max_tokens": [OUTPUT_TOKENS]}, False),
    ]
    for model, inputs, streams in runs:
        file = site.fleet.folder / f"{model}.json"
        file.write_text(json.dumps({"data": [inputs]}), encoding="utf-8")
        shapes = [word for name, values in inputs.items() for word in ("--shape", f"{name}:{len(values)}")]
        words = [
            "-m",
            model,
            "-i",
            "grpc",
            "-u",
            site.address(),
            "--async",
            "--input-data",
            str(file),
            *shapes,
        ]
        windows = ["--measurement-mode", "count_windows", "--measurement-request-count", str(REQUESTS)]
        loose = ["--concurrency-range", "4", "--stability-percentage", "999", "--max-trials", "3"]
        said = await _output(program, libraries, *words, *windows, *loose, *["--streaming"] * streams)
        count = re.search(r"Request count: (\d+)", said)
        rate = re.search(r"Throughput: ([\d.]+) infer/sec", said)
        assert count is not None and rate is not None, said
        assert int(count[1]) >= REQUESTS, said
        responses = re.search(r"Response Throughput: ([\d.]+) infer/sec", said)
        each = float(responses[1]) / float(rate[1]) if responses else 1.0
        if streams:
            assert 1 < each <= OUTPUT_TOKENS + 1, said
        seen.append(f"{model} {float(rate[1]):.0f}/s of {each:.0f}")
    return f"requests and their responses: {', '.join(seen)}"


def installed() -> tuple[str, str]:
    """Return the program and the folder of its CUDA library, installed now if they are missing. Raises Unavailable."""
    program = environment("tritonclient", CLIENT_VERSION) / "bin" / "perf_analyzer"
    home = environment("nvidia-cuda-runtime-cu12", CUDA_VERSION)
    (library,) = home.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12")
    return str(program), str(library.parent)


async def _output(program: str, libraries: str, *words: str) -> str:
    """Return what the program prints. Raises Unavailable without a library, AssertionError if it fails."""
    path = ":".join(filter(None, (libraries, os.environ.get("LD_LIBRARY_PATH"))))
    child = await asyncio.create_subprocess_exec(
        program,
        *words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LD_LIBRARY_PATH": path},
    )
    try:
        out, _ = await wait_for(child.communicate(), RUN_S_MAX)
    except TimeoutError:
        child.kill()
        await child.wait()
        raise AssertionError(f"perf_analyzer did not end within {RUN_S_MAX:g} s") from None
    said = out.decode(errors="replace")
    if missing := _MISSING.search(said):
        raise Unavailable(f"{missing[1]} is missing (Debian: apt-get install libb64-0d)")
    assert child.returncode == 0, f"status {child.returncode}: {said}"
    return said
