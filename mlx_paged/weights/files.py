"""The safetensors files of a checkpoint: all there, and whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from mlx_paged.weights.errors import ModelError

HEADER_LENGTH_BYTES = 8
INDEX = "model.safetensors.index.json"


def check_weight_files(path: Path) -> None:
    """Raises ModelError that names the file if a shard is missing, cut off or not safetensors."""
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ModelError(
            f"there are no weights (model*.safetensors) in {path}; "
            "give a folder written by mlx_lm.convert"
        )
    if (path / INDEX).is_file():
        _check_index(path)
    for file in files:
        _check_size(file)


def _check_index(path: Path) -> None:
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / INDEX} can't be read: {error!r}") from error
    missing = [name for name in shards if not (path / name).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(shards)} weight files are missing in {path}: "
            f"{', '.join(missing)}; copy or download them again"
        )


def _check_size(file: Path) -> None:
    """A safetensors file says in its header where its last byte is."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as stream:
            (header_length,) = struct.unpack("<Q", stream.read(HEADER_LENGTH_BYTES))
            if header_length > size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(header_length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file} is not a safetensors file: {error}") from error
    expected = HEADER_LENGTH_BYTES + header_length + max(ends, default=0)
    if size < expected:
        raise ModelError(
            f"{file} is cut off: {size} of {expected} bytes; copy or download it again"
        )
