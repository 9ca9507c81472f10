"""The aims: what a figure should at most be on a small machine (two cores, no GPU)."""

from __future__ import annotations

from bench.results import Aim, Key

STREAMS_64 = "64 streams, 20 ms"
RATE_200 = "200 requests/s"

PER_TOKEN = "CPU per token"
PER_FRAME = "CPU per frame"
FRAME_WRITER = "CPU per frame of the writer"
EDGE_WRITER = "CPU per token of a server of the client API"
EDGE_PART = "of it between client and frontend, p50"
MESH_PART = "of it between frontend and prefill replica, p50"
CALL_PART = "of it in the replica's own call of Triton, p50"
ATTACH_TRIP = "round trip over Attach, p50"
EDGE_TRIP = "time to first token of a server of the client API, p50"
PER_REQUEST = "CPU per request"
ROWS = "rows per frame"
STREAM_BYTES = "memory per live stream"
IDLE = "memory idle"
LEASED = "from a slab"
UNLEASED = "by Redis"
ADMISSION = "CPU of an admission"
ADMISSION_LATENCY = "added latency, p50"
REFUSAL = "CPU of a refusal by a budget"
PER_REFUSAL = "CPU per refusal"
OWN_REFUSAL = "CPU per refusal of our own code"

FELT = "p95 beside the burst / p95 alone"
ATTEMPTS = "attempts / requests"
BURST = "a burst of long prompts"
SERVEGEN = "ServeGen's clients at 0.01 of their rates"
HALVED = "1x, half of the prefill replicas killed"

AIMS: dict[Key, Aim] = {
    Key("router", STREAMS_64, PER_TOKEN): Aim(15.0),
    Key("frontend", STREAMS_64, PER_TOKEN): Aim(60.0),
    Key("router", RATE_200, PER_REQUEST): Aim(0.6),
    Key("frontend", RATE_200, PER_REQUEST): Aim(1.0),
    **{
        Key(role, case, metric): Aim(limit)
        for role in ("frontend", "router", "decode")
        for case, metric, limit in (("256 streams, 50 ms", STREAM_BYTES, 48.0), ("idle", IDLE, 120.0))
    },
    **{
        Key("refusals", case, metric): Aim(limit)
        for case in ("unknown key", "in-flight cap", "quota")
        for metric, limit in ((PER_REFUSAL, 400.0), (OWN_REFUSAL, 20.0))
    },
    **{Key("fairness", case, FELT): Aim(1.3) for case in (BURST, SERVEGEN)},
    Key("overload", HALVED, ATTEMPTS): Aim(1.1),
    Key("path", "one request at a time", "added time to first token, p50"): Aim(3.0),
    Key("admission", LEASED, ADMISSION): Aim(5.0),
    Key("admission", UNLEASED, ADMISSION_LATENCY): Aim(150.0),
    Key("admission", "refused", REFUSAL): Aim(20.0),
    Key("index", "lookup of 64 blocks, 1M in the index", "time"): Aim(15.0),
    Key("index", "1M blocks", "memory per block"): Aim(110.0),
    Key("index", "1M blocks", "longest stall while loading"): Aim(10.0),
    Key("index", "1M blocks", "cold start"): Aim(1.0),
}
