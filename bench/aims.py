"""The aims: upper or lower limits of figures on a small machine (two cores, no GPU)."""

from __future__ import annotations

from bench.results import Aim, Key

STREAMS_64 = "64 streams, 20 ms"
RATE_200 = "200 requests/s"

PER_TOKEN = "CPU per token"
PER_FRAME = "CPU per frame"
FRAME_WRITER = "CPU per frame of the writer"
EDGE_WRITER = "CPU per token of a server of the client API"
EDGE_PART = "between client and frontend, p50"
MESH_PART = "between frontend and prefill replica, p50"
CALL_PART = "in the replica's call of Triton, p50"
ATTACH_TRIP = "round trip over Attach, p50"
EDGE_TRIP = "time to first token of a server of the client API, p50"
PER_REQUEST = "CPU per request"
ONE_AT_A_TIME = "one request at a time"
ADDED_TTFT = "added to that of Generate"
ROWS = "rows per frame"
STREAM_BYTES = "memory per live stream"
IDLE = "memory idle"
LEASED = "from a quota lease"
UNLEASED = "by Redis"
ADMISSION = "CPU of an admission"
ADMISSION_LATENCY = "added latency, p50"
REFUSAL = "CPU of a refusal by a budget"
THREE_POOLS = "three pools of two routers, two versions"
THREE_REGIONS = "three regions of two routers, no spill"
REGION_CHOICE = "added CPU of a request's choice"
VERSION_CHOICE = "version choice, CPU of a request"
OBSERVED = "200 tokens each, 200 requests/s"
OBSERVATION = "CPU of the observation of a request"
HOT_PROMPTS = "prompts of 2,048 tokens, a full record"
RECORDING = "CPU of the record of a request"
TAPPED = "shadow traffic"
TAP_OFF = "CPU of a request's tap, off"
CONNECTED = "16 receivers, two pools"
CORE_SHARE = "share of a core, idle"
ACK = "publication to the ACK of a receiver"
ADS_CLIENTS = "200 ADS clients, 8 frontends"
RESIDENT = "memory with all clients"
ARRIVAL = "change of a frontend to the last client"
OWN_COST = "CPU per token of the engine itself, above the LLM API alone"
PER_REFUSAL = "CPU per refusal"
OWN_REFUSAL = "CPU per refusal, the frontend's code alone"

LOAD_BUSY = "most CPU of an event-loop iteration, loading"
BURST_BUSY = "most CPU of an event-loop iteration, reading events"
DECISION = "CPU of a decision, p50"
STALL_MS = 10.0

FELT = "p95 with the burst / p95 without"
ATTEMPTS = "attempts / requests"
BURST = "a burst of long prompts"
SERVEGEN = "ServeGen's clients at 0.01 of their rates"
CONVERSATIONS = "conversations of the trace, lengths / 16"
SCARCE = "the same conversations with half the cache"
REUSE = "blocks found in cache / blocks computed before anywhere"
IMBALANCE = "most prefill work of a replica / mean"
HIT_DISTANCE = "hit ratio, mesh minus simulator, absolute"
HALVED = "1x, half of the prefill replicas killed"


def placement_case(replicas: int, blocks: str) -> str:
    """Return the name of a case of the scenario `placement`."""
    return f"{replicas:,} replicas, half of them prefill, {blocks} blocks"


GOSSIP = (
    "2 routers, 50 dispatches/s each",
    "4 routers, 50 dispatches/s each",
    "2 routers, 500 dispatches/s each",
)

NEW_COSTS: dict[tuple[str, str], float] = {
    ("64 streams, 20 ms, frontend alone", PER_TOKEN): 18.0,
    ("128 streams, 20 ms, frontend alone", PER_TOKEN): 12.0,
    ("800 streams more, frontend alone", STREAM_BYTES): 20.0,
    ("64 streams, 20 ms, router alone", PER_TOKEN): 5.0,
    ("64 streams, 20 ms, whole path", f"{PER_TOKEN}, router"): 8.0,
    ("64 streams, 20 ms, whole path", f"{PER_TOKEN}, decode"): 30.0,
    ("64 streams, 20 ms, whole path", f"{PER_TOKEN}, Triton of decode"): 6.0,
    ("64 streams, 20 ms, whole path", f"{PER_TOKEN}, engine process of decode"): 50.0,
    ("requests of 40 words", f"{PER_REQUEST}, frontend"): 0.5,
    ("requests of 40 words", f"{PER_REQUEST}, router"): 0.4,
    ("requests of 40 words", f"{PER_REQUEST}, decode"): 0.8,
    ("requests of 1,200 words", f"{PER_REQUEST}, frontend"): 2.0,
    ("requests of 1,200 words", f"{PER_REQUEST}, router"): 1.0,
    ("requests of 1,200 words", f"{PER_REQUEST}, decode"): 0.5,
    ("requests of 1,200 words", f"{PER_REQUEST}, prefill"): 2.5,
    ("one request at a time", "added time to first token, p50"): 2.5,
}
"""Limits by case and metric, for batched transports and step frames (docs/decisions/0052, 0053)."""

