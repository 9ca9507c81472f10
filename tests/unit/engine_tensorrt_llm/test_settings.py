"""llm.yaml and the model folder: what is completed, and the sentence of each refusal."""

from __future__ import annotations

import copy
import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engines.tensorrt_llm import llm_file, model_folder, model_repository, repository, settings
from engines.tensorrt_llm.settings import ModelFacts, SettingsRefused

FACTS = ModelFacts("llama", 4096, 8192, "d16e57")
LLM: dict[str, Any] = {"model": "/models/llama", "kv_cache_config": {"max_tokens": 3200}}


def changed(**changes: Any) -> dict[str, Any]:
    """Return LLM with changes; "__" stands between the names of a nested object."""
    found = copy.deepcopy(LLM)
    for path, value in changes.items():
        outer, _, inner = path.rpartition("__")
        (found.setdefault(outer, {}) if outer else found)[inner] = value
    return found


def test_what_the_mesh_needs_is_completed_and_the_rest_kept() -> None:
    """Defaults are filled in, keys of LLM(...) stay as they are."""
    found = settings.complete(changed(tensor_parallel_size=2, max_batch_size=64), FACTS)
    assert found.llm["tensor_parallel_size"] == 2 and found.llm["enable_chunked_prefill"] is True
    assert found.llm["kv_cache_config"]["event_buffer_max_size"] == settings.EVENT_BUFFER
    assert (found.tokens_per_block, found.kv_blocks, found.max_sequence_tokens) == (32, 100, 8192)
    assert (found.model_version, found.max_batch_size, found.parallelism) == ("llama", 64, (2, 1))
    assert not found.is_disaggregated and found.has_events and not found.has_guides


def test_the_file_of_the_model_says_what_the_settings_say() -> None:
    """The model reads the settings that the launcher checked."""
    given = changed(kvmesh__loras={7: {"name": "legal", "path": "/l"}}, enable_lora=True)
    found = settings.complete(given, FACTS, "v2")
    assert settings.from_file(yaml.safe_load(llm_file.text(found.to_file()))) == found
    assert found.model_version == "v2"


def test_parallelism_does_not_change_the_digest_and_data_types_do() -> None:
    """Engines of other parallelism exchange KV blocks; engines of other blocks or data types do not."""
    same = settings.complete(changed(tensor_parallel_size=4), FACTS).digest
    assert settings.complete(LLM, FACTS).digest == same
    others = (
        {"dtype": "float16"},
        {"kv_cache_config__dtype": "fp8"},
        {"kv_cache_config__tokens_per_block": 64},
    )
    digests = {settings.complete(changed(**each), FACTS).digest for each in others}
    assert len(digests | {same}) == 4


