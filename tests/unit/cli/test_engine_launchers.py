"""The engines of `kvmesh up`: one launcher for each kind, addresses of external ones, GPUs, and each wrong combination."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from bench import llm_surface
from kvmesh.cli.engine_launchers import OPTIONS
from kvmesh.cli.main import main
from kvmesh.cli.planned_process import Process
from kvmesh.cli.processes import processes_of
from kvmesh.cli.readiness import ReadyLine
from kvmesh.cli.supervisor import Limits, ProcessFailed, supervised
from kvmesh.config import ConfigError, parse
from kvmesh.roles import ENGINE_KINDS, option_of

EXTERNAL = '[engine]\nkind = "external"\n'
ONE = '[decode]\nengines = ["10.0.0.1:8001"]\n'


def planned(text: str, folder: Path) -> dict[str, Process]:
    return {each.name: each for each in processes_of(parse(text), folder / "c", folder)}


def test_every_kind_has_a_module_and_options() -> None:
    """A kind without either would fail at the start of a mesh."""
    assert OPTIONS.keys() == ENGINE_KINDS.keys()
    for kind in ENGINE_KINDS.values():
        assert kind.ports[0] == "grpc"
        assert {"grpc", "metrics"} <= set(kind.ports)


def test_external_engines_are_dialled_and_not_started(tmp_path: Path) -> None:
    """A replica for each address, in order, whatever the number of replicas."""
    text = (
        EXTERNAL
        + '[prefill]\nreplicas = 5\nengines = ["10.0.0.1:8001", "[fd00::1]:8001"]\n'
        + '[decode]\nengines = ["gpu-2:8001"]\n'
    )
    processes = planned(text, tmp_path)
    assert list(processes) == ["redis", "router-0", "prefill-0", "prefill-1", "decode-0", "frontend-0"]
    assert option_of(processes["prefill-0"].command, "engine") == "10.0.0.1:8001"
    assert option_of(processes["prefill-1"].command, "engine") == "[fd00::1]:8001"
    assert option_of(processes["decode-0"].command, "engine") == "gpu-2:8001"
    assert processes["decode-0"].deps == ("redis",)
    assert "prefill-2" not in processes


def test_each_pool_has_external_engines_of_its_own(tmp_path: Path) -> None:
    """Without prefill engines a pool has no prefill replica."""
    text = (
        EXTERNAL
        + '[pools.stable]\ndecode_engines = ["a:1", "b:1"]\n'
        + '[pools.next]\nprefill_engines = ["c:1"]\ndecode_engines = ["d:1"]\n'
    )
    found = {
        name: option_of(each.command, "engine")
        for name, each in planned(text, tmp_path).items()
        if each.role in ("prefill", "decode")
    }
    assert found == {
        "stable-decode-0": "a:1",
        "stable-decode-1": "b:1",
        "next-prefill-0": "c:1",
        "next-decode-0": "d:1",
    }


def test_tensorrt_llm_engines_get_their_file_and_their_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version's llm.yaml goes before that of the section, and an engine loads its weights for minutes."""
    monkeypatch.syspath_prepend(llm_surface.SURFACE)
    for name in ("llm.yaml", "next.yaml"):
        (tmp_path / name).write_text("model: /models/m\n")
    text = (
        f'[engine]\nkind = "tensorrt_llm"\nllm_config = "{tmp_path}/llm.yaml"\ngpus = ["0", "1,2", "3"]\n'
        f'[versions.v1]\n[versions.v2]\nllm_config = "{tmp_path}/next.yaml"\n'
        '[pools.stable]\nversion = "v1"\n[pools.next]\nversion = "v2"\nprefill = 0\n'
    )
    engines = {name: each for name, each in planned(text, tmp_path).items() if each.role == "engine"}
    assert [(name, dict(each.environment)["CUDA_VISIBLE_DEVICES"]) for name, each in engines.items()] == [
        ("stable-prefill-0-engine", "0"),
        ("stable-decode-0-engine", "1,2"),
        ("next-decode-0-engine", "3"),
    ]
    last = engines["next-decode-0-engine"]
    assert last.command[1:3] == ("-m", "engines.tensorrt_llm.serve")
    assert option_of(last.command, "config") == f"{tmp_path}/next.yaml"
    assert option_of(last.command, "model-version") == "v2"
    assert last.start_s > 600


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[engine]\nkind = "tensorrt_llm"',
            'engine.kind = "tensorrt_llm" needs engine.llm_config, which is "": allowed is the path of an llm.yaml.',
        ),
        (
            '[engine]\nllm_config = "a.yaml"',
            'engine.llm_config needs engine.kind = "tensorrt_llm": it is "reference", which takes no llm_config.',
        ),
        (
            EXTERNAL + 'gpus = ["0"]\n' + ONE,
            'engine.gpus needs engine.kind = "tensorrt_llm": it is "external", which takes no gpus.',
        ),
        (
            '[engine]\nkind = "vllm"',
            'engine.kind = "vllm" is out of range: allowed is "reference" or "tensorrt_llm" or "external".',
        ),
        (
            EXTERNAL,
            'decode.engines = [] beside engine.kind = "external": allowed is one address of an engine or more.',
        ),
        (
            ONE,
            'decode.engines needs engine.kind = "external": it is "reference", for which `kvmesh up` starts the engines.',
        ),
        (
            EXTERNAL + ONE + '[pools.stable]\ndecode_engines = ["a:1"]',
            "decode.engines is not used beside [pools.NAME]: allowed is pools.NAME.decode_engines.",
        ),
        (
            EXTERNAL + ONE + '[prefill]\nengines = ["10.0.0.1:8001"]',
            '"10.0.0.1:8001" is the engine of 2 replicas: allowed is one for each engine.',
        ),
        (
            EXTERNAL + '[decode]\nengines = ["gpu"]',
            'decode.engines = ["gpu"] is out of range: allowed is a list of addresses such as ["10.1.0.4:8001"].',
        ),
        (
            '[engine]\nkind = "tensorrt_llm"\nllm_config = "none.yaml"',
            'llm_config = "none.yaml" of version kvmesh-1 is not a file: allowed is an llm.yaml.',
        ),
        (
            '[engine]\nkind = "tensorrt_llm"\nllm_config = "kvmesh.toml"',
            (
                'engine.kind = "tensorrt_llm" needs the package tensorrt_llm, which is not installed here: '
                'run kvmesh up in NVIDIA\'s container, or start the engines there and use "external".'
            ),
        ),
        (
            '[engine]\nkind = "tensorrt_llm"\nllm_config = "kvmesh.toml"\ngpus = ["0"]',
            "engine.gpus has 1 entries: allowed are 4, one for each engine, or none.",
        ),
    ],
)
def test_a_wrong_combination_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    """Nothing is started."""
    with pytest.raises(ConfigError) as refused:
        processes_of(parse(text), tmp_path / "c", tmp_path)
    assert str(refused.value) == sentence