AIMS: dict[Key, Aim] = {
    **{Key("cost", f"{case}, new", metric): Aim(limit) for (case, metric), limit in NEW_COSTS.items()},
    **{
        Key("surfaces", f"{STREAMS_64}, {surface}", PER_TOKEN): Aim(limit)
        for surface, limit in (
            ("chat completions", 25.0),
            ("completions", 25.0),
            ("KServe ensemble, one stream", 30.0),
            ("KServe tensorrt_llm, one stream", 30.0),
        )
    },
    **{
        Key("surfaces", f"{RATE_200}, {surface}, not streamed", PER_REQUEST): Aim(0.8)
        for surface in ("chat completions", "completions")
    },
    **{
        Key("surfaces", f"{ONE_AT_A_TIME}, {surface}", f"{ADDED_TTFT}, p50"): Aim(0.5)
        for surface in ("chat completions", "completions")
    },
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
    Key("conversations", CONVERSATIONS, REUSE): Aim(0.87, is_least=True),
    Key("conversations", CONVERSATIONS, IMBALANCE): Aim(1.3),
    **{Key("conversations", case, HIT_DISTANCE): Aim(3.0) for case in (CONVERSATIONS, SCARCE)},
    Key("overload", HALVED, ATTEMPTS): Aim(1.1),
    Key("trtllm", STREAMS_64, OWN_COST): Aim(10.0),
    Key("path", "one request at a time", "added time to first token, p50"): Aim(3.0),
    Key("admission", LEASED, ADMISSION): Aim(5.0),
    Key("admission", UNLEASED, ADMISSION_LATENCY): Aim(150.0),
    Key("admission", "refused", REFUSAL): Aim(20.0),
    Key("versions", THREE_POOLS, VERSION_CHOICE): Aim(3.0),
    Key("versions", THREE_REGIONS, REGION_CHOICE): Aim(2.0),
    Key("versions", OBSERVED, OBSERVATION): Aim(10.0),
    Key("hot", HOT_PROMPTS, RECORDING): Aim(5.0),
    Key("versions", TAPPED, TAP_OFF): Aim(1.0),
    Key("snapshots", CONNECTED, f"{ACK}, p99"): Aim(500.0),
    Key("snapshots", CONNECTED, CORE_SHARE): Aim(1.0),
    Key("snapshots", CONNECTED, IDLE): Aim(120.0),
    Key("xds", ADS_CLIENTS, f"{ARRIVAL}, p99"): Aim(500.0),
    Key("xds", ADS_CLIENTS, CORE_SHARE): Aim(1.0),
    Key("xds", ADS_CLIENTS, RESIDENT): Aim(120.0),
    Key("index", "lookup of 64 blocks, 1M in the index", "time"): Aim(15.0),
    Key("index", "1M blocks", "memory per block"): Aim(110.0),
    Key("index", "1M blocks", "longest stall while loading"): Aim(STALL_MS),
    **{
        Key("index", f"{size} blocks{burst}", metric): Aim(STALL_MS)
        for size in ("1M", "10M")
        for burst, metric in (("", LOAD_BUSY), (", a burst of 100,000 events", BURST_BUSY))
    },
    **{
        Key("index", "16 routers at once, 100k blocks each", metric): Aim(STALL_MS)
        for metric in (LOAD_BUSY, BURST_BUSY)
    },
    Key("index", "1M blocks", "cold start"): Aim(1.0),
    **{Key("gossip", case, "propagation delay, p99"): Aim(10.0) for case in GOSSIP},
    Key("gossip", GOSSIP[0], "CPU per own dispatch"): Aim(900),
    Key("gossip", GOSSIP[2], "CPU per own dispatch"): Aim(350),
    **{
        Key("placement", placement_case(replicas, size), DECISION): Aim(limit)
        for size in ("10k", "1M", "10M")
        for replicas, limit in ((8, 40.0), (1000, 250.0))
    },
    **{
        Key("placement", placement_case(1000, size), "memory per block"): Aim(110.0) for size in ("1M", "10M")
    },
}
