"""Weights from Hugging Face folders, read slice by slice into the shards of this rank.

Parameters carry Hugging Face's names and are plain tensors or DTensors. No file is ever unpickled, and
no rank holds more than its own part of the model.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class UsageError(ValueError):
    """A mistake of the user's: printed without a traceback, exit code 2. One problem a line."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """' Did you mean X?', or nothing if no choice is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UsageError with the file's name otherwise."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as e:
        raise UsageError(f"{path}: no such file") from e
    except (OSError, ValueError) as e:
        raise UsageError(f"{path}: cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise UsageError(f"{path}: must hold a JSON object")
    return value


def unique_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter; a tied head appears once, under the embedding's name."""
    return dict(model.named_parameters())  # named_parameters skips repeated objects


def local_slices(p: torch.Tensor) -> tuple[slice, ...]:
    """Which part of the whole parameter this rank holds, one slice per dim.

    tp cuts first and dp_shard cuts what tp left, both as torch.chunk does; replicas hold the same.
    """
    ranges = [(0, n) for n in p.shape]
    if isinstance(p, DTensor):
        axes = p.device_mesh.mesh_dim_names
        for axis in ("tp", "dp_shard"):
            if axis not in axes or not hasattr(placement := p.placements[axes.index(axis)], "dim"):
                continue
            start, stop = ranges[placement.dim]
            piece = -(-(stop - start) // p.device_mesh[axis].size())  # ceil, as torch.chunk
            start = min(start + piece * p.device_mesh.get_local_rank(axis), stop)
            ranges[placement.dim] = (start, min(start + piece, stop))
    return tuple(slice(*r) for r in ranges)


def local_tensor(p: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or gradient, sharing its memory."""
    p = p.detach()
    return p.to_local() if isinstance(p, DTensor) else p


class Checkpoint:
    """The safetensors files of a Hugging Face folder: names, shapes, and slices read on demand."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = sorted(set(read_json(index).get("weight_map", {}).values()))
        else:
            files = ["model.safetensors"]
        self.folder, self.handles = folder, {}
        for file in files:
            try:
                handle = safe_open(folder / file, framework="pt")
            except FileNotFoundError as e:
                raise UsageError(f"{folder / file}: no such file") from e
            except (SafetensorError, OSError) as e:
                raise UsageError(f"{folder / file}: damaged or not a safetensors file: {e}") from e
            self.handles |= dict.fromkeys(handle.keys(), handle)
        self.unused = set(self.handles)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return (
            tuple(self.handles[name].get_slice(name).get_shape()) if name in self.handles else None
        )

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        self.unused.discard(name)
        return self.handles[name].get_slice(name)[part]


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Fill this rank's shards from a Hugging Face folder, reading only the slices it keeps.

    Experts may be stored one tensor each (hub files) or stacked (transformers v5). Raises UsageError
    that lists every missing, mis-shaped or left-over tensor.
    """
    source, errors = Checkpoint(folder), []

    def fill(
        local: torch.Tensor, name: str, shape: tuple[int, ...], part: tuple[slice, ...]
    ) -> None:
        found = source.shape(name)
        if found == shape:
            local.copy_(source.read(name, part))
        else:
            problem = (
                "missing"
                if found is None
                else f"has shape {list(found)}, the model needs {list(shape)}"
            )
            errors.append(f"{folder}: tensor {name} {problem}")

    for name, p in unique_parameters(model).items():
        local, part = local_tensor(p), local_slices(p)
        if ".experts." not in name or name in source.handles:
            fill(local, name, tuple(p.shape), part)
            continue
        prefix, kind = name.rsplit(".", 1)
        for i, expert in enumerate(range(part[0].start, part[0].stop)):
            if kind == "down_proj":
                fill(local[i], f"{prefix}.{expert}.down_proj.weight", tuple(p.shape[1:]), part[1:])
                continue
            width, rows = p.shape[1] // 2, range(p.shape[1])[part[1]]  # gate rows, then up rows
            for half, start in (("gate_proj", 0), ("up_proj", width)):
                own = slice(max(rows.start - start, 0), max(0, min(rows.stop - start, width)))
                if own.start < own.stop:
                    offset = max(start - rows.start, 0)
                    target = local[i, offset : offset + own.stop - own.start]
                    shape = (width, *p.shape[2:])
                    fill(target, f"{prefix}.{expert}.{half}.weight", shape, (own, *part[2:]))
        kinds = ("gate_proj", "up_proj", "down_proj")  # what other ranks read
        source.unused -= {f"{prefix}.{e}.{k}.weight" for e in range(p.shape[0]) for k in kinds}
    if model.config.tie_word_embeddings:
        source.unused.discard("lm_head.weight")  # some folders store the tied head as well
    errors += [f"{folder}: tensor {n} is not part of this model" for n in sorted(source.unused)]
    if errors:
        raise UsageError("\n".join(errors))