async def test_a_start_has_the_limit_of_its_process(tmp_path: Path) -> None:
    """An engine that loads weights for minutes is not taken for one that hangs, and the other way round."""
    command = (sys.executable, "-c", "import signal; signal.pause()")
    hanging = Process("engine", "fake", command, (), ReadyLine(), start_s=0.2)
    with pytest.raises(ProcessFailed, match=r"engine was not ready after 0\.2 s"):
        async with supervised([hanging], tmp_path / "logs", limits=Limits(start_s=600.0)) as supervisor:
            await asyncio.wait_for(supervisor.start(), 60)


def test_the_repository_command_runs_the_module_of_the_kind(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its exit status is that of the module; a kind without a repository is refused."""
    ran: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr("kvmesh.cli.engine_commands.subprocess.run", run)
    with pytest.raises(SystemExit) as ended:
        main(["engine", "repository", "--config", "llm.yaml", "--to", "models"])
    assert ended.value.code == 3
    assert ran == [["-m", "engines.tensorrt_llm.repository", "--config", "llm.yaml", "--to", "models"]]
    with pytest.raises(SystemExit) as ended:
        main(["engine", "repository", "--config", "a", "--to", "b", "--engine", "reference"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == (
        '--engine = "reference" has no model repository: allowed is tensorrt_llm.\n'
    )
