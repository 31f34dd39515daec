"""Weights in, weights out, and training checkpoints; nothing here is needed by a training step.

    load_weights         Hugging Face folder -> this rank's shards, slice by slice
    export               shards -> Hugging Face folder, in the hub's layout, checked by transformers
    TrainingCheckpoints  everything that a run needs to go on, on the same or another layout
    StopSignal           SIGTERM and SIGINT as a request to save and stop

Parameters carry Hugging Face's names and are plain tensors or DTensors. Beyond its own part of the model
a rank holds the piece of one tensor that it reads or writes. Nothing that a file says is executed: weights
are safetensors, facts are JSON, and the one pickle, the metadata of torch.distributed.checkpoint (DCP), may
name a handful of data classes only.
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
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

log = logging.getLogger("qwen3-trn")
# One process saves without collectives, on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


# ---- Errors and small files ---------------------------------------------------------------------
class UsageError(ValueError):
    """A mistake of the user's: printed without a traceback, exit code 2. One problem a line."""


class RunError(RuntimeError):
    """Ends a run with one message and no traceback, exit code 1."""


class SaveError(RunError):
    """Something could not be written; earlier checkpoints and exports are as they were."""


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


def write_file(path: Path, text: str) -> None:
    """Complete or not there at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(temporary: Path, final: Path) -> None:
    """Rename a complete folder; one that was there before is never lost in between."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    sync(temporary)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def control_group() -> dist.ProcessGroup | None:
    """A new gloo group of all ranks, for messages between hosts; None on one rank, also if it only plays one of
    many (a dry run). Every rank must call it."""
    if dist.get_world_size() == 1 or dist.get_backend() == dist.Backend.FAKE:
        return None
    # Long, because a rank may still compile, or write, while the others wait for it.
    minutes = int(os.environ.get("PG_TIMEOUT_MINUTES", "60"))
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """``value`` of every rank; None as group means one rank."""
    values = [value]
    if group is not None:
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=group)
    return values


def together(what: str, function: Callable[[], Any] | None, group: Any) -> None:
    """Run on this rank; if it fails on any rank, raise the same SaveError on all of them."""
    error = None
    try:
        if function is not None:
            function()
    except (OSError, RuntimeError, ValueError, SafetensorError, CheckpointException) as e:
        error = reason(e)
    if found := next(filter(None, gathered(error, group)), None):
        raise SaveError(f"{what} failed: {found}")


def reason(error: BaseException) -> str:
    """One line; DCP wraps what happened into an exception of its own, with all tracebacks."""
    if isinstance(error, UsageError | SaveError):
        return str(error).splitlines()[0]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    text = str(error).strip() or repr(error)
    for cause in (
        "No space left on device",
        "Read-only file system",
        "Permission denied",
        "No such file",
    ):
        if cause in text:
            return cause
    return f"{type(error).__name__}: {text.splitlines()[-1]}"


# ---- Which part of a tensor lies where ----------------------------------------------------------
Part = tuple[slice, ...]  # one slice a dim, with start and stop


def unique_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter; a tied head appears once, under the embedding's name."""
    return dict(model.named_parameters())  # named_parameters skips repeated objects


def local_slices(p: torch.Tensor) -> Part:
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


def overlap(a: Part, b: Part) -> Part | None:
    both = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return both if all(s.start < s.stop for s in both) else None


def within(part: Part, outer: Part) -> Part:
    """``part`` of a whole tensor as a part of the piece ``outer`` of it."""
    return tuple(
        slice(p.start - o.start, p.stop - o.start) for p, o in zip(part, outer, strict=True)
    )


@dataclass(frozen=True)
class HubTensor:
    """One tensor of a Hugging Face folder: where it lies in a parameter of the model."""

    name: str
    param: str
    part: Part  # of the whole parameter
    drop_first: bool  # an expert's slice [1, ...] is stored as [...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.part)[self.drop_first :]


