"""Weights in, weights out, and training checkpoints; nothing here is needed by a training step.

    load_weights         Hugging Face folder -> this rank's shards, slice by slice
    export               shards -> Hugging Face folder, in the hub's layout, checked by transformers
    TrainingCheckpoints  everything that a run needs to go on, on the same or another layout
    StopSignal           SIGTERM and SIGINT as a request to save and stop

Parameters carry Hugging Face's names and are plain tensors or DTensors. No rank ever holds more than its
own part of the model and one file of an export. Nothing that a file says is executed.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import pickle
import re
import shutil
import signal
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException  # not an Exception
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor

log = logging.getLogger("qwen3-trn")
# One process saves without collectives, on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


# ---- Errors and small files ---------------------------------------------------------------------
class UsageError(ValueError):
    """A mistake of the user's: printed without a traceback, exit code 2. One problem a line."""


class RunError(RuntimeError):
    """Ends a run with one message and no traceback, exit code 1."""


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


# ---- Reading ------------------------------------------------------------------------------------
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
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        files = [single.name]
        if index.exists():
            files = sorted(set(read_json(index).get("weight_map", {}).values()))
        elif not single.exists() and (
            pickled := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
        ):
            raise UsageError(
                f"{pickled[0]}: pickled weights can run code and are never read; convert them to safetensors"
            )
        self.folder, self.files, self.shapes = folder, {}, {}
        for file in files:
            handle = self.open(file)
            self.files |= dict.fromkeys(handle.keys(), file)
            self.shapes |= {n: tuple(handle.get_slice(n).get_shape()) for n in handle.keys()}  # noqa: SIM118
        self.unused, self.current, self.left = set(self.files), ("", None), 0

    def open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt")
        except FileNotFoundError as e:
            raise UsageError(f"{self.folder / file}: no such file") from e
        except (SafetensorError, OSError) as e:
            raise UsageError(f"{self.folder / file}: damaged or not a safetensors file: {e}") from e

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A slice of a tensor, in the stored dtype."""
        self.unused.discard(name)
        file = self.files[name]
        if self.current[0] != file or self.left < 0:
            # A file is mapped into memory, and what was read stays in it: map it anew now and then.
            self.current, self.left = (file, self.open(file)), 2**27
        tensor = self.current[1].get_slice(name)[part]
        self.left -= tensor.nbytes
        return tensor


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill this rank's shards from a Hugging Face folder, reading only the slices it keeps.

    Experts may be stored one tensor each (hub files) or stacked (transformers v5). Raises UsageError
    that lists every missing, mis-shaped or left-over tensor, on every rank of ``group`` (gloo) alike.
    """
    source, errors = Checkpoint(folder), []

    def fill(
        local: torch.Tensor, name: str, shape: tuple[int, ...], part: tuple[slice, ...]
    ) -> None:
        found = source.shapes.get(name)
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
        if ".experts." not in name or name in source.files:
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
    found: list[list[str]] = [errors]
    if group is not None:  # each rank read other tensors
        found = [[]] * dist.get_world_size()
        dist.all_gather_object(found, errors, group=group)
    if errors := sorted({e for rank_errors in found for e in rank_errors}):
        raise UsageError("\n".join(errors))


# ---- Export -------------------------------------------------------------------------------------
TOKENIZER_FILES = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")  # fmt: skip
SHARD_BYTES = 5 * 10**9  # of one safetensors file, as on the hub


@dataclass(frozen=True)
class HubTensor:
    """One tensor of the hub's layout: where it lies in a parameter of the model."""

    name: str
    param: str
    part: tuple[slice, ...]  # of the whole parameter
    drop_first: bool  # an expert's slice [1, ...] is stored as [...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.part)[self.drop_first :]


def hub_tensors(model: nn.Module) -> list[HubTensor]:
    """The hub's tensors, in order. Stacked experts become one gate, up and down matrix each."""
    tensors = []
    for name, p in unique_parameters(model).items():
        whole = tuple(slice(0, n) for n in p.shape)
        if ".experts." not in name:
            tensors.append(HubTensor(name, name, whole, False))
            continue
        prefix, kind = name.rsplit(".", 1)
        width = p.shape[1] // 2
        rows = {"gate_proj": slice(0, width), "up_proj": slice(width, 2 * width)}
        if kind == "down_proj":
            rows = {kind: whole[1]}
        for e in range(p.shape[0]):
            for half, r in rows.items():
                part = (slice(e, e + 1), r, whole[2])
                tensors.append(HubTensor(f"{prefix}.{e}.{half}.weight", name, part, True))
    return tensors


