"""Plan a run of train_qwen3_trn.py before it starts: memory, communication and time, without any device.

    bash run.sh --dry_run --world_size 64 --tp 4 --model 30B-A3B --seq_len 4096    # one plan, as text
    bash run.sh --dry_run json ...                                                 # as one JSON object
    python plan.py table                                                           # the table of the README

A dry run is the trainer's own code: Trainer builds the model, overrides, tensor parallelism, FSDP and optimizer
and takes one training step, on tensors without values (FakeTensorMode) among ranks that do not exist (torch's
fake process group). Tracker watches; in a real run it counts the same things.
"""

from __future__ import annotations

# ---- Imports ------------------------------------------------------------------------------------
import contextlib
import copy
import dataclasses
import functools
import gc
import json
import logging
import math
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_qwen3_trn as trn

log = logging.getLogger("qwen3-trn")


# ---- Dry run: devices ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Device:
    """One device as PyTorch sees it; bytes, bytes/s, FLOP/s."""

    name: str
    hbm: float  # bytes
    code: float  # bytes of HBM that hold no tensor: programs
    flops: float  # dense bf16
    hbm_bandwidth: float
    chip: int  # devices of one chip
    node: int  # devices of one instance
    chip_bandwidth: float  # of a device to its neighbours on the chip
    node_bandwidth: float  # of a device to other chips of the instance
    network: float  # of a whole instance


def trn2(lnc: int) -> Device:
    """trn2.48xlarge with ``lnc`` physical cores to a device. Sources: AWS Neuron documentation 2.33, trn2
    architecture: 96 GiB and 2.9 TB/s HBM, 8 physical cores, 1,024 GB/s NeuronLink per chip inside the instance,
    16 chips, EFAv3 3,200 Gb/s; program code about 96 MB per physical core (users' reports). Cores of one chip
    exchange through its HBM, a read and a write: half its bandwidth (inferred).
    """
    devices = 8 // lnc
    return Device(
        f"trn2 (LNC={lnc})", 96 * 2**30 / devices, lnc * 96e6, trn.PEAK_FLOPS["trn2"] * lnc / 2, 2.9e12 / devices,
        devices, 16 * devices, 2.9e12 / devices / 2, 1024e9 / devices, 3200e9 / 8,
    )  # fmt: skip


def device_of(cfg: trn.Config) -> Device | None:
    """The device that a plan is for; None where no figures are known (cpu, cuda)."""
    if trn.device_type(cfg) != "neuron":
        return None
    return trn2(int(os.environ.get("NEURON_LOGICAL_NC_CONFIG") or 2))


# ---- Dry run: tracker ---------------------------------------------------------------------------
KINDS = {  # last part of a module's name -> what the memory made in its forward is called
    "embed_tokens": "embedding", "self_attn": "attention", "mlp": "mlp", "gate": "router", "experts": "experts",
    "input_layernorm": "norm", "post_attention_layernorm": "norm", "norm": "norm", "q_norm": "norm",
    "k_norm": "norm", "lm_head": "loss",
}  # fmt: skip
PERSISTENT = ("parameters", "gradients", "optimizer state", "buffers")
COMMUNICATION = "communication buffers"
COLLECTIVES = {  # dispatched op -> its common name
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce",
    "broadcast_": "broadcast", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
}  # fmt: skip


class Storage:
    """One allocation: what it is for (which may be known only later) and its size in bytes now."""

    __slots__ = ("kind", "ref", "size")

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.ref: Any = None