def hub_tensors(model: nn.Module, whole: Collection[str] = ()) -> list[HubTensor]:
    """The hub's tensors, in order. Stacked experts become one gate, up and down matrix each, unless
    their parameter is named in ``whole``."""
    tensors = []
    for name, p in unique_parameters(model).items():
        full = tuple(slice(0, n) for n in p.shape)
        if ".experts." not in name or name in whole:
            tensors.append(HubTensor(name, name, full, False))
            continue
        prefix, kind = name.rsplit(".", 1)
        width = p.shape[1] // 2
        rows = {"gate_proj": slice(0, width), "up_proj": slice(width, 2 * width)}
        if kind == "down_proj":
            rows = {kind: full[1]}
        for e in range(p.shape[0]):
            for half, r in rows.items():
                part = (slice(e, e + 1), r, full[2])
                tensors.append(HubTensor(f"{prefix}.{e}.{half}.weight", name, part, True))
    return tensors


# ---- Loading ------------------------------------------------------------------------------------
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CHUNK = 2**22  # bytes that one thread reads before it converts them


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class Checkpoint:
    """The safetensors files of a Hugging Face folder: what is in them, and slices read on demand."""

    def __init__(self, folder: Path, mode: str = "rb") -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        files = [single.name]
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                isinstance(f, str) and Path(f).name == f for f in weight_map.values()
            ):
                raise UsageError(f"{index}: weight_map must map tensor names to files beside it")
            files = sorted(set(weight_map.values()))
        elif not single.exists() and (
            pickled := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
        ):
            raise UsageError(
                f"{pickled[0]}: pickled weights can run code and are never read; convert them to safetensors"
            )
        self.folder, self.mode, self.open_files = folder, mode, {}
        self.tensors: dict[str, Stored] = {}
        for file in files:
            for name, stored in self.header(file):
                if name in self.tensors:
                    raise UsageError(
                        f"{folder}: tensor {name} is in both {self.tensors[name].file} and {file}"
                    )
                self.tensors[name] = stored

    def header(self, file: str) -> Iterator[tuple[str, Stored]]:
        """The tensors of one file. Raises UsageError that names it, with its size if that is the fault."""
        path, length, size = self.folder / file, 0, 0
        try:
            size = path.stat().st_size
            with path.open("rb") as f:
                length = int.from_bytes(f.read(8), "little")
                with safe_open(path, framework="pt"):  # checks the header against the file
                    entries = json.loads(f.read(length))
        except FileNotFoundError as e:
            raise UsageError(f"{path}: no such file") from e
        except (SafetensorError, OSError) as e:
            # Cut off in its header, or in its data: the header, if whole, says how long it should be.
            needed = 8 + length
            if needed <= size:
                ends = re.findall(rb'"data_offsets":\s*\[\d+,\s*(\d+)', path.read_bytes()[:needed])
                needed += max(map(int, ends), default=0)
            sizes = f"; it needs {needed:,} bytes and has {size:,}" if needed > size else ""
            raise UsageError(f"{path}: damaged or not a safetensors file: {e}{sizes}") from e
        for name, entry in entries.items():
            if name != "__metadata__":
                offset = 8 + length + entry["data_offsets"][0]
                yield name, Stored(file, entry["dtype"], tuple(entry["shape"]), offset)

    def problem(self, t: HubTensor) -> str | None:
        """Why a tensor of the model cannot be read from here."""
        stored = self.tensors.get(t.name)
        if stored is None:
            return f"{self.folder}: tensor {t.name} missing"
        where = f"{self.folder / stored.file}: tensor {t.name}"
        if stored.shape != t.shape:
            return f"{where} has shape {list(stored.shape)}, the model needs {list(t.shape)}"
        if stored.dtype not in FLOATS:
            return f"{where} has dtype {stored.dtype}, must be {', '.join(FLOATS)}"
        return None

    def file(self, t: Stored) -> Any:
        if t.file not in self.open_files:
            self.open_files[t.file] = (self.folder / t.file).open(self.mode, buffering=0)
        return self.open_files[t.file]

    def read(self, name: str, part: Part, target: torch.Tensor) -> None:
        """Copy a slice of a tensor into ``target``, which has the slice's shape. Threads may share it.

        Whole rows of dim 0 are read, so that the disk sees long sequential reads also where tp cuts
        columns; those of the same dtype go straight into the target's memory.
        """
        t = self.tensors[name]
        file, dtype = self.file(t), FLOATS[t.dtype]
        width = math.prod(t.shape[1:]) * dtype.itemsize  # bytes of a row
        first, rows = part[0].start, part[0].stop - part[0].start
        on_cpu = target.device.type == "cpu"
        whole_rows = all(s == slice(0, n) for s, n in zip(part[1:], t.shape[1:], strict=True))
        if whole_rows and on_cpu and target.dtype == dtype and target.is_contiguous():
            read_into(target, file, t.offset + first * width)
            return
        step = max(1, CHUNK // width)
        buffer = torch.empty((min(step, rows), *t.shape[1:]), dtype=dtype)
        for i in range(0, rows, step):
            piece = buffer[: min(step, rows - i)]
            read_into(piece, file, t.offset + (first + i) * width)
            piece = piece[(slice(None), *part[1:])]
            # devices get the dtype that they keep: no operator to compile for the conversion
            target[i : i + len(piece)].copy_(piece if on_cpu else piece.to(target.dtype))

    def write(self, name: str, part: Part, piece: torch.Tensor) -> None:
        """Put ``piece``, contiguous and of the stored dtype, at its place: whole rows at once, columns
        row by row."""
        t = self.tensors[name]
        descriptor, width = self.file(t).fileno(), math.prod(t.shape[1:]) * piece.itemsize
        column = part[1].start * piece.itemsize if len(part) > 1 else 0
        start = t.offset + part[0].start * width + column
        whole_rows = piece.nbytes == len(piece) * width
        for i, run in enumerate([piece] if whole_rows else piece):
            left, offset = as_bytes(run), start + i * width
            while left:
                n = os.pwrite(descriptor, left, offset)
                left, offset = left[n:], offset + n


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def read_into(tensor: torch.Tensor, file: Any, offset: int) -> None:
    left = as_bytes(tensor)
    while left:
        if (n := os.preadv(file.fileno(), [left], offset)) == 0:
            raise OSError(0, "ended early, was it changed while it was read?", file.name)
        left, offset = left[n:], offset + n


def load_weights(model: nn.Module, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill this rank's shards from a Hugging Face folder, reading only the slices it keeps.

    Experts may be stored one tensor each (hub files) or stacked (transformers v5); float32, bfloat16 and
    float16 are converted to the parameters' dtype. Raises UsageError that lists every missing, mis-shaped
    or left-over tensor, on every rank of ``group`` (gloo) alike.
    """
    try:
        errors = fill_parameters(model, folder)
    except UsageError as e:
        errors = [str(e)]
    except OSError as e:
        errors = [f"{folder}: {reason(e)}"]
    if errors := sorted({e for rank_errors in gathered(errors, group) for e in rank_errors}):
        raise UsageError("\n".join(errors))


def fill_parameters(model: nn.Module, folder: Path) -> list[str]:
    """Read this rank's slices if the folder holds the model's tensors, else say what is wrong."""
    source, params = Checkpoint(folder), unique_parameters(model)
    held = {name: local_slices(p) for name, p in params.items()}
    local = {name: local_tensor(p) for name, p in params.items()}
    wanted = hub_tensors(model, whole=source.tensors)
    errors = [p for t in wanted if (p := source.problem(t))]
    left = source.tensors.keys() - {t.name for t in wanted}
    if model.config.tie_word_embeddings:
        left = left - {"lm_head.weight"}  # some folders store the tied head as well
    errors += [
        f"{folder / source.tensors[n].file}: tensor {n} is not part of this model" for n in left
    ]
    if errors:
        return errors
    jobs = []
    for t in wanted:
        if both := overlap(held[t.param], t.part):
            target = local[t.param][within(both, held[t.param])]
            part = within(both, t.part)[t.drop_first :]
            jobs.append((t.name, part, target[0] if t.drop_first else target))
    # Threads wait for the disk in turn; a device's runtime is left to the one that owns it.
    on_cpu = all(p.device.type == "cpu" for p in local.values())
    with ThreadPoolExecutor(4 if on_cpu else 1) as pool:
        list(pool.map(lambda job: source.read(*job), jobs))
    return []


# ---- Export -------------------------------------------------------------------------------------
TOKENIZER_FILES = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")  # fmt: skip
EXPORT_FILES = (*TOKENIZER_FILES, "*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "README.md")  # fmt: skip
SHARD_BYTES = 5 * 10**9  # of one safetensors file, as on the hub


def export_problem(folder: Path, source: Path | None) -> str | None:
    """Why ``folder`` may not be replaced by an export. Creates nothing but its parent."""
    if folder.exists():
        if not folder.is_dir():
            return f"{folder} is a file; use a new folder"
        if source is not None and folder.samefile(source):
            return f"{folder} is the folder that the run starts from; use another one"
        foreign = [
            f.name
            for f in folder.iterdir()
            if not any(f.match(pattern) for pattern in EXPORT_FILES)
        ]
        if foreign:
            return f"{folder} holds {foreign[0]}, which no export writes; use a new or an exported folder"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        probe = folder.with_name(f".{folder.name}.probe{os.getpid()}")
        probe.mkdir()
        probe.rmdir()
    except OSError as e:
        return f"{folder} cannot be written: {reason(e)}; use another folder"
    return None


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


def create_safetensors(path: Path, tensors: list[HubTensor], dtype: torch.dtype) -> None:
    """A safetensors file with its header and room for the data. A full disk shows here."""
    code = next(c for c, d in FLOATS.items() if d == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        start, end = end, end + math.prod(t.shape) * dtype.itemsize
        header[t.name] = {"dtype": code, "shape": t.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.flush()
        if hasattr(os, "posix_fallocate") and end:
            os.posix_fallocate(f.fileno(), 0, 8 + len(text) + end)
        else:  # macOS
            f.truncate(8 + len(text) + end)


class ShardWriter:
    """Writes the parts that the ranks hold into files that exist already.

    The ranks of the first node write, each what it holds; those of other nodes send to them. So the
    files need not be shared between nodes, and no rank holds more than one part of one tensor.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, group: Any) -> None:
        self.dtype, self.group, self.rank = dtype, group, dist.get_rank()
        self.writers = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.params = unique_parameters(model)
        mine = {
            n: tuple((s.start, s.stop) for s in local_slices(p)) for n, p in self.params.items()
        }
        # name -> part, as (start, stop) a dim -> first rank that holds it: replicas write nothing
        self.owners: dict[str, dict[tuple[tuple[int, int], ...], int]] = {}
        for rank, parts in enumerate(gathered(mine, group)):
            for name, ranges in parts.items():
                self.owners.setdefault(name, {}).setdefault(ranges, rank)

    def write(self, folder: Path, tensors: list[HubTensor]) -> None:
        """Every rank must call it. After an error a rank still takes part: the others may wait for it."""
        error, files = None, None
        for t in tensors:
            for ranges, owner in self.owners[t.param].items():
                held = tuple(slice(*r) for r in ranges)
                both, writer = overlap(held, t.part), owner % self.writers
                if both is None or self.rank not in (owner, writer):
                    continue
                part = within(both, t.part)[t.drop_first :]
                if self.rank == owner:
                    local = local_tensor(self.params[t.param])[within(both, held)]
                    piece = local.to("cpu", self.dtype).contiguous()
                    if owner != writer:
                        dist.send(piece, writer, group=self.group)
                else:
                    piece = torch.empty([s.stop - s.start for s in part], dtype=self.dtype)
                    dist.recv(piece, owner, group=self.group)
                if self.rank == writer and error is None:
                    try:
                        files = files or Checkpoint(folder, "r+b")
                        files.write(t.name, part, piece.view([s.stop - s.start for s in part]))
                    except (OSError, UsageError) as e:
                        error = e
        if error is not None:
            raise error


def export(
    model: nn.Module, folder: Path, dtype: torch.dtype, source: Path | None, facts: dict[str, Any],
    group: dist.ProcessGroup | None, end_of_turn: int | None = None, shard_bytes: int = SHARD_BYTES,
) -> str:  # fmt: skip
    """Write a complete Hugging Face folder in the hub's layout; every rank must call it.

    Files are written to a temporary folder beside ``folder``, checked, and renamed. A rank holds at
    most one tensor's part beyond its own parameters.

    Args:
        dtype: of the stored tensors: float32, bfloat16 or float16
        source: the folder that the run started from; its config, tokenizer and generation config are
            carried over
        facts: what the model card says of the training
        group: a gloo group of all ranks; None on one rank
        end_of_turn: token id that must end generation too, for a fine-tuned chat model
        shard_bytes: largest size of one safetensors file
    Returns: how the folder was checked, for the log (rank 0's)
    Raises: SaveError, on every rank; an earlier export is as it was
    """
    rank, what, how = dist.get_rank(), f"export to {folder}", []
    temporary = folder.with_name(f".{folder.name}.tmp")
    tensors = hub_tensors(model)
    shards = plan_shards(tensors, dtype.itemsize, shard_bytes)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]

    def begin() -> None:
        if problem := export_problem(folder, source):
            raise SaveError(f"--export_dir {problem}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_metadata(model, temporary, dtype, source, facts, end_of_turn)
        for name, shard in zip(names, shards, strict=True):
            create_safetensors(temporary / name, shard, dtype)
        if len(shards) > 1:
            total = sum(math.prod(t.shape) * dtype.itemsize for t in tensors)
            where = {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            write_file(temporary / "model.safetensors.index.json", json.dumps(index, indent=2))

    def finish() -> None:
        for name in names:
            sync(temporary / name)
        how.append(verify_export(temporary, shard_bytes))
        put_in_place(temporary, folder)

    def compare() -> None:
        if rank < writer.writers:  # others may not see the files
            compare_sample(model, temporary, dtype)

    together(what, begin if rank == 0 else None, group)
    writer = ShardWriter(model, dtype, group)
    together(what, lambda: writer.write(temporary, tensors), group)
    together(what, compare, group)
    together(what, finish if rank == 0 else None, group)
    return "".join(how)


def write_metadata(
    model: nn.Module, folder: Path, dtype: torch.dtype, source: Path | None, facts: dict[str, Any],
    end_of_turn: int | None,
) -> None:  # fmt: skip
    """Everything but the weights: config, generation config, tokenizer files, model card."""
    hf = model.config
    if source is not None:
        config = read_json(source / "config.json")
        for pattern in TOKENIZER_FILES:
            for file in filter(Path.is_file, source.glob(pattern)):
                shutil.copyfile(file, folder / file.name)
                sync(folder / file.name)
    else:
        config = hf.to_diff_dict() | {"model_type": hf.model_type}
        kind = "Qwen3MoeForCausalLM" if hf.model_type == "qwen3_moe" else "Qwen3ForCausalLM"
        config |= {"architectures": [kind], "rope_theta": hf.rope_parameters["rope_theta"]}
        config |= {"vocab_size": hf.vocab_size, "tie_word_embeddings": hf.tie_word_embeddings}
    if "num_local_experts" in config:  # so transformers; the hub's files and vLLM say num_experts
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


def verify_export(folder: Path, most_bytes: int) -> str:
    """transformers must find every tensor and no other -> how that was found out. Raises SaveError.

    Files of at most ``most_bytes`` together are loaded, as a user would. Of more, names and shapes are
    compared with those of transformers' model on the meta device, which needs no memory.
    """
    stored = {name: t.shape for name, t in Checkpoint(folder).tensors.items()}
    if sum(f.stat().st_size for f in folder.glob("*.safetensors")) <= most_bytes:
        transformers.utils.logging.disable_progress_bar()
        _, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
        problems, how = {k: v for k, v in info.items() if v}, "transformers loads it"
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            wanted = hub_tensors(transformers.AutoModelForCausalLM.from_config(config))
        problems = sorted({(t.name, t.shape) for t in wanted} ^ set(stored.items()))
        how = "too large to load it here, but names and shapes compared with transformers' model"
    if problems:
        raise SaveError(f"{folder}: transformers does not load it cleanly: {problems}")
    return f"{how}: no missing, unexpected or mismatched key; a sample of tensors equals the trained ones"


def compare_sample(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """This rank's part of some tensors must be in the files bit for bit. Raises SaveError."""
    source, tensors, params = Checkpoint(folder), hub_tensors(model), unique_parameters(model)
    for t in tensors[:: max(1, len(tensors) // 8)]:
        held = local_slices(params[t.param])
        if both := overlap(held, t.part):
            ours = local_tensor(params[t.param])[within(both, held)].to("cpu", dtype)
            ours = ours[0] if t.drop_first else ours
            stored = torch.empty(ours.shape, dtype=dtype)
            source.read(t.name, within(both, t.part)[t.drop_first :], stored)
            if not torch.equal(stored, ours):
                raise SaveError(f"{folder}: tensor {t.name} differs from the trained one")


# ---- Training checkpoints -----------------------------------------------------------------------
def checksum(path: Path) -> list[int]:
    """[bytes, CRC-32]"""
    crc, size = 0, 0
    with path.open("rb") as f:
        while block := f.read(2**22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


class SafeReader(FileSystemReader):
    """DCP's reader, without arbitrary code: its metadata is a pickle, and only ``ALLOWED`` may be in it.

    Every entry must be a tensor: DCP reads those by torch.load with weights_only=True, anything else
    without.
    """

    DCP = "torch.distributed.checkpoint"
    ALLOWED = frozenset({
        (f"{DCP}.metadata", "Metadata"), (f"{DCP}.metadata", "MetadataIndex"), (f"{DCP}.metadata", "StorageMeta"),
        (f"{DCP}.metadata", "TensorStorageMetadata"), (f"{DCP}.metadata", "ChunkStorageMetadata"),
        (f"{DCP}.metadata", "TensorProperties"), (f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        (f"{DCP}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("pathlib", "WindowsPath"),
    })  # fmt: skip

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            if is_dtype or (module, name) in SafeReader.ALLOWED:
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in checkpoint metadata")

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
        with (Path(self.path) / ".metadata").open("rb") as f:
            metadata = self.Unpickler(f).load()
        entries = metadata.state_dict_metadata
        if other := [k for k, v in entries.items() if not isinstance(v, TensorStorageMetadata)]:
            raise pickle.UnpicklingError(f"{other[0]} is not a tensor")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


# What makes two models of one shape compute differently, or differ in shape.
ARCHITECTURE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_parameters", "rms_norm_eps",
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers",
)  # fmt: skip


class TrainingCheckpoints:
    """OUTPUT_DIR/checkpoints/step-N: all that a run needs to go on, complete or not there.

    A folder holds DCP's files (model, optimizer, RNG: tensors only), state.json (step, data position,
    configuration) and manifest.json (size and CRC-32 of every file). It is written as step-N.tmp, synced
    and renamed; ``latest`` is written last, and a step above it is not used. All nodes must share the
    file system. The checksums show damage; who may write to the folder is trusted with the numbers in
    it, but cannot make a run execute code: nothing is unpickled but DCP's metadata, by SafeReader.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        """``keep``: checkpoints that stay, the oldest go; 0: all. Every rank must call it."""
        self.folder, self.keep = folder / "checkpoints", keep
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # A group of its own: an asynchronous save uses it while the training thread uses the other.
        self.group = control_group()
        self.pending: tuple[threading.Thread, str] | None = None  # an asynchronous save
        self.error: str | None = None  # why it failed

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08}"

    def save(self, state: dict[str, Any], facts: dict[str, Any], asynchronous: bool) -> None:
        """Write a checkpoint, or start to. Every rank must call it.

        Args:
            state: name -> tensor or DTensor; may be changed as soon as this returns
            facts: JSON of what is not a tensor, with "step"
        Raises: SaveError, on every rank, also for the asynchronous save before this one
        """
        self.wait()
        step = facts["step"]
        what, temporary = f"checkpoint of step {step}", self.path(step).with_suffix(".tmp")

        def begin() -> None:
            self.folder.mkdir(exist_ok=True)  # not its parents: a folder that vanished is an error
            for stale in self.folder.glob("*.tmp"):
                shutil.rmtree(stale)
            temporary.mkdir()
            write_file(temporary / "state.json", json.dumps(facts))

        together(what, begin if self.rank == 0 else None, self.group)
        target = {"checkpoint_id": str(temporary), "process_group": self.group}
        target |= {} if self.group else {"no_dist": True}
        if not asynchronous:
            together(what, lambda: dcp.save(state, **target), self.group)
            self.publish(what, temporary, step)
            return
        future = dcp.async_save(state, **target)  # copies the tensors first

        def finish() -> None:
            try:
                together(what, future.result, self.group)
                self.publish(what, temporary, step)
            except (SaveError, RuntimeError) as e:  # RuntimeError: another rank is gone
                self.error = reason(e)

        self.error = None
        self.pending = (threading.Thread(target=finish, daemon=True), what)
        self.pending[0].start()

    def publish(self, what: str, temporary: Path, step: int) -> None:
        """All ranks have written: add checksums, make the checkpoint visible, then remove the oldest."""

        def sum_up() -> None:
            """Checksums of the files that this rank wrote; rank 0 also of the common ones."""
            files = [*temporary.glob(f"__{self.rank}_*")]
            files += [temporary / n for n in (".metadata", "state.json")] if self.rank == 0 else []
            sums = json.dumps({f.name: checksum(f) for f in files})
            write_file(temporary / f"manifest-{self.rank}.json", sums)

        def rename() -> None:
            parts = [temporary / f"manifest-{r}.json" for r in range(self.world)]
            if lost := [p for p in parts if not p.exists()]:
                raise SaveError(
                    f"rank 0 does not see {lost[0]}: all nodes must share the file system of --output_dir"
                )
            merged = {name: entry for part in parts for name, entry in read_json(part).items()}
            write_file(temporary / "manifest.json", json.dumps(merged))
            for part in parts:
                part.unlink()
            put_in_place(temporary, self.path(step))
            write_file(self.folder / "latest", f"{step}\n")
            # Steps above this one are of an earlier run, which this one replaces: they go first.
            steps = sorted(self.steps(), key=lambda s: (s <= step, s))
            for old in steps[: -self.keep] if self.keep else []:
                if old > step:
                    log.warning(f"removing {self.path(old)}, of an earlier run")
                shutil.rmtree(self.path(old), ignore_errors=True)

        together(what, sum_up, self.group)
        together(what, rename if self.rank == 0 else None, self.group)

    def wait(self) -> None:
        """Until an asynchronous save is complete; raises SaveError on all ranks if it failed."""
        if self.pending is None:
            return
        self.pending[0].join()
        self.pending = None
        if self.error:
            raise SaveError(self.error)

    def steps(self) -> list[int]:
        found = (re.fullmatch(r"step-(\d+)", p.name) for p in self.folder.glob("step-*"))
        return sorted(int(m[1]) for m in found if m)

    def damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint; each rank checks some files, all return the same."""
        error, folder = None, self.path(step)
        try:
            manifest = read_json(folder / "manifest.json")
            for name, entry in sorted(manifest.items())[self.rank :: self.world]:
                if not (folder / name).exists():
                    error = f"{folder / name} is missing"
                elif checksum(folder / name) != entry:
                    error = (
                        f"{folder / name} is damaged: size or checksum differ from manifest.json"
                    )
        except (UsageError, OSError) as e:
            error = str(e)
        return next(filter(None, gathered(error, self.group)), None)

    def find(self, resume: str) -> int | None:
        """The step to go on from, or None if there is no checkpoint at all. Every rank must call it.

        With "auto" the newest that is not damaged, up to ``latest``. Raises UsageError if that leaves none,
        or if the step asked for is not there or damaged: a run never starts over unless told "never".
        """
        if resume == "never":
            return None
        steps = self.steps()
        try:
            newest = int((self.folder / "latest").read_text())
        except (OSError, ValueError):
            newest = max(steps, default=0)
        # rank 0's view: a folder on a network may show late elsewhere
        steps, newest = gathered((steps, newest), self.group)[0]
        if resume != "auto":
            if problem := self.damage(int(resume)):
                raise UsageError(f"--resume {resume}: {problem}; existing steps: {steps}")
            return int(resume)
        for step in reversed([s for s in steps if s <= newest]):
            problem = self.damage(step)
            if problem is None:
                return step
            log.warning(
                f"checkpoint of step {step} is NOT USED: {problem}; looking for an older one"
            )
        if steps:
            raise UsageError(
                f"--resume auto: no usable checkpoint in {self.folder}, only steps {steps}; use "
                f"--resume never to start over, or another --output_dir"
            )
        return None

    def facts(self, step: int, config: Any) -> dict[str, Any]:
        """What save was given. Raises UsageError if it is of a model that computes otherwise than
        ``config``, a transformers configuration."""
        facts = read_json(self.path(step) / "state.json")
        then, now = facts["architecture"], architecture(config)
        if other := [
            f"{k} is {then.get(k)} there, {now[k]} here" for k in now if then.get(k) != now[k]
        ]:
            raise self.misfit(step, "; ".join(other))
        return facts

    def misfit(self, step: int, problem: str) -> UsageError:
        return UsageError(
            f"--resume: {self.path(step)} does not fit this model: {problem}; use --resume never or another --output_dir"
        )

    def load(self, state: dict[str, Any], step: int) -> None:
        """Fill the tensors of ``state`` in place, whatever layout they were saved from.

        Raises UsageError if the checkpoint lacks one of them, or has others or other shapes.
        """
        reader = SafeReader(str(self.path(step)))
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as e:  # a broken or forged pickle can raise anything
            raise UsageError(f"--resume: {self.path(step) / '.metadata'}: {reason(e)}") from e
        errors = [f"{n} is not part of the model" for n in stored.keys() - state.keys()]
        errors += [f"{n} is missing" for n in state.keys() - stored.keys()]
        errors += [
            f"{n} is {list(stored[n].size)}, not {list(v.shape)}"
            for n, v in state.items()
            if n in stored and stored[n].size != v.shape
        ]
        if errors:
            raise self.misfit(step, f"{len(errors)} tensors differ, such as {min(errors)}")
        try:
            dcp.load(state, storage_reader=reader, process_group=self.group, no_dist=not self.group)
        except (
            OSError,
            RuntimeError,
            ValueError,
            pickle.UnpicklingError,
            CheckpointException,
        ) as e:
            raise UsageError(f"--resume: {self.path(step)} cannot be read: {reason(e)}") from e


def architecture(config: Any) -> dict[str, Any]:
    """The part of a transformers configuration that a checkpoint must share, as JSON returns it."""
    return json.loads(json.dumps({k: getattr(config, k, None) for k in ARCHITECTURE}))


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
        """``group``: a gloo group of all ranks; None on one rank. Only the main thread may call it."""
        self.group, self.asked = group, False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, _frame: Any) -> None:
        stop_file = os.environ.get("STOP_FILE")
        if self.asked or (stop_file and not os.path.exists(stop_file)):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = True

    def at_end_of_step(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all, since a signal may reach the ranks
        of one node only. Four bytes between hosts, which do not wait for their devices."""
        seen = torch.tensor([self.asked], dtype=torch.int32)
        if self.group is not None:
            dist.all_reduce(seen, dist.ReduceOp.MAX, self.group)
        return bool(seen.item())
