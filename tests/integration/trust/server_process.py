"""A server under mutual TLS, as a process that may crash: `python -m ...server_process JSON` with the keys of [trust].

It prints its address, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys

from kvmesh.config import build
from kvmesh.trust.peers import Trust
from tests.integration.trust.ends import serving


async def main(section: dict[str, str]) -> None:
    """Serve as a router until stdin ends."""
    config = build({"mesh": {"name": "kvmesh"}, "trust": section})
    async with serving(Trust(config, "router")) as (address, _):
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