def overlap(a: tuple[slice, ...], b: tuple[slice, ...]) -> tuple[slice, ...] | None:
    both = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return both if all(s.start < s.stop for s in both) else None


def within(part: tuple[slice, ...], outer: tuple[slice, ...]) -> tuple[slice, ...]:
    """``part`` of a whole tensor as a part of the piece ``outer`` of it."""
    return tuple(
        slice(p.start - o.start, p.stop - o.start) for p, o in zip(part, outer, strict=True)
    )


class Gatherer:
    """Assembles whole tensors on one rank from the parts that the ranks hold."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.group, self.rank = group, dist.get_rank()
        self.params = unique_parameters(model)
        mine = {
            n: tuple((s.start, s.stop) for s in local_slices(p)) for n, p in self.params.items()
        }
        everyone: list[Any] = [mine]
        if group is not None:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine, group=group)
        # name -> part, as (start, stop) a dim -> first rank that holds it: replicas send nothing
        self.owners: dict[str, dict[tuple[tuple[int, int], ...], int]] = {}
        for rank, parts in enumerate(everyone):
            for name, ranges in parts.items():
                owners = self.owners.setdefault(name, {})
                owners.setdefault(ranges, rank)

    def gather(self, t: HubTensor, dtype: torch.dtype, writer: int) -> torch.Tensor | None:
        """The whole tensor on rank ``writer``, None on the others. Every rank must call it."""
        size = tuple(s.stop - s.start for s in t.part)
        out = torch.empty(size, dtype=dtype) if self.rank == writer else None
        for ranges, owner in self.owners[t.param].items():
            held = tuple(slice(*r) for r in ranges)
            both = overlap(held, t.part)
            if both is None or self.rank not in (owner, writer):
                continue
            piece = None
            if self.rank == owner:
                local = local_tensor(self.params[t.param])[within(both, held)]
                piece = local.to("cpu", dtype).contiguous()
                if owner != writer:
                    dist.send(piece, writer, group=self.group)
            if self.rank == writer:
                target = out[within(both, t.part)]
                if owner != writer:
                    piece = torch.empty(target.shape, dtype=dtype)
                    dist.recv(piece, owner, group=self.group)
                target.copy_(piece)
        return out[0] if out is not None and t.drop_first else out


def plan_shards(tensors: list[HubTensor], itemsize: int, limit: int) -> list[list[HubTensor]]:
    """Consecutive tensors in files of at most ``limit`` bytes (one tensor may be larger)."""
    shards: list[list[HubTensor]] = [[]]
    size = 0
    for t in tensors:
        nbytes = math.prod(t.shape) * itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(t)
        size += nbytes
    return shards


def export(
    model: nn.Module, folder: Path, dtype: torch.dtype, source: Path | None, facts: dict[str, Any],
    group: dist.ProcessGroup | None, end_of_turn: int | None = None, shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write a complete Hugging Face folder in the hub's layout; every rank must call it.

    Files are written to a temporary folder beside ``folder``, checked, and renamed. A rank holds at
    most one file's tensors beyond its own parameters; the ranks take turns in writing files.

    Args:
        dtype: of the stored tensors
        source: the folder that the run started from; its config, tokenizer and generation config are
            carried over
        facts: what the model card says of the training
        group: a gloo group of all ranks; None on one rank
        end_of_turn: token id that must end generation too, for a fine-tuned chat model
    Raises: SaveError
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    temporary = folder.with_name(f".{folder.name}.tmp")
    tensors = hub_tensors(model)
    shards = plan_shards(tensors, dtype.itemsize, shard_bytes)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]

    def begin() -> None:
        if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
            raise SaveError(
                f"--export_dir {folder}: holds other files; use a new or an exported folder"
            )
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_metadata(model, temporary, dtype, source, facts, end_of_turn)
        if len(shards) > 1:
            total = sum(math.prod(t.shape) * dtype.itemsize for t in tensors)
            where = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            write_file(temporary / "model.safetensors.index.json", json.dumps(index, indent=2))

    def write_shards() -> None:
        gatherer, failed = Gatherer(model, group), None
        for i, (name, shard) in enumerate(zip(names, shards, strict=True)):
            found = {t.name: gatherer.gather(t, dtype, i % world) for t in shard}
            try:
                if rank == i % world and failed is None:
                    save_file(found, temporary / name, metadata={"format": "pt"})
                    sync(temporary / name)
            except (OSError, SafetensorError) as e:
                failed = e  # raised when no rank waits for this one's tensors any more
            del found
        if failed is not None:
            raise failed

    def finish() -> None:
        verify_export(temporary)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)

    together(f"export to {folder}", begin if rank == 0 else None, group)
    together(f"export to {folder}", write_shards, group)
    together(f"export to {folder}", lambda: compare_sample(model, temporary, dtype), group)
    together(f"export to {folder}", finish if rank == 0 else None, group)


def write_metadata(
    model: nn.Module, folder: Path, dtype: torch.dtype, source: Path | None, facts: dict[str, Any],
    end_of_turn: int | None,
) -> None:  # fmt: skip
    """Everything but the weights: config, generation config, tokenizer files, model card."""
    hf = model.config
    if source is not None:
        config = read_json(source / "config.json")
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)
    else:
        config = hf.to_diff_dict() | {"model_type": hf.model_type}
        kind = "Qwen3MoeForCausalLM" if hf.model_type == "qwen3_moe" else "Qwen3ForCausalLM"
        config |= {"architectures": [kind], "rope_theta": hf.rope_parameters["rope_theta"]}
        config |= {"vocab_size": hf.vocab_size, "tie_word_embeddings": hf.tie_word_embeddings}
    if (
        "num_local_experts" in config
    ):  # transformers' name; the hub's files and vLLM say num_experts
        config["num_experts"] = config.pop("num_local_experts")
    name = str(dtype).removeprefix("torch.")
    config |= {"dtype": name, "torch_dtype": name, "use_cache": True}
    write_file(folder / "config.json", json.dumps(config, indent=2, sort_keys=True))
    generation = {}
    if source is not None and (source / "generation_config.json").exists():
        generation = read_json(source / "generation_config.json")
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end_of_turn is not None and end_of_turn not in ends:
        ends = [end_of_turn, *ends]
    if ends:
        generation["eos_token_id"] = ends
    write_file(folder / "generation_config.json", json.dumps(generation, indent=2))
    lines = "\n".join(f"| {k} | {v} |" for k, v in facts.items())
    card = f"---\nlibrary_name: transformers\n---\n\nTrained with qwen3-trn.\n\n| | |\n|---|---|\n{lines}\n"
    write_file(folder / "README.md", card)


def verify_export(folder: Path) -> None:
    """transformers must find every tensor and no other. Raises SaveError.

    It loads the folder if that takes at most half of the free memory; if not, names and shapes are
    compared with those of its model on the meta device.
    """
    stored = Checkpoint(folder).shapes
    nbytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    if nbytes < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2:
        transformers.utils.logging.disable_progress_bar()
        _, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
        problems = {k: v for k, v in info.items() if v}
    else:
        with torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(folder)
            wanted = hub_tensors(transformers.AutoModelForCausalLM.from_config(config))
        problems = dict({(t.name, t.shape) for t in wanted} ^ set(stored.items()))
    if problems:
        raise SaveError(f"{folder}: transformers does not load it cleanly: {problems}")


def compare_sample(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """This rank's part of some tensors must be in the files bit for bit."""
    source, tensors = Checkpoint(folder), hub_tensors(model)
    for t in tensors[:: max(1, len(tensors) // 8)]:
        p = unique_parameters(model)[t.param]
        held = local_slices(p)
        if both := overlap(held, t.part):
            part = within(both, t.part)[t.drop_first :]
            stored = source.read(t.name, part)
            ours = local_tensor(p)[within(both, held)].to("cpu", dtype).view(stored.shape)
            if not torch.equal(stored, ours):
                raise SaveError(f"{folder}: tensor {t.name} differs from the trained one")


# ---- Training checkpoints -----------------------------------------------------------------------
class SaveError(RunError):
    """Something could not be written; earlier checkpoints and exports are as they were."""


def together(what: str, function: Callable[[], None] | None, group: Any) -> None:
    """Run on this rank; if it fails on any rank, raise the same SaveError on all of them."""
    error = None
    try:
        if function is not None:
            function()
    except (OSError, RuntimeError, UsageError, SafetensorError, CheckpointException) as e:
        error = str(e).splitlines()[0] if isinstance(e, UsageError | SaveError) else reason(e)
    errors = [error]
    if group is not None:
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error, group=group)
    if found := next((e for e in errors if e), None):
        raise SaveError(f"{what} failed: {found}")


def reason(error: BaseException) -> str:
    """One line; DCP wraps what happened into an exception of its own, with all tracebacks."""
    text = str(error)
    for cause in (
        "No space left on device",
        "Read-only file system",
        "Permission denied",
        "No such file",
    ):
        if cause in text or (isinstance(error, OSError) and cause in (error.strerror or "")):
            return f"{cause}{f': {error.filename}' if getattr(error, 'filename', None) else ''}"
    return f"{type(error).__name__}: {text.strip().splitlines()[-1] if text.strip() else ''}"


def write_file(path: Path, text: str) -> None:
    """Complete or not there at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> list[int]:
    """[bytes, CRC-32]"""
    crc, size = 0, 0
    with path.open("rb") as f:
        while block := f.read(2**22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


class SafeReader(FileSystemReader):
    """DCP's reader, without arbitrary code: its metadata is a pickle, and only these names may be in it.

    The tensors themselves are read by torch.load with weights_only=True.
    """

    class Unpickler(pickle.Unpickler):
        allowed = (
            ("torch.distributed.checkpoint.metadata", None),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.filesystem", "StorageMeta"),
            ("torch", "Size"),
            ("torch", "device"),
            ("torch.serialization", "_get_layout"),
            ("torch._utils", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        )

        def find_class(self, module: str, name: str) -> Any:
            for m, n in self.allowed:
                if module == m and n in (None, name) and "." not in name:
                    return super().find_class(module, name)
            if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as f:
            metadata = self.Unpickler(f).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TrainingCheckpoints:
    """OUTPUT_DIR/checkpoints/step-N: all that a run needs to go on, complete or not there.

    A folder holds DCP's files (model, optimizer, RNG: tensors only), state.json (step, data position,
    configuration) and manifest.json (size and CRC-32 of every file). It is written as step-N.tmp, synced
    and renamed; ``latest`` is written last. Nothing in it is unpickled but DCP's metadata, by SafeReader.
    """

    def __init__(self, folder: Path, keep: int, group: dist.ProcessGroup | None) -> None:
        self.folder, self.keep, self.group = folder / "checkpoints", keep, group
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # An asynchronous save talks while the steps do: on a group of its own, or messages get mixed up.
        self.background = dist.new_group(backend="gloo") if group is not None else None
        self.pending: Any = None  # an asynchronous save: its thread, and what it is called

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def save(self, state: dict[str, Any], facts: dict[str, Any], asynchronous: bool) -> None:
        """state: name -> tensor or DTensor; facts: JSON, with "step". Every rank must call it."""
        self.wait()
        step = facts["step"]
        temporary = self.path(step).with_suffix(".tmp")

        def begin() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write_file(temporary / "state.json", json.dumps(facts))

        what = f"checkpoint of step {step}"
        together(what, begin if self.rank == 0 else None, self.group)
        kwargs = {"checkpoint_id": str(temporary), "process_group": self.group}
        no_dist = {} if self.group is not None else {"no_dist": True}
        if asynchronous:
            self.error: str | None = None
            future = dcp.async_save(state, **kwargs | {"process_group": self.background}, **no_dist)
            thread = threading.Thread(target=self.publish_later, args=(future, temporary, step))
            thread.start()
            self.pending = (thread, what)
            return
        together(what, lambda: dcp.save(state, **kwargs, **no_dist) and None, self.group)
        together(what, lambda: self.write_manifest(temporary), self.group)
        together(
            what, (lambda: self.publish(temporary, step)) if self.rank == 0 else None, self.group
        )

    def write_manifest(self, folder: Path) -> None:
        """Checksums of the files that this rank wrote; rank 0 also of the common ones."""
        mine = [*folder.glob(f"__{self.rank}_*")]
        if self.rank == 0:
            mine += [folder / ".metadata", folder / "state.json"]
        write_file(
            folder / f"manifest-{self.rank}.json",
            json.dumps({f.name: checksum(f) for f in mine}),
        )

    def publish(self, temporary: Path, step: int) -> None:
        """All ranks have written: make the checkpoint visible, then remove the oldest."""
        parts = [read_json(temporary / f"manifest-{r}.json") for r in range(self.world)]
        merged = {name: entry for part in parts for name, entry in part.items()}
        write_file(temporary / "manifest.json", json.dumps(merged))
        for r in range(self.world):
            (temporary / f"manifest-{r}.json").unlink()
        sync(temporary)
        final = self.path(step)
        shutil.rmtree(final, ignore_errors=True)  # of an earlier run of this step
        temporary.rename(final)
        sync(self.folder)
        write_file(self.folder / "latest", f"{step}\n")
        for old in self.steps()[: -self.keep] if self.keep else []:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def publish_later(self, future: Any, temporary: Path, step: int) -> None:
        """The rest of an asynchronous save, in a thread of its own; collective calls are not allowed here."""
        try:
            future.result()
            self.write_manifest(temporary)
            if self.rank == 0:
                wanted = [temporary / f"manifest-{r}.json" for r in range(self.world)]
                end = time.monotonic() + 600
                while not all(f.exists() for f in wanted):
                    if time.monotonic() > end:
                        raise SaveError("other ranks did not finish within 600 s")
                    time.sleep(0.05)
                self.publish(temporary, step)
        except (
            Exception,
            CheckpointException,
        ) as e:  # handed to the training thread, which raises it in wait
            self.error = reason(e)

    def wait(self) -> None:
        """Until an asynchronous save is complete; raises SaveError on all ranks if it failed on one."""
        if self.pending is None:
            return
        thread, what = self.pending
        thread.join()
        self.pending = None

        def check() -> None:
            if self.error:
                raise SaveError(self.error)

        together(what, check, self.group)

    def steps(self) -> list[int]:
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.folder.glob("step-*"))
        return sorted(int(m[1]) for m in found if m)

    def damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint; each rank checks some files, all return the same."""
        error = None
        try:
            manifest = read_json(self.path(step) / "manifest.json")
            for i, (name, entry) in enumerate(sorted(manifest.items())):
                if i % self.world == self.rank:
                    file = self.path(step) / name
                    if not file.exists():
                        error = f"{file} is missing"
                    elif checksum(file) != entry:
                        error = f"{file} is damaged: size or checksum differ from manifest.json"
        except (UsageError, OSError) as e:
            error = str(e)
        errors = [error]
        if self.group is not None:
            errors = [None] * self.world
            dist.all_gather_object(errors, error, group=self.group)
        return next((e for e in errors if e), None)

    def find(self, resume: str) -> int | None:
        """The step to go on from, or None. A damaged one is skipped with "auto", else refused."""
        if resume == "never":
            return None
        for step in reversed(self.steps()) if resume == "auto" else [int(resume)]:
            problem = self.damage(step)
            if problem is None:
                return step
            if resume != "auto":
                raise UsageError(f"--resume {resume}: {problem}; existing steps: {self.steps()}")
            log.warning(
                f"checkpoint of step {step} is NOT USED: {problem}; trying the one before it"
            )
        return None

    def facts(self, step: int) -> dict[str, Any]:
        return read_json(self.path(step) / "state.json")

    def load(self, state: dict[str, Any], step: int) -> None:
        """Fill the tensors of ``state`` in place, whatever layout they were saved from."""
        folder = self.path(step)
        reader = SafeReader(str(folder))
        try:
            dcp.load(
                state, storage_reader=reader, process_group=self.group, no_dist=self.group is None
            )
        except (
            RuntimeError,
            pickle.UnpicklingError,
            ValueError,
            KeyError,
            CheckpointException,
        ) as e:
            raise UsageError(f"--resume: {folder} does not fit this model: {reason(e)}") from e


# ---- Signals ------------------------------------------------------------------------------------
RESUMABLE = 75  # exit code: stopped by a signal after saving; EX_TEMPFAIL of sysexits.h


class Stopped(Exception):  # noqa: N818 - not an error
    """The run was asked to stop and has saved."""


class StopSignal:
    """SIGTERM and SIGINT ask for a stop after the current step; a second one ends the process at once.

    Under run.sh, torchrun also sends SIGTERM when another rank died: then $STOP_FILE does not exist and
    there is no use in waiting for collectives that will never finish.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.asked = group, torch.zeros(1, dtype=torch.int32)
        self.work: Any = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, _frame: Any) -> None:
        stop_file = os.environ.get("STOP_FILE")
        if self.asked.item() or (stop_file and not os.path.exists(stop_file)):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked.fill_(1)

    def begin_step(self) -> None:
        """Start to ask all ranks, so that they stop at the same step: a host message, no device wait."""
        self.seen = self.asked.clone()
        if self.group is not None:
            self.work = dist.all_reduce(self.seen, dist.ReduceOp.MAX, self.group, async_op=True)

    def at_end_of_step(self) -> bool:
        if self.work is not None:
            self.work.wait()
        return bool(self.seen.item())
