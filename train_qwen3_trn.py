"""Train Qwen3 on AWS Trainium2, or on any machine that runs PyTorch, with one readable script.

    bash run.sh --backend native                          # a laptop CPU: small model, real text
    bash run.sh --backend native --nki --tp 4 \\
        --model 8B --seq_len 4096                          # one trn2.48xlarge: 64 NeuronCores
    NNODES=4 bash run.sh --model 30B-A3B --tp 4            # several nodes; see the README

The mesh, tp innermost, so that a tp group of 4 is one Trainium chip (4 logical cores at LNC=2):

    world = dp_replicate x dp_shard x tp
    dp_replicate   copies of the model                    all-reduce of gradients (HSDP)
    dp_shard       parameters, gradients, optimizer       all-gather, reduce-scatter (FSDP2)
    tp             heads, FFN columns, experts, vocabulary; between blocks the sequence (SP)

Read from top to bottom: configuration, model, Hugging Face model and weights, parallelism, loss,
optimizer, metrics, and at the end the training loop; data.py makes the batches, checkpoint.py reads
weights. The model never asks which rank it is.

Shape letters, here and in kernels.py: B batch, S sequence, T tokens = B*S, D hidden, N query heads,
K key/value heads (top-k in the router), H head_dim, F FFN width, E experts, e local experts,
R routed rows, V vocabulary.
"""

from __future__ import annotations

# ---- Imports and constants ----------------------------------------------------------------------
import contextlib
import copy
import ctypes
import dataclasses
import fnmatch
import functools
import hashlib
import json
import logging
import math
import os
import platform
import resource
import socket
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers.hf_argparser import HfArgumentParser
from transformers.integrations.moe import ExpertsInterface

import data
import kernels
from checkpoint import (
    RESUMABLE,
    RunError,
    SaveError,
    Stopped,
    StopSignal,
    TrainingCheckpoints,
    UsageError,
    architecture,
    control_group,
    export,
    export_problem,
    load_weights,
    local_slices,
    local_tensor,
    nearest,
    read_json,
    unique_parameters,
)
from data import (  # noqa: F401 - some for tests and scripts
    BYTE_EOS,
    IGNORE_INDEX,
    Batch,
    Encoder,
    FileRows,
    Loader,
    StreamRows,
    make_batch,
    write_tokens,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Dense bf16 FLOP/s of one device as PyTorch sees it. trn2: one logical core at LNC=2 is two physical
# cores of 79e12 (torchtitan tools/utils.py uses the same figure); GPUs: the vendors' data sheets.
PEAK_FLOPS = {
    "trn2": 158e12,
    "trn3": 158e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "MI300X": 1307e12,
}
QWEN3_VOCAB = 151_936  # Qwen3's padded vocabulary
# The published sizes (config.json of Qwen/Qwen3-*), with names as in transformers' Qwen3Config.
_DENSE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
_MOE = (*_DENSE, "moe_intermediate_size", "num_experts", "num_experts_per_tok")
PRESETS: dict[str, dict[str, Any]] = {
    "0.6B": dict(zip(_DENSE, (1024, 3072, 28, 16, 8, True), strict=True)),
    "1.7B": dict(zip(_DENSE, (2048, 6144, 28, 16, 8, True), strict=True)),
    "4B": dict(zip(_DENSE, (2560, 9728, 36, 32, 8, True), strict=True)),
    "8B": dict(zip(_DENSE, (4096, 12288, 36, 32, 8, False), strict=True)),
    "14B": dict(zip(_DENSE, (5120, 17408, 40, 40, 8, False), strict=True)),
    "32B": dict(zip(_DENSE, (5120, 25600, 64, 64, 8, False), strict=True)),
    "30B-A3B": dict(zip(_MOE, (2048, 6144, 48, 32, 4, False, 768, 128, 8), strict=True)),
    "235B-A22B": dict(zip(_MOE, (4096, 12288, 94, 64, 4, False, 1536, 128, 8), strict=True)),
    # Small, but every kind of layer: the first one dense, the others with experts.
    "debugmodel": dict(zip(_MOE, (256, 768, 4, 8, 4, False, 128, 8, 2), strict=True))
    | {"vocab_size": 512, "head_dim": 64, "mlp_only_layers": [0], "max_position_embeddings": 4096},
}

log = logging.getLogger("qwen3-trn")
SILENT = logging.Logger("silent", logging.CRITICAL)


# ---- Configuration ------------------------------------------------------------------------------
def flag(default: Any, text: str, *aliases: str, value_if_alone: str | None = None) -> Any:
    """A field of the configuration: its default, its --help line and its short spellings."""
    make = {"default_factory": lambda: list(default)} if isinstance(default, list) else {}
    make = make or {"default": default}
    alone = {"nargs": "?", "const": value_if_alone} if value_if_alone else {}
    return dataclasses.field(**make, metadata={"help": text, "aliases": list(aliases), **alone})


@dataclass
class ModelFlags:
    _argument_group_name = "model"
    backend: Literal["native", "hf"] = flag(
        "native", "native: the model of this file; hf: transformers' own Qwen3 classes"
    )
    model: str = flag(
        "debugmodel", "a preset (random weights), a local Hugging Face folder, or a hub id"
    )
    random_init: bool = flag(False, "take only config and tokenizer from --model, not its weights")
    nki: bool = flag(False, "put in the NKI kernels: kernels.nki_rotary and kernels.nki_moe")
    override: list[str] = flag(
        [], "more overrides: MODULE.FUNCTION or MODULE.FUNCTION={json keywords}; default: none"
    )
    router_aux_loss_coef: float | None = flag(
        None,
        "weight of the experts' load-balancing loss; 0: off; default: the model's own if its config "
        "has output_router_logits, as in transformers, else 0",
    )


@dataclass
class DataFlags:
    _argument_group_name = "data"
    task: Literal["pretrain", "sft"] = flag(
        "pretrain",
        "pretrain: all tokens of texts; sft: the assistant's tokens of conversations, in the model's "
        "chat template",
    )
    packing: Literal["auto", "concat", "isolate", "none"] = flag(
        "auto",
        "how documents fill rows. concat: end to end, and tokens attend across documents; isolate: "
        "side by side, attention and positions of each on its own; none: one a row, padded. "
        "auto: concat, and none with --task sft",
    )
    dataset: str = flag(
        "demo",
        "demo (Python's own source files), a local .txt, .jsonl, .parquet or .npy file, or a hub id",
    )
    dataset_config: str | None = flag(None, "configuration of a hub dataset; default: its own")
    split: str = flag("train", "split of a hub dataset")
    text_column: str | None = flag(
        None,
        "column of .jsonl, .parquet and hub rows that holds the text, or the messages; default: text, "
        "and messages with --task sft",
    )
    streaming: bool = flag(False, "read a hub dataset as a stream instead of downloading it whole")
    disable_shuffle: bool = flag(False, "keep the rows in file order")
    seq_len: int = flag(256, "tokens in a training row (> 0)")
    local_batch_size: int = flag(8, "rows per data-parallel rank in one forward pass (> 0)", "--bs")
    global_batch_size: int = flag(
        -1, "rows per step over all ranks; -1: no gradient accumulation", "--gbs"
    )
    eval_every: int = flag(0, "validate every this many steps; 0: never")
    eval_steps: int = flag(4, "global batches that are held out for validation (> 0)")


@dataclass
class OptimFlags:
    _argument_group_name = "optimization"
    steps: int = flag(60, "optimizer steps (> 0)")
    seed: int = flag(0, "seed of weights and data order (0 to 2**31 - 1)")
    lr: float = flag(1e-3, "peak learning rate (> 0)", "--learning_rate")
    warmup_steps: int | None = flag(
        None, "steps of linear warm-up; 0: start at the peak; default: 5, or half of fewer --steps"
    )
    decay_type: Literal["linear", "cosine", "sqrt", "none"] = flag(
        "linear", "shape of the decay at the end; none: constant after warm-up"
    )
    decay_ratio: float | None = flag(
        None, "share of --steps that decays, 0 to 1; default: all steps after warm-up"
    )
    min_lr_factor: float = flag(0.1, "learning rate at the end, as a share of the peak (0 to 1)")
    weight_decay: float = flag(0.1, "AdamW weight decay, on matrices only; 0: off")
    max_norm: float = flag(1.0, "clip the global gradient norm to this; 0: off")
    adam_beta1: float = flag(0.9, "AdamW beta1 (0 <= x < 1)")
    adam_beta2: float = flag(0.95, "AdamW beta2 (0 <= x < 1)")
    adam_eps: float = flag(1e-8, "AdamW epsilon (> 0)")


@dataclass
class ParallelFlags:
    _argument_group_name = "parallelism and memory"
    device: Literal["auto", "neuron", "cuda", "cpu"] = flag("auto", "auto: the accelerator found")
    data_parallel_replicate_degree: int = flag(
        1, "copies of the model (HSDP); 1: off", "--dp_replicate"
    )
    data_parallel_shard_degree: int = flag(
        -1, "ranks that share one copy of the parameters (FSDP2); -1: all that remain", "--dp_shard"
    )
    tensor_parallel_degree: int = flag(1, "ranks that share each layer; 1: off", "--tp")
    disable_sequence_parallel: bool = flag(
        False, "keep whole sequences between blocks; needs --tp above 1"
    )
    reshard_after_forward: Literal["default", "always", "never"] = flag(
        "default",
        "free gathered parameters after forward. default: all but the last group; never: more memory, "
        "one all-gather less",
    )
    cpu_offload: bool = flag(False, "keep parameters, gradients and optimizer state in host memory")
    activation_checkpoint: Literal["none", "selective", "full"] = flag(
        "none",
        "recompute in backward. selective: all but matmuls and attention; full: whole blocks",
        "--ac",
    )
    compile: bool = flag(False, "torch.compile each block, static shapes, full graph")
    compile_backend: str | None = flag(
        None, "backend of --compile; default: neuron on Trainium, inductor elsewhere"
    )
    mixed_precision_param: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "dtype of parameters and activations in forward and backward (weights and optimizer stay "
        "float32). auto: bfloat16 on accelerators, float32 on CPU",
    )
    mixed_precision_reduce: Literal["float32", "bfloat16"] = flag(
        "float32", "dtype in which gradients are summed over data-parallel ranks"
    )
    loss_chunks: int = flag(
        0,
        "pieces of the batch whose logits exist at one time; 0: at least 8, and at most 64 MiB each",
    )
    disable_loss_parallel: bool = flag(
        False, "gather the vocabulary before the loss; needs --tp above 1"
    )


@dataclass
class OutputFlags:
    _argument_group_name = "output"
    output_dir: str = flag("outputs", "folder of metrics.jsonl, TensorBoard files and traces")
    save_every: int = flag(0, "steps between training checkpoints; 0: none but after a signal")
    keep: int = flag(2, "training checkpoints that are kept; 0: all")
    resume: str = flag(
        "auto", "auto: go on from OUTPUT_DIR's last complete checkpoint; never; or a step number"
    )
    async_save: bool = flag(False, "write checkpoints while training goes on")
    export_dir: str | None = flag(
        None, "where the Hugging Face folder goes at the end; default: OUTPUT_DIR/hf"
    )
    export_dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "dtype of the exported weights. auto: that of --model's folder; bfloat16 for presets",
    )
    skip_export: bool = flag(False, "write no Hugging Face folder at the end")
    expect_first_loss: float | None = flag(
        None, "stop if the loss of step 1 is elsewhere; default: off"
    )
    expect_tol: float = flag(0.05, "largest distance from --expect_first_loss")
    log_every: int = flag(10, "steps between log lines (> 0)")
    tensorboard: bool = flag(False, "write TensorBoard files (needs the tensorboard package)")
    wandb: bool = flag(False, "log to Weights & Biases (needs the wandb package)")
    profile: bool = flag(False, "write a torch.profiler trace of steps 3 to 5 to OUTPUT_DIR/trace")
    inspect: int = flag(
        0,
        "print this many training rows as text, what is trained in \u27e6 \u27e7, then stop; 0: off",
    )
    check: bool = flag(False, "check flags and prepare the data, then stop; run.sh does this first")
    dry_run: Literal["off", "text", "json"] = flag(
        "off",
        "predict memory, communication and time of --world_size ranks without any device or data, then "
        "stop; text (the same as no value): for people, json: one object",
        value_if_alone="text",
    )
    world_size: int | None = flag(
        None, "ranks of a --dry_run (> 0); default: as many as the degrees given make"
    )