REFUSED = [
    ([], "llm.yaml is no table"),
    (changed(max_batch_sise=3), "max_batch_sise (did you mean max_batch_size?)"),
    (
        changed(kv_cache_config__max_token=3),
        "kv_cache_config.max_token (did you mean kv_cache_config.max_tokens?)",
    ),
    (
        changed(kvmesh__modle_version="1"),
        "kvmesh has modle_version: allowed are model_version, warm_up, loras",
    ),
    (changed(kvmesh__warm_up=3), "kvmesh.warm_up = 3: allowed is a truth value"),
    (changed(model=7), "model is missing"),
    (changed(backend="tensorrt"), "backend = 'tensorrt': allowed is pytorch"),
    (changed(max_seq_len=9000), "max_seq_len = 9000: allowed is 2..8192"),
    (changed(max_batch_size=0), "max_batch_size = 0: allowed is a whole number, 1..65536"),
    (changed(kv_cache_config=3), "kv_cache_config is no table"),
    (changed(kv_cache_config={}), "kv_cache_config.max_tokens is missing"),
    (changed(kv_cache_config__max_tokens=16), "kv_cache_config.max_tokens = 16"),
    (
        changed(kv_cache_config__tokens_per_block=48),
        "tokens_per_block = 48: allowed is a power of two above 1",
    ),
    (changed(cache_transceiver_config="UCX"), "cache_transceiver_config is no table"),
    (changed(cache_transceiver_config__backend="MPI"), "backend = 'MPI': allowed are UCX and NIXL"),
    (changed(cache_transceiver_config__backend="DEFAULT"), "allowed are UCX and NIXL"),
    (changed(kvmesh__loras={0: {"name": "a", "path": "/"}}), "kvmesh.loras has 0"),
    (changed(tensor_parallel_size="two"), "tensor_parallel_size = 'two': allowed is a whole number, 1..1024"),
    (changed(pipeline_parallel_size=0), "pipeline_parallel_size = 0: allowed is a whole number, 1..1024"),
    (
        changed(kv_cache_config__max_tokens=10**10),
        "max_tokens = 10000000000: allowed is a whole number, 32..1000000000",
    ),
    (changed(max_num_tokens=float("nan")), "max_num_tokens = nan: allowed is a whole number, 1..16777216"),
    (changed(max_batch_size=1 << 20_000), "max_batch_size is a whole number beyond 64 bits"),
    (changed(dtype=3), "dtype = 3: allowed is the name of a data type"),
    (
        changed(model_kwargs__day=dt.date(2024, 1, 1)),
        "model_kwargs.day = datetime.date(2024, 1, 1) is a date",
    ),
    (changed(stream_interval={"a"} | set()), "stream_interval = {'a'} is a set"),
    (changed(model_kwargs={1.5: 3}), "llm.yaml has a key of type float"),
    (changed(backend=["x" * 1000]), "backend = ['xx"),
    (changed(kvmesh__loras={1: {"name": "a", "path": "/"}}), "needs lora_config or enable_lora"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[text for _, text in REFUSED])
def test_each_mistake_is_one_sentence(given: Any, sentence: str) -> None:
    """It names the key, the value and what is allowed."""
    with pytest.raises(SettingsRefused) as caught:
        settings.complete(given, FACTS)
    text = str(caught.value)
    assert sentence in text and text.endswith(".") and "\n" not in text


def folder(path: Path, **config: Any) -> Path:
    """Write a model folder."""
    path.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": 4096, "max_position_embeddings": 512, **config}
    (path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def test_a_model_folder_tells_its_sizes(tmp_path: Path) -> None:
    """Sizes are those of config.json, of a model of several parts those of its text; other weights are another digest."""
    first = model_folder.read(str(folder(tmp_path / "m")))
    nested = folder(tmp_path / "n", vocab_size=None, text_config={"vocab_size": 99})
    assert (first.name, first.vocab_size, first.max_sequence_tokens) == ("m", 4096, 512)
    assert model_folder.read(str(nested)).vocab_size == 99
    (tmp_path / "m" / "model.safetensors").write_bytes(b"other weights")
    assert model_folder.read(str(tmp_path / "m")).digest != first.digest


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "has no weights"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
            ),
            "lacks model-2.safetensors, which model.safetensors.index.json names",
        ),
        (
            lambda path: (path / "model.safetensors.index.json").write_text("[]"),
            "index.json cannot be read",
        ),
        (lambda path: (path / "config.json").unlink(), "config.json cannot be read"),
        (lambda path: (path / "config.json").write_text("[]"), "config.json is no object"),
        (lambda path: folder(path, vocab_size="4096"), "has vocab_size = '4096'"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be read"),
        (
            lambda path: (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 4096}}}'),
            "has token id 4096: allowed is 0..4095",
        ),
        (
            lambda path: (path / "tokenizer.json").write_text(
                '{"model": {"vocab": ["a"]}, "added_tokens": [{"id": 5000}]}'
            ),
            "has token id 5000",
        ),
    ],
)
def test_a_model_folder_that_cannot_be_served_is_refused(
    tmp_path: Path, break_it: Any, sentence: str
) -> None:
    """Missing weights, another vocabulary, broken files."""
    path = folder(tmp_path / "m")
    break_it(path)
    with pytest.raises(SettingsRefused, match=sentence.replace("(", r"\(")):
        model_folder.read(str(path))


def test_a_name_of_a_hub_is_refused() -> None:
    """Each host would fetch its own revision."""
    with pytest.raises(SettingsRefused, match="must be downloaded first"):
        model_folder.read("meta-llama/Llama-3.1-8B")


def written(tmp_path: Path, **changes: Any) -> Path:
    """Write an llm.yaml beside its model folder."""
    folder(tmp_path / "model")
    path = tmp_path / "llm.yaml"
    path.write_text(yaml.safe_dump(changed(**{"model": "./model", **changes})), encoding="utf-8")
    return path


_IMPORT = """
import sys, types
sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each)]
stub = types.ModuleType("triton_python_backend_utils")
stub.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
llm = types.ModuleType("tensorrt_llm")
llm.__spec__ = types.SimpleNamespace()
sys.modules.update({"triton_python_backend_utils": stub, "tensorrt_llm": llm})
import model
assert model.TritonPythonModel.__module__ == "engines.tensorrt_llm.triton_model"
print(*sorted(name for name, each in sys.modules.items() if name.split(".")[0] in ("engines", "kvmesh")))
print(sys.modules["engines.contract"].__file__)
"""
"""Imports the written model as Triton's stub does, without kvmesh. TensorRT-LLM is imported by `initialize` alone."""