class Pause:
    """A context, to be entered many times, in which a tracker counts nothing."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def __enter__(self) -> None:
        self.tracker.paused = True

    def __exit__(self, *_: Any) -> None:
        self.tracker.paused = False


class Tracker(TorchDispatchMode):
    """Counts live tensor storages by kind, collectives by group, and the time that each op takes at least.

    Works on real and on fake tensors. What an op allocates and frees inside itself stays unseen, on both.
    torch's FSDPMemTracker does not serve: it knows no kinds of module, calls tensor parallel buffers
    activations, and copies all its numbers at each op.
    """

    def __init__(self, trainer: trn.Trainer, device: Device | None = None) -> None:
        super().__init__()
        self.trainer, self.device = trainer, device
        self.live: dict[int, Storage] = {}  # by address
        self.events: list[tuple[Storage, int]] = []  # allocation (+) and release (-), bytes
        self.collectives: Counter[tuple[str, str]] = Counter()  # (name, mesh axis) -> calls
        self.comm_bytes: Counter[tuple[str, str]] = (
            Counter()
        )  # -> bytes of the whole, gathered side
        self.seconds = 0.0  # of computation, each op at its roofline
        self.micro_batches: list[Any] = []  # (collectives, bytes, seconds) before each
        self.stack: list[str] = []  # kinds of the modules that are running forward
        self.axes = mesh_axes(trainer)
        self.undo: list[Callable[[], None]] = []
        self.paused = False
        self.gradient_bytes = 0

    # -- memory
    def storage(self, t: torch.Tensor, kind: str) -> Storage:
        """The record of t's storage; a new one of this kind if it is first seen."""
        raw = t.untyped_storage()
        key = raw._cdata
        found = self.live.get(key)
        if found is None:
            found = self.live[key] = Storage(kind, 0)
            found.ref = weakref.ref(raw, functools.partial(self.freed, key))
        if found.size != raw.nbytes():
            self.resized(found, raw.nbytes())
        return found

    def resized(self, storage: Storage, size: int) -> None:
        self.events.append((storage, size - storage.size))
        storage.size = size

    def freed(self, key: int, _: Any) -> None:
        self.resized(self.live.pop(key), 0)

    def label(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        for t in tensors:
            if t is not None:
                t = t.to_local() if isinstance(t, DTensor) else t
                self.storage(t, kind).kind = kind

    def current_kind(self) -> str:
        if self.stack:
            return self.stack[-1]
        return "backward" if torch._C._current_graph_task_id() != -1 else "other"

    def peak(self) -> Counter[str]:
        """Bytes of each kind at the moment when most were live."""
        total = most = moment = 0
        for i, (_, change) in enumerate(self.events):
            total += change
            if total > most:
                most, moment = total, i + 1
        sizes: Counter[str] = Counter()
        for storage, change in self.events[:moment]:
            sizes[storage.kind] += change
        return +sizes

    # -- what it hangs into
    @torch.no_grad()
    def __enter__(self) -> Tracker:
        self.fake_mode = active_fake_mode()
        model, optimizer = self.trainer.model, self.trainer.optimizer
        self.label(model.buffers(), "buffers")
        self.label(model.parameters(), "parameters")
        self.label_optimizer()
        for name, module in model.named_modules():
            last = name.rsplit(".", 1)[-1]
            kind = KINDS.get(last) or ("residual stream" if last.isdigit() else None)
            if kind:
                kind = "experts" if kind == "mlp" and hasattr(module, "experts") else kind
                self.undo.append(self.watch(module, kind))
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.label_gradients()),
            optimizer.register_step_post_hook(lambda *_: self.label_optimizer()),
        ]
        for p in trn.unique_parameters(model).values():  # without FSDP; it sets .grad by itself
            hooks.append(
                p.register_post_accumulate_grad_hook(lambda p: self.label([p.grad], "gradients"))
            )
        resize = torch.UntypedStorage.resize_  # FSDP frees and refills with it, unseen by dispatch

        def resize_(raw: torch.UntypedStorage, size: int) -> None:
            resize(raw, size)
            if found := self.live.get(raw._cdata):
                self.resized(found, raw.nbytes())

        torch.UntypedStorage.resize_ = resize_
        # DTensor learns an op's global shapes by running it on fake tensors of no use; this is around it.
        lock, ShardingPropagator._fake_mode_lock = ShardingPropagator._fake_mode_lock, Pause(self)
        self.undo += [hook.remove for hook in hooks]
        self.undo.append(lambda: setattr(ShardingPropagator, "_fake_mode_lock", lock))
        self.undo.append(lambda: setattr(torch.UntypedStorage, "resize_", resize))
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        while self.undo:
            self.undo.pop()()

    def watch(self, module: nn.Module, kind: str) -> Callable[[], None]:
        """Note while the module's forward runs. No hooks: tensor parallelism copies a module's dicts of them."""
        forward, own = module.forward, "forward" in vars(module)

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if kind == "embedding":
                self.micro_batches.append((+self.collectives, +self.comm_bytes, self.seconds))
            self.stack.append(kind)
            try:
                return forward(*args, **kwargs)
            finally:
                self.stack.pop()

        module.forward = watched
        return lambda: setattr(module, "forward", forward) if own else delattr(module, "forward")

    def label_gradients(self) -> None:
        self.label((p.grad for p in self.trainer.model.parameters()), "gradients")
        self.gradient_bytes = sum(s.size for s in self.live.values() if s.kind == "gradients")

    def label_optimizer(self) -> None:
        state = tree_leaves(list(self.trainer.optimizer.state.values()))
        self.label((t for t in state if isinstance(t, torch.Tensor)), "optimizer state")

    # -- ops
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # they unwrap themselves, then we see local tensors
        if func is torch.ops._c10d_functional.wait_tensor.default:
            if self.fake_mode is None:
                func(*args)
            return args[0]  # as in eager mode; its fake implementation would copy
        out = func(*args, **(kwargs or {}))
        if self.paused or func.is_view or func.namespace == "prim":
            return out  # of DTensor's guesses; views and questions, which hold nothing and come in thousands
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        kind = self.current_kind()
        for t in results:
            self.storage(t, kind)
        space = func.namespace
        if space in ("c10d", "_c10d_functional", "fsdp"):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            for t in results + (tensors if space != "_c10d_functional" else []):
                if (found := self.storage(t, kind)).kind not in PERSISTENT:
                    found.kind = COMMUNICATION
            self.count(func, args, kwargs or {}, results + tensors)
        if self.device and space not in ("c10d", "_c10d_functional"):
            self.seconds += seconds_of(func, args, kwargs, results, self.trainer, self.device)
        return out

    def count(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        name = COLLECTIVES.get(func._schema.name.split("::")[1])
        if name is None:
            return
        group = next(filter(None, map(group_of, [*args, *kwargs.values()])))
        ranks = tuple(dist.get_process_group_ranks(group))
        # By name, since several axes may hold the same ranks; DTensor's caches may know an equal, older mesh.
        axis = next(
            (a for a, g in self.axes.items() if g.group_name == group.group_name), None
        ) or next(
            a for a, g in self.axes.items() if tuple(dist.get_process_group_ranks(g)) == ranks
        )
        self.collectives[name, axis] += 1
        self.comm_bytes[name, axis] += max(t.numel() * t.itemsize for t in tensors)


def group_of(arg: Any) -> dist.ProcessGroup | None:
    """The process group that an op was given, by name or as an object; None: arg is something else."""
    with contextlib.suppress(RuntimeError):  # another string, another object
        if isinstance(arg, str):
            return _resolve_process_group(arg)
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
    return None


def mesh_axes(trainer: trn.Trainer) -> dict[str, dist.ProcessGroup]:
    """What the collectives of a step are called -> their group."""
    axes = {axis: trainer.mesh.get_group(axis) for axis in ("tp", "dp_shard", "dp_replicate")}
    return (
        axes | ({"dp": trainer.dp_group} if trainer.dp_group else {}) | {"world": dist.group.WORLD}
    )


def seconds_of(
    func: Any,
    args: Any,
    kwargs: Any,
    results: list[torch.Tensor],
    trainer: trn.Trainer,
    device: Device,
) -> float:
    """Roofline of one op: its matmuls at peak FLOP/s or its bytes at HBM bandwidth, whichever takes longer."""
    name = func._schema.name.split("::")[1]
    if name.startswith("empty") or name in ("detach", "wait_tensor", "_unsafe_view", "alias"):
        return 0.0
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    written = [
        t
        for given, argument in zip(args, func._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for t in tree_leaves(given)
        if isinstance(t, torch.Tensor)
    ]
    fresh = {id(t) for t in written}
    moved = sum(
        min(t.numel() * t.itemsize, t.untyped_storage().nbytes())
        for t in [*inputs, *written, *(t for t in results if id(t) not in fresh)]
    )
    return max(
        op_flops(name, inputs, results, trainer) / device.flops, moved / device.hbm_bandwidth
    )


def op_flops(
    name: str, inputs: list[torch.Tensor], results: list[torch.Tensor], trainer: trn.Trainer
) -> float:
    """FLOPs of matmuls and attention; 0 for all else. Experts: routing is even, a rank computes its 1/tp."""
    if name in ("mm", "bmm", "linear"):
        return 2.0 * results[0].numel() * inputs[0].shape[-1]
    if name in ("addmm", "addmm_", "baddbmm"):
        return 2.0 * results[0].numel() * inputs[1].shape[-1]
    if name == "_grouped_mm" or name.startswith(("experts_linear", "grouped_linear")):
        a, b = [t for t in inputs if t.is_floating_point()][:2]
        both = 2.0 * name.endswith(("_grad", "_grads")) or 1.0
        rows = a if a.ndim == 2 and b.ndim == 3 else None
        if rows is not None:  # rows [R, C] x experts [e, C, M] or [e, M, C]
            return both * 2.0 * rows.shape[0] * math.prod(b.shape[1:]) / trainer.tp
        return 2.0 * math.prod(a.shape) * b.shape[-1] / trainer.tp  # [C, R] x [R, M] by expert
    if "scaled_dot_product" in name:
        grad = name.endswith("backward")
        q_BNSH = inputs[1] if grad else inputs[0]
        # causal: half of q k and of p v; backward does five such products
        return (5 if grad else 2) * q_BNSH.numel() * q_BNSH.shape[-2]
    return 0.0


# ---- Dry run: prediction ------------------------------------------------------------------------
class PlannedTrainer(trn.Trainer):
    """The trainer without data, files and earlier checkpoints, on tensors without values."""

    def __init__(self, cfg: trn.Config, hf: Any, stack: contextlib.ExitStack) -> None:
        self.stack = stack  # when it closes, tensors have values again
        super().__init__(cfg, hf)

    def load_rows(self) -> Any:
        # All meshes are made, which needs values, and the model is on meta, still without memory.
        self.stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return SimpleNamespace(num_rows=None, hold_out=lambda *_: None)

    def resume(self) -> None:
        pass

    def summary(self, total: int, active: int) -> None:
        self.parameters = total, active

    def batches(self, n: int) -> list[trn.Batch]:
        rows = torch.zeros((self.cfg.local_batch_size, self.cfg.seq_len), dtype=torch.int64)
        starts = [rows.clone()] if self.cfg.packing in ("isolate", "none") else []
        return [(rows.clone(), rows.clone(), *starts) for _ in range(n)]


@contextlib.contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """This process plays rank 0 of a job. Rank 0 is the heaviest: FSDP, vocabulary, heads and experts are all
    cut like torch.chunk, whose first piece is the largest; whatever is replicated is the same everywhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    align = trn.group_align
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        trn.group_align = align


def predict(cfg: trn.Config, hf: Any) -> dict[str, Any]:
    """Memory, collectives and time of one step of the heaviest rank, once the optimizer has its state.

    Sizes are bytes, times seconds. "memory" is at the moment of the peak, "persistent" what always stays.
    """
    cfg = dataclasses.replace(
        cfg, compile=False, compile_backend=None
    )  # nothing to trace without values
    world_size, device = trn.num_ranks(cfg), device_of(cfg)
    with fake_ranks(world_size), contextlib.ExitStack() as stack:
        trainer = PlannedTrainer(cfg, hf, stack)
        trainer.model.train()
        trainer.state()  # makes the optimizer's
        # Each micro-batch but the last costs the same, and memory no longer grows after the second.
        n = min(trainer.grad_accum_steps, 2)
        report = measure(trainer, trainer.batches(n), device, trainer.grad_accum_steps - n)
        report |= {
            "model": cfg.model,
            "world_size": world_size,
            "mesh": dict(zip(trainer.mesh.mesh_dim_names, trainer.mesh.shape, strict=True)),
            "parameters": trainer.parameters[0],
            "active_parameters": trainer.parameters[1],
            "precision": cfg.mixed_precision_param,
            "micro_batches": trainer.grad_accum_steps,
            "tokens_per_step": trainer.loader.global_batch * cfg.seq_len,
            "minimum_bytes": minimum_bytes(cfg, hf, world_size),
        }
        if device is not None:
            report |= roofline(report, cfg, hf, trainer, device)
        del trainer
    gc.collect()  # FSDP's modules and states form cycles
    return report


def measure(
    trainer: trn.Trainer, batches: list[trn.Batch], device: Device | None = None, repeats: int = 0
) -> dict[str, Any]:
    """Take a step and count. For real trainers, too."""
    trainer.step += 1
    gc.collect()
    with Tracker(trainer, device) as tracker:
        trainer.train_step(batches)
    return measurements(tracker, repeats)


def measurements(tracker: Tracker, repeats: int) -> dict[str, Any]:
    """What the tracker saw, with the first micro-batch counted ``repeats`` times more."""
    calls, sizes, seconds = tracker.collectives, tracker.comm_bytes, tracker.seconds
    if repeats:
        (c0, b0, s0), (c1, b1, s1) = tracker.micro_batches
        calls = Counter({k: n + repeats * (c1[k] - c0[k]) for k, n in calls.items()})
        sizes = Counter({k: n + repeats * (b1[k] - b0[k]) for k, n in sizes.items()})
        seconds += repeats * (s1 - s0)
    persistent: Counter[str] = Counter()
    for storage in tracker.live.values():
        persistent[storage.kind] += storage.size
    peak = tracker.peak()
    return {
        "memory": dict(peak),
        "peak_bytes": sum(peak.values()),
        "persistent": {k: persistent[k] for k in PERSISTENT}
        | {"gradients": tracker.gradient_bytes},
        "collectives": [
            {"kind": kind, "group": axis, "count": n, "bytes": sizes[kind, axis]}
            for (kind, axis), n in sorted(calls.items())
        ],
        "compute_seconds": seconds,
    }


def wire_seconds(row: dict[str, Any], trainer: trn.Trainer, device: Device) -> float:
    """A ring over the slowest link of the group, at full bandwidth and without latency."""
    ranks = dist.get_process_group_ranks(mesh_axes(trainer)[row["group"]])
    n = len(ranks)
    wire = row["bytes"] * (n - 1) / n * (2 if row["kind"] == "all_reduce" else 1)
    if ranks[-1] < device.chip:
        return wire / device.chip_bandwidth
    seconds = wire / device.node_bandwidth
    if (
        ranks[-1] >= device.node
    ):  # each group of the instance sends through its network at the same time
        inside = sum(rank < device.node for rank in ranks)
        seconds = max(seconds, wire * device.node / inside / device.network)
    return seconds


def minimum_bytes(cfg: trn.Config, hf: Any, world_size: int) -> dict[str, float]:
    """The least bytes that FSDP2 + TP + SP move a step, by term: gathered (or not yet summed) sides, per rank.

    P: parameters of a tp rank, M micro-batches, T tokens of a micro-batch, D hidden size, L layers, b and r bytes
    of an activation and of a gradient:
      gather     M b (2 P - P_last)  FSDP: parameters before forward and, the head apart, again before backward
      scatter    r P                 FSDP: gradients, once a step
      copies     r P / dp_shard      all-reduce over dp_replicate
      blocks     M L 8 T D b         in and out of attention and MLP, forward and backward (no SP: 4, all-reduces)
      recompute  M L 3 T D b         with --ac full, all but the end of a block (no SP: 1); selective: 2 (no SP: 0)
      ends       M 4 T D b           out of the embedding, into the head, forward and backward (no SP: 2)
      loss       M 12 T              three float32 of each token
      shared     b P_shared          gradients of what every tp rank holds whole: norms (SP), router, key/value
                                     projections if they have fewer heads than tp has ranks
    """
    replicate, shard, tp = trn.degrees(cfg, world_size)
    b = trn.DTYPES[cfg.mixed_precision_param].itemsize
    r = trn.DTYPES[cfg.mixed_precision_reduce].itemsize
    D, H, L, sp = (
        hf.hidden_size,
        hf.head_dim,
        hf.num_hidden_layers,
        not cfg.disable_sequence_parallel,
    )
    kv = 2 * D * H * hf.num_key_value_heads
    kv_tp, split = (kv, 0) if hf.num_key_value_heads < tp else (0, kv)
    moe = sum(trn.is_moe_layer(hf, i) for i in range(L))
    between, heads = 2 * L * D + D, 2 * L * H
    split = (
        L * (split + 2 * D * H * hf.num_attention_heads) + (L - moe) * 3 * D * hf.intermediate_size
    )
    router = 0
    if moe:
        router = moe * hf.num_experts * D
        split += moe * 3 * hf.num_experts * D * hf.moe_intermediate_size
    vocab = D * -(-hf.vocab_size // tp)
    whole = between + heads + router + L * kv_tp
    last = vocab + D  # head, or the tied embedding, with the final norm: gathered once by default
    P = split / tp + whole + vocab * (1 if hf.tie_word_embeddings else 2)
    twice = {"never": 0, "always": P}.get(cfg.reshard_after_forward, P - last)
    T = cfg.local_batch_size * cfg.seq_len
    dp = replicate * shard
    M = 1 if cfg.global_batch_size == -1 else cfg.global_batch_size // (dp * cfg.local_batch_size)
    recompute = {"full": 3 if sp else 1, "selective": 2 if sp else 0}.get(
        cfg.activation_checkpoint, 0
    )
    return {
        "gather": M * b * (P + twice) * (shard > 1),
        "scatter": r * P * (shard > 1),
        "copies": r * P / shard * (replicate > 1),
        "blocks": M * L * (8 if sp else 4) * T * D * b * (tp > 1),
        "recompute": M * L * recompute * T * D * b * (tp > 1),
        "ends": M * (4 if sp else 2) * T * D * b * (tp > 1),
        "loss": M * 12 * T * (tp > 1),
        "shared": b * (whole - (0 if sp else between)) * (tp > 1),
    }


def roofline(
    report: dict[str, Any], cfg: trn.Config, hf: Any, trainer: trn.Trainer, device: Device
) -> dict[str, Any]:
    """Seconds of a step and MFU if each op runs at its roofline and each collective at its bandwidth."""
    wires: Counter[str] = Counter()
    for row in report["collectives"]:
        wires["tp" if row["group"] == "tp" else "dp"] += wire_seconds(row, trainer, device)
    # tp: an op waits for it. dp: FSDP gathers the next block and scatters the last one while this one computes
    seconds = max(report["compute_seconds"] + wires["tp"], wires["dp"])
    flops = sum(trn.flops_per_token(hf, cfg.seq_len).values())
    total = flops * report["tokens_per_step"]
    return {
        "tp_seconds": wires["tp"],
        "dp_seconds": wires["dp"],
        "step_seconds": seconds,
        "flops_per_token": flops,
        "flops_per_step": total,
        "mfu": total / (report["world_size"] * device.flops * seconds),
        "hbm_bytes": device.hbm,
        "total_bytes": report["peak_bytes"] + device.code,
        "fits": report["peak_bytes"] + device.code <= device.hbm,
    }


# ---- Dry run: what to change --------------------------------------------------------------------
def changes(cfg: trn.Config, world_size: int) -> Iterator[dict[str, Any]]:
    """Flags that may save memory, cheapest in time first, alone and then together."""
    replicate, _, tp = trn.degrees(cfg, world_size)
    single: list[dict[str, Any]] = []
    if cfg.reshard_after_forward == "never":
        single.append({"reshard_after_forward": "default"})
    single += (
        [{"activation_checkpoint": "selective"}] if cfg.activation_checkpoint == "none" else []
    )
    if cfg.local_batch_size > 1:
        smaller: dict[str, Any] = {"local_batch_size": max(1, cfg.local_batch_size // 4)}
        single.append(smaller)
    single += [{"activation_checkpoint": "full"}] if cfg.activation_checkpoint != "full" else []
    if replicate > 1:
        single.append({"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1})
    shard = {} if cfg.data_parallel_shard_degree == -1 else {"data_parallel_shard_degree": -1}
    wider = [{"tensor_parallel_degree": tp * k, **shard} for k in (2, 4)]
    together: dict[str, Any] = {}
    for change in single:
        together |= change
    yield from single
    if len(single) > 1:
        yield together
    for wide in wider:
        yield wide
        yield together | wide


def spelled(change: dict[str, Any]) -> str:
    return " ".join(f"--{k}" if v is True else f"--{k} {v}" for k, v in change.items())


def outlook(cfg: trn.Config, hf: Any) -> dict[str, Any]:
    """predict's totals, of a deep model from two shallow ones: each further layer adds the same."""
    period, first = (
        2 * getattr(hf, "decoder_sparse_step", 1),
        len(getattr(hf, "mlp_only_layers", ())),
    )
    few, more = first + period, first + 2 * period
    if hf.num_hidden_layers <= 2 * more:
        return predict(cfg, hf)
    plans = []
    for layers in (few, more):
        shallow = copy.deepcopy(hf)
        shallow.num_hidden_layers = layers
        plans.append(predict(cfg, shallow))
    a, b = plans
    times = (hf.num_hidden_layers - few) / (more - few)
    keys = ("total_bytes", "step_seconds")
    found = {k: a[k] + times * (b[k] - a[k]) for k in keys}
    return found | {"fits": found["total_bytes"] <= a["hbm_bytes"]}


def advice(cfg: trn.Config, hf: Any, world_size: int, seconds: float) -> list[dict[str, Any]]:
    """Plans with other flags, those that fit first, then the fastest; as many as fit into ``seconds``."""
    start, longest, tried = time.perf_counter(), 0.0, []
    for change in changes(cfg, world_size):
        new = dataclasses.replace(cfg, **change)
        if trn.validate(new, hf, world_size):
            continue
        began = time.perf_counter()
        if began - start + longest > seconds:
            tried.append({"flags": spelled(change), "fits": None})
            continue
        plan = outlook(new, hf)
        longest = max(longest, time.perf_counter() - began)
        tried.append(
            {"flags": spelled(change)}
            | {k: plan[k] for k in ("total_bytes", "fits", "step_seconds")}
        )
    known = [t for t in tried if t["fits"] is not None]
    known.sort(key=lambda t: (not t["fits"], t["step_seconds"] if t["fits"] else t["total_bytes"]))
    return known + [t for t in tried if t["fits"] is None]


# ---- Dry run: output ----------------------------------------------------------------------------
ASSUMPTIONS = """each op at its roofline (matmuls at peak FLOP/s, the rest at HBM bandwidth, nothing fused), even routing; collectives
as rings at full bandwidth, without latency; tp ones waited for, dp ones behind computation; no input or host time"""


def gib(n: float) -> str:
    return f"{n / 2**30:8.2f} GiB" if n >= 2**30 / 100 else f"{n / 2**20:8.2f} MiB"


def text(report: dict[str, Any], device: Device | None) -> Iterator[str]:
    mesh = " x ".join(f"{k} {v}" for k, v in report["mesh"].items())
    yield (
        f"{report['model']}: {report['parameters']:,} parameters, {report['active_parameters']:,} active; "
        f"{report['world_size']:,} ranks = {mesh}; {report['precision']}"
    )
    yield "memory of the heaviest rank, rank 0, at its peak:"
    for kind, size in sorted(
        report["memory"].items(), key=lambda x: (x[0] not in PERSISTENT, -x[1])
    ):
        note = (
            f"  ({gib(report['persistent'][kind]).strip()} at most)" if kind == "gradients" else ""
        )
        yield f"  {kind:24}{gib(size)}{note}"
    if device:
        yield f"  {'programs (no tensors)':24}{gib(device.code)}"
        free = device.hbm - report["total_bytes"]
        says = (
            f"fits, {gib(free).strip()} free"
            if free >= 0
            else f"does not fit, by {gib(-free).strip()}"
        )
        says += "; tight: predictions are good to 10 %" if 0 <= free < 0.1 * device.hbm else ""
        yield f"  {'total':24}{gib(report['total_bytes'])} of {gib(device.hbm).strip()} of one {device.name} core: {says}"
    else:
        yield f"  {'total':24}{gib(report['peak_bytes'])}; no figures of this device, so no verdict and no time"
    if report.get("advice"):
        yield "what to change first:"
    for t in report.get("advice", ()):
        if t["fits"] is None:
            yield f"  {t['flags']}: not tried, no time left"
        else:
            yield (
                f"  {t['flags']}: {gib(t['total_bytes']).strip()}, {'fits' if t['fits'] else 'does not fit'}, "
                f"{t['step_seconds']:.2f} s a step"
            )
    yield "collectives a step (bytes of the gathered or not yet summed side):"
    for row in report["collectives"]:
        yield f"  {row['kind']:16}{row['group']:14}{row['count']:8,}{gib(row['bytes'])}"
    least, moved = (
        sum(report["minimum_bytes"].values()),
        sum(row["bytes"] for row in report["collectives"]),
    )
    if least:
        yield f"  together {gib(moved).strip()}, {moved / least:.3f} x the closed-form minimum"
    if device:
        yield (
            f"FLOPs: {report['flops_per_token']:.4g} a token, {report['flops_per_step']:.4g} a step of "
            f"{report['tokens_per_step']:,} tokens"
        )
        yield (
            f"roofline: {report['step_seconds']:.3f} s a step, MFU {100 * report['mfu']:.1f} % of {device.flops:.4g} "
            f"FLOP/s (computation {report['compute_seconds']:.3f} s, tp {report['tp_seconds']:.3f} s, "
            f"dp {report['dp_seconds']:.3f} s)"
        )
        yield f"assumed: {ASSUMPTIONS}"


def checked(cfg: trn.Config) -> Any:
    """All start-up checks of a real run, in the environment that run.sh gives it on Trainium."""
    if trn.device_type(cfg) == "neuron":
        os.environ.setdefault("NEURON_LOGICAL_NC_CONFIG", "2")
    return trn.preflight(cfg)


def dry_run(cfg: trn.Config, seconds: float = 55.0) -> None:
    """Print the plan of this configuration. ``seconds``: when to stop trying other flags."""
    start = time.perf_counter()
    if cfg.dry_run == "json":
        for handler in logging.getLogger().handlers:
            handler.setStream(sys.stderr)
    hf, device = checked(cfg), device_of(cfg)
    report = predict(cfg, hf)
    report["seconds_to_plan"] = time.perf_counter() - start
    if device and not report["fits"]:
        report["advice"] = advice(
            cfg, hf, report["world_size"], seconds - report["seconds_to_plan"]
        )
    if cfg.dry_run == "json":
        print(json.dumps(report | {"assumptions": ASSUMPTIONS}))
    else:
        print(*text(report, device), sep="\n")


# ---- Dry run: ten layouts -----------------------------------------------------------------------
LAYOUTS = (  # model, ranks, further flags
    ("0.6B", 1, "--bs 1"),
    ("0.6B", 16, "--bs 1"),
    ("1.7B", 16, "--bs 1"),
    ("4B", 64, "--bs 1 --ac selective"),
    ("8B", 64, "--tp 4 --bs 1"),
    ("14B", 64, "--tp 4 --bs 1 --ac full"),
    ("32B", 128, "--tp 4 --bs 1 --ac full"),
    ("30B-A3B", 64, "--tp 4 --bs 1 --ac full"),
    ("235B-A22B", 512, "--tp 4 --bs 1 --ac full"),
    ("235B-A22B", 4096, "--tp 4 --bs 1 --ac full"),
)


def table() -> Iterator[str]:
    """The plans of LAYOUTS as a Markdown table."""
    yield "| model | cores | flags | GiB a core | verdict | s a step | MFU |"
    yield "|---|---|---|---|---|---|---|"
    for model, ranks, flags in LAYOUTS:
        argv = (
            f"--dry_run --device neuron --model {model} --world_size {ranks} --seq_len 4096 {flags}"
        )
        cfg = trn.parse(argv.split())
        r = predict(cfg, checked(cfg))
        yield (
            f"| {model} | {ranks:,} | `{flags}` | {r['total_bytes'] / 2**30:.1f} | {'fits' if r['fits'] else 'does not fit'} "
            f"| {r['step_seconds']:.2f} | {100 * r['mfu']:.0f} % |"
        )


if __name__ == "__main__":
    if sys.argv[1:] != ["table"]:
        sys.exit(
            "[qwen3-trn] error: python plan.py table; a plan of your own: bash run.sh --dry_run"
        )
    logging.basicConfig(format="[qwen3-trn] %(message)s", level=logging.WARNING, stream=sys.stderr)
    for line in table():
        print(line, flush=True)
