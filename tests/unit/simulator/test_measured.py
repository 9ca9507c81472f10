"""`kvmesh replay --cost-of`: the prefill cost measured by a running router, and a replay with it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.bad_option import BadOption
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from services.router.placement.cost_model import CostModel
from simulator import options
from simulator.cost import COSTS
from simulator.measured import PROMPTS_MIN, measured
from tests.unit.simulator import small
from tests.unit.simulator.test_command import run

QUICK = ("--replicas", "2", "--load", ".7", "--policies", "kvmesh,random", "--json")


def told(prompts: int = 500, **fields: Any) -> pb.GetStatusResponse:
    """Return the status of a router that has measured `prompts`."""
    costs = pb.PrefillCosts(c0_s=0.02, a_s=1.5e-4, b_s=2e-9, uncached_tokens_min=40, uncached_tokens_max=900)
    costs.measured_prompt_count, costs.fitted_prompt_count = prompts, min(prompts, 128)
    costs.MergeFrom(pb.PrefillCosts(**fields))
    return pb.GetStatusResponse(router="router-3", prefill_costs=costs)


@contextmanager
def answering(status: pb.GetStatusResponse | None) -> Iterator[str]:
    """Yield the address of a server that answers `status`; with None, the server is not a router."""

    class Router(router_pb2_grpc.RouterServiceServicer):
        def GetStatus(self, request: Any, context: Any) -> pb.GetStatusResponse:
            assert status is not None
            return status

        def ListHotPrefixes(self, request: Any, context: Any) -> Any:
            raise NotImplementedError

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        if status is not None:
            router_pb2_grpc.add_RouterServiceServicer_to_server(Router(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a small trace in a file."""
    return str(small.write(tmp_path / "small.jsonl", small.trace(1)))