@dataclass
class Config(OutputFlags, ParallelFlags, OptimFlags, DataFlags, ModelFlags):
    """Every flag. A YAML or JSON file given as first argument sets them too; flags given win."""

    def __post_init__(self) -> None:
        if self.warmup_steps is None:
            self.warmup_steps = min(5, self.steps // 2)
        if self.text_column is None:
            self.text_column = "messages" if self.task == "sft" else "text"
        if self.packing == "auto":
            self.packing = "none" if self.task == "sft" else "concat"


class Parser(HfArgumentParser):
    def error(self, message: str) -> None:  # argparse would print the whole usage first
        raise UsageError(message)


def file_arguments(path: Path) -> list[str]:
    """The flags in a YAML or JSON file, as a command line would spell them."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())  # JSON is a subset of YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise UsageError(f"{path}: cannot be read as YAML or JSON: {e}") from e
    if not isinstance(values, dict):
        raise UsageError(f"{path}: must hold one mapping from flag to value")
    names = [f.name for f in dataclasses.fields(Config)]
    unknown = [
        f"{path}: unknown key {k!r}.{nearest(str(k), names)}" for k in values if k not in names
    ]
    if unknown:
        raise UsageError("\n".join(unknown))
    argv = []
    for name, value in values.items():
        if value is not None:
            argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return argv


def parse(argv: list[str]) -> Config:
    """Command line -> Config. Raises UsageError; prints help and exits for --help."""
    groups = (ModelFlags, DataFlags, OptimFlags, ParallelFlags, OutputFlags)
    parser = Parser(
        groups, prog="bash run.sh", allow_abbrev=False, usage="bash run.sh [FILE.yaml] [flags]",
        description=__doc__.split("\n\n")[0],
    )  # fmt: skip
    if argv and argv[0].endswith((".yaml", ".yml", ".json")):
        argv = file_arguments(Path(argv[0])) + argv[1:]
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        spellings = [s for a in parser._actions for s in a.option_strings]
        raise UsageError(
            "\n".join(f"unknown argument {u}.{nearest(u, spellings)}" for u in unknown)
        )
    return Config(**vars(known))


def degrees(cfg: Config, world_size: int) -> tuple[int, int, int]:
    """(dp_replicate, dp_shard, tp); a dp_shard of -1 takes the ranks that remain."""
    replicate, shard = cfg.data_parallel_replicate_degree, cfg.data_parallel_shard_degree
    tp = cfg.tensor_parallel_degree
    return replicate, (world_size // (replicate * tp) if shard == -1 else shard), tp


def validate(cfg: Config, hf: Any, world_size: int) -> list[str]:
    """All problems of this configuration on this many ranks, each as flag, value, rule, fix.

    ``hf`` is the model's transformers config. Nothing here touches a device.
    """
    errors = check_values(cfg)
    if errors:
        return errors  # degrees of 0 would only raise again below
    replicate, shard, tp = degrees(cfg, world_size)
    if replicate * shard * tp != world_size or shard < 1:
        errors.append(
            f"--dp_replicate {replicate} x --dp_shard {shard if shard > 0 else -1} x --tp {tp} must be the "
            f"number of ranks, {world_size}; change a degree or start {replicate * max(shard, 1) * tp} ranks (NGPU)"
        )
    dp, local = replicate * max(shard, 1), cfg.local_batch_size
    if cfg.global_batch_size != -1 and cfg.global_batch_size % (dp * local):
        down = cfg.global_batch_size // (dp * local) * dp * local
        near = f"{down} or {down + dp * local}" if down else f"{dp * local}"
        errors.append(
            f"--global_batch_size {cfg.global_batch_size} must be a multiple of {dp} data-parallel ranks x "
            f"--local_batch_size {local}; nearest: {near}"
        )
    if tp > 1:
        errors += check_tp(cfg, hf, tp)
    elif cfg.disable_sequence_parallel or cfg.disable_loss_parallel:
        errors.append(
            "--disable_sequence_parallel and --disable_loss_parallel do nothing without --tp above 1; "
            "leave them out"
        )
    if cfg.seq_len > hf.max_position_embeddings:
        errors.append(
            f"--seq_len {cfg.seq_len} must be at most the model's max_position_embeddings, "
            f"{hf.max_position_embeddings}"
        )
    return errors


def is_backend(name: str) -> bool:
    # importing torch._dynamo takes a second; torch-neuronx registers its backend when it is imported
    return name == "neuron" or name in torch._dynamo.list_backends(exclude_tags=())


def check_values(cfg: Config) -> list[str]:
    """Ranges of single flags, and flags that have no effect beside others."""
    planned = cfg.dry_run != "off"
    rules = [  # flag, holds, rule
        ("seq_len", cfg.seq_len > 0, "must be above 0"),
        ("local_batch_size", cfg.local_batch_size > 0, "must be above 0"),
        ("global_batch_size", cfg.global_batch_size == -1 or cfg.global_batch_size > 0, "must be above 0, or -1"),
        ("steps", cfg.steps > 0, "must be above 0"),
        ("seed", 0 <= cfg.seed < 2**31, "must be 0 to 2147483647"),
        ("lr", 0 < cfg.lr < math.inf, "must be above 0 and finite"),
        ("warmup_steps", 0 <= cfg.warmup_steps <= cfg.steps, f"must be 0 to --steps ({cfg.steps})"),
        ("decay_ratio", cfg.decay_ratio is None or 0 <= cfg.decay_ratio <= 1, "must be 0 to 1"),
        ("min_lr_factor", 0 <= cfg.min_lr_factor <= 1, "must be 0 to 1"),
        ("weight_decay", 0 <= cfg.weight_decay < math.inf, "must be 0 or above"),
        ("max_norm", 0 <= cfg.max_norm < math.inf, "must be 0 (off) or above"),
        ("adam_beta1", 0 <= cfg.adam_beta1 < 1, "must be at least 0 and below 1"),
        ("adam_beta2", 0 <= cfg.adam_beta2 < 1, "must be at least 0 and below 1"),
        ("adam_eps", 0 < cfg.adam_eps < 1, "must be above 0 and below 1"),
        ("data_parallel_replicate_degree", cfg.data_parallel_replicate_degree > 0, "must be above 0"),
        ("data_parallel_shard_degree", cfg.data_parallel_shard_degree > 0 or cfg.data_parallel_shard_degree == -1,
         "must be above 0, or -1 for all ranks that remain"),
        ("tensor_parallel_degree", cfg.tensor_parallel_degree > 0, "must be above 0"),
        ("loss_chunks", cfg.loss_chunks >= 0, "must be 0 (auto) or above"),
        ("eval_every", cfg.eval_every >= 0, "must be 0 (never) or above"),
        ("eval_steps", cfg.eval_steps > 0, "must be above 0"),
        ("log_every", cfg.log_every > 0, "must be above 0"),
        ("save_every", cfg.save_every >= 0, "must be 0 (never) or above"),
        ("keep", cfg.keep >= 0, "must be 0 (all) or above"),
        ("resume", cfg.resume in ("auto", "never") or cfg.resume.isdigit(), "must be auto, never or a step number"),
        ("expect_tol", cfg.expect_tol > 0, "must be above 0"),
        ("export_dir", not (cfg.skip_export and cfg.export_dir), "does nothing with --skip_export"),
        ("router_aux_loss_coef", cfg.router_aux_loss_coef is None or 0 <= cfg.router_aux_loss_coef < math.inf,
         "must be 0 (off) or above"),
        ("device", cfg.device != "neuron" or planned or os.path.exists("/dev/neuron0"), "there is no /dev/neuron0 here"),
        ("device", cfg.device != "cuda" or planned or torch.cuda.is_available(), "PyTorch finds no CUDA GPU here"),
        ("world_size", cfg.world_size is None or cfg.world_size > 0, "must be above 0"),
        ("world_size", cfg.world_size is None or planned, "does nothing without --dry_run; NGPU starts that many ranks"),
        ("compile_backend", cfg.compile_backend is None or is_backend(cfg.compile_backend),
         "must be a backend of torch.compile, such as inductor"),
        ("random_init", not cfg.random_init or cfg.model not in PRESETS, "does nothing: a preset always has random weights"),
        ("eval_steps", cfg.eval_every > 0 or cfg.eval_steps == Config.eval_steps, "does nothing without --eval_every"),
        ("compile_backend", cfg.compile or cfg.compile_backend is None, "does nothing without --compile"),
        ("decay_ratio", cfg.decay_ratio is None or cfg.decay_type != "none", "does nothing with --decay_type none"),
    ]  # fmt: skip
    errors = [f"--{name} {getattr(cfg, name)}: {rule}" for name, holds, rule in rules if not holds]
    if cfg.decay_ratio and cfg.decay_ratio * cfg.steps + cfg.warmup_steps > cfg.steps:
        errors.append(
            f"--decay_ratio {cfg.decay_ratio} of --steps {cfg.steps} and --warmup_steps {cfg.warmup_steps} "
            f"overlap; --decay_ratio may be at most {1 - cfg.warmup_steps / cfg.steps:.3f}"
        )
    errors += data.check_data_flags(cfg, cfg.model in PRESETS)
    for package in [p for p in ("tensorboard", "wandb") if getattr(cfg, p)]:
        if not transformers.utils.import_utils._is_package_available(package)[0]:
            errors.append(
                f"--{package}: the package {package} is not installed; pip install {package}"
            )
    return errors


def check_tp(cfg: Config, hf: Any, tp: int) -> list[str]:
    """Sizes that tensor parallelism divides."""
    errors = []

    def divides(what: str, size: int) -> None:
        if size % tp:
            legal = [d for d in range(1, size + 1) if size % d == 0 and d <= 64]
            errors.append(f"--tp {tp} must divide {what} = {size}; use one of {legal}")

    divides("num_attention_heads", hf.num_attention_heads)
    if hf.num_key_value_heads < tp and tp % hf.num_key_value_heads:
        errors.append(
            f"--tp {tp} must divide, or be a multiple of, num_key_value_heads = {hf.num_key_value_heads}"
        )
    elif hf.num_key_value_heads >= tp:
        divides("num_key_value_heads", hf.num_key_value_heads)
    if not cfg.disable_sequence_parallel:
        divides("--seq_len", cfg.seq_len)
    kinds = {is_moe_layer(hf, i) for i in range(hf.num_hidden_layers)}
    if False in kinds:
        divides("intermediate_size", hf.intermediate_size)
    if True in kinds:
        divides("num_experts", hf.num_experts)
    if (tp - 1) * -(-hf.vocab_size // tp) >= hf.vocab_size:  # shares of ceil(V / tp) rows
        errors.append(f"--tp {tp} leaves a rank without a row of vocab_size = {hf.vocab_size}")
    if cfg.disable_loss_parallel:
        divides("vocab_size (with --disable_loss_parallel)", hf.vocab_size)
    if cfg.compile and cfg.activation_checkpoint == "full":
        errors.append(  # AOTAutograd fails on a DTensor parameter inside a recomputed region
            "--compile with --ac full and --tp above 1: torch 2.13 cannot trace it; use --ac selective"
        )
    if hf.attention_bias:
        errors.append(f"--tp {tp}: models with attention_bias are trained with --tp 1 only")
    return errors


def is_moe_layer(hf: Any, layer: int) -> bool:
    """Whether layer ``layer`` has experts; the rule of transformers' Qwen3MoeDecoderLayer."""
    return (
        hf.model_type == "qwen3_moe"
        and layer not in hf.mlp_only_layers
        and hf.num_experts > 0
        and (layer + 1) % hf.decoder_sparse_step == 0
    )


def load_model_config(cfg: Config) -> Any:
    """transformers' config object for --model: a preset, a local folder or a hub id.

    Raises UsageError with every problem of the config. Never runs code from the folder.
    """
    from transformers import Qwen3Config, Qwen3MoeConfig

    if cfg.model in PRESETS:
        sizes = {
            "vocab_size": QWEN3_VOCAB,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
        } | PRESETS[cfg.model]
        rope = {"rope_type": "default", "rope_theta": 1e6}
        if "num_experts" not in sizes:
            return Qwen3Config(**sizes, rope_parameters=rope, use_cache=False)
        # Random weights need the balance loss, which transformers turns on by output_router_logits.
        moe = {"norm_topk_prob": True, "output_router_logits": True}
        return Qwen3MoeConfig(**sizes, **moe, rope_parameters=rope, use_cache=False)
    folder = model_folder(cfg, ["config.json"])
    raw = read_json(folder / "config.json")
    if raw.get("model_type") not in ("qwen3", "qwen3_moe"):
        raise UsageError(
            f"{folder}/config.json: model_type {raw.get('model_type')!r} must be qwen3 or qwen3_moe"
        )
    if errors := check_architecture(raw):
        raise UsageError("\n".join(f"{folder}/config.json: {e}" for e in errors))
    kind = Qwen3Config if raw["model_type"] == "qwen3" else Qwen3MoeConfig
    try:
        hf = kind.from_dict(raw)
    except Exception as e:  # transformers validates fields with several exception types
        raise UsageError(f"{folder}/config.json: {type(e).__name__}: {e}") from e
    hf.use_cache = False
    return hf


def check_architecture(raw: dict[str, Any]) -> list[str]:
    """Values of a config.json that are wrong, or that neither backend computes."""
    sizes = {*_MOE, "vocab_size", "head_dim", "num_local_experts", "decoder_sparse_step"}
    sizes = sizes - {"tie_word_embeddings"} | {"max_position_embeddings"}
    errors = [
        f"{name} {raw[name]!r} must be a whole number above 0"
        for name in sorted(sizes & raw.keys())
        if type(raw[name]) is not int or raw[name] < 1
    ]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        errors.append(f"rope_parameters {rope!r} must be an object")
    if errors:
        return errors  # the rules below would trip over them
    kind = rope.get("rope_type", rope.get("type", "default"))
    top, nested = raw.get("rope_theta"), rope.get("rope_theta")
    thetas = {t for t in (top, nested) if t is not None}
    layers = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    heads, kv = raw.get("num_attention_heads", 1), raw.get("num_key_value_heads", 1)
    experts, top_k = (
        raw.get("num_experts", raw.get("num_local_experts")),
        raw.get("num_experts_per_tok"),
    )
    act, dropout, head_dim = (
        raw.get("hidden_act", "silu"),
        raw.get("attention_dropout", 0),
        raw.get("head_dim", 2),
    )
    rules = [  # holds, rule
        ("auto_map" not in raw, "auto_map asks to run code from the folder; remove it"),
        (len(thetas) > 0, "no rope_theta, neither at the top nor in rope_parameters; add it"),
        (len(thetas) < 2, f"rope_theta is {top} at the top, {nested} in rope_parameters; keep one"),
        (all(isinstance(t, int | float) and t > 0 for t in thetas), f"rope_theta {thetas} must be a number above 0"),
        (kind in ("default", "yarn"), f"rope_type {kind!r} must be default or yarn"),
        (head_dim % 2 == 0, f"head_dim {head_dim} must be even, for rotary pairs"),
        (heads % kv == 0, f"num_key_value_heads {kv} must divide num_attention_heads {heads}"),
        (not (experts and top_k) or top_k <= experts, f"num_experts_per_tok {top_k} must be at most num_experts {experts}"),
        (act == "silu", f"hidden_act {act!r} must be silu"),
        (not dropout, f"attention_dropout {dropout} must be 0"),
        (not raw.get("use_sliding_window"), "use_sliding_window is not supported; set it to false for full attention"),
        (not layers, f"layer_types {layers} are not supported; all must be full_attention"),
        (not raw.get("quantization_config"), "quantization_config is not supported; use a folder in bf16 or float32"),
        (not raw.get("partial_rotary_factor"), "partial_rotary_factor is not supported"),
    ]  # fmt: skip
    return [rule for holds, rule in rules if not holds]


MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja"]  # of a hub repository


def model_folder(cfg: Config, patterns: list[str]) -> Path:
    """The folder of --model; for a hub id, the files of ``patterns`` are fetched into its cache."""
    if Path(cfg.model).is_dir():
        return Path(cfg.model)
    if cfg.model.count("/") != 1 or cfg.model.startswith((".", "/", "~")):
        raise UsageError(
            f"--model {cfg.model}: neither a preset ({', '.join(PRESETS)}), nor a folder here, nor a hub id "
            f"like Qwen/Qwen3-0.6B.{nearest(cfg.model, PRESETS)}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(cfg.model, allow_patterns=patterns))
    except (
        Exception
    ) as e:  # the hub client raises network, HTTP and validation errors of many types
        reason = str(e).strip().splitlines()[0]
        raise UsageError(f"--model {cfg.model}: no such folder, and the hub says: {reason}") from e


# ---- Model --------------------------------------------------------------------------------------
class RMSNormFunction(torch.autograd.Function):
    """x / rms(x) * weight. By hand, because F.rms_norm is a chain of small ops on devices without a
    fused kernel, forward and backward (float32 on CPU: twice as fast), and keeps what each of them saw.

    With r = 1 / sqrt(mean(x^2) + eps):  y = x r w,  dw = sum(g x r),
    dx = g w r - x r^3 mean(g w x).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        r = (norm.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        D, w = x.shape[-1], weight.float()
        gx_TD = (grad.float() * x).view(-1, D)
        mean = (gx_TD @ w).view_as(r) / D
        dx = (grad * w).mul_(r).addcmul_(x, -mean * r**3)
        return dx.to(x.dtype), (r.view(-1) @ gx_TD).to(weight.dtype), None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping only gate and up for backward (silu is cheap to repeat)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class RMSNorm(nn.Module):
    """RMSNormFunction over the last dim, in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNormFunction.apply(x, self.weight, self.eps)


def rope_frequencies(hf: Any) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [H/2] float32, factor on cos and sin), as in transformers.

    Source: transformers 5.16 modeling_rope_utils.py; YaRN is https://arxiv.org/abs/2309.00071.
    """
    rope, H = hf.rope_parameters, hf.head_dim
    theta = rope["rope_theta"]
    inv_freq = 1.0 / theta ** (torch.arange(0, H, 2, dtype=torch.float) / H)
    if rope["rope_type"] == "default":
        return inv_freq, 1.0
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")

    def growth(
        m: float,
    ) -> float:  # how much longer contexts sharpen attention, section 3.4 of the paper
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    def pair(rotations: float) -> float:  # the pair that turns this often over the original length
        return H * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, H - 1)
    high += 0.001 * (low == high)  # transformers' guard against 0/0
    interpolate = ((torch.arange(H // 2, dtype=torch.float) - low) / (high - low)).clamp(0, 1)
    inv_freq = inv_freq / factor * interpolate + inv_freq * (1 - interpolate)
    scale = rope.get("attention_factor")
    if scale is None:
        scale = growth(mscale) / growth(mscale_all) if mscale and mscale_all else growth(1.0)
    return inv_freq, scale


class RotaryEmbedding(nn.Module):
    """cos and sin of every position: two float32 tables [S, H/2], computed on the host."""

    def __init__(self, hf: Any, seq_len: int) -> None:
        super().__init__()
        self.hf, self.seq_len = hf, seq_len
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(seq_len, hf.head_dim // 2), persistent=False)

    def reset(self) -> None:
        """Fill the tables; non-persistent buffers are in no checkpoint, and meta leaves them undefined."""
        inv_freq, scale = rope_frequencies(self.hf)
        angles = torch.arange(self.seq_len, dtype=torch.float)[:, None] * inv_freq
        self.cos.copy_(angles.cos() * scale)
        self.sin.copy_(angles.sin() * scale)


def rotate(x_BSNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[i], x[i + H/2]); cos, sin float32 [S, H/2] or [B, S, H/2]."""
    x1, x2 = x_BSNH.chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for every head
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_BSNH.dtype)


