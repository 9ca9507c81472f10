"""A load generator of a frontend's client surfaces. Beside the commands of `load`: `use`, `ask` and `first_tokens`.

The clients are cheap: HTTP/1.1 with httptools, and gRPC on the transport of the links. A prompt is words, drawn in the same
way for all surfaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bench import completions, control, generation, kserve
from bench.http_wire import CompletionWire
from bench.link_wires import KserveWire, LinkedGenerateWire, link_channel
from bench.load import serve_load
from bench.word_load import Wire, WordLoad
from kvmesh.http2.client import LinkChannel

GENERATE: Final = "Generate"
GENERATE_CHAT: Final = "Generate, chat"
CHAT: Final = "chat completions"
COMPLETIONS: Final = "completions"
CHAT_WHOLE: Final = "chat completions, not streamed"
COMPLETIONS_WHOLE: Final = "completions, not streamed"
KSERVE_TEXT: Final = "KServe ensemble, one stream"
KSERVE_IDS: Final = "KServe tensorrt_llm, one stream"
BARE_EVENTS: Final = "a bare HTTP server"


async def serve(grpc: str, http: str, bare: str, model: str, seed: int = 1) -> None:
    """Serve until stdin ends.

    `grpc`, `http`: host:port of the ports of a frontend. `bare`: of bench.bare_events. `model`: name for completions.
    """
    completing = {
        name: CompletionWire(address, path, model, streams=streams)
        for name, address, path, streams in (
            (CHAT, http, completions.CHAT, True),
            (COMPLETIONS, http, completions.COMPLETIONS, True),
            (CHAT_WHOLE, http, completions.CHAT, False),
            (COMPLETIONS_WHOLE, http, completions.COMPLETIONS, False),
            (BARE_EVENTS, bare, completions.CHAT, True),
        )
    }
    channel = link_channel(grpc)
    wires: dict[str, Wire] = {**completing, **_grpc_wires(channel)}
    load = WordLoad(wires[GENERATE], seed)

    async def renew() -> None:
        """Open another gRPC connection: one does not survive a status that crosses with the cancellation of its call."""
        nonlocal channel
        await channel.close()
        channel = link_channel(grpc)
        wires.update(_grpc_wires(channel))

    async def use(surface: str) -> None:
        """Send the next load over another surface."""
        await renew()
        load.wire = wires[surface]

    async def first_tokens(surfaces: list[str], rounds: int, words: int) -> Mapping[str, Any]:
        """Return times to first token in milliseconds, by surface."""
        await renew()
        await load.first_tokens({name: wires[name] for name in surfaces}, 1, words)  # opens connections
        return await load.first_tokens({name: wires[name] for name in surfaces}, rounds, words)

    try:
        await serve_load(load, seed, load.ask, use, first_tokens)
    finally:
        for wire in completing.values():
            wire.close()
        await channel.close()


def _grpc_wires(channel: LinkChannel) -> dict[str, Wire]:
    return {
        GENERATE: LinkedGenerateWire(channel, generation.text_request),
        GENERATE_CHAT: LinkedGenerateWire(channel, generation.chat_request),
        KSERVE_TEXT: KserveWire(channel, kserve.ENSEMBLE),
        KSERVE_IDS: KserveWire(channel, kserve.TENSORRT_LLM),
    }


if __name__ == "__main__":
    control.main(serve, __doc__)