def test_the_cost_that_is_shown_is_the_cost_that_is_simulated(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """--cost with the shown coefficients gives the same figures without a mesh, for any fit of a router."""
    rng = random.Random(2)
    for _ in range(3):
        status = told(c0_s=rng.uniform(0, 0.1), a_s=rng.uniform(1e-6, 1e-3), b_s=rng.uniform(0, 1e-7))
        with answering(status) as address:
            code, out, err = run(capsys, trace, "--cost-of", address, *QUICK)
        assert code == 0, err
        mesh = json.loads(out)
        cost = mesh["comparison"][0]["row"]["cost"]
        for name in ("c0_s", "a_s", "b_s"):
            assert cost[name] == pytest.approx(getattr(status.prefill_costs, name), rel=1e-5)
        assert mesh["measured"] == {
            "router": "router-3",
            "address": address,
            "prompts": 500,
            "fitted_prompts": 128,
            "uncached_tokens": [40, 900],
            "factors": {},
        }
        shown = measured("", address, status, COSTS["8b"]).sentences(1)[0].rpartition(" ")[2]
        code, out, _ = run(capsys, trace, shown, *QUICK)
        alone = json.loads(out)
        assert code == 0 and alone["measured"] is None
        assert alone["comparison"][0]["policies"] == mesh["comparison"][0]["policies"]


def test_the_table_names_the_source_of_the_costs(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names the router, its number of prompts, the extrapolated range and deviating replicas."""
    status = told(1234)
    for name, role, factor in (
        ("prefill-0", pb.ReplicaView.ROLE_PREFILL, 1.0),
        ("prefill-1", pb.ReplicaView.ROLE_PREFILL, 1.5),
        ("prefill-2", pb.ReplicaView.ROLE_PREFILL, 0.25),
        ("decode-0", pb.ReplicaView.ROLE_DECODE, 9.0),
    ):
        status.replicas.add(replica=name, role=role, prefill_factor=factor)
    with answering(status) as address:
        code, out, _ = run(capsys, trace, "--cost-of", address, *QUICK[:-1])
    sentences = " ".join(out.split())
    assert code == 0 and "prefill as router-3 measured it" in sentences
    assert (
        f"router-3 at {address} has measured 1,234 prompts. By the last 128, of 40 to 900 uncached"
        in sentences
    )
    assert "the cost of more than 900 is a guess." in sentences
    assert "These take longer or shorter by a factor: prefill-2 0.25, prefill-1 1.50." in sentences


def test_measured_lengths_are_not_called_a_guess() -> None:
    """Prompt lengths within the measured range are not marked as a guess."""
    assert len(measured("", "a:1", told(), COSTS["8b"]).sentences(1000)) == 1
    assert len(measured("", "a:1", told(), COSTS["8b"]).sentences(2000)) == 2


@pytest.mark.parametrize("prompts", [0, 1, PROMPTS_MIN - 1, PROMPTS_MIN])
def test_a_router_that_has_measured_too_little_is_refused(prompts: int) -> None:
    """A router with one measured prompt less than needed is refused."""
    if prompts >= PROMPTS_MIN:
        assert measured("--cost-of", "a:1", told(prompts), COSTS["8b"]).prompts == prompts
        return
    with pytest.raises(
        BadOption, match=rf'--cost-of = "a:1": router-3 has measured {prompts} .* {PROMPTS_MIN} are needed'
    ):
        measured("--cost-of", "a:1", told(prompts), COSTS["8b"])


def test_a_router_of_an_older_release_is_refused() -> None:
    """A router of an older release sends no coefficients, which is not a coefficient of 0."""
    with pytest.raises(BadOption, match="router-9 is of a release that does not report prefill costs"):
        measured("--cost-of", "a:1", pb.GetStatusResponse(router="router-9"), COSTS["8b"])


def test_the_rest_of_the_model_stays(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """KV bytes per token and the TTFT objective stay as given, since no router measures them."""
    base = options.cost("8b", 3.0, 40_960)
    cost = measured("", "a:1", told(), base).cost
    assert (cost.slo_floor_s, cost.kv_bytes, cost.a_s) == (3.0, 40_960, 1.5e-4)
    with answering(told()) as address:
        _, out, _ = run(capsys, trace, "--cost-of", address, "--kv-bytes", "4096", "--slo-s", "2", *QUICK)
    assert (json.loads(out)["kv_bytes_per_token"], json.loads(out)["slo_s"]) == (4096, 2)


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["--cost-of", "router-0"], '--cost-of = "router-0" is not HOST:PORT with a port of 1 to 65535'),
        (["--cost-of", ""], '--cost-of = "" is not HOST:PORT'),
        (["--cost-of", "a:1", "--cost", "8b"], "--cost and --cost-of exclude each other"),
        (["--cost-of", "a:1", "--config", "/no/mesh.toml"], "/no/mesh.toml"),
        (["--kv-bytes", "0"], "--kv-bytes = 0 is out of range: allowed are 1 to"),
    ],
)
def test_a_wrong_option_is_refused_in_one_sentence(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str], sentences: str
) -> None:
    """A wrong option is refused in one sentence with status 2, before the router is called."""
    code, out, err = run(capsys, trace, *arguments)
    assert code == 2 and not out
    assert sentences in err and err.count("\n") == 1


def test_an_address_without_a_router_is_named(
    trace: str, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address without a server, and a server that is not a router, are named in the error."""
    code, _, err = run(capsys, trace, "--cost-of", f"127.0.0.1:{free_port}")
    assert (code, err) == (2, f'--cost-of = "127.0.0.1:{free_port}" does not answer: UNAVAILABLE.\n')
    with answering(None) as address:
        code, _, err = run(capsys, trace, "--cost-of", address)
    assert (code, err) == (2, f'--cost-of = "{address}" is not a router.\n')


def test_the_model_reports_the_prompts_of_its_fit() -> None:
    """The fit reports the prompts of its window only."""
    model = CostModel()
    assert (model.fitted_count, model.uncached_span) == (0, (0, 0))
    model.observe(5000, 5000, 1.0)
    for uncached in range(1, 501):
        model.observe(uncached, 1000, 0.01)
    assert (model.fitted_count, model.uncached_span) == (128, (373, 500))
    model.forget()
    assert (model.fitted_count, model.uncached_span) == (0, (0, 0))