def test_the_repository_has_all_that_the_model_imports(tmp_path: Path) -> None:
    """The container has no kvmesh: the model imports `engines` from its own folder, and nothing of kvmesh."""
    repository.write(repository.load(written(tmp_path)), tmp_path / "models")
    version = tmp_path / "models" / "tensorrt_llm" / "1"
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], cwd=version, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    names, path = done.stdout.splitlines()
    assert (
        "engines.tensorrt_llm.engine" in names and "kvmesh" not in names and "engines.reference" not in names
    )
    assert Path(path) == version / "engines" / "contract" / "__init__.py"
    assert (version / "llm.yaml").is_file()


def test_a_container_without_a_package_is_told_which(tmp_path: Path) -> None:
    """The model fails to load with one sentence."""
    repository.write(repository.load(written(tmp_path)), tmp_path / "models")
    version = tmp_path / "models" / "tensorrt_llm" / "1"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(version / "model.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        "ImportError: The Python of this Triton lacks msgspec, numpy, xxhash, yaml, tensorrt_llm"
        in done.stderr
    )


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path) -> None:
    """The command may run twice by mistake."""
    found = repository.load(written(tmp_path))
    repository.write(found, tmp_path / "models")
    with pytest.raises(SettingsRefused, match="is not empty"):
        repository.write(found, tmp_path / "models")


def test_bad_yaml_and_missing_adapters_are_refused(tmp_path: Path) -> None:
    """The sentence names the file and the line, or the folder."""
    path = written(tmp_path, kvmesh__loras={1: {"name": "a", "path": "/nowhere"}}, enable_lora=True)
    with pytest.raises(SettingsRefused, match=r"kvmesh.loras has /nowhere"):
        repository.load(path)
    path.write_text("model: [", encoding="utf-8")
    with pytest.raises(SettingsRefused, match="is no YAML in line"):
        repository.load(path)
    with pytest.raises(SettingsRefused, match="cannot be read"):
        repository.load(tmp_path / "other.yaml")


_BOMB = "".join(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]\n" for at in range(1, 12))

HOSTILE = {
    "model: 2024-13-45\n": "is no value of its type: month must be in 1..12",
    "model: !!timestamp x\n": "is no value of its type",
    "model: !!int ''\n": "is no value of its type",
    "dtype: " + "[" * 3000 + "]" * 3000: "is nested too deeply: allowed are 32 levels",
    "dtype: " + "[" * 40 + "]" * 40: "dtype is nested too deeply: allowed are 32 levels",
    "dtype: &a [*a]": "dtype is nested too deeply",
    "max_batch_size: " + "9" * 5000: "is no value of its type",
    "max_batch_size: 0x" + "f" * 5000: "max_batch_size is a whole number beyond 64 bits",
    "a0: &a0 1\n" + _BOMB: "too many values: allowed are 10000",
    "model: " + "x" * (1 << 20): "has more than 1048576 bytes: allowed is 1 MiB",
    "dtype: 2024-01-01": "dtype = datetime.date(2024, 1, 1) is a date",
    "stream_interval: !!set {a, b}": "is a set",
}


@pytest.mark.parametrize("text", HOSTILE, ids=list(HOSTILE.values()))
def test_hostile_yaml_is_one_short_sentence(tmp_path: Path, text: str) -> None:
    """No file makes PyYAML's own errors, or a sentence of its own length."""
    path = written(tmp_path)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsRefused) as caught:
        repository.load(path)
    said = str(caught.value)
    assert HOSTILE[text] in said and len(said) < 500 and "\n" not in said


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        ({}, ["kv_events", "retention_decode_priority"], ["context_phase_params", "lora_task_id"]),
        ({"cache_transceiver_config__backend": "NIXL"}, ["context_phase_params"], []),
        ({"kv_cache_config__event_buffer_max_size": 0}, [], ['"kv_events"']),
        ({"enable_attention_dp": True}, [], ['"kv_events"']),
        ({"guided_decoding_backend": "xgrammar"}, ["guided_decoding_guide"], []),
        ({"kvmesh__warm_up": False}, [], ["model_warmup"]),
    ],
)
def test_the_model_lists_what_it_has(changes: Any, present: list[str], absent: list[str]) -> None:
    """The mesh sends only inputs that the model lists."""
    text = model_repository.config_pbtxt(settings.complete(changed(**changes), FACTS))
    assert all(name in text for name in present) and not any(name in text for name in absent)
