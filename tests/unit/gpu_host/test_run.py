"""The run on a GPU host without engines: the plan that fits a host, phases that fail or hang, the page, the refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvmesh.config import ROOT
from tools.gpu import archive, distributions
from tools.gpu.__main__ import app
from tools.gpu.distributions import Missing
from tools.gpu.front import TOKENIZER, model_folder
from tools.gpu.host import EIGHT, GB, HALF, HASHED, SMALL, CannotRun, Host, plan_for
from tools.gpu.page import NOT_RUN, page
from tools.gpu.phases import Phases

BEYOND_THE_LIMIT_S = 60.0
GPU_RUN = ROOT / "docs" / "measurements" / "gpu-run.json"


@pytest.mark.parametrize(
    ("free", "shape", "gpus"),
    [
        ((79 * GB,), "8B", ("0", "0")),
        ((40 * GB,), "0.5B", ("0", "0")),
        ((40 * GB, 40 * GB), "8B", ("0", "1")),
        ((40 * GB, 5 * GB), "0.5B", ("0", "0")),
    ],
)
def test_the_largest_shape_that_fits_is_taken(
    free: tuple[int, ...], shape: str, gpus: tuple[str, str]
) -> None:
    """Two engines share one GPU, or take one each."""
    plan = plan_for(Host("2.9.0", ("H100",) * len(free), free))
    assert (plan.shape, plan.device, plan.gpus) == (shape, "cuda", gpus)


@pytest.mark.parametrize("plan", [SMALL, HASHED, HALF, EIGHT])
def test_the_streams_of_a_plan_fit(plan: Any) -> None:
    """All streams, and the longest prompt, have room in the caches; a step takes the longest prompt whole."""
    longest = max(sum(prompt) for prompt in plan.prompts)
    assert plan.streams * -(-(256 + plan.stream_tokens) // 32) <= plan.decode_blocks
    assert -(-longest // 32) < plan.prefill_blocks
    assert max(uncached for _, uncached in plan.prompts) <= plan.step_tokens
    assert longest < plan.sequence_tokens >= 256 + plan.stream_tokens


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (Host("", reason="No module named 'torch'"), "this Python has no PyTorch (No module named 'torch')"),
        (Host("2.9.0"), "PyTorch 2.9.0 finds no CUDA device: rehearse on the CPU with --cpu"),
        (Host("2.9.0", ("T4",), (9 * GB,)), "T4 has 9.0 GB free, and two engines of the shape 0.5B take"),
    ],
)
def test_a_host_that_lacks_something_is_told_what(host: Host, said: str) -> None:
    """One sentence with the way out."""
    with pytest.raises(CannotRun) as refused:
        plan_for(host)
    assert str(refused.value).startswith(said)
    assert plan_for(Host(""), is_cpu=True, arithmetic="hashed") is HASHED


def test_phases_fail_or_hang_alone(tmp_path: Path) -> None:
    """A phase that fails, or hangs and survives errors, is recorded with what it had; the next one runs."""
    file = tmp_path / "run.json"
    phases = Phases(file, {"plan": 1})

    def fails(result: dict[str, Any]) -> None:
        result["so far"] = 3
        raise ValueError("no such thing")

    def hangs(result: dict[str, Any]) -> None:
        result["began"] = True
        while True:
            try:
                threading.Event().wait(BEYOND_THE_LIMIT_S)
            except Exception:  # noqa: BLE001  # as code that survives errors
                continue

    assert not phases.run("first", 10, fails)
    assert not phases.run("second", 1.1, hangs)
    assert json.loads(file.read_text())["phases"]["second"]["result"] == {"began": True}
    assert phases.run("third", 10, lambda result: result.update(done=1))
    record = json.loads(file.read_text())
    assert record == phases.record
    assert record["plan"] == 1
    states = [(name, phase["passed"], phase["reason"]) for name, phase in record["phases"].items()]
    assert states == [
        ("first", False, "ValueError: no such thing"),
        ("second", False, "not done within 1 s"),
        ("third", True, ""),
    ]


def test_phases_share_the_time_of_the_run(tmp_path: Path) -> None:
    """Behind the end of the run no phase begins."""
    phases = Phases(tmp_path / "run.json", {}, total_s=0.5)
    assert not phases.run("late", 10, lambda _: pytest.fail("it began"))


def test_a_page_is_written_of_every_record() -> None:
    """Whatever phases are missing, the page says where it was not run on a GPU; conformance is told by its results."""
    whole = json.loads(GPU_RUN.read_text(encoding="utf-8"))
    names = list(whole["phases"])
    assert len(names) >= 5
    for count in range(len(names) + 1):
        part = {**whole, "phases": {name: whole["phases"][name] for name in names[:count]}}
        assert NOT_RUN.split(".")[0] in page(part)
        emptied = {name: {**phase, "result": {}} for name, phase in part["phases"].items()}
        assert page({**part, "phases": emptied}).startswith("# A run")
    on_gpu = {**whole, "plan": {**whole["plan"], "device": "cuda"}}
    assert NOT_RUN.split(".")[0] not in page(on_gpu)
    checks = [
        {"capability": "events", "check": "order", "result": "pass", "why": ""},
        {"capability": "limits", "check": "long", "result": "fail", "why": "took 3 | 4"},
    ]
    told = {"passed": False, "reason": "", "seconds": 1.0, "result": {"told": {"checks": checks}}}
    text = page({**whole, "phases": {"conformance": told}})
    assert "1 pass, 1 fail." in text and "| limits | long | fail | took 3 / 4 |" in text


def test_the_tokenizer_is_as_large_as_the_vocabulary(tmp_path: Path) -> None:
    """Every id of a large vocabulary has a text; a small one takes the folder as it is."""
    from kvmesh.models.tokenizer import ModelTokenizer

    assert model_folder(4096, tmp_path / "none") == TOKENIZER
    made = ModelTokenizer.load(model_folder(EIGHT.vocabulary, tmp_path / "made"))
    assert made.vocab_size == EIGHT.vocabulary
    assert made.decode([EIGHT.vocabulary - 1]) == f"filler{EIGHT.vocabulary - 1}"
    known = ModelTokenizer.load(TOKENIZER)
    assert made.encode("It was a fine morning") == known.encode("It was a fine morning")


def test_another_python_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """The archive's packages are for one version."""
    (tmp_path / "python-version").write_text("3.9\n")
    script = ROOT / "tools" / "gpu" / "host_environment.py"
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("cannot run: this archive is for Python 3.9, and ")
    assert done.stderr.endswith(f"or pack with --python {sys.version_info.major}.{sys.version_info.minor}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pack", "--to", "a.zip"), 'to = "a.zip" is not possible: allowed are names that end with .tar.xz or .tar'),
        (("pack", "--to", "a.tar", "--python", "3.10"), 'python = "3.10" is not possible: allowed is 3.11 or 3.12'),
        (("run", "--arithmetic", "hashed"), 'arithmetic = "hashed" is not possible: allowed is torch, and hashed with'),
        (("run", "--only", "steps,rest"), 'only = "rest" is not possible: allowed are engines, prefills, transfers,'),
        (("page", "missing.json", "--write", "page.md"), "missing.json is no record of a run"),
    ],
)  # fmt: skip
def test_bad_options_get_one_sentence(words: tuple[str, ...], said: str) -> None:
    """The field, the value, the allowed ones."""
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.output.startswith(said)) == (2, True), done.output


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheels of Triton or Redis nothing is packed."""
    monkeypatch.setattr(archive, "REDIS", "no-such-package")
    with pytest.raises(
        Missing, match="the package no-such-package is not installed in this environment: make setup"
    ):
        archive.pack(tmp_path / "a.tar")
    monkeypatch.setattr(distributions, "UNDECLARED", ("no-other",))
    with pytest.raises(Missing, match="the package no-other is not installed"):
        distributions.closure()


def _repository(folder: Path) -> None:
    """Make a repository with a tracked, an ignored and an untracked file."""
    (folder / "kvmesh").mkdir(parents=True)
    for name, text in (
        (".gitignore", "secret.env\n"),
        ("kvmesh/a.py", "1\n"),
        ("kvmesh/secret.env", "key\n"),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    for words in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"),
    ):
        subprocess.run(["git", "-C", str(folder), *words], check=True, timeout=60)
    (folder / "kvmesh" / "untracked.py").write_text("2\n", encoding="utf-8")


def test_only_tracked_files_are_packed(tmp_path: Path) -> None:
    """Neither untracked nor ignored ones. A changed file shows behind the commit, an untracked one does not."""
    folder = tmp_path / "clone"
    _repository(folder)
    names = [path.relative_to(folder).as_posix() for path in archive.files(folder)]
    assert names == ["kvmesh/a.py"]
    clean = archive.commit(folder)
    assert clean.isalnum()
    (folder / "kvmesh" / "a.py").write_text("3\n", encoding="utf-8")
    assert archive.commit(folder) == f"{clean} with changes"


def test_a_folder_inside_another_repository_has_no_commit(tmp_path: Path) -> None:
    """The commit of the outer one does not describe it. All its files are packed."""
    _repository(tmp_path)
    inner = tmp_path / "unpacked"
    (inner / "kvmesh").mkdir(parents=True)
    (inner / "kvmesh" / "b.py").write_text("1\n", encoding="utf-8")
    assert archive.commit(inner) == "not in a repository"
    assert list(archive.files(inner)) == [inner / "kvmesh" / "b.py"]


def test_an_archive_names_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes depend on its files alone: no user, no group, no time."""
    file = tmp_path / "a.py"
    file.write_text("1\n", encoding="utf-8")
    monkeypatch.setattr(archive, "_contents", lambda python, folder: [("repo/a.py", file)])
    archive.pack(tmp_path / "a.tar")
    file.chmod(0o600)
    file.touch()
    archive.pack(tmp_path / "b.tar")
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as packed:
        (found,) = packed.getmembers()
    assert (found.uid, found.gid, found.uname, found.gname) == (0, 0, "", "")
    assert (found.mtime, found.mode) == (archive.PACKED_AT_S, 0o644)
