"""Reads the folder of a model of Hugging Face: its sizes, and a digest that tells it from other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from engines.tensorrt_llm.settings import ModelFacts, SettingsRefused

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def read(name: str) -> ModelFacts:
    """Return the facts of the model folder `name`.

    A name of Hugging Face's hub is refused: each host would fetch its own revision, and the sizes would be unknown here.
    The digest covers config.json, and names and sizes of the weights: their bytes would take minutes. Raises
    SettingsRefused.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise SettingsRefused(
            f'model = "{name}": allowed is a folder on this host. A name of a hub must be downloaded first.'
        )
    config = _config(folder)
    vocab_size = _number(config, "vocab_size", folder)
    _check_tokenizer(folder, vocab_size)
    weights = sorted(each for each in folder.iterdir() if each.suffix in _WEIGHTS)
    if not weights:
        raise SettingsRefused(
            f"{folder} has no weights: allowed are files that end with {', '.join(_WEIGHTS)}."
        )
    _check_shards(folder)
    digest = xxhash.xxh3_64((folder / "config.json").read_bytes())
    for each in weights:
        digest.update(f"{each.name} {each.stat().st_size}\n".encode())
    longest = _number(config, "max_position_embeddings", folder)
    return ModelFacts(folder.resolve().name, vocab_size, longest, digest.hexdigest())


def _check_shards(folder: Path) -> None:
    """Raise SettingsRefused if the index of the weights names a file that is not there, as after a broken download."""
    for path in sorted(folder.glob("*.index.json")):
        try:
            names = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (AttributeError, OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsRefused(f"{path} cannot be read: {type(error).__name__}: {error}.") from None
        absent = sorted(str(name) for name in names if not (folder / str(name)).is_file())
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise SettingsRefused(
                f"{folder} lacks {absent[0]}{more}, which {path.name} names: download it again."
            )


def _config(folder: Path) -> dict[str, Any]:
    """Return config.json; for a model of several parts that of its text model."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsRefused(f"{folder / 'config.json'} cannot be read: {error}.") from None
    if not isinstance(config, dict):
        raise SettingsRefused(f"{folder / 'config.json'} is no object.")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _number(config: dict[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsRefused(
            f"{folder / 'config.json'} has {name} = {value!r}: allowed is a whole number above 0."
        )
    return value


def _check_tokenizer(folder: Path, vocab_size: int) -> None:
    """Raise SettingsRefused if tokenizer.json makes token ids that the model has not."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
        highest = max([*ids, *(each["id"] for each in tokenizer.get("added_tokens", ()))], default=-1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsRefused(f"{path} cannot be read: {type(error).__name__}: {error}.") from None
    if highest >= vocab_size:
        raise SettingsRefused(
            f"{path} has token id {highest}: allowed is 0..{vocab_size - 1}, the vocab_size of config.json."
        )
