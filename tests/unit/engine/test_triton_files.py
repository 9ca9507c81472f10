"""The files of tritonserver: which installation is taken, and what its backend directory gets."""

from __future__ import annotations

from pathlib import Path

from engines.contract import model_repository, tritonserver


def _container(root: Path) -> Path:
    """Write the files that NVIDIA's containers have in /opt/tritonserver."""
    for name in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_stub",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return root


def test_a_container_has_one_stub_beside_the_library(tmp_path: Path) -> None:
    """The server of the container comes before that of the wheel, with its own stub."""
    found = tritonserver.find_installation(_container(tmp_path / "opt"))
    assert found.server == tmp_path / "opt" / "bin" / "tritonserver"
    assert [path.name for path in found.backend_files()] == [
        "libtriton_python.so",
        "triton_python_backend_stub",
    ]
    wheel = tritonserver.find_installation(tmp_path / "none")
    assert "pytriton" in str(wheel.server) and wheel.backend_files()[-1].name == "triton_python_backend_stub"


def test_a_model_gets_its_further_files(tmp_path: Path) -> None:
    """By their path in the model's folder; one of them may replace the generated module."""
    files = {"1/llm.yaml": b"x", "1/model.py": b"y", "warmup/input_lengths": b"z"}
    version = model_repository.write_model(tmp_path, "engines.reference", "config", files)
    model = version.parent
    assert {name: (model / name).read_bytes() for name in files} == files
    assert (model / "config.pbtxt").read_text(encoding="utf-8") == "config"