class Rotary(nn.Module):
    """Rotates queries and keys. A module of its own so that a kernel can take its place."""

    def forward(
        self, q_BSNH: torch.Tensor, k_BSKH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(q_BSNH, cos, sin), rotate(k_BSKH, cos, sin)


def isolation(document_starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the row each token's document starts [B, S] (-1: padding) -> positions [B, S], and who
    may be seen [B, 1, S, S] bool: the tokens of the same document up to oneself.

    Padding sees all before it, so that no row of the mask is empty; nothing real sees padding.
    """
    place = torch.arange(document_starts.shape[1], device=document_starts.device)
    seen = (place <= place[:, None]) & (place >= document_starts[:, None, :, None])
    return place - document_starts.clamp(min=0), seen


def causal_attention(
    q_BNSH: torch.Tensor,
    k_BKSH: torch.Tensor,
    v_BKSH: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax(q k / sqrt(H)) v -> [B, N, S, H], causal or by a mask [B, 1, S, S] bool. Each key/value
    head serves N/K query heads.

    On Trainium, S % 512 == 0, H <= 128 and no mask select TorchNeuron's flash kernel.
    """
    return F.scaled_dot_product_attention(
        q_BNSH, k_BKSH, v_BKSH, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )


class Attention(nn.Module):
    def __init__(self, hf: Any) -> None:
        super().__init__()
        D, H, bias = hf.hidden_size, hf.head_dim, hf.attention_bias
        self.head_dim = H
        self.q_proj = nn.Linear(D, hf.num_attention_heads * H, bias=bias)
        self.k_proj = nn.Linear(D, hf.num_key_value_heads * H, bias=bias)
        self.v_proj = nn.Linear(D, hf.num_key_value_heads * H, bias=bias)
        self.o_proj = nn.Linear(hf.num_attention_heads * H, D, bias=bias)
        self.q_norm = RMSNorm(H, hf.rms_norm_eps)  # over each head, Qwen3's addition to Qwen2
        self.k_norm = RMSNorm(H, hf.rms_norm_eps)
        self.rotary = Rotary()

    def forward(
        self,
        hidden_states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        B, S, _ = hidden_states.shape
        # -1 heads: with tensor parallelism the projections return this rank's share
        q_BSNH = self.q_proj(hidden_states).view(B, S, -1, self.head_dim)
        k_BSKH = self.k_proj(hidden_states).view(B, S, -1, self.head_dim)
        v_BSKH = self.v_proj(hidden_states).view(B, S, -1, self.head_dim)
        q_BSNH, k_BSKH = self.rotary(self.q_norm(q_BSNH), self.k_norm(k_BSKH), cos, sin)
        out_BNSH = causal_attention(*(t.transpose(1, 2) for t in (q_BSNH, k_BSKH, v_BSKH)), mask)
        return self.o_proj(out_BNSH.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        D, width = hf.hidden_size, hf.intermediate_size
        self.gate_proj = nn.Linear(D, width, bias=False)
        self.up_proj = nn.Linear(D, width, bias=False)
        self.down_proj = nn.Linear(width, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


class Router(nn.Module):
    """Token-choice router: softmax in float32, top-k, weights renormalised if norm_topk_prob."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = hf.num_experts_per_tok, hf.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(hf.num_experts, hf.hidden_size))

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> router_logits [T, E], topk_scores [T, K] in x's dtype, topk_expert_ids [T, K]"""
        router_logits_TE = F.linear(x_TD, self.weight)
        scores_TK, ids_TK = router_logits_TE.softmax(-1, dtype=torch.float).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        return router_logits_TE, scores_TK.to(x_TD.dtype), ids_TK


def grouped_linear(x_RD: torch.Tensor, w_eFD: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
    """Rows ends[i-1] to ends[i] of x times w[i].T -> [R, F]; rows past the last end are undefined."""
    if x_RD.dtype == torch.bfloat16:
        return F.grouped_mm(x_RD, w_eFD.transpose(1, 2), offs=ends_e)
    return torch.ops.qwen3_trn.experts_linear(x_RD, w_eFD, ends_e)


# The same as an op of our own, because torch 2.13 cannot trace grouped_mm in other dtypes.
@torch.library.custom_op("qwen3_trn::experts_linear", mutates_args=())
def grouped_linear_op(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(x, w.transpose(1, 2), offs=ends)


@torch.library.custom_op("qwen3_trn::experts_linear_grad", mutates_args=())
def grouped_linear_grad_op(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return F.grouped_mm(grad, w, offs=ends), F.grouped_mm(grad.t(), x, offs=ends)


grouped_linear_op.register_fake(lambda x, w, ends: x.new_empty(x.shape[0], w.shape[1]))
grouped_linear_grad_op.register_fake(
    lambda grad, x, w, ends: (torch.empty_like(x), torch.empty_like(w))
)
grouped_linear_op.register_autograd(
    lambda ctx, grad: (*grouped_linear_grad_op(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# Rows at which a group may start: TorchNeuron's grouped matmul needs multiples of 128, a CPU or GPU
# takes any. Set when the device is picked.
group_align = 1


def experts_forward(
    experts: nn.Module,
    x_TD: torch.Tensor,
    topk_expert_ids_TK: torch.Tensor,
    topk_scores_TK: torch.Tensor,
) -> torch.Tensor:
    """Sum over k of score * SwiGLU expert of each token, [T, D], with e = len(gate_up_proj) experts.

    Dropless: rows are sorted by expert and multiplied group by group, so every shape is static. An
    expert id of e or more belongs to another rank and contributes nothing.
    """
    (T, D), K = x_TD.shape, topk_expert_ids_TK.shape[1]
    assignment_R, ends_e = group_rows(topk_expert_ids_TK.flatten(), len(experts.gate_up_proj))
    # Assignment T*K is nobody's: it reads a row of zeros and its result is dropped. That keeps
    # rows that grouped_mm leaves undefined (past the last group) out of values and gradients.
    token_R = assignment_R // K
    routed_RD = F.pad(x_TD, (0, 0, 0, 1))[token_R]
    gate_RF, up_RF = grouped_linear(routed_RD, experts.gate_up_proj, ends_e).chunk(2, dim=-1)
    out_RD = grouped_linear(SwiGLU.apply(gate_RF, up_RF), experts.down_proj, ends_e)
    scores_R = F.pad(topk_scores_TK.flatten(), (0, 1))[assignment_R]
    return x_TD.new_zeros(T + 1, D).index_add(0, token_R, out_RD * scores_R[:, None])[:T]


def group_rows(ids_A: torch.Tensor, e: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert id of each assignment [A = T*K] -> assignment of each row [R], end of each of the e
    experts' rows [e] int32. R is static: A plus room to align every expert's first row."""
    A, align = ids_A.numel(), group_align
    sorted_ids_A, order_A = ids_A.sort(stable=True)  # experts of other ranks (id e) come last
    num_tokens_e = (ids_A[:, None] == torch.arange(e, device=ids_A.device)).sum(0)
    padded_e = (num_tokens_e + align - 1) // align * align
    ends_e = padded_e.cumsum(0)
    # where an expert's rows start once padded, less where they start in the sorted list
    shift_e = F.pad(ends_e - num_tokens_e.cumsum(0), (1, 0))
    row_A = torch.arange(A, device=ids_A.device) + shift_e[sorted_ids_A]
    here_A = torch.where(sorted_ids_A < e, order_A, A)
    num_rows = (A + e * (align - 1) + align - 1) // align * align
    assignment_R = torch.full((num_rows,), A, device=ids_A.device).scatter(0, row_A, here_A)
    return assignment_R, ends_e.int()


class Experts(nn.Module):
    """All experts of a layer, stacked as in transformers v5 (gate rows first, then up)."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        E, D, width = hf.num_experts, hf.hidden_size, hf.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, width))

    forward = experts_forward


class SparseMoeBlock(nn.Module):
    """Router and experts in place of a dense feed-forward."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.gate = Router(hf)
        self.experts = Experts(hf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        _, scores_TK, ids_TK = self.gate(x_TD)
        return self.experts(x_TD, ids_TK, scores_TK).view_as(x)


class TransformerBlock(nn.Module):
    def __init__(self, hf: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(hf)
        self.mlp = SparseMoeBlock(hf) if is_moe_layer(hf, layer) else FeedForward(hf)
        self.input_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Model(nn.Module):
    """Token ids [B, S] -> hidden states [B, S, D]."""

    def __init__(self, hf: Any, seq_len: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(hf.vocab_size, hf.hidden_size)
        self.layers = nn.ModuleList(TransformerBlock(hf, i) for i in range(hf.num_hidden_layers))
        self.norm = RMSNorm(hf.hidden_size, hf.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(hf, seq_len)

    def forward(
        self, input_ids: torch.Tensor, document_starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin, mask = self.rotary_emb.cos, self.rotary_emb.sin, None
        if document_starts is not None:
            positions, mask = isolation(document_starts)
            cos, sin = F.embedding(positions, cos), F.embedding(positions, sin)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class LMHead(nn.Linear):
    """The output projection. Given labels it returns their summed loss and never the whole logits."""

    loss_chunks = 8
    loss_fn: Callable[..., torch.Tensor]  # set below, and again by tensor parallelism

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return F.linear(x, self.weight)
        return self.loss_fn(x.flatten(0, -2), self.weight, labels.flatten(), self.loss_chunks)


class Qwen3ForCausalLM(nn.Module):
    """Decoder and head. Both backends share it: ``model`` is Qwen3Model above or transformers' own."""

    def __init__(self, hf: Any, model: nn.Module, isolate: bool = False) -> None:
        super().__init__()
        self.config, self.isolate = hf, isolate
        self.model = model
        self.lm_head = LMHead(hf.hidden_size, hf.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """One parameter for embedding and head, if the config says so; again after each step that
        makes new parameters (tensor parallelism, materialisation)."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids, labels [B, S] (already shifted: labels[t] follows input_ids[t]) -> the sum of the
        losses of valid labels, float32; without labels the logits [B, S, V].

        ``document_starts`` isolates the documents of a row; one document before padding needs none.
        """
        return self.lm_head(
            self.model(input_ids, document_starts if self.isolate else None), labels
        )


# ---- Hugging Face model and weights -------------------------------------------------------------
def hf_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of this file, in the form of transformers' AttentionInterface.

    For an implementation that AttentionMaskInterface does not know, transformers hands on a ready 4-D
    mask; it neither builds one (from the sequence-sharded hidden states, wrongly) nor reads position
    ids on the host.
    """
    return causal_attention(query, key, value, mask).transpose(1, 2), None


def build_model(cfg: Config, hf: Any) -> Qwen3ForCausalLM:
    """The model of --backend, on the meta device: no memory, no values yet."""
    isolate = cfg.packing == "isolate"
    with torch.device("meta"):
        if cfg.backend == "native":
            return Qwen3ForCausalLM(hf, Qwen3Model(hf, cfg.seq_len), isolate)
        ours = dict.fromkeys(("attn_implementation", "experts_implementation"), "qwen3_trn")
        transformers.AttentionInterface.register("qwen3_trn", hf_attention)
        ExpertsInterface.register("qwen3_trn", experts_forward)
        decoder = transformers.AutoModelForCausalLM.from_config(
            hf, dtype=torch.float32, **ours
        ).model
        position_ids = torch.arange(cfg.seq_len, device="cpu")[None]
        decoder.forward = functools.partial(hf_forward, decoder.forward, position_ids)
        return Qwen3ForCausalLM(hf, decoder, isolate)


def override_specs(cfg: Config) -> list[str]:
    """The overrides that --nki and --override ask for, as MODULE.FUNCTION[={json}]."""
    return [*(kernels.NKI_OVERRIDES if cfg.nki else ()), *cfg.override]


def hf_forward(
    forward: Callable[..., Any],
    position_ids: torch.Tensor,
    input_ids: torch.Tensor,
    document_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """transformers' decoder forward, called like Qwen3Model's. The positions are given because under
    sequence parallelism transformers would count only this rank's part."""
    position_ids, mask = position_ids.to(input_ids.device), None
    if document_starts is not None:
        position_ids, mask = isolation(document_starts)
    out = forward(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=position_ids,
        use_cache=False,
        output_router_logits=False,  # RouterStats takes them; transformers' hooks break --compile
    )
    return out.last_hidden_state


def reset_buffers(model: Qwen3ForCausalLM) -> None:
    """Recompute the rotary tables after materialisation from meta; they are stored nowhere."""
    rotary = model.model.rotary_emb
    if isinstance(rotary, RotaryEmbedding):
        return rotary.reset()
    fresh = type(rotary)(rotary.config)
    for name, buffer in rotary.named_buffers():
        buffer.copy_(fresh.get_buffer(name))


def normal_slice(name: str, seed: int, shape: torch.Size, part: tuple[slice, ...]) -> torch.Tensor:
    """``part`` of a standard normal tensor that depends only on (name, seed, shape), float32.

    Counter-based: element i of the whole tensor comes from the i-th output of Philox, by Box-Muller,
    so every layout draws the same numbers and makes only its own (times tp where columns are cut).
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    row = math.prod(shape[1:])
    first, last = part[0].start * row, part[0].stop * row
    counter = first // 8  # one Philox counter gives 4 x 64 bits: 8 uniforms, 4 pairs of normals
    words = np.random.Philox(key=key).advance(counter).random_raw(4 * (-(-last // 8) - counter))
    uniforms = torch.from_numpy(words.view(np.uint32).astype(np.float32).reshape(-1, 2))
    radius = uniforms[:, 0].add_(0.5).div_(2**32).log_().mul_(-2).sqrt_()
    angle = uniforms[:, 1].mul_(2 * math.pi / 2**32)
    normals = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).flatten()
    block = normals[first - 8 * counter : last - 8 * counter].view(-1, *shape[1:])
    return block[(slice(None), *part[1:])]


@torch.no_grad()
def init_weights(model: Qwen3ForCausalLM, seed: int) -> None:
    """Random weights, the same for every layout: norms 1, biases 0, all else normal(initializer_range)."""
    rows = 2**24  # elements made at one time: bounds host memory
    for name, p in unique_parameters(model).items():
        local, part = local_tensor(p), local_slices(p)
        if p.ndim == 1:
            local.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            continue
        step = max(1, rows // math.prod(p.shape[1:]))
        for start in range(part[0].start, part[0].stop, step):
            stop = min(start + step, part[0].stop)
            piece = normal_slice(name, seed, p.shape, (slice(start, stop), *part[1:]))
            piece = piece * model.config.initializer_range
            local[start - part[0].start : stop - part[0].start].copy_(piece)


# ---- Parallelism --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Split:
    """How tensor parallelism treats one module: one entry of the plan below.

    The module runs on plain local tensors. Its parameters stay DTensors for FSDP, optimizer and
    checkpoints; ``forward`` sees their local parts.
    """

    params: Placement | None = (
        None  # over tp: Shard(dim), Replicate(), or None: it has no parameters
    )
    grads: Placement | None = None  # what backward leaves in a gradient; None: as params
    gather: bool = False  # the input's sequence shards are gathered on the way in
    reduce: bool = False  # the output is a partial sum, to be added up on the way out


def tp_plan(hf: Any, sp: bool, tp: int) -> dict[str, Split]:
    """Module-name glob -> Split, for both backends (their names are the same).

    Between blocks each rank holds a slice of the sequence (sp) or all of it. A block gathers it,
    computes its own heads, columns or experts, and adds the results up: all-gather and reduce-scatter
    with sp, two all-reduces without. Parameters that every rank holds whole but that see only its
    share of tokens, heads or experts get partial gradients, which are summed over tp.
    """
    share = Split(Replicate(), grads=Partial())
    norm = share if sp else Split(Replicate())
    block = Split(gather=True, reduce=True)
    return {
        "model.embed_tokens": Split(Shard(0), reduce=True),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": block,
        "model.layers.*.self_attn.q_proj": Split(Shard(0)),
        # With fewer key/value heads than ranks, every rank holds all of them and computes one.
        "model.layers.*.self_attn.[kv]_proj": Split(Shard(0))
        if hf.num_key_value_heads >= tp
        else share,
        "model.layers.*.self_attn.[qk]_norm": share,
        "model.layers.*.self_attn.o_proj": Split(Shard(1)),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": block,
        "model.layers.*.mlp.gate_proj": Split(Shard(0)),
        "model.layers.*.mlp.up_proj": Split(Shard(0)),
        "model.layers.*.mlp.down_proj": Split(Shard(1)),
        "model.layers.*.mlp.gate": share,
        "model.layers.*.mlp.experts": Split(Shard(0)),  # whole experts, split by expert
        "model.norm": norm,
        "lm_head": Split(Shard(0), gather=True),
    }


class TensorParallel:
    """Applies the plan on one tp mesh."""

    def __init__(self, mesh: DeviceMesh, sp: bool) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()
        self.between: Placement = Shard(1) if sp else Replicate()  # hidden states between blocks

    def apply(self, model: Qwen3ForCausalLM, hf: Any, gather_logits: bool) -> None:
        start, _ = self.share_of(hf.vocab_size)
        model.lm_head.loss_fn = functools.partial(
            chunked_cross_entropy,
            group=self.mesh.get_group(),
            vocab_start=start,
            gather_logits=gather_logits,
        )
        plan = tp_plan(hf, self.between == Shard(1), self.size)
        for name, module in model.named_modules():
            split = next((s for glob, s in plan.items() if fnmatch.fnmatchcase(name, glob)), None)
            if split is not None:
                self.split(module, name.rsplit(".", 1)[-1], split, hf)
        model.tie_weights()

    def split(self, module: nn.Module, kind: str, split: Split, hf: Any) -> None:
        """Distribute the module's parameters and put collectives around its forward."""
        run = self.on_local_parameters(module, kind, split, hf) if split.params else module.forward
        if kind == "embed_tokens":
            run = self.own_vocabulary(run, *self.share_of(hf.vocab_size))
        elif kind == "experts":
            run = self.own_experts(run, *self.share_of(hf.num_experts))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if split.gather and args:
                args = (self.gather(args[0]), *args[1:])
            elif split.gather:
                kwargs["hidden_states"] = self.gather(kwargs["hidden_states"])
            out = run(*args, **kwargs)
            if not split.reduce:
                return out
            # transformers' attention returns (output, weights)
            return (self.reduce(out[0]), *out[1:]) if isinstance(out, tuple) else self.reduce(out)

        module.forward = forward

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Sequence shards -> the whole sequence (all-gather); backward: reduce-scatter of shares."""
        x = DTensor.from_local(x, self.mesh, [self.between], run_check=False)
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums -> sequence shards (reduce-scatter) or whole (all-reduce); backward: gather."""
        x = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return x.redistribute(placements=[self.between]).to_local()

    def share_of(self, n: int) -> tuple[int, int]:
        """(first, number) of this rank's part of n rows, cut as torch.chunk and DTensor do."""
        piece = -(-n // self.size)
        start = min(self.rank * piece, n)
        return start, min(start + piece, n) - start

    def on_local_parameters(
        self, module: nn.Module, kind: str, split: Split, hf: Any
    ) -> Callable[..., Any]:
        """Make the parameters DTensors, and return a forward that sees their local parts."""
        for name, p in module.named_parameters(recurse=False):
            # on meta: nothing is sent. Big weights must not be scattered on a Neuron device.
            p = nn.Parameter(distribute_tensor(p, self.mesh, [split.params], src_data_rank=None))
            module.register_parameter(name, p)
        inner = copy.copy(module)  # runs the module's own forward; holds no parameters of its own
        inner._parameters = module._parameters.copy()
        inner._forward_hooks = {}
        grads = [split.grads or split.params]
        one_head = kind in ("k_proj", "v_proj") and split.grads is not None
        head = self.rank * hf.num_key_value_heads // self.size

        def forward(*args: Any, **kwargs: Any) -> Any:
            local = {
                n: p.to_local(grad_placements=grads)
                for n, p in module.named_parameters(recurse=False)
            }
            if one_head:
                local = {n: p.narrow(0, head * hf.head_dim, hf.head_dim) for n, p in local.items()}
            return torch.func.functional_call(inner, local, args, kwargs)

        return forward

    @staticmethod
    def own_vocabulary(run: Callable[..., Any], start: int, size: int) -> Callable[..., Any]:
        """Look up the tokens whose rows are here; the others give zeros, for the sum over ranks."""

        def forward(input_ids: torch.Tensor) -> torch.Tensor:
            ids = input_ids - start
            here = (ids >= 0) & (ids < size)
            return torch.where(here[..., None], run(ids.clamp(0, size - 1)), 0)

        return forward

    @staticmethod
    def own_experts(run: Callable[..., Any], start: int, size: int) -> Callable[..., Any]:
        """Number the experts held here from 0; all others become ``size``, which experts skip."""

        def forward(
            x_TD: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
        ) -> torch.Tensor:
            ids_TK = ids_TK - start
            here = (ids_TK >= 0) & (ids_TK < size)
            return run(x_TD, torch.where(here, ids_TK, size), scores_TK)

        return forward


# What selective checkpointing keeps: matrix products, attention and collectives cost more to repeat
# than to store. neuron keeps linear as one op, so aten.mm never appears there.
SAVED_OPS = {
    "aten.mm", "aten.addmm", "aten.bmm", "aten.linear", "aten._grouped_mm",
    "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_reduce",
}  # fmt: skip


def selective_policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(getattr(op, "overloadpacket", op))
    saved = name in SAVED_OPS or name.startswith("qwen3_trn.")  # our kernels
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def apply_activation_checkpoint(model: Qwen3ForCausalLM, mode: str) -> None:
    """Recompute each block's activations in backward: all of them, or all but SAVED_OPS."""
    kwargs: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no dropout
    if mode == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, selective_policy)
        kwargs["context_fn"] = contexts

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kw: checkpoint(forward, *args, **kwargs, **kw)

    for layer in model.model.layers:  # forward, not a wrapper module: parameter names stay
        layer.forward = recomputed(layer.forward)


def apply_fsdp(model: Qwen3ForCausalLM, mesh: DeviceMesh, cfg: Config) -> None:
    """FSDP2 with one group per block, one for the embedding, one for final norm and head."""
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[cfg.mixed_precision_param],
        reduce_dtype=DTYPES[cfg.mixed_precision_reduce],
        cast_forward_inputs=False,  # the rotary tables stay float32
    )
    pin = torch.accelerator.is_available()
    offload = CPUOffloadPolicy(pin_memory=pin) if cfg.cpu_offload else OffloadPolicy()
    size = mesh[mesh.mesh_dim_names[-1]].size()  # of dp_shard

    def cut(p: nn.Parameter) -> Shard | None:
        """FSDP pads dim 0 to a multiple of dp_shard: 32 experts on 1,024 ranks would be sent 32 times over.
        Stacked experts are cut along the first dim that divides instead."""
        local = local_tensor(p).shape
        even = [d for d, n in enumerate(local) if n % size == 0]
        return Shard(even[0]) if len(local) == 3 and even else None

    shard = functools.partial(
        fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload, shard_placement_fn=cut
    )
    reshard = cfg.reshard_after_forward != "never"
    for layer in model.model.layers:
        shard(layer, reshard_after_forward=reshard)
    last = cfg.reshard_after_forward == "always"  # the head is needed again at once, in backward
    if not model.config.tie_word_embeddings:  # tied: one parameter, so both join the root's group
        shard(model.model.embed_tokens, reshard_after_forward=reshard)
        shard([model.model.norm, model.lm_head], reshard_after_forward=last)
    shard(model, reshard_after_forward=last)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the global token count, so gradients are summed and nothing else.
            # Plain SUM: gloo and TorchNeuron lack the pre-multiplied one, and gloo's AVG is a sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def build_mesh(cfg: Config, device_type: str, world_size: int) -> DeviceMesh:
    names = ("dp_replicate", "dp_shard", "tp")
    return init_device_mesh(device_type, degrees(cfg, world_size), mesh_dim_names=names)


def parallelize(model: Qwen3ForCausalLM, mesh: DeviceMesh, cfg: Config) -> None:
    """Tensor parallelism, then checkpointing, then compilation, then FSDP: each wraps the former."""
    if mesh["tp"].size() > 1:
        tp = TensorParallel(mesh["tp"], sp=not cfg.disable_sequence_parallel)
        tp.apply(model, model.config, gather_logits=cfg.disable_loss_parallel)
    if cfg.activation_checkpoint != "none":
        apply_activation_checkpoint(model, cfg.activation_checkpoint)
    if cfg.compile:
        backend = cfg.compile_backend or ("neuron" if mesh.device_type == "neuron" else "inductor")
        torch._dynamo.config.automatic_dynamic_shapes = False  # one graph for each block, ever
        # RouterStats' hook stores what it saw; a recomputed block must not store it again
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True, dynamic=False)
    replicated = mesh["dp_replicate"].size() > 1
    if (
        replicated
        or mesh["dp_shard"].size() > 1
        or cfg.mixed_precision_param != "float32"
        or cfg.cpu_offload
    ):
        if cfg.cpu_offload and mesh.device_type == "cpu":
            log.warning(
                "--cpu_offload has no effect on a CPU: everything is in host memory already"
            )
        apply_fsdp(model, mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"], cfg)


def materialize(
    model: Qwen3ForCausalLM, device: torch.device, cfg: Config, group: Any = None
) -> None:
    """Allocate this rank's shards and fill them: random, or from --model's safetensors files.

    ``group``: a gloo group of all ranks; None on one rank.
    """
    model.to_empty(device="cpu" if cfg.cpu_offload else device)
    model.tie_weights()
    reset_buffers(model)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    if cfg.dry_run != "off":
        return  # there is memory to count, but no values
    if cfg.model in PRESETS or cfg.random_init:
        init_weights(model, cfg.seed)
        return
    if group is not None:
        # The first rank of each node fetches a hub id; the others find it in the cache.
        if os.environ["LOCAL_RANK"] == "0":
            model_folder(cfg, MODEL_FILES)
        dist.barrier(group=group)
    load_weights(model, model_folder(cfg, MODEL_FILES), group)


# ---- Loss, optimizer, schedule --------------------------------------------------------------------
class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and summed cross-entropy over chunks of tokens; the whole logits never exist.

    Forward already computes both gradients of each chunk (the loss is linear in its upstream
    gradient), so nothing is recomputed: three matmuls a chunk, as for unchunked logits. With a group,
    ``weight`` holds rows vocab_start.. of the vocabulary, and dx is this rank's share of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunks: int,
        group: dist.ProcessGroup | None, vocab_start: int, gather_logits: bool,
    ) -> torch.Tensor:  # fmt: skip
        want_grads = ctx.needs_input_grad[0]
        loss = x.new_zeros((), dtype=torch.float32)
        dx = torch.empty_like(x) if want_grads else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if want_grads else None
        step = -(-len(x) // chunks)
        for i in range(0, len(x), step):
            x_CD, labels_C = x[i : i + step], labels[i : i + step]
            logits_CV = (x_CD @ weight.t()).float()
            start, n = vocab_start, weight.shape[0]
            if gather_logits:
                start, logits_CV = 0, funcol.all_gather_tensor(logits_CV, 1, group)
            valid = labels_C != IGNORE_INDEX
            index = labels_C - start
            here = valid & (index >= 0) & (index < logits_CV.shape[1])
            index = index.clamp(0, logits_CV.shape[1] - 1)[:, None]
            top = logits_CV.amax(-1)
            if group is not None and not gather_logits:
                top = funcol.all_reduce(top, "max", group)
            logits_CV.sub_(top[:, None])
            picked = logits_CV.gather(1, index)[:, 0] * here
            probs_CV = logits_CV.exp_()
            total = probs_CV.sum(-1)
            if group is not None and not gather_logits:
                total, picked = funcol.all_reduce(torch.stack((total, picked)), "sum", group)
            loss += ((total.log() - picked) * valid).sum()
            if want_grads:
                grad_CV = probs_CV.mul_(
                    (valid / total)[:, None]
                )  # softmax - one-hot, 0 where ignored
                grad_CV.scatter_add_(1, index, -here[:, None].to(grad_CV.dtype))
                if gather_logits:
                    grad_CV = grad_CV[:, vocab_start : vocab_start + n]
                grad_CV = grad_CV.to(weight.dtype)
                torch.mm(grad_CV, weight, out=dx[i : i + step])
                if weight.dtype == torch.float32:
                    dw.addmm_(grad_CV.t(), x_CD)
                else:
                    dw += grad_CV.t() @ x_CD  # summed in float32
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        return (dx * grad.to(dx.dtype), dw.mul(grad).to(ctx.dtype), *[None] * 5)


def chunked_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunks: int,
    group: dist.ProcessGroup | None = None, vocab_start: int = 0, gather_logits: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [T, D], weight [V or this rank's rows, D], labels [T] -> summed loss of valid labels, float32."""
    return ChunkedCrossEntropy.apply(x, weight, labels, chunks, group, vocab_start, gather_logits)


LMHead.loss_fn = staticmethod(chunked_cross_entropy)


def num_loss_chunks(cfg: Config, vocab_rows: int) -> int:
    """At least torchtitan's 8; more if float32 logits of a chunk would pass 64 MiB."""
    tokens = cfg.local_batch_size * cfg.seq_len
    auto = max(8, -(-tokens * vocab_rows * 4 // 2**26))
    return min(cfg.loss_chunks or auto, tokens)


class RouterStats:
    """Watches the routers of either backend for the balance loss and the expert load."""

    def __init__(self, model: Qwen3ForCausalLM, coef: float, dp_group: Any, scale: float) -> None:
        gates = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
        self.coef, self.dp_group, self.scale, self.gates = coef, dp_group, scale, gates
        for gate in gates:
            gate.register_forward_hook(self.keep)
            gate.routed = None
        self.load_E: torch.Tensor | None = None  # assignments per expert since the last log line

    @staticmethod
    def keep(gate: nn.Module, _: Any, out: tuple[torch.Tensor, ...]) -> None:
        gate.routed = (out[0], out[2])  # router_logits [T, E], topk_expert_ids [T, K]

    def balance_loss(self, document_starts: torch.Tensor | None = None) -> torch.Tensor | None:
        """E * sum_e(share of assignments to e * mean probability of e), over all layers and all
        data-parallel ranks: transformers' load_balancing_loss_func of the joined micro-batch.

        The counts are summed over ranks first, so that the ranks' losses add up to the whole one.
        With ``document_starts`` padding counts as nothing.
        """
        routed = [gate.routed for gate in self.gates]
        self.clear()
        if not routed:
            return None
        (T, E), device = routed[0][0].shape, routed[0][0].device
        real_T = None if document_starts is None else (document_starts >= 0).flatten()
        with torch.no_grad():
            ids_LTK = torch.stack([ids for _, ids in routed])
            chosen = ids_LTK[..., None] == torch.arange(E, device=device)
            tokens = torch.full((1,), float(T), device=device)
            if real_T is not None:
                chosen, tokens = chosen & real_T[:, None, None], real_T.sum(dim=0, keepdim=True)
            counts = torch.cat((chosen.sum((0, 1, 2), dtype=torch.float32), tokens))
            if self.dp_group is not None:
                counts = funcol.all_reduce(counts, "sum", self.dp_group)
            count_E, rows = counts[:E], (len(routed) * counts[E]).clamp(min=1)
            self.load_E = count_E + (0 if self.load_E is None else self.load_E)
        if not self.coef:
            return None
        probs_TE = sum(logits.softmax(-1, dtype=torch.float32) for logits, _ in routed)
        probs_E = probs_TE.sum(0) if real_T is None else real_T.to(probs_TE.dtype) @ probs_TE
        return self.coef * self.scale * E * (count_E * probs_E).sum() / rows**2

    def clear(self) -> None:
        """Let go of the graph; recomputation in backward fills the fields again."""
        for gate in self.gates:
            gate.routed = None

    def max_load(self) -> float:
        """Busiest expert's assignments over the mean, since the last call (1.0: even). Waits."""
        load, self.load_E = self.load_E, None
        return (load.max() / load.mean()).item()


def build_optimizer(model: nn.Module, cfg: Config) -> torch.optim.AdamW:
    """AdamW, one fused kernel; decay on matrices (embedding and head too), not on norms and biases."""
    params = list(unique_parameters(model).values())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=cfg.lr, betas=(cfg.adam_beta1, cfg.adam_beta2), eps=cfg.adam_eps, fused=True
    )


def lr_at(step: int, cfg: Config) -> float:
    """Learning rate of step 1..steps: warm-up, constant, decay (WSD, the numbers of torchtitan)."""
    decay = (
        cfg.steps - cfg.warmup_steps
        if cfg.decay_ratio is None
        else round(cfg.steps * cfg.decay_ratio)
    )
    if cfg.decay_type == "none":
        decay = 0
    if step <= cfg.warmup_steps:  # 1. linear, never 0, and the peak at the last warm-up step
        return cfg.lr * step / cfg.warmup_steps
    done = step - (cfg.steps + 1 - decay)
    if done <= 0:  # 2. constant
        return cfg.lr
    progress = done / decay  # 3. below 1 at the last step: decaying to exactly 0 would waste it
    shape = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress)}
    factor = shape.get(cfg.decay_type, 0.5 * (1 + math.cos(math.pi * progress)))
    return cfg.lr * (cfg.min_lr_factor + (1 - cfg.min_lr_factor) * factor)


@torch.no_grad()
def finish_gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's gradients as local tensors; partial ones are summed over tp first.

    FSDP does that sum itself; without it (tp only) it is due here, once per step.
    """
    grads = []
    for p in unique_parameters(model).values():
        if p.grad is None:
            p.grad = torch.zeros_like(p)  # AdamW would skip it, and its decay, on some layouts only
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            p.grad = p.grad.redistribute(placements=p.placements)
        grads.append(local_tensor(p.grad))
    return grads


def global_norm(model: nn.Module, grads: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm over all parameters and ranks, float32, the same number on every rank.

    A parameter that several ranks hold whole is counted by each with 1/copies of its square.
    """
    copies = []
    for p in unique_parameters(model).values():
        mesh = p.device_mesh if isinstance(p, DTensor) else None
        whole = (
            [mesh.size(i) for i, x in enumerate(p.placements) if not hasattr(x, "dim")]
            if mesh
            else []
        )
        copies.append(1.0 / math.prod(whole))
    norms = torch.stack(torch._foreach_norm(grads, dtype=torch.float32))
    square = (norms.square() * torch.tensor(copies).to(norms.device)).sum()
    if dist.get_world_size() > 1:
        square = funcol.all_reduce(square, "sum", dist.group.WORLD)
    return square.sqrt()


@torch.no_grad()
def update(
    optimizer: torch.optim.AdamW,
    grads: list[torch.Tensor],
    norm: torch.Tensor,
    skip: torch.Tensor,
    max_norm: float,
) -> None:
    """Clip, and step unless ``skip``, without asking the device what its values are.

    CPU and CUDA kernels of fused AdamW leave weights and state alone where found_inf is set (the
    protocol of torch.amp.GradScaler). TorchNeuron's kernel ignores it (its source of April 2026), so
    there a bad step sees zero gradients: weights move by momentum only, never by the bad values.
    """
    clip = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    if grads[0].device.type in ("cpu", "cuda"):
        optimizer.found_inf = skip.to(torch.float32)
        torch._foreach_mul_(grads, clip.nan_to_num(0.0).to(grads[0].device))
    else:
        for grad in grads:
            grad.copy_(torch.where(skip, 0.0, grad * clip))
    optimizer.step()
    optimizer.zero_grad()


# ---- Metrics ------------------------------------------------------------------------------------
def count_parameters(model: nn.Module, hf: Any) -> tuple[int, int]:
    """(total, active per token): of the experts, only num_experts_per_tok of num_experts are active."""
    sizes = {name: p.numel() for name, p in unique_parameters(model).items()}
    total = sum(sizes.values())
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    return total, total - (
        experts - experts * hf.num_experts_per_tok // hf.num_experts if experts else 0
    )


def flops_per_token(hf: Any, seq_len: int) -> dict[str, float]:
    """FLOPs of one token in one training step by term: forward, and backward at twice that.

    A matmul with n weights costs 2n forward. Looking up an embedding is no matmul; the head is one,
    tied or not. Only active experts count. Causal attention: a query sees (S + 1)/2 keys on average,
    for q k and for p v.
    """
    D, H, N = hf.hidden_size, hf.head_dim, hf.num_attention_heads
    moe_layers = sum(is_moe_layer(hf, i) for i in range(hf.num_hidden_layers))
    dense_layers = hf.num_hidden_layers - moe_layers
    weights = {
        "attention projections": hf.num_hidden_layers * D * H * 2 * (N + hf.num_key_value_heads),
        "dense FFN": dense_layers * 3 * D * hf.intermediate_size,
        "head": D * hf.vocab_size,
    }
    if moe_layers:
        weights["router"] = moe_layers * D * hf.num_experts
        weights["active experts"] = (
            moe_layers * 3 * D * hf.moe_intermediate_size * hf.num_experts_per_tok
        )
    terms = {name: 3 * 2.0 * n for name, n in weights.items()}
    terms["attention"] = 3 * 2.0 * hf.num_hidden_layers * 2 * N * H * (seq_len + 1) / 2
    return terms


def device_module(device: torch.device) -> Any:
    """torch.cuda, torch.neuron, ...; None on CPU, which reports the process instead."""
    return None if device.type == "cpu" else getattr(torch, device.type)


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    return device_module(device).get_device_properties(device).name


def peak_memory(device: torch.device) -> tuple[int, int]:
    """(peak bytes since start, capacity): of the device, or of this process on a CPU."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, capacity
    module = device_module(device)
    module.synchronize()  # neuron frees asynchronously: without this the numbers are of no moment
    return module.max_memory_allocated(), module.get_device_properties(device).total_memory


@contextlib.contextmanager
def waiting_for(what: str, every: float = 30.0) -> Iterator[None]:
    """Says every 30 s what the program is doing, so that no minute is silent."""
    done, start = threading.Event(), time.perf_counter()

    def speak() -> None:
        while not done.wait(every):
            log.info(f"still {what}, {time.perf_counter() - start:.0f} s so far")

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Metrics:
    """The step line, metrics.jsonl, and on request TensorBoard and W&B. Rank 0 writes."""

    def __init__(
        self, cfg: Config, hf: Any, world_size: int, device: torch.device, header: dict[str, Any]
    ) -> None:
        self.cfg, self.world_size, self.device = cfg, world_size, device
        self.flops = sum(flops_per_token(hf, cfg.seq_len).values())
        name = device_name(device)
        self.peak_flops = next(
            (f for key, f in PEAK_FLOPS.items() if key.lower() in name.lower()), None
        )
        self.file = self.board = self.run = None
        if dist.get_rank() == 0:
            Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)
            self.file = (Path(cfg.output_dir) / "metrics.jsonl").open("a")
            self.write({"config": dataclasses.asdict(cfg), **header})
            if cfg.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(cfg.output_dir)
            if cfg.wandb:
                import wandb

                self.run = wandb.init(
                    project="qwen3-trn", config=dataclasses.asdict(cfg), dir=cfg.output_dir
                )
        self.mark(0, 0)

    def mark(self, step: int, tokens: int) -> None:
        self.time, self.step, self.tokens = time.perf_counter(), step, tokens

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def memory(self) -> tuple[list[int], int]:
        """Peak bytes of every rank, and the capacity of one."""
        peak, capacity = peak_memory(self.device)
        peaks = torch.zeros(self.world_size, dtype=torch.float32, device=self.device)
        peaks[dist.get_rank()] = peak / 2**20  # MiB: float32 and int32 hold it exactly enough
        if self.world_size > 1:
            peaks = funcol.all_reduce(peaks, "sum", dist.group.WORLD)
        return [round(p) * 2**20 for p in peaks.tolist()], capacity

    def log(self, step: int, tokens: int, values: dict[str, float]) -> None:
        """``tokens``: read by all ranks since the start, padding and ignored ones included."""
        peaks, capacity = self.memory()
        seconds = time.perf_counter() - self.time
        tps = (tokens - self.tokens) / seconds / self.world_size
        tflops = self.flops * tps / 1e12
        mfu = f"{tflops * 1e14 / self.peak_flops:.2f}%" if self.peak_flops else "N/A"
        top = max(peaks)
        where = f" rank {peaks.index(top)}" if top - min(peaks) > 0.01 * top else ""
        left = (self.cfg.steps - step) * seconds / (step - self.step)
        extra = "".join(
            f"  {k}: {v:.4g}" for k, v in values.items() if k not in ("loss", "grad_norm", "labels")
        )
        log.info(
            f"step: {step:2d}  loss: {values['loss']:8.5f}  grad_norm: {values['grad_norm']:7.4f}  "
            f"memory: {top / 2**30:5.2f}GiB({100 * top / capacity:.2f}%){where}  tps: {round(tps):,}  "
            f"tflops: {tflops:,.2f}  mfu: {mfu}{extra}  eta: {timedelta(seconds=round(left))}"
        )
        values = values | {
            "tps": tps,
            "tflops": tflops,
            "seconds_per_step": seconds / (step - self.step),
        }
        if self.peak_flops:
            values["mfu"] = tflops * 1e14 / self.peak_flops
        self.record({"step": step, "tokens": tokens, **values, "memory_bytes": peaks})
        self.mark(step, tokens)

    def record(self, row: dict[str, Any]) -> None:
        if self.file is None:
            return
        self.write(row)
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        if self.board:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, row["step"])
        if self.run:
            self.run.log(numbers, step=row["step"])

    def close(self) -> None:
        for sink in (self.file, self.board):
            if sink:
                sink.close()
        if self.run:
            self.run.finish()


# ---- Training -----------------------------------------------------------------------------------
# Said of modules that return a view, which ours do under tensor parallelism; nothing adds in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def setup_logging() -> None:
    """One format; rank 0 speaks, the others only warn. run.sh keeps every rank's output in a file."""
    logging.basicConfig(
        format="[qwen3-trn] %(asctime)s - %(levelname)s - %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stdout,
    )
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


def device_type(cfg: Config) -> str:
    """neuron, cuda or cpu. Does not touch the device: on Trainium the process group must come first."""
    if cfg.device != "auto":
        return cfg.device
    if cfg.dry_run != "off":
        return "neuron"
    found = torch.accelerator.current_accelerator(check_available=True)
    cuda = found is not None and found.type == "cuda"  # a laptop's mps has no process group
    return "neuron" if os.path.exists("/dev/neuron0") else "cuda" if cuda else "cpu"


def pick_device(cfg: Config) -> torch.device:
    """The device of --device, ready for init_process_group."""
    kind = device_type(cfg)
    global group_align
    group_align = 128 if kind == "neuron" else 1
    if cfg.dry_run != "off":
        return torch.device("cpu")  # of tensors without values; sizes are those of --device
    if kind == "neuron":
        import torch_neuronx  # noqa: F401 - registers the device and its process-group backend
    elif kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(kind)


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks instead of returning each to the kernel.

    Every step frees and allocates the same activations; page faults for them can cost more than the
    arithmetic (SwiGLU of 4,096 x 768 on two cores: 21 ms, and 6 ms with this). CPU runs only.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def init_distributed(device: torch.device) -> None:
    """Process group from torchrun's environment; one rank by itself needs no launcher."""
    if dist.is_initialized():  # by a test, or by a script that imports this one
        return
    if "RANK" not in os.environ:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = str(s.getsockname()[1])
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update(alone)
    backend = {"cpu": "gloo", "cuda": "nccl"}.get(device.type, device.type)
    # Long, because a rank may still be compiling while the others wait in a collective.
    minutes = int(os.environ.get("PG_TIMEOUT_MINUTES", "60"))
    dist.init_process_group(backend, timeout=timedelta(minutes=minutes))


# Flags whose change alters a run that is resumed.
ALTERING_FLAGS = (
    "model", "task", "packing", "dataset", "dataset_config", "split", "text_column", "disable_shuffle", "seq_len",
    "global_batch_size", "eval_every", "eval_steps", "steps", "seed", "lr", "warmup_steps", "decay_type",
    "decay_ratio", "min_lr_factor", "weight_decay", "max_norm", "adam_beta1", "adam_beta2", "adam_eps",
    "router_aux_loss_coef", "mixed_precision_param", "mixed_precision_reduce",
)  # fmt: skip


class Trainer:
    """Everything between the flags and the loop, in the order in which it must happen."""

    def __init__(self, cfg: Config, hf: Any) -> None:
        self.cfg, self.hf, self.device = cfg, hf, pick_device(cfg)
        if self.device.type == "cpu" and cfg.dry_run == "off":
            keep_freed_memory()
        init_distributed(self.device)  # before anything touches the device
        self.world_size = dist.get_world_size()
        # for errors, signals and files: host messages that never wait for the device
        self.control = control_group()
        if cfg.mixed_precision_param == "auto":
            cfg.mixed_precision_param = "float32" if device_type(cfg) == "cpu" else "bfloat16"
        torch.manual_seed(cfg.seed)
        self.mesh = build_mesh(cfg, self.device.type, self.world_size)
        replicate, shard, self.tp = degrees(cfg, self.world_size)
        self.dp_size = replicate * shard
        self.dp_rank = dist.get_rank() // self.tp  # tp is innermost
        self.dp_group = self.make_dp_group()

        self.model = build_model(cfg, hf)
        kernels.apply_overrides(self.model, kernels.load_overrides(override_specs(cfg)), log)
        total, active = count_parameters(self.model, hf)
        parallelize(self.model, self.mesh, cfg)
        coef = cfg.router_aux_loss_coef
        if coef is None:
            coef = hf.router_aux_loss_coef if getattr(hf, "output_router_logits", False) else 0.0
        self.loader = Loader(self.load_rows(), cfg, self.dp_rank, self.dp_size)
        self.grad_accum_steps = self.loader.global_batch // self.loader.micro
        # Each tp rank adds the same balance loss, each micro-batch its own.
        self.routers = RouterStats(
            self.model, coef, self.dp_group, 1 / (self.tp * self.grad_accum_steps)
        )
        self.model.lm_head.loss_chunks = num_loss_chunks(cfg, -(-hf.vocab_size // self.tp))
        with waiting_for("loading weights"):
            materialize(self.model, self.device, cfg, self.control)
        self.optimizer = build_optimizer(self.model, cfg)
        self.step = self.first_step = 0
        self.bad_steps = torch.zeros((), device=self.device)  # consecutive, counted on the device
        self.checkpoints = TrainingCheckpoints(Path(cfg.output_dir), cfg.keep)
        self.resume()
        self.summary(total, active)

    def make_dp_group(self) -> Any:
        """The ranks that read different data (they share a tp rank); None if there is only one."""
        if self.dp_size == 1:
            return None
        return self.mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group()

    def load_rows(self) -> Any:
        """The dataset; the first rank of each node tokenises it, unless run.sh already did."""
        if self.world_size == 1:
            return open_rows(self.cfg, self.hf)
        first = os.environ["LOCAL_RANK"] == "0"
        rows = open_rows(self.cfg, self.hf) if first else None
        dist.barrier(group=self.control)
        return rows if first else open_rows(self.cfg, self.hf)

    def summary(self, total: int, active: int) -> None:
        cfg, mesh = self.cfg, self.mesh
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
        shape = " x ".join(f"{n} {s}" for n, s in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        log.info(
            f"{versions}; {self.world_size} rank(s) on {self.device.type} ({device_name(self.device)}); {shape}"
        )
        log.info(
            f"model {cfg.model} ({cfg.backend}): {total:,} parameters, {active:,} active per token; "
            f"compute in {cfg.mixed_precision_param}"
        )
        tokens = self.loader.global_batch * cfg.seq_len
        rows = self.loader.rows.num_rows
        log.info(
            f"data {cfg.dataset}: {f'{rows:,} rows' if rows else 'stream'} of {cfg.seq_len}; {tokens:,} tokens a step = "
            f"{self.dp_size} dp rank(s) x {cfg.local_batch_size} rows x {self.grad_accum_steps} micro-batch(es)"
        )
        header = {
            "versions": versions,
            "parameters": total,
            "active_parameters": active,
            "mesh": shape,
            "first_step": self.first_step,
        }
        self.metrics = Metrics(cfg, self.hf, self.world_size, self.device, header)
        self.metrics.mark(self.step, self.step * tokens)

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds as tensors; the optimizer's state is made if there is none yet."""
        state = {"rng": torch.get_rng_state(), "bad_steps": self.bad_steps}
        for name, p in unique_parameters(self.model).items():
            moments = self.optimizer.state[p]
            if not moments:
                moments["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state |= {f"model.{name}": p.detach()}
            state |= {f"optimizer.{key}.{name}": value for key, value in moments.items()}
        return state

    def save(self) -> None:
        facts = {
            "step": self.step,
            "position": self.loader.position,
            "global_batch": self.loader.global_batch,
            "world_size": self.world_size,
            "rows": self.loader.rows.num_rows,
            "config": dataclasses.asdict(self.cfg),
            "architecture": architecture(self.hf),
        }
        with waiting_for(f"saving the checkpoint of step {self.step}"):
            self.checkpoints.save(self.state(), facts, self.cfg.async_save)

    def resume(self) -> None:
        """Go on from the checkpoint that --resume asks for, and say what differs from then."""
        with waiting_for("looking for a checkpoint"):
            step = self.checkpoints.find(self.cfg.resume)
        if step is None:
            return
        facts, state = self.checkpoints.facts(step, self.hf), self.state()
        with waiting_for(f"loading the checkpoint of step {step}"):
            self.checkpoints.load(state, step)
        torch.set_rng_state(state["rng"])
        self.step = self.first_step = step
        self.loader.position = facts["position"]
        log.info(
            f"resuming from step {step} of {self.cfg.output_dir}, saved on {facts['world_size']} rank(s)"
        )
        then = facts["config"] | {"global_batch_size": facts["global_batch"]}
        now = dataclasses.asdict(self.cfg) | {"global_batch_size": self.loader.global_batch}
        if facts["rows"] != (rows := self.loader.rows.num_rows):
            log.warning(
                f"the dataset has {rows} rows, had {facts['rows']}: the run goes on differently"
            )
        for name in ALTERING_FLAGS:
            if then.get(name) != now[name]:
                log.warning(
                    f"--{name} is {now[name]}, was {then.get(name)}: the run goes on differently"
                )

    def to_device(self, batch: Batch) -> Batch:
        return tuple(t.to(self.device, non_blocking=True) for t in batch)

    def sum_over_dp(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.dp_group is None else funcol.all_reduce(x, "sum", self.dp_group)

    def train_step(self, batches: list[Batch]) -> dict[str, torch.Tensor]:
        """One optimizer step over this rank's micro-batches -> scalars on the device, not yet read.

        loss: this rank's part of sum over valid labels / their global number; aux likewise.
        """
        cfg, loss_sum = self.cfg, torch.zeros((), device=self.device)
        aux_sum = torch.zeros((), device=self.device)
        valid = sum((labels != IGNORE_INDEX).sum() for _, labels, *_ in batches).float()
        # over ranks and micro-batches, so that uneven padding cannot skew the mean
        num_valid = self.sum_over_dp(valid.to(self.device))
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(self.step, cfg)
        for i, batch in enumerate(batches):
            inputs, labels, *starts = self.to_device(batch)
            self.set_gradient_sync(i == len(batches) - 1)
            loss = self.model(inputs, labels, *starts) / num_valid.clamp(min=1)
            aux = self.routers.balance_loss(*starts)
            (loss if aux is None else loss + aux).backward()
            self.routers.clear()
            loss_sum += loss.detach()
            aux_sum += 0 if aux is None else aux.detach()
        grads = finish_gradients(self.model)
        norm = global_norm(self.model, grads)
        # Nothing to learn from, or not finite: the weights stay. The same decision on every rank.
        finite = norm.isfinite()
        update(self.optimizer, grads, norm, ~finite | (num_valid == 0), cfg.max_norm)
        self.bad_steps = torch.where(finite, 0.0, self.bad_steps + 1)
        return {
            "loss": loss_sum,
            "aux": aux_sum * self.tp,
            "grad_norm": norm,
            "num_valid": num_valid,
        }

    def set_gradient_sync(self, last: bool) -> None:
        """Reduce gradients over data-parallel ranks once a step, with the last micro-batch."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)

    def log_step(self, out: dict[str, torch.Tensor]) -> float:
        """Read the step's numbers (the host waits here) and print them. Raises on persistent NaNs."""
        sums = self.sum_over_dp(torch.stack((out["loss"], out["aux"])))
        numbers = torch.stack((*sums, out["grad_norm"], out["num_valid"], self.bad_steps)).tolist()
        loss, aux, norm, num_valid, bad = numbers
        values = {"loss": loss, "grad_norm": norm, "labels": num_valid}
        if self.routers.load_E is not None:
            values |= {"aux_loss": aux} if self.routers.coef else {}
            values["expert_load"] = self.routers.max_load()
        tokens = self.step * self.loader.global_batch * self.cfg.seq_len
        self.metrics.log(self.step, tokens, values | {"lr": lr_at(self.step, self.cfg)})
        if num_valid == 0:
            log.warning(
                f"step {self.step}: no label of the whole batch is valid; weights left as they were"
            )
        if bad:
            log.warning(
                f"step {self.step}: gradients were not finite for the last {bad:.0f} step(s), which were skipped"
            )
        if bad >= 3:
            raise FloatingPointError(
                f"gradients were not finite for {bad:.0f} steps in a row (up to step {self.step}, loss {loss}, grad_norm "
                f"{norm}); the weights are those of step {self.step - bad:.0f}. Try a lower --lr or longer --warmup_steps"
            )
        return loss

    @torch.no_grad()
    def evaluate(self) -> None:
        """Token-weighted mean loss over the held-out rows."""
        start = time.perf_counter()
        self.model.eval()
        totals = torch.zeros(2, device=self.device)  # summed loss, valid labels
        for batch in self.loader.validation():
            inputs, labels, *starts = self.to_device(batch)
            loss = self.model(inputs, labels, *starts)
            totals += torch.stack((loss, (labels != IGNORE_INDEX).sum().float()))
        self.routers.clear()
        self.model.train()
        loss, valid = self.sum_over_dp(totals).tolist()
        log.info(
            f"step: {self.step:2d}  eval_loss: {loss / max(valid, 1):8.5f}  eval_tokens: {valid:,.0f}"
        )
        self.metrics.record(
            {"step": self.step, "eval_loss": loss / max(valid, 1), "eval_tokens": valid}
        )
        self.metrics.time += time.perf_counter() - start  # evaluation is not training time

    def train(self) -> None:
        """The loop: a step, and now and then a line, a validation, a checkpoint; at the end the export."""
        cfg, start = self.cfg, time.perf_counter()
        stop = StopSignal(self.control)
        self.model.train()
        if self.step >= cfg.steps:
            log.info(
                f"nothing to train: the checkpoint is of step {self.step}, --steps is {cfg.steps}"
            )
        with self.profiler() as profiler:
            while self.step < cfg.steps:
                self.step += 1
                first, last = self.step == self.first_step + 1, self.step == cfg.steps
                with waiting_for("compiling the first step") if first else contextlib.nullcontext():
                    out = self.train_step(next(self.loader))
                    if first:
                        out["grad_norm"].item()  # waits, so that its time is known apart
                        seconds = time.perf_counter() - start
                        log.info(f"first step, with compilation: {seconds:.1f} s")
                if first or last or self.step % cfg.log_every == 0:
                    loss = self.log_step(out)
                if self.step == 1:
                    self.check_first_loss(loss)
                if cfg.eval_every and self.step % cfg.eval_every == 0:
                    self.evaluate()
                stopping = stop.at_end_of_step()
                if stopping or (cfg.save_every and (last or self.step % cfg.save_every == 0)):
                    self.save()
                profiler.step()
                if stopping and not last:
                    self.checkpoints.wait()
                    raise Stopped(
                        f"stopped by a signal after step {self.step}, which is saved; the same command goes on"
                    )
        self.checkpoints.wait()
        seconds = time.perf_counter() - start
        tokens = (self.step - self.first_step) * self.loader.global_batch * cfg.seq_len
        steps = self.step - self.first_step
        log.info(f"trained {steps} steps, {tokens:,} tokens in {timedelta(seconds=round(seconds))}")
        if not cfg.skip_export:
            try:
                self.export()
            except SaveError as e:
                if cfg.save_every:
                    raise
                self.save()  # nothing else holds what was trained
                self.checkpoints.wait()
                raise SaveError(
                    f"{e}; a training checkpoint of step {self.step} was saved instead"
                ) from e
        log.info(f"done: {self.step} steps; numbers in {cfg.output_dir}/metrics.jsonl")
        self.metrics.close()

    def check_first_loss(self, loss: float) -> None:
        """The first loss tells whether weights, tokenizer and data belong together."""
        cfg, chance = self.cfg, math.log(self.hf.vocab_size)
        if (
            cfg.expect_first_loss is not None
            and not abs(loss - cfg.expect_first_loss) <= cfg.expect_tol
        ):
            raise RunError(
                f"the first loss is {loss:.4f}, --expect_first_loss is {cfg.expect_first_loss} within "
                f"--expect_tol {cfg.expect_tol}: are weights, tokenizer and data those that you meant?"
            )
        if cfg.model not in PRESETS and not cfg.random_init and loss > 0.9 * chance:
            log.warning(
                f"the first loss, {loss:.2f}, is near that of random weights, ln(vocab_size) = {chance:.2f}: "
                f"do the weights of --model {cfg.model} and its tokenizer fit the data?"
            )

    def export(self) -> None:
        """The trained weights as a Hugging Face folder."""
        cfg = self.cfg
        source = None if cfg.model in PRESETS else model_folder(cfg, MODEL_FILES)
        stored = str(self.hf.dtype or "").removeprefix("torch.") if source else ""
        dtype = DTYPES.get(
            stored if cfg.export_dtype == "auto" else cfg.export_dtype, torch.bfloat16
        )
        folder = export_folder(cfg)
        facts = {
            "started from": cfg.model + " (random weights)" * (source is None or cfg.random_init),
            "data": cfg.dataset, "task": cfg.task, "steps": self.step, "sequence length": cfg.seq_len,
            "rows per step": self.loader.global_batch, "peak learning rate": cfg.lr, "seed": cfg.seed,
        }  # fmt: skip
        chat = text_encoder(cfg).chat if cfg.task == "sft" else None
        end = chat.tokenizer.convert_tokens_to_ids(chat.end) if chat else None
        with waiting_for(f"exporting to {folder}"):
            how = export(self.model, folder, dtype, source, facts, self.control, end)
        log.info(f"exported to {folder} ({dtype}); {how}")

    def profiler(self) -> Any:
        """torch.profiler over steps 3 to 5, one trace file a rank; otherwise an object that does nothing."""
        if not self.cfg.profile:
            return contextlib.nullcontext(types.SimpleNamespace(step=lambda: None))
        trace = Path(self.cfg.output_dir) / "trace"
        return torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                str(trace), f"rank{dist.get_rank()}"
            ),
        )


def export_folder(cfg: Config) -> Path:
    return Path(cfg.export_dir or Path(cfg.output_dir) / "hf")


def text_encoder(cfg: Config) -> Encoder:
    """The tokenizer of --model, fetched when it is first needed; bytes for presets."""
    if cfg.model in PRESETS:
        return Encoder(cfg.model, None)
    return Encoder(cfg.model, lambda: model_folder(cfg, ["*.json", "*.txt", "*.jinja"]))


def open_rows(cfg: Config, hf: Any) -> FileRows | StreamRows:
    """The dataset as rows; tokenises it if no earlier run has."""
    with waiting_for(f"preparing {cfg.dataset}"):
        return data.open_rows(cfg, text_encoder(cfg), hf.vocab_size)


# ---- Entry point --------------------------------------------------------------------------------
def num_ranks(cfg: Config) -> int:
    """Ranks of this run; of a dry run those of --world_size, or of the degrees."""
    if cfg.dry_run == "off":
        return int(os.environ.get("WORLD_SIZE", "1"))
    shard = max(1, cfg.data_parallel_shard_degree)
    product = cfg.data_parallel_replicate_degree * shard * cfg.tensor_parallel_degree
    return cfg.world_size or product


def output_problems(cfg: Config) -> list[str]:
    """Whether the folders that the run will write can be written. A dry run only looks."""
    if cfg.dry_run != "off":
        folders = {"output_dir": Path(cfg.output_dir)}
        if not cfg.skip_export:
            folders["export_dir"] = export_folder(cfg).parent
        errors = []
        for name, folder in folders.items():
            there = next(f for f in (folder.absolute(), *folder.absolute().parents) if f.exists())
            if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
                errors.append(f"--{name} {folder}: cannot be written; use another folder")
        return errors
    try:
        Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cfg.output_dir).close()
    except OSError as e:
        return [
            f"--output_dir {cfg.output_dir}: cannot be written: {e.strerror}; use another folder"
        ]
    source = Path(cfg.model) if Path(cfg.model).is_dir() else None
    if not cfg.skip_export and (problem := export_problem(export_folder(cfg), source)):
        return [f"--export_dir {problem}"]
    return []


def preflight(cfg: Config) -> Any:
    """All that can be known before devices start. Returns the model's config; raises UsageError."""
    hf = load_model_config(cfg)
    errors = validate(cfg, hf, num_ranks(cfg))
    if specs := override_specs(cfg):
        overrides = kernels.load_overrides(specs)
        errors += kernels.check_constraints(
            hf, cfg.seq_len, cfg.tensor_parallel_degree, overrides, device_type(cfg)
        )
        if not errors:  # on a throw-away model without memory: conflicts show before devices start
            kernels.apply_overrides(build_model(cfg, hf), overrides, SILENT)
    errors += output_problems(cfg)
    if errors:
        raise UsageError("\n".join(errors))
    return hf


def leave(code: int) -> NoReturn:
    """Exit. torchrun turns every failure into 1, so run.sh learns the code from a file."""
    if path := os.environ.get("EXIT_CODE_FILE"):
        Path(path).write_text(str(code))
    sys.exit(code)


def run(cfg: Config) -> None:
    """Check, then train, or what --check and --inspect ask for instead."""
    if cfg.dry_run != "off":
        sys.modules.setdefault("train_qwen3_trn", sys.modules[__name__])  # plan imports it by name
        import plan

        return plan.dry_run(cfg)
    hf = preflight(cfg)
    if cfg.check:
        Loader(open_rows(cfg, hf), cfg, 0, 1)
    elif cfg.inspect:
        if os.environ.get("RANK", "0") == "0":
            loader = Loader(open_rows(cfg, hf), cfg, 0, 1)
            sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
            print(*data.inspect(loader, text_encoder(cfg), cfg.inspect), sep="\n", flush=True)
    else:
        Trainer(cfg, hf).train()
        dist.destroy_process_group()


@record  # torchrun prints the traceback of the rank that failed first
def main() -> None:
    setup_logging()
    try:
        run(parse(sys.argv[1:]))
    except Stopped as e:
        log.warning(e)
        leave(RESUMABLE)
    except (UsageError, kernels.OverrideError, RunError, FloatingPointError) as e:
        for line in str(e).splitlines():  # no traceback
            print(f"[qwen3-trn] error: {line}", file=sys.stderr)
        leave(1 if isinstance(e, RunError | FloatingPointError) else 2)
    except KeyboardInterrupt:
        leave(130)  # as a shell says of SIGINT


if __name__ == "__main__":
    main()
