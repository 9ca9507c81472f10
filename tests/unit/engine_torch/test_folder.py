"""Hugging Face folders without PyTorch: the format of the weights, the fields of config.json, hostile files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.reference.llama.folder import FolderError, check_weights, read_shape, weight_names
from engines.reference.llama.safetensors import FormatError, read_folder
from engines.reference.llama.shape import NAMED, LlamaShape, RopeScaling
from tests.unit.engine_torch.checkpoints import FAMILIES, LLAMA, QWEN, SCALED, write_checkpoint


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_was_written(tmp_path: Path, family: str, shards: int) -> None:
    """Names, shapes and bytes of all tensors come back, from one file and from several."""
    written = write_checkpoint(tmp_path, FAMILIES[family], shards=shards)
    stored = read_folder(tmp_path)
    check_weights(tmp_path, written.shape, stored)
    assert set(stored) == set(written.tensors)
    for name, tensor in stored.items():
        found = np.frombuffer(tensor.data(), "<f4").reshape(tensor.shape)
        assert np.array_equal(found, written.tensors[name]), name


def test_the_named_shapes_have_their_size() -> None:
    """The shapes have as many weights as their names say, within a tenth."""
    assert NAMED["0.5B"].weight_count == pytest.approx(0.49e9, rel=0.1)
    assert NAMED["8B"].weight_count == pytest.approx(8.0e9, rel=0.1)
    assert NAMED["8B"].kv_values(1) * 2 == 128 << 10  # bytes per token in bf16


def test_frequencies_of_llama3_are_kept_blended_and_stretched() -> None:
    """Short wavelengths stay, long ones are stretched by the factor, and none lies outside the two."""
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    plain = LlamaShape(1, 4096, 32, 8, 128, 1, 1, 1, 500_000.0)
    scaled = LlamaShape(1, 4096, 32, 8, 128, 1, 1, 1, 500_000.0, scaling)
    ratio = plain.frequencies() / scaled.frequencies()
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)
    assert (np.diff(ratio) >= 0).all()
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, 'architectures = ["MixtralForCausalLM"]; allowed: ["Llama'),
        ({"architectures": None}, "architectures = null; allowed"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"; allowed: "silu"'),
        ({"attention_bias": True}, "attention_bias = true; allowed: false"),
        ({"use_sliding_window": True}, "use_sliding_window = true; allowed: false"),
        ({"quantization_config": {"bits": 4}}, 'quantization_config = {"bits": 4}; allowed: absent'),
        ({"hidden_size": "32"}, 'hidden_size = "32"; allowed: 1 to 10000000'),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; allowed: 1 to 10000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3; allowed: a divisor of num_attention_heads (4)"),
        ({"hidden_size": 30}, "head_dim = 7; allowed: an even number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1; allowed: a number above 0"),
        ({"rope_scaling": {"rope_type": "yarn"}}, 'rope_scaling.rope_type = "yarn"; allowed: "llama3" or "default"'),
        ({"rope_scaling": {"type": "llama3"}}, "factor = null; allowed: a number above 0"),
        ({"rope_parameters": {"rope_type": "linear"}}, 'rope_parameters.rope_type = "linear"; allowed'),
        ({"rope_scaling": 3}, "rope_scaling = 3; allowed: absent or an object"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_built_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """The sentence names the field, its value and the allowed ones."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    with pytest.raises(FolderError) as refused:
        read_shape(tmp_path)
    assert said in str(refused.value)


def test_newer_folders_name_the_rotation_otherwise(tmp_path: Path) -> None:
    """`rope_parameters` has the base and the scaling in one object."""
    older = dict(SCALED)
    scaling = older.pop("rope_scaling")
    newer = {**older, "rope_parameters": {**scaling, "rope_theta": 100.0}}
    newer.pop("rope_theta")
    assert (
        write_checkpoint(tmp_path / "newer", newer).shape
        == write_checkpoint(tmp_path / "older", SCALED).shape
    )


def test_missing_parts_are_named(tmp_path: Path) -> None:
    """A folder without weights, with a missing shard, a missing tensor or one of another shape: one sentence each."""
    written = write_checkpoint(tmp_path, LLAMA, shards=2)
    shape = written.shape
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FormatError, match=r"names model-00002-of-00002\.safetensors, which is not in the folder"
    ):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=r"has no weights: allowed is model\.safetensors, or"):
        read_folder(tmp_path)
    stored = read_folder(write_checkpoint(tmp_path, LLAMA).folder)
    lacking = {name: tensor for name, tensor in stored.items() if name != "lm_head.weight"}
    with pytest.raises(FolderError, match=r"lacks the weight lm_head\.weight, \[97, 32\]"):
        check_weights(tmp_path, shape, lacking)
    other = write_checkpoint(tmp_path / "other", {**LLAMA, "intermediate_size": 64})
    with pytest.raises(
        FolderError, match=r"gate_proj\.weight has shape \[64, 32\], config\.json asks for \[48, 32\]"
    ):
        check_weights(tmp_path, shape, read_folder(other.folder))


def test_a_tied_model_needs_no_head() -> None:
    """The names of a tied model have no lm_head; those of Qwen2 have biases of queries, keys and values."""
    tied = LlamaShape(1, 32, 4, 2, 8, 48, 97, 64, has_qkv_bias=True, is_tied=True)
    assert "lm_head.weight" not in weight_names(tied)
    assert sum(name.endswith(".bias") for name in weight_names(tied)) == 3
    assert QWEN["tie_word_embeddings"]


@pytest.mark.parametrize("file", ["/etc/passwd", "../model.safetensors", "a/b"])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, file: str) -> None:
    """A path in the index is refused, whether the file exists or not."""
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(FormatError, match="allowed are files of the folder itself"):
        read_folder(tmp_path)


def test_a_file_that_is_cut_behind_its_header_is_refused(tmp_path: Path) -> None:
    """The tensor that lost its end is named with the size of the file."""
    path = write_checkpoint(tmp_path, LLAMA).folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"ends at byte (\d+), but the file has \d+ bytes"):
        read_folder(tmp_path)


def test_broken_files_end_in_one_sentence(tmp_path: Path) -> None:
    """Whatever is cut or changed in a file, reading gives tensors of the right size or a FormatError."""
    path = write_checkpoint(tmp_path, LLAMA).folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw, refused = random.Random(7), 0
    for _ in range(400):
        broken = bytearray(whole[: draw.choice((len(whole), draw.randrange(header + 100)))])
        for _ in range(draw.randrange(1, 4)):
            if broken:
                broken[draw.randrange(min(header, len(broken)))] = draw.randrange(256)
        path.write_bytes(broken)
        try:
            for tensor in read_folder(tmp_path).values():
                assert len(tensor.data()) == tensor.end - tensor.begin
        except FormatError:
            refused += 1
    assert refused > 100
