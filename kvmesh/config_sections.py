"""The sections of kvmesh.toml: one frozen struct each, every key with its unit, its range and a sentence.

To add a key, add one annotated line with a default. Checks, messages and the documentation follow from the annotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final

from kvmesh.config_keys import NAME, Allowed, ConfigError, Section
from kvmesh.deadlines import RUNTIME_MAX_S
from kvmesh.pool_sections import ENGINE_ADDRESSES
from kvmesh.queue_order import ORDERS
from kvmesh.redis_sentinel_url import is_sentinel, sentinel_fault
from kvmesh.redis_url import without_password
from kvmesh.roles import ENGINE_KINDS, EXTERNAL, REFERENCE, TENSORRT_LLM
from kvmesh.trust import networks

ROOT: Final = Path(__file__).resolve().parent.parent
"""Folder with the packages; relative paths of the configuration start here."""


TRANSPORTS: Final = ("batched", "grpcio")
"""grpcio writes each message by itself; batched writes once per connection and turn of the event loop (kvmesh.http2)."""


class Mesh(Section, frozen=True, kw_only=True):
    section: ClassVar[str] = "mesh"

    name: Annotated[
        str,
        Allowed(
            "Name of the mesh; prefix of its Redis keys.",
            pattern=r"[a-z0-9][a-z0-9-]{0,31}",
            words="up to 32 of a-z, 0-9 and -",
        ),
    ] = "kvmesh"
    host: Annotated[
        str,
        Allowed(
            "Listen address of the processes of `kvmesh up`.", pattern=r"\S+", words="a host name or address"
        ),
    ] = "127.0.0.1"
    model: Annotated[
        str,
        Allowed(
            "Name of the model for clients, for example meta-llama/Llama-3.1-8B-Instruct.",
            pattern=r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}",
            words="1 to 128 letters, digits and ._/-, a letter or digit first",
        ),
    ] = "reference"
    model_dir: Annotated[
        str, Allowed("Folder with tokenizer and weights; relative paths start at the repository.")
    ] = "engines/reference/model"
    data_dir: Annotated[
        str,
        Allowed(
            "Folder for logs, mesh.json and the embedded Redis of `kvmesh up`; relative paths start where it runs."
        ),
    ] = ".kvmesh"

    hops: Annotated[
        str,
        Allowed(
            "Transport between the services, and of the long streams to engines. Both speak gRPC, so processes may differ. "
            "`batched` takes less CPU.",
            choices=TRANSPORTS,
        ),
    ] = "batched"

    @property
    def model_path(self) -> Path:
        """Absolute path of `model_dir`."""
        return (ROOT / self.model_dir).resolve()


class Redis(Section, frozen=True, kw_only=True):
    section: ClassVar[str] = "redis"

    url: Annotated[
        str,
        Allowed(
            "Existing Redis (6.2 or later); empty starts an embedded one.",
            pattern=r"(?:(?:rediss?(?:\+sentinel)?|unix)://\S+)?",
            words="empty, redis://, rediss://, unix://, redis+sentinel:// or rediss+sentinel://",
            secret=True,
        ),
    ] = ""

    def check(self) -> None:
        if is_sentinel(self.url) and (fault := sentinel_fault(self.url)):
            raise ConfigError(f'redis.url = "{without_password(self.url)}" {fault}')


class Engine(Section, frozen=True, kw_only=True):
    """The engine behind every replica."""

    section: ClassVar[str] = "engine"

    kind: Annotated[
        str,
        Allowed(
            "What runs the model. `kvmesh up` starts a `reference` or `tensorrt_llm` engine for each replica. `external` "
            "engines run already.",
            choices=(*ENGINE_KINDS, EXTERNAL),
        ),
    ] = REFERENCE
    llm_config: Annotated[
        str,
        Allowed("File llm.yaml of `tensorrt_llm` engines; relative paths start at the repository."),
    ] = ""
    gpus: Annotated[
        tuple[str, ...],
        Allowed(
            "CUDA_VISIBLE_DEVICES of each `tensorrt_llm` engine, in start order; empty: every engine sees all.",
            pattern=r"\d{1,2}(,\d{1,2})*",
            words='a list with GPU numbers for each engine, such as ["0", "1"] or ["0,1", "2,3"]',
        ),
    ] = ()
    arithmetic: Annotated[
        str,
        Allowed(
            "Source of the logits: the trained model, a hash of the history, or a Llama or Qwen2 folder in PyTorch.",
            choices=("transformer", "hashed", "torch"),
        ),
    ] = "transformer"
    block_tokens: Annotated[
        int, Allowed("Tokens per KV block, the same in the whole mesh.", 1, 1024, "tokens", fact=True)
    ] = 32
    kv_blocks: Annotated[
        int, Allowed("KV cache of a decode engine, in blocks.", 8, 10_000_000, "blocks", fact=True)
    ] = 1024
    prefill_kv_blocks: Annotated[
        int,
        Allowed(
            "KV cache of a prefill engine, in blocks; 0 takes kv_blocks.", 0, 10_000_000, "blocks", fact=True
        ),
    ] = 0
    max_sequence_tokens: Annotated[
        int,
        Allowed("Longest prompt plus output of one request.", 2, 1_000_000, "tokens", fact=True),
    ] = 4096
    vocab_size: Annotated[
        int,
        Allowed(
            "Vocabulary of the engines; 0 asks the model. A stock TensorRT-LLM model does not tell it.",
            0,
            10_000_000,
            "tokens",
            fact=True,
        ),
    ] = 0
    metrics_port: Annotated[
        int,
        Allowed(
            "Port of Triton's /metrics on the host of each engine; 0: replicas do not read it.", 0, 65_535
        ),
    ] = 0
    disaggregated: Annotated[
        str,
        Allowed(
            "KV transfer from prefill to decode: tried where the model does not promise it, or never used.",
            choices=("auto", "no"),
        ),
    ] = "auto"
    step_frames: Annotated[
        bool,
        Allowed(
            "Calls to an engine that offers step frames share one stream; false: each has its own.",
            words="true or false",
        ),
    ] = True
    salt: Annotated[
        str,
        Allowed(
            "Salt of the engines; without a [versions.NAME] also the name of the model version.",
            pattern=r"\S{1,64}",
            words="1 to 64 characters without spaces",
        ),
    ] = "kvmesh-1"
    handoff_timeout_s: Annotated[
        float, Allowed("A prefill engine frees an unclaimed handoff after this time.", 0.1, 600, "s")
    ] = 30.0
    step_s: Annotated[float, Allowed("Cost of one step; costs apply to `hashed` only.", 0, 10, "s")] = 0.0
    prefill_s: Annotated[float, Allowed("Fixed cost of a prefill.", 0, 10, "s")] = 0.0
    prefill_token_s: Annotated[float, Allowed("Cost per uncached prompt token.", 0, 1, "s")] = 0.0
    prefill_token2_s: Annotated[
        float, Allowed("Cost per difference of squared positions of the uncached tokens.", 0, 1, "s")
    ] = 0.0
    block_transfer_s: Annotated[float, Allowed("Cost per KV block moved between engines.", 0, 1, "s")] = 0.0
    cold_s: Annotated[
        float,
        Allowed(
            "Extra time of a cold step; `hashed` only. Each shape of a step is cold in its first runs after boot.",
            0,
            60,
            "s",
        ),
    ] = 0.0
    cold_runs: Annotated[
        int, Allowed("Runs of each shape after boot that are cold, if cold_s is above 0.", 0, 100, "runs")
    ] = 2

    def check(self) -> None:
        self._check_kind()
        if self.cold_s and self.arithmetic != "hashed":
            raise ConfigError(
                f'engine.cold_s = {self.cold_s:g} needs engine.arithmetic = "hashed": it is "{self.arithmetic}", '
                "for which allowed is 0 s."
            )
        needed = -(-self.max_sequence_tokens // self.block_tokens)
        for key, blocks in (("kv_blocks", self.kv_blocks), ("prefill_kv_blocks", self.blocks_of_prefill)):
            if blocks < needed:
                raise ConfigError(
                    f"engine.{key} = {blocks} is too small for one request of engine.max_sequence_tokens = "
                    f"{self.max_sequence_tokens}: allowed are {needed} or more blocks of {self.block_tokens} "
                    "tokens."
                )

    def _check_kind(self) -> None:
        if self.kind == TENSORRT_LLM and not self.llm_config:
            raise ConfigError(
                f'engine.kind = "{TENSORRT_LLM}" needs engine.llm_config, which is "": allowed is the path of an llm.yaml.'
            )
        for key in ("llm_config", "gpus"):
            if self.kind != TENSORRT_LLM and getattr(self, key):
                raise ConfigError(
                    f'engine.{key} needs engine.kind = "{TENSORRT_LLM}": it is "{self.kind}", which takes no {key}.'
                )

    @property
    def blocks_of_prefill(self) -> int:
        """KV blocks of a prefill engine, with the default resolved."""
        return self.prefill_kv_blocks or self.kv_blocks


class Prefill(Section, frozen=True, kw_only=True):
    section: ClassVar[str] = "prefill"

    replicas: Annotated[int, Allowed("Prefill replicas that `kvmesh up` starts.", 0, 64)] = 2
    engines: Annotated[tuple[str, ...], ENGINE_ADDRESSES] = ()
    queue_max_requests: Annotated[
        int, Allowed("Queue limit of a prefill replica; more requests are refused.", 1, 100_000, "requests")
    ] = 256
    queue_order: Annotated[
        str,
        Allowed(
            "Order of a tenant's waiting prompts, at routers too: shortest job first with aging, or first in, first out.",
            choices=tuple(ORDERS),
        ),
    ] = "shortest"
    engine_concurrency: Annotated[
        int, Allowed("Concurrency limit of a prefill engine.", 1, 1024, "requests")
    ] = 2


class Decode(Section, frozen=True, kw_only=True):
    section: ClassVar[str] = "decode"

    replicas: Annotated[int, Allowed("Decode replicas that `kvmesh up` starts.", 1, 64)] = 2
    engines: Annotated[tuple[str, ...], ENGINE_ADDRESSES] = ()
    slots_max: Annotated[
        int, Allowed("Slots of a decode replica: pending, running and detached requests.", 1, 100_000)
    ] = 256
    detached_s: Annotated[
        float,
        Allowed(
            "A running slot waits this long for a takeover after its Attach stream broke.", 0.05, 600, "s"
        ),
    ] = 3.0
    slow_reader_s: Annotated[
        float,
        Allowed(
            "A request with a closed flow-control window for this long is cancelled (slow reader).",
            0.1,
            3600,
            "s",
        ),
    ] = 30.0
    coalesce_max_ms: Annotated[
        float,
        Allowed(
            "Coalescing window: longest wait of an Attach frame for the step's other tokens.", 0, 1000, "ms"
        ),
    ] = 10.0


class Router(Section, frozen=True, kw_only=True):
    section: ClassVar[str] = "router"

    replicas: Annotated[int, Allowed("Routers that `kvmesh up` starts.", 1, 16)] = 1
    dispatch_ahead_s: Annotated[
        float,
        Allowed(
            "Unstarted work dispatched to each prefill replica, or one request if larger.", 0.01, 60, "s"
        ),
    ] = 1.0
    queue_max_requests: Annotated[
        int, Allowed("Queue limit of a router; more requests are refused.", 1, 1_000_000, "requests")
    ] = 1024
    queue_max_wait_s: Annotated[
        float, Allowed("Longest wait of a request in the queue; then it is refused.", 0.1, 3600, "s")
    ] = 60.0
    queue_delay_max_s: Annotated[
        float,
        Allowed(
            "Load shedding, the one limit of overload: a request with a longer estimated queue delay is refused at "
            "admission.",
            0.1,
            3600,
            "s",
        ),
    ] = 20.0
    queue_max_tokens: Annotated[
        int,
        Allowed("Prompt tokens in a router's queue; more are refused.", 1024, 1_000_000_000, "tokens"),
    ] = 8_000_000
    local_prefill_tokens_max: Annotated[
        int,
        Allowed(
            "A prompt with at most this many uncached tokens may run on decode alone, if that costs less.",
            0,
            100_000,
            "tokens",
        ),
    ] = 64
    transfer_block_us: Annotated[
        float, Allowed("Time of a KV transfer from prefill to decode, per block.", 0, 1_000_000, "us")
    ] = 100.0
    snapshot_interval_s: Annotated[
        float,
        Allowed(
            "Interval of the snapshots of a replica's KV cache in Redis; routers rely on it.", 0.1, 3600, "s"
        ),
    ] = 30.0
    index_blocks_max: Annotated[
        int,
        Allowed(
            "Distinct KV blocks in a router's prefix index, some 100 bytes each. Beyond it blocks are evicted by "
            "eviction score: never used ones first, then the least recently used (LRU).",
            1024,
            100_000_000,
            "blocks",
        ),
    ] = 10_000_000


class Frontend(Section, frozen=True, kw_only=True):
    section: ClassVar[str] = "frontend"

    edge: Annotated[
        str,
        Allowed(
            "Transport to the clients, which need no change. `batched` takes a fraction of the CPU per token.",
            choices=TRANSPORTS,
        ),
    ] = "batched"
    replicas: Annotated[int, Allowed("Frontends that `kvmesh up` starts.", 1, 16)] = 1
    port: Annotated[
        int,
        Allowed("Port of the first frontend; the others take the next ones. 0 takes a free port.", 0, 65_535),
    ] = 0
    http_port: Annotated[
        int,
        Allowed(
            "HTTP port of the first frontend (OpenAI API); the others take the next ones. 0 takes a free port.",
            0,
            65_535,
        ),
    ] = 0
    max_live_requests: Annotated[
        int, Allowed("Live requests of a frontend; more are refused.", 1, 1_000_000, "requests")
    ] = 1024
    default_deadline_s: Annotated[
        float, Allowed("Deadline of a request without one.", 0.1, RUNTIME_MAX_S, "s")
    ] = 120.0
    runtime_max_s: Annotated[
        float,
        Allowed(
            "Longest deadline; longer ones are shortened. Deadline propagation inside the mesh carries an hour at most.",
            0.1,
            RUNTIME_MAX_S,
            "s",
        ),
    ] = 600.0
    start_min_s: Annotated[
        float, Allowed("A request with less time than this to its deadline is refused.", 0, 60, "s")
    ] = 0.1
    anonymous_tenant: Annotated[
        str,
        Allowed(
            "Tenant of requests without credentials, if there are tenants; empty: such requests are refused.",
            pattern=rf"(?:{NAME})?",
            words="empty or the NAME of a [tenants.NAME]",
        ),
    ] = ""
    max_output_tokens_default: Annotated[
        int, Allowed("Output limit of a request without one.", 1, 1_000_000, "tokens")
    ] = 256
    max_output_tokens_max: Annotated[
        int, Allowed("Largest output limit of a request.", 1, 1_000_000, "tokens")
    ] = 4096
    message_bytes_max: Annotated[int, Allowed("Largest message of a client.", 1024, 64 << 20, "bytes")] = (
        4 << 20
    )
    request_timeout_s: Annotated[
        float,
        Allowed(
            "A call without its message this long after its headers is ended (slowloris).", 0.1, 600, "s"
        ),
    ] = 10.0
    unread_calls_max: Annotated[
        int,
        Allowed(
            "Calls without their message; more are refused. One caller may hold at most as many of them as remain free.",
            1,
            100_000,
            "calls",
        ),
    ] = 2_000
    connections_max: Annotated[
        int,
        Allowed(
            "Connection limit for clients; further ones are closed at once.", 16, 1_000_000, "connections"
        ),
    ] = 4_096
    first_token_silence_s: Annotated[
        float,
        Allowed(
            "Watchdog: a request without a message for this long before its first token is retried. The waits that the "
            "router announces are added. Raise it for prompts that take longer than the router expects.",
            0.1,
            3600,
            "s",
        ),
    ] = 30.0
    token_silence_s: Annotated[
        float,
        Allowed(
            "The same between two tokens. Keep it longer than the timeouts of the watchdogs behind it, which know more.",
            0.1,
            3600,
            "s",
        ),
    ] = 15.0
    attempts_max: Annotated[
        int,
        Allowed(
            "Attempts of one request that engines take, the first included; before the first one, attempts in all.",
            1,
            16,
        ),
    ] = 4
    retry_budget_ratio: Annotated[float, Allowed("Retry budget: retries per request, on average.", 0, 1)] = (
        0.1
    )
    retry_budget_per_s: Annotated[
        float, Allowed("Retry budget: retries on top of the ratio.", 0, 1000, "per second")
    ] = 3.0
    certificate: Annotated[
        str, Allowed("Certificate for clients, followed by its chain, PEM; empty: clients use plain text.")
    ] = ""
    key: Annotated[str, Allowed("The certificate's key, PEM, without a password.")] = ""
    client_authority: Annotated[
        str, Allowed("Authorities of client certificates, PEM; empty: clients need no certificate.")
    ] = ""

    def check(self) -> None:
        if self.default_deadline_s > self.runtime_max_s:
            raise ConfigError(
                f"frontend.default_deadline_s = {self.default_deadline_s:g} is longer than "
                f"frontend.runtime_max_s: allowed are 0.1 to {self.runtime_max_s:g} s."
            )
        if self.max_output_tokens_default > self.max_output_tokens_max:
            raise ConfigError(
                f"frontend.max_output_tokens_default = {self.max_output_tokens_default} is above "
                f"frontend.max_output_tokens_max: allowed are 1 to {self.max_output_tokens_max} tokens."
            )
        for key, port in (("port", self.port), ("http_port", self.http_port)):
            if port and port + self.replicas - 1 > 65_535:
                raise ConfigError(
                    f"frontend.{key} = {port} leaves no port for frontend.replicas = {self.replicas}: "
                    f"allowed are 0 to {65_536 - self.replicas}."
                )
        if self.port and self.http_port and abs(self.port - self.http_port) < self.replicas:
            raise ConfigError(
                f"frontend.http_port = {self.http_port} takes a port of frontend.port = {self.port} for "
                f"frontend.replicas = {self.replicas}: allowed is 0, or a distance of {self.replicas} and more."
            )
        given = {name: getattr(self, name) for name in ("certificate", "key", "client_authority")}
        for name in ("certificate", "key"):
            if not given[name] and any(given.values()):
                raise ConfigError(
                    f'frontend.{name} = "" beside frontend.{" and frontend.".join(_set(given))}: '
                    "allowed are certificate and key together, or neither."
                )


class Control(Section, frozen=True, kw_only=True):
    section: ClassVar[str] = "control"

    replicas: Annotated[
        int, Allowed("Control processes that `kvmesh up` starts; 0: the mesh has no control plane.", 0, 3)
    ] = 0
    state_dir: Annotated[
        str,
        Allowed(
            "Folder in which control processes keep their state; relative paths start where they run, empty: none."
        ),
    ] = ""


class WarmUp(Section, frozen=True, kw_only=True):
    """Warm-up of replicas before they serve (docs/warmup.md)."""

    section: ClassVar[str] = "warm_up"

    mode: Annotated[
        str,
        Allowed(
            "Parts of the warm-up that the control plane drives: full has shapes, seeding and golden prompts, shapes has "
            "no seeding; with none, replicas serve at once.",
            choices=("full", "shapes", "none"),
        ),
    ] = "full"
    seeding: Annotated[
        str,
        Allowed(
            "Way of hot prefixes into the cache of a fresh replica: pull copies KV blocks from a warm replica, replay "
            "computes the prompts.",
            choices=("pull", "replay", "none"),
        ),
    ] = "pull"
    prompt_tokens_max: Annotated[
        int,
        Allowed(
            "Longest prompt of a warm-up. Engines run longer prompts in parts of a size of their own.",
            1,
            65_536,
            "tokens",
        ),
    ] = 2048
    warming_max_s: Annotated[float, Allowed("Longest time over the shapes.", 1, 3600, "s")] = 120.0
    seeding_max_s: Annotated[
        float,
        Allowed(
            "Longest seeding before a replica serves; up to a minute follows while it serves.", 0, 600, "s"
        ),
    ] = 1.0
    probing_max_s: Annotated[float, Allowed("Longest time for golden prompts.", 1, 600, "s")] = 20.0
    package_every_s: Annotated[float, Allowed("Time between two packages of a pool.", 1, 86_400, "s")] = 300.0


class Trust(Section, frozen=True, kw_only=True):
    """Mutual TLS between the processes of the mesh (docs/security.md)."""

    section: ClassVar[str] = "trust"

    certificate: Annotated[
        str,
        Allowed(
            "Certificate of this process, followed by its chain, PEM; empty: no TLS. {role} in a path stands for the role."
        ),
    ] = ""
    key: Annotated[str, Allowed("The certificate's key, PEM, without a password.")] = ""
    authority: Annotated[str, Allowed("Authorities of the mesh's certificates, PEM.")] = ""
    networks: Annotated[
        tuple[str, ...],
        Allowed(
            "Networks of the addresses in Redis that this process may dial; empty: any. It works without certificates.",
            words='a list of CIDRs, such as ["10.0.0.0/8", "fd00::/8"]',
        ),
    ] = ()

    def check(self) -> None:
        for text in self.networks:
            try:
                networks.parse(text)
            except ValueError as error:
                raise ConfigError(
                    f'trust.networks has "{text}", which is not a network ({error}): allowed are CIDRs without host bits, '
                    'such as "10.0.0.0/8" or "fd00::/8".'
                ) from error
        given = {name: getattr(self, name) for name in ("certificate", "key", "authority")}
        for name, value in given.items():
            if not value and any(given.values()):
                raise ConfigError(
                    f'trust.{name} = "" beside trust.{" and trust.".join(_set(given))}: allowed are all three or none.'
                )


class Telemetry(Section, frozen=True, kw_only=True):
    section: ClassVar[str] = "telemetry"

    otlp_endpoint: Annotated[
        str,
        Allowed(
            "OTLP/gRPC collector; empty exports no spans.",
            pattern=r"(?:https?://\S+)?",
            words="empty, http:// or https://",
        ),
    ] = ""
    sample_ratio: Annotated[
        float, Allowed("Share of traced requests, if the client does not decide.", 0, 1)
    ] = 0.01
    log_level: Annotated[
        str, Allowed("Least severe event logged.", choices=("debug", "info", "warning", "error"))
    ] = "info"


def _set(given: Mapping[str, str]) -> list[str]:
    """Return the names with a value."""
    return [name for name, value in given.items() if value]
