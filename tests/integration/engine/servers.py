"""Real tritonservers with the reference engine, and a small client for them."""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton

from kvmesh.cli.supervisor import STARTS_MAX
from kvmesh.ports import free_ports
from tests.integration.harness import own_loopback
from tests.patience import Patience

_ROOT = Path(__file__).resolve().parents[3]
_READY_TIMEOUT_S = 45.0


@dataclass
class Server:
    """One launched engine."""

    grpc: str
    http: str
    kv: str
    shm_prefix: str
    log: Path
    started_s: float
    command: list[str]
    metrics: str
    process: subprocess.Popen[bytes] = field(init=False, repr=False)
    starts: int = 0

    def start(self) -> None:
        """Start the process, or start it again."""
        self.starts += 1
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command, cwd=_ROOT, stdout=output, stderr=output)

    def wait_ready(self) -> None:
        """Wait until the model is ready; fail with the log if the process ends before."""
        bound = Patience(_READY_TIMEOUT_S)
        while not bound.is_over:
            if self.process.poll() is not None:
                # tritonserver may abort while it starts a Python model; `kvmesh up` starts it again, too.
                if self.process.returncode == -signal.SIGABRT and self.starts < STARTS_MAX:
                    print(f"tritonserver aborted, and is started again: {self.log.read_text()[-2000:]}")
                    self.start()
                    continue
                raise AssertionError(f"tritonserver ended: {self.log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=1.0) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"not ready: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self.process.kill()
        self.process.wait()


REFERENCE = ("engines.reference.serve", "--arithmetic=hashed")


def launch(
    directory: Path, *options: str, module: Sequence[str] = REFERENCE, metrics_port: int = 0
) -> Server:
    """Start a hashed engine on free ports. `module`: launcher and its first options. `metrics_port`: 0 takes a free one."""
    directory.mkdir(parents=True, exist_ok=True)
    host = own_loopback()
    grpc, http, metrics, kv = free_ports(host, 4)
    metrics = metrics_port or metrics
    log, prefix = directory / "log", f"kvmesh_test_{host}_{grpc}_"
    command = [sys.executable, "-m", *module, f"--host={host}"]
    command += [f"--grpc-port={grpc}", f"--http-port={http}", f"--metrics-port={metrics}", f"--kv-port={kv}"]
    command += [f"--shm-prefix={prefix}", f"--work-dir={directory}", "--die-with-parent", *options]
    addresses = (f"{host}:{grpc}", f"{host}:{http}", f"{host}:{kv}")
    server = Server(*addresses, prefix, log, time.monotonic(), command, f"{host}:{metrics}")
    server.start()
    return server


@dataclass
class Answer:
    """The collected responses to one request."""

    tokens: list[int] = field(default_factory=list)
    handoff: bytes | None = None
    error: str | None = None
    is_final: bool = False
    messages: int = 0
    first: dict[str, Any] = field(default_factory=dict)  # other tensors of the first message


def request(prompt: list[int], output: int = 8, kind: str | None = None, **options: Any) -> dict[str, Any]:
    """Return a request for `stream_infer`. Options: handoff, kv_peer, request_id, and any tensor of _TYPES by name."""
    handoff, kv_peer = options.pop("handoff", None), options.pop("kv_peer", None)
    request_id = options.pop("request_id", "r")
    tensors = {"streaming": True, "return_perf_metrics": True, **options}
    inputs = [
        _input("input_ids", np.array([prompt], dtype=np.int32), "INT32"),
        _input("input_lengths", np.array([[len(prompt)]], dtype=np.int32), "INT32"),
        _input("request_output_len", np.array([[output]], dtype=np.int32), "INT32"),
    ]
    for name, value in tensors.items():
        data_type, dtype = _TYPES[name]
        values = [value] if isinstance(value, list) else [[value]]
        inputs.append(_input(name, np.array(values, dtype=dtype), data_type))
    if handoff is not None:
        inputs.append(
            _input("context_phase_params", np.frombuffer(handoff, np.uint8).reshape(1, -1), "UINT8")
        )
    parameters = {"request_type": kind, "kv_peer": kv_peer}
    return {
        "model_name": "tensorrt_llm",
        "inputs": inputs,
        "request_id": request_id,
        "parameters": {key: value for key, value in parameters.items() if value is not None},
    }


_TYPES = {
    "streaming": ("BOOL", np.bool_),
    "stop": ("BOOL", np.bool_),
    "return_perf_metrics": ("BOOL", np.bool_),
    "return_log_probs": ("BOOL", np.bool_),
    "temperature": ("FP32", np.float32),
    "runtime_top_p": ("FP32", np.float32),
    "runtime_top_k": ("INT32", np.int32),
    "end_id": ("INT32", np.int32),
    "seed": ("UINT64", np.uint64),
    "exclude_input_in_output": ("BOOL", np.bool_),
    "stop_words_list": ("INT32", np.int32),
    "return_top_log_probs": ("INT32", np.int32),
    "lora_task_id": ("UINT64", np.uint64),
    "retention_token_range_starts": ("INT32", np.int32),
    "retention_token_range_ends": ("INT32", np.int32),
    "retention_token_range_priorities": ("INT32", np.int32),
    "retention_token_range_durations_ms": ("INT32", np.int32),
    "retention_decode_priority": ("INT32", np.int32),
}


def _input(name: str, values: npt.NDArray[Any], data_type: str) -> triton.InferInput:
    tensor = triton.InferInput(name, list(values.shape), data_type)
    tensor.set_data_from_numpy(values)
    return tensor


class Client:
    """A client of one server; one stream per request."""

    def __init__(self, address: str) -> None:
        self._client = triton.InferenceServerClient(address)

    async def close(self) -> None:
        await self._client.close()

    def stream(self, body: dict[str, Any], timeout_s: float = 30.0) -> Any:
        """Return the raw call, to be iterated or cancelled."""

        async def one() -> AsyncIterator[dict[str, Any]]:
            yield body

        return self._client.stream_infer(one(), stream_timeout=timeout_s)

    async def run(self, *arguments: Any, **options: Any) -> Answer:
        """Send a request and collect its responses."""
        answer = Answer()
        async for result, error in self.stream(request(*arguments, **options)):
            assert not answer.is_final, "a message came after the final response"
            if error is not None:
                answer.error = str(error)
                continue
            answer.messages += 1
            response = result.get_response()
            answer.is_final = response.parameters["triton_final_response"].bool_param
            tensors = {one.name: result.as_numpy(one.name) for one in response.outputs}
            answer.tokens += tensors.pop("output_ids").reshape(-1).tolist()
            handoff = tensors.pop("context_phase_params", None)
            answer.handoff = answer.handoff if handoff is None else handoff.tobytes()
            answer.first = answer.first or tensors
        return answer

    async def subscribe(self, kind: str, timeout_s: float = 30.0) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the messages of a subscription until it ends or the caller closes this generator."""
        call = self.stream(request([1], 1, kind), timeout_s)
        try:
            async for result, error in call:
                assert error is None, error
                yield msgspec.json.decode(result.as_numpy(kind).tobytes())
        finally:
            call.cancel()

    async def parameters(self) -> dict[str, str]:
        """Return the model's parameters."""
        config = await self._client.get_model_config("tensorrt_llm", as_json=True)
        return {key: value.get("string_value", "") for key, value in config["config"]["parameters"].items()}

    async def metadata(self) -> dict[str, Any]:
        """Return the model's metadata."""
        found = await self._client.get_model_metadata("tensorrt_llm", as_json=True)
        return dict(found)
