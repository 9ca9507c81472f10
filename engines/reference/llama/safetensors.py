"""Reads *.safetensors: names, types, shapes and raw bytes of the tensors of a folder. No PyTorch.

A file is a little-endian u64 with the length of a JSON header, the header, and the bytes. The header has for each tensor
its dtype, its shape and its half-open range of bytes behind the header. A folder has one file, or several with an index.
Files are hostile input: each number is checked against the size of the file before it is used.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
HEADER_BYTES_MAX: Final = 100_000_000
"""Longest header that the format allows."""
BYTES_OF: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one value, by dtype. Other types are refused when a tensor of theirs is read."""


class FormatError(ValueError):
    """A file or an index breaks the format. The text names the file and the field."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    """First byte, from the start of the file."""
    end: int

    def data(self) -> memoryview:
        """Return the bytes, writable in private memory. They stay valid while the view lives. Raises OSError."""
        with self.file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return memoryview(mapped)[self.begin : self.end]


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name. Raises FormatError, and OSError for a file that cannot be read."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise FormatError(f"{folder} has no weights: allowed is {SINGLE}, or {INDEX} with its files")
        return dict(read_file(folder / SINGLE))
    files: dict[str, dict[str, StoredTensor]] = {}
    found: dict[str, StoredTensor] = {}
    for name, file in _weight_map(index).items():
        if file not in files:
            if not (folder / file).is_file():
                raise FormatError(f"{index} names {file}, which is not in the folder")
            files[file] = dict(read_file(folder / file))
        if name not in files[file]:
            raise FormatError(f"{index} has {name} in {file}, which has no tensor of that name")
        found[name] = files[file][name]
    return found


def read_file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of one file. Raises FormatError and OSError."""
    size = path.stat().st_size
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
            raise FormatError(f"{path} is cut: a header of {length} bytes in a file of {size}")
        text = opened.read(length)
    header = _object(path, text, "header")
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, _tensor(path, name, entry, 8 + length, size)


def _tensor(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        first, last = entry["data_offsets"]
        numbers = (*shape, first, last)
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{path}: {name} lacks dtype, shape or two data_offsets") from error
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise FormatError(
            f"{path}: {name} has shape {list(shape)} at {first}..{last}; allowed are numbers from 0 on"
        )
    if start + last > size or first > last:
        raise FormatError(f"{path}: {name} ends at byte {start + last}, but the file has {size} bytes")
    if dtype in BYTES_OF and last - first != BYTES_OF[dtype] * math.prod(shape):
        raise FormatError(f"{path}: {name} has {last - first} bytes, not those of {dtype} {list(shape)}")
    return StoredTensor(dtype, shape, path, start + first, start + last)


def _weight_map(index: Path) -> dict[str, str]:
    found = _object(index, index.read_bytes(), "content").get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise FormatError(f"{index}: weight_map must be an object of file names by tensor")
    for file in found.values():
        if Path(file).name != file:
            raise FormatError(f"{index}: weight_map names {file!r}; allowed are files of the folder itself")
    return found


def _object(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the {what} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path}: the {what} must be a JSON object")
    return found
