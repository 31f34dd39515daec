"""Tests of train_qwen3_trn.py. They run on a CPU and download nothing.

pytest test_train.py -n 2           # every claim at least once
pytest test_train.py -n 2 --slow    # the full cross product of models, backends and layouts as well
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import checkpoint
import data
import kernels
import nki_cpu
import plan
import train_qwen3_trn as trn
from nki_cpu import isa as nisa
from nki_cpu import language as nl

HERE = Path(trn.__file__).parent
S, ROWS, STEPS = 32, 8, 10  # tokens in a row, rows in a global batch, steps of a comparison
# Largest difference, relative to the largest element. float32 keeps 6e-8; a sum of a few hundred
# terms in another order costs some ten times that, and three layers of it stay below:
TOL = 1e-5
LOSS_TOL = 1e-6  # one number, a mean over hundreds of tokens: rounding averages out
# Norms after ten AdamW steps: Adam divides by sqrt(v), so rounding in tiny gradients moves weights.
# transformers in float32 is as far from transformers in float64 (measured 5e-5 dense, 6e-4 MoE).
NORM_TOL = {"tied": 1e-4, "untied": 1e-4, "moe": 6e-4}
SIZES = {
    "vocab_size": 203, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
    "max_position_embeddings": 512, "initializer_range": 0.05, "use_cache": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
MOE = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "mlp_only_layers": [0], "output_router_logits": True, "router_aux_loss_coef": 0.02,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "tied": {"tie_word_embeddings": True, "vocab_size": 208},
    "untied": {},  # a vocabulary of 203 divides by no tp
    "yarn": {"rope_parameters": YARN},
    "moe": MOE,
    "moe_sparse": MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False},
}


def hf_config(kind: str, **changes):
    sizes = SIZES | KINDS[kind] | changes
    return (Qwen3MoeConfig if "num_experts" in sizes else Qwen3Config)(**sizes)


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory) -> None:
    os.environ["QWEN3_TRN_TESTS"] = str(tmp_path_factory.mktemp("shared"))


def root() -> Path:
    """A folder of this test process and its ranks: checkpoints and tokens, made once."""
    return Path(os.environ["QWEN3_TRN_TESTS"])


@functools.cache
def model_folder(kind: str) -> str:
    """A seeded checkpoint in the hub's layout. Its norms differ from 1, so that a mixed-up one shows."""
    if (root() / kind).exists():  # made by the process that started this rank
        return str(root() / kind)
    torch.manual_seed(1)  # no routing near-tie in the steps below, which rounding would decide
    model = AutoModelForCausalLM.from_config(hf_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.add_(0.1 * torch.randn_like(p))
            elif name.endswith("mlp.gate.weight"):
                p.copy_(0.2 * torch.randn_like(p))
    model.save_pretrained(root() / kind)
    return str(root() / kind)


@functools.cache
def token_file(vocab: int = 203, rows: int = ROWS * STEPS, seq_len: int = S) -> str:
    """Rows of a learnable stream: the next token is a fixed function of the last, 7 times in 10."""
    path = root() / f"tokens{vocab}_{rows}_{seq_len}.npy"
    if path.exists():
        return str(path)
    rng = np.random.default_rng(7)
    x = rng.integers(vocab, size=(rows, seq_len + 1))
    for t in range(1, seq_len + 1):
        x[:, t] = np.where(rng.random(rows) < 0.7, (x[:, t - 1] * 5 + 3) % vocab, x[:, t])
    np.save(path, x)
    return str(path)


def arguments(kind: str, *flags: str, out: Path | None = None) -> list[str]:
    return [
        "--model", model_folder(kind), "--dataset", token_file(), "--seq_len", str(S), "--disable_shuffle",
        "--steps", str(STEPS), "--log_every", "1", "--global_batch_size", str(ROWS),
        "--output_dir", str(out or root() / "out"), *" ".join(flags).split(),
    ]  # fmt: skip


def loaded(kind: str, *flags: str) -> trn.Qwen3ForCausalLM:
    """Our model with the checkpoint's weights, in this process, without any parallelism."""
    cfg = trn.parse(arguments(kind, *flags))
    model = trn.build_model(cfg, trn.load_model_config(cfg))
    trn.materialize(model, torch.device("cpu"), cfg)
    return model


def plain_hf(kind: str, **kwargs):
    """transformers' own model, loaded by transformers."""
    return AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32, **kwargs)


def batch(first: int = 0, rows: int = ROWS) -> trn.Batch:
    return trn.make_batch(list(np.load(token_file())[first : first + rows]))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def hf_loss(model, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of whole logits; labels are shifted already."""
    logits = model(input_ids=inputs).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def hf_aux(model, inputs: torch.Tensor) -> torch.Tensor:
    router_logits = model(input_ids=inputs, output_router_logits=True).router_logits
    c = model.config
    return load_balancing_loss_func(router_logits, c.num_experts, c.num_experts_per_tok)


@pytest.fixture(autouse=True)
def token_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ---- Ranks --------------------------------------------------------------------------------------
# Forked from a server that has imported everything, so that starting four ranks takes no time.
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload([__name__])


def rank_main(pipe, store: str, rank: int, world: int, env: dict, function, args: tuple) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        result = (True, function(*args))
    except BaseException:  # handed to the test, which fails with it
        result = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    os._exit(0)  # no farewell between ranks: a test may leave them out of step


def run_ranks(world: int, function, *args, timeout: float = 240) -> list:
    """function(*args) on ``world`` gloo ranks -> what each returned. The first failure fails the test."""
    store = str(root() / f"store{time.perf_counter_ns()}")
    processes, pipes, results = [], {}, {}
    for rank in range(world):
        receive, send = SPAWN.Pipe(duplex=False)
        env = {k: v for k, v in os.environ.items() if k.startswith(("XDG_", "QWEN3_TRN_TESTS"))}
        args_ = (send, store, rank, world, env, function, args)
        processes.append(SPAWN.Process(target=rank_main, args=args_, daemon=True))
        processes[-1].start()
        send.close()
        pipes[receive] = rank
    end = time.monotonic() + timeout
    try:
        while pipes:
            ready = wait(list(pipes), max(0, end - time.monotonic()))
            assert ready, f"ranks {sorted(pipes.values())} said nothing within {timeout} s"
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    ok, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    ok, results[rank] = False, "it died"
                assert ok, f"rank {rank} of {world}: {results[rank]}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(world)]


def full(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def make_trainer(argv: list[str]) -> trn.Trainer:
    cfg = trn.parse(argv)
    return trn.Trainer(cfg, trn.preflight(cfg))


def gradients_of(argv: list[str], batches_of_rank) -> tuple[float, float, dict]:
    """Loss, norm and whole gradients of one step over batches_of_rank(rank), before clipping."""
    trainer, grads = make_trainer(argv), {}

    def keep(*_args, **_kwargs) -> None:
        grads.update({n: full(p.grad) for n, p in trn.unique_parameters(trainer.model).items()})

    trn.update = keep
    out = trainer.train_step(batches_of_rank(trainer.dp_rank))
    return trainer.sum_over_dp(out["loss"]).item(), out["grad_norm"].item(), grads


# ---- Model --------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_equals_transformers(kind, backend):
    """Logits, loss and every gradient, on the same weights: rotary tables, causal mask, experts, ties."""
    ours, theirs = loaded(kind, "--backend", backend), plain_hf(kind)
    inputs, labels = batch()
    labels[0, :5] = trn.IGNORE_INDEX
    assert relative(ours(inputs), theirs(input_ids=inputs).logits) < TOL
    loss, expected = ours(inputs, labels), hf_loss(theirs, inputs, labels)
    assert abs(loss.item() / expected.item() - 1) < LOSS_TOL
    loss.backward()
    expected.backward()
    grads = {n: p.grad for n, p in theirs.named_parameters()}
    assert grads.keys() == trn.unique_parameters(ours).keys()
    for name, p in trn.unique_parameters(ours).items():
        assert relative(p.grad, grads[name]) < TOL, name


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_attention_is_causal_and_knows_positions(backend):
    model, inputs = loaded("untied", "--backend", backend), batch(rows=1)[0]
    changed = inputs.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 203
    assert torch.equal(model(inputs)[:, :-1], model(changed)[:, :-1])
    swapped = inputs[:, [1, 0, *range(2, S)]]  # without positions the last token could not tell
    assert not torch.allclose(model(inputs)[:, -1], model(swapped)[:, -1], atol=1e-3)


def test_labels_are_shifted_once():
    """make_batch against the loss of transformers, which shifts for itself."""
    rows = np.load(token_file())[:ROWS]
    inputs, labels = trn.make_batch(list(rows))
    ids = torch.from_numpy(rows)
    expected = plain_hf("untied")(input_ids=ids, labels=ids).loss
    mean = loaded("untied")(inputs, labels) / labels.numel()
    assert abs(mean.item() / expected.item() - 1) < LOSS_TOL


def test_rotary_tables_are_float32_exact():
    """At far positions too: the phase never passes through a lower precision."""
    hf = hf_config("untied", max_position_embeddings=32768)
    rotary = trn.RotaryEmbedding(hf, 32768)
    rotary.reset()
    inv_freq = 1e6 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    for position in (0, 255, 4095, 32767):
        # float32 angle: one rounding of position * inv_freq, up to 32767 * 6e-8
        expected = (position * inv_freq).cos()
        assert (rotary.cos[position] - expected).abs().max() < 32767 * 1.2e-7 + 1e-6


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [("0.6B", 596_049_920, None), ("1.7B", 1_720_574_976, None), ("4B", 4_022_468_096, None),
     ("8B", 8_190_735_360, None), ("14B", 14_768_307_200, None), ("32B", 32_762_123_264, None),
     ("30B-A3B", 30_532_122_624, 3_353_032_704), ("235B-A22B", 235_093_634_560, 22_190_763_520)],
)  # fmt: skip
def test_presets_have_the_published_sizes(preset, total, active):
    """Names and shapes of transformers; of the experts only 8 of 128 are active."""
    cfg = trn.parse(["--model", preset])
    hf = trn.load_model_config(cfg)
    ours = trn.build_model(cfg, hf)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf)
    shapes = [{n: p.shape for n, p in model.named_parameters()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert trn.count_parameters(ours, hf) == (total, active or total)


@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_bf16_error_is_at_most_twice_that_of_transformers(kind):
    """Loss and gradients of bf16 mixed precision against float32, both measured the same way."""
    argv = arguments(kind, "--mixed_precision_param bfloat16 --router_aux_loss_coef 0")
    [(loss, _, grads)] = run_ranks(1, gradients_of, argv, whole_batch)
    inputs, labels = batch()
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=dtype)
        value = hf_loss(model, inputs, labels) / labels.numel()
        value.backward()
        theirs[dtype] = value.item(), {n: p.grad.float() for n, p in model.named_parameters()}
    exact_loss, exact = theirs[torch.float32]
    hf_bf16_loss, hf_bf16 = theirs[torch.bfloat16]
    # 2e-3: below half a unit in bf16's last place, being nearer than twice HF's luck proves nothing
    assert abs(loss - exact_loss) <= max(2 * abs(hf_bf16_loss - exact_loss), 2e-3 * exact_loss)

    def error(found: dict) -> float:
        return math.sqrt(sum((found[n] - exact[n]).square().sum().item() for n in exact))

    assert error(grads) <= 2 * error(hf_bf16)


def whole_batch(_rank: int) -> list[trn.Batch]:
    return [batch()]


# ---- Parallelism --------------------------------------------------------------------------------
LAYOUTS = {  # name -> ranks, data-parallel ranks, micro-batches, flags
    "single": (1, 1, 1, ""),
    "accumulate": (1, 1, 2, ""),
    "full_ac": (1, 1, 1, "--ac full"),
    "selective_ac": (1, 1, 1, "--ac selective"),
    "compile": (1, 1, 1, "--compile"),
    "compile_fsdp2_ac": (2, 2, 1, "--compile --compile_backend aot_eager --ac full"),
    "fsdp2": (2, 2, 1, ""),
    "fsdp2_always": (2, 2, 1, "--reshard_after_forward always --loss_chunks 3"),
    "fsdp2_never_ac": (2, 2, 2, "--reshard_after_forward never --ac selective"),
    "fsdp2_offload": (2, 2, 1, "--cpu_offload"),
    "tp2": (2, 1, 1, "--tp 2"),
    "tp2_no_sp": (2, 1, 1, "--tp 2 --disable_sequence_parallel"),
    "tp2_whole_vocab": (2, 1, 1, "--tp 2 --disable_loss_parallel"),
    "compile_tp2": (2, 1, 1, "--tp 2 --compile --compile_backend aot_eager"),
    "compile_fsdp2_tp2": (4, 2, 1, "--tp 2 --ac selective --compile --compile_backend aot_eager"),
    "tp4": (4, 1, 1, "--tp 4"),
    "fsdp2_tp2": (4, 2, 1, "--tp 2"),
    "fsdp2_tp2_accumulate_ac": (4, 2, 2, "--tp 2 --ac selective"),
    "hsdp": (4, 4, 1, "--dp_replicate 2 --dp_shard 2"),
    "replicate2_tp2": (4, 2, 1, "--dp_replicate 2 --tp 2 --disable_sequence_parallel"),
}
OPTIMIZER = "--lr 2e-3 --warmup_steps 2 --weight_decay 0.1 --max_norm 0.9 --decay_type cosine"


@functools.cache
def reference(kind: str, micro_batches: int) -> list[tuple[float, float, float]]:
    """(loss, aux, grad norm) of each step, by transformers, AdamW and torch's clipping, one process."""
    model, cfg = plain_hf(kind), trn.parse(arguments(kind, OPTIMIZER))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-8)
    rows = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            progress = max(0, step - 2) / 8  # warm-up of 2 steps, then cosine over the other 8
            cosine = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
            group["lr"] = 2e-3 * ((step + 1) / 2 if step < 2 else cosine)
            assert math.isclose(group["lr"], trn.lr_at(step + 1, cfg))
        inputs, labels = batch(step * ROWS)
        loss = hf_loss(model, inputs, labels) / labels.numel()
        aux = torch.zeros(())
        if kind == "moe":  # transformers' balance loss is that of a forward pass: of a micro-batch
            parts = inputs.chunk(micro_batches)
            aux = 0.02 * sum(hf_aux(model, part) for part in parts) / micro_batches
        (loss + aux).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.9)
        rows.append((loss.item(), aux.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return rows


def train(argv: list[str]) -> None:
    make_trainer(argv).train()


def check_parity(tmp_path, layout: str, kind: str, backend: str, extra: str = "") -> None:
    world, dp, micro_batches, flags = LAYOUTS[layout]
    local = ROWS // dp // micro_batches
    flags = f"{flags} {extra} --backend {backend} --local_batch_size {local} {OPTIMIZER}"
    run_ranks(world, train, arguments(kind, flags, out=tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, (loss, aux, norm) in zip(rows, reference(kind, micro_batches), strict=True):
        assert row["loss"] == pytest.approx(loss, rel=TOL), row["step"]
        assert row["grad_norm"] == pytest.approx(norm, rel=NORM_TOL[kind]), row["step"]
        if aux:
            assert row["aux_loss"] == pytest.approx(aux, rel=NORM_TOL[kind]), row["step"]


def works(layout: str, kind: str) -> bool:
    return layout != "tp2_whole_vocab" or kind == "tied"  # 203 rows cannot be gathered evenly


EVERY = [
    (layout, kind, backend)
    for layout in LAYOUTS for kind in NORM_TOL for backend in ("native", "hf") if works(layout, kind)
]  # fmt: skip
# Every layout once, with model and backend in turn; and the plainest and the most mixed with all.
SHORT = {
    (layout, "tied" if layout == "tp2_whole_vocab" else ("moe", "untied", "tied")[i % 3], backend)
    for i, layout in enumerate(LAYOUTS)
    for backend in [("native", "hf")[i // 3 % 2]]
} | {case for case in EVERY if case[0] in ("single", "fsdp2_tp2")}


@pytest.mark.parametrize(
    ("layout", "kind", "backend"),
    [case if case in SHORT else pytest.param(*case, marks=pytest.mark.slow) for case in EVERY],
)
def test_ten_steps_equal_transformers(tmp_path, layout, kind, backend):
    """Losses and gradient norms of any layout are those of a plain loop around transformers."""
    check_parity(tmp_path, layout, kind, backend)


def masked_step(argv: list[str], dp: int, micro_batches: int, mask):
    """The first global batch, ``mask`` applied to its labels, as each rank's micro-batches."""
    inputs, labels = batch()
    labels = torch.where(mask, trn.IGNORE_INDEX, labels)
    parts = [x.chunk(dp * micro_batches) for x in (inputs, labels)]
    return gradients_of(argv, lambda rank: list(zip(*parts, strict=True))[rank::dp])


MASKS = {  # rows whose labels are ignored, of 8
    "unequal": [(0, 30), (1, 5), (5, 31), (7, 12)],
    "one_rank_or_micro_batch_has_none": [(i, S) for i in range(4, 8)] + [(0, 3)],
    "one_row_is_left": [(i, S) for i in range(7)],
}


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("layout", ["accumulate", "fsdp2", "fsdp2_tp2", "hsdp", "replicate2_tp2"])
def test_unequal_labels_give_the_joined_batch(layout, masked):
    """Loss and every gradient, where ranks or micro-batches differ in valid labels or have none."""
    mask = torch.zeros(ROWS, S, dtype=torch.bool)
    for row, n in MASKS[masked]:
        mask[row, :n] = True
    world, dp, micro_batches, flags = LAYOUTS[layout]
    argv = arguments("untied", flags, f"--local_batch_size {ROWS // dp // micro_batches}")
    results = run_ranks(world, masked_step, argv, dp, micro_batches, mask)
    inputs, labels = batch()
    labels[mask] = trn.IGNORE_INDEX
    model = plain_hf("untied")
    expected = hf_loss(model, inputs, labels) / (~mask).sum()
    expected.backward()
    exact = {n: p.grad for n, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm(exact.values()).item()
    for loss, found, grads in results:  # the same on every rank
        assert loss == pytest.approx(expected.item(), rel=LOSS_TOL * 2)  # a sum over ranks
        assert found == pytest.approx(norm, rel=TOL)
        assert all(relative(grads[n], g) < TOL for n, g in exact.items())


class Watch(TorchDispatchMode):
    """Records (operator, size of its largest output) of everything that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.seen.append((str(func.overloadpacket), max(sizes, default=0)))
        return out


def watched_step(argv: list[str]) -> list[tuple[str, int]]:
    """What runs in the second optimizer step."""
    trainer = make_trainer(argv)
    trainer.train_step(next(trainer.loader))
    batches = next(trainer.loader)
    with Watch() as watch:
        trainer.train_step(batches)
    return watch.seen


@pytest.mark.parametrize(
    ("world", "flags"),
    [(1, ""), (1, "--backend hf"), (2, "--tp 2"), (2, "--tp 2 --disable_loss_parallel")],
)
def test_whole_logits_never_exist(world, flags):
    """The largest tensor of a step, in forward, backward and optimizer, is one of 8 chunks of them."""
    folder, tokens, vocab = root() / "wide", 4 * 256, 8192
    hf_config("untied", vocab_size=vocab, num_hidden_layers=1).save_pretrained(folder)
    argv = f"--model {folder} --random_init --seq_len 256 --bs 4 {flags}".split()
    argv += ["--dataset", token_file(203, 20, 256), "--output_dir", str(root() / "out")]
    for seen in run_ranks(world, watched_step, argv):
        largest = max(size for _, size in seen)
        assert 0 < largest <= tokens * vocab // 8  # the head's weight is half of that


def test_step_does_not_wait_for_the_device():
    """Reading a value would stop an accelerator. One read: the labels are counted on the host."""
    for kind in ("tied", "moe"):
        argv = arguments(kind, "--local_batch_size 4")
        [seen] = run_ranks(1, watched_step, argv)
        reads = [op for op, _ in seen if op in ("aten._local_scalar_dense", "aten.nonzero")]
        assert len(reads) <= 1, reads


def test_gradients_are_reduced_once_a_step():
    """However many micro-batches there are."""
    counts = []
    for local in (4, 1):
        argv = arguments("untied", f"--local_batch_size {local}")
        counts.append(sum("reduce_scatter" in op for op, _ in run_ranks(2, watched_step, argv)[0]))
    assert counts[0] == counts[1] > 0


def hash_of_weights(argv: list[str]) -> dict:
    trainer = make_trainer(argv)
    whole = {n: full(p) for n, p in trn.unique_parameters(trainer.model).items()}
    local = sum(trn.local_tensor(p).numel() for p in trainer.model.parameters())
    return {"whole": whole, "share": local / sum(p.numel() for p in whole.values())}


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_random_weights_are_the_same_on_every_layout(backend):
    """Bit for bit, with the given spread, no block repeated, and no rank holding more than its share."""
    argv = f"--backend {backend} --bs 1 --seq_len 32 --dataset {token_file()} --seed 3".split()
    argv += ["--output_dir", str(root() / "out")]
    [one] = run_ranks(1, hash_of_weights, argv)
    for world, flags in [(2, ""), (2, "--tp 2"), (4, "--tp 2"), (4, "--dp_replicate 2 --tp 2")]:
        for result in run_ranks(world, hash_of_weights, [*argv, *flags.split()]):
            assert all(torch.equal(result["whole"][n], w) for n, w in one["whole"].items())
            shards = 2 if "replicate" in flags else world
            assert result["share"] < 1.02 / shards  # norms and the router are whole under tp
    for name, w in one["whole"].items():
        if w.ndim == 1:
            assert torch.equal(w, torch.ones_like(w))
            continue
        assert w.std().item() == pytest.approx(0.02, rel=0.05), name  # 1/sqrt(2n), n > 2000
        rows = w.flatten(0, -2)
        assert len(rows.unique(dim=0)) == len(rows)


def tied_after_training(argv: list[str]) -> tuple[bool, bool, dict]:
    trainer = make_trainer(argv)
    trainer.train()
    head, embedding = trainer.model.lm_head.weight, trainer.model.model.embed_tokens.weight
    norms = {n: trn.local_tensor(p) for n, p in trainer.model.named_parameters() if p.ndim == 1}
    return head is embedding, torch.equal(full(head), full(embedding)), norms


@pytest.mark.parametrize(("world", "flags"), [(2, "--bs 4"), (2, "--tp 2"), (4, "--tp 2 --bs 4")])
def test_tied_head_stays_tied_and_copies_stay_equal(world, flags):
    argv = arguments("tied", flags, "--steps 3")
    results = run_ranks(world, tied_after_training, argv)
    assert all(same and equal for same, equal, _ in results)
    if flags == "--tp 2":  # norms are whole on both ranks and see other tokens: bit-equal still
        assert all(torch.equal(results[0][2][n], results[1][2][n]) for n in results[0][2])


def clipped(argv: list[str], max_norm: float) -> tuple:
    """Whole gradients before and after clipping, and the norm."""
    trainer, seen = make_trainer([*argv, "--max_norm", str(max_norm)]), {}

    def keep(when: str) -> None:
        seen[when] = {n: full(p.grad) for n, p in trn.unique_parameters(trainer.model).items()}

    update = trn.update
    trn.update = lambda *args: (keep("before"), update(*args))
    trainer.optimizer.step = lambda *_: keep("after")
    norm = trainer.train_step(next(trainer.loader))["grad_norm"].item()
    return seen["before"], seen["after"], norm


@pytest.mark.parametrize("max_norm", [0, 0.1, 1e9])
@pytest.mark.parametrize("layout", ["fsdp2_tp2", "replicate2_tp2", "tp4"])
def test_clipping_equals_torch_on_gathered_gradients(layout, max_norm):
    world, dp, _, flags = LAYOUTS[layout]
    argv = arguments("moe", flags, f"--local_batch_size {ROWS // dp}")
    for before, after, norm in run_ranks(world, clipped, argv, max_norm):
        params = [torch.nn.Parameter(g) for g in before.values()]
        for p, g in zip(params, before.values(), strict=True):
            p.grad = g.clone()
        expected = torch.nn.utils.clip_grad_norm_(params, max_norm or math.inf)
        assert norm == pytest.approx(expected.item(), rel=TOL)
        assert all(relative(a, p.grad) < TOL for a, p in zip(after.values(), params, strict=True))


def poisoned(argv: list[str], bad_steps: set[int], value: float) -> tuple[list, list, str]:
    """Train with ``value`` in one gradient element of the last rank at the given steps."""
    trainer, finish, changed, bad = make_trainer(argv), trn.finish_gradients, [], []

    def finish_and_poison(model):
        grads = finish(model)
        if trainer.step in bad_steps and dist.get_rank() == dist.get_world_size() - 1:
            grads[-1].view(-1)[0] = value
        return grads

    trn.finish_gradients, step = finish_and_poison, trainer.train_step

    def compare(batches):
        before = [trn.local_tensor(p).clone() for p in trainer.model.parameters()]
        out = step(batches)
        after = [trn.local_tensor(p) for p in trainer.model.parameters()]
        changed.append(not all(map(torch.equal, before, after)))
        assert all(p.isfinite().all() for p in after)
        bad.append(int(trainer.bad_steps))
        return out

    trainer.train_step, message = compare, ""
    try:
        trainer.train()
    except FloatingPointError as e:
        message = str(e)
    return changed, bad, message


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("layout", ["single", "fsdp2", "fsdp2_tp2"])
def test_non_finite_gradients_never_reach_the_weights(layout, value):
    """Skipped on all ranks together, counted, forgotten after a good step, fatal three in a row."""
    world, dp, _, flags = LAYOUTS[layout]
    argv = arguments("untied", flags, f"--bs {ROWS // dp}")
    for changed, bad, message in run_ranks(world, poisoned, argv, {2, 3, 5, 6, 7}, value):
        assert changed == [True, False, False, True, False, False, False]
        assert bad == [0, 1, 2, 0, 1, 2, 3]
        assert "3 steps in a row" in message
        assert "step 7" in message
        assert "--lr" in message


def no_labels(argv: list[str]) -> tuple[bool, float]:
    trainer = make_trainer(argv)
    before = [trn.local_tensor(p).clone() for p in trainer.model.parameters()]
    inputs, labels = batch(rows=4)
    out = trainer.train_step([(inputs, torch.full_like(labels, trn.IGNORE_INDEX))])
    same = all(map(torch.equal, before, map(trn.local_tensor, trainer.model.parameters())))
    return same, out["loss"].item()


def test_batch_without_any_label_changes_nothing():
    assert run_ranks(2, no_labels, arguments("untied", "--bs 4")) == [(True, 0.0)] * 2


def decayed(argv: list[str]) -> dict[str, bool]:
    """Name -> whether a step with gradients of zero moved it."""
    trainer = make_trainer([*argv, "--lr", "0.1", "--weight_decay", "0.1", "--warmup_steps", "0"])
    before = {n: full(p) for n, p in trainer.model.named_parameters()}
    trainer.step = 1
    finish = trn.finish_gradients
    trn.finish_gradients = lambda model: [g.zero_() for g in finish(model)]
    trainer.train_step(next(trainer.loader))
    return {n: not torch.equal(full(p), before[n]) for n, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(("world", "flags"), [(1, ""), (4, "--tp 2 --bs 4"), (1, "--backend hf")])
def test_weight_decay_moves_matrices_only(world, flags):
    for moved in run_ranks(world, decayed, arguments("moe", flags)):
        assert all(m == (not n.endswith("norm.weight")) for n, m in moved.items()), moved


def idle_experts(argv: list[str]) -> tuple[list[float], int]:
    """Losses when all tokens go to the first experts, which live on the first tp rank; idle ones."""
    trainer = make_trainer(argv)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                trn.local_tensor(p).zero_()  # a tie: top-k takes the first experts
    losses = []
    for _ in range(3):
        trainer.step += 1
        losses.append(trainer.train_step(next(trainer.loader))["loss"].item())
    return losses, (trainer.routers.load_E == 0).sum().item()


def test_experts_without_tokens():
    """No hang, no undefined rows, and the same as on one rank."""
    argv = arguments("moe", "--router_aux_loss_coef 0 --lr 1e-12 --weight_decay 0")
    [(one, idle)] = run_ranks(1, idle_experts, argv)
    assert idle == 6
    for losses, idle in run_ranks(2, idle_experts, [*argv, "--tp", "2"]):
        assert losses == pytest.approx(one, rel=TOL)
        assert idle == 6


# ---- Weights ------------------------------------------------------------------------------------
def saved(tmp_path: Path, kind: str, **kwargs) -> Path:
    model = plain_hf(kind).to(kwargs.pop("dtype", torch.float32))
    model.save_pretrained(tmp_path, **kwargs)
    return tmp_path


def load(folder: Path, *flags: str) -> trn.Qwen3ForCausalLM:
    cfg = trn.parse(["--model", str(folder), *flags])
    model = trn.build_model(cfg, trn.load_model_config(cfg))
    trn.materialize(model, torch.device("cpu"), cfg)
    return model


@pytest.mark.parametrize(
    "form", ["one_file", "index", "stacked_experts", "bfloat16", "tied_stored_twice"]
)
def test_load_every_form_of_folder(tmp_path, form):
    """Experts one by one (the hub) or stacked (transformers), several files, bf16, a superfluous head."""
    kind = "tied" if form == "tied_stored_twice" else "moe"
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    size = {"max_shard_size": "100KB"} if form == "index" else {}
    folder = saved(tmp_path, kind, dtype=dtype, **size)
    expected = {n: p.to(dtype).float() for n, p in plain_hf(kind).named_parameters()}
    file = folder / "model.safetensors"
    if form == "index":
        assert len(list(folder.glob("*.safetensors"))) > 2
    elif form == "stacked_experts":
        save_file({n: p.detach() for n, p in expected.items()}, file)
    elif form == "tied_stored_twice":
        tensors = load_file(file)
        head = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors | {"lm_head.weight": head}, file)
    for name, p in trn.unique_parameters(load(folder)).items():
        assert p.dtype == torch.float32
        assert torch.equal(p, expected[name]), name


def shards_are_right(folder: str) -> list[str]:
    """Parameters whose gathered shards differ from the checkpoint."""
    trainer = make_trainer(arguments("moe", "--tp 2 --bs 4", "--model", folder))
    expected = {n: p.detach() for n, p in plain_hf("moe").named_parameters()}
    found = {n: full(p) for n, p in trn.unique_parameters(trainer.model).items()}
    return [n for n in expected if not torch.equal(found[n], expected[n])]


@pytest.mark.parametrize("stacked", [True, False])
def test_ranks_read_their_slices(tmp_path, stacked):
    folder = saved(tmp_path, "moe")
    if stacked:
        tensors = {n: p.detach() for n, p in plain_hf("moe").named_parameters()}
        save_file(tensors, folder / "model.safetensors")
    assert run_ranks(4, shards_are_right, str(folder)) == [[]] * 4


Q, EXPERT = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts"
INDEX = "model.safetensors.index.json"
DAMAGES = {  # what is done to file, bytes of it or tensors -> what must be said
    "no_file": (lambda file, _: file.unlink(), ["model.safetensors: no such file"]),
    "truncated": (lambda file, _: file.write_bytes(file.read_bytes()[:-1000]), ["model.safetensors: damaged"]),
    "header": (lambda file, _: file.write_bytes(bytes([0, 202, 154, 59, 0, 0, 0, 0])), ["safetensors: damaged"]),
    "bad_index": (lambda file, _: (file.parent / INDEX).write_text("{"), [INDEX, "JSON"]),
    "index_of_nothing": (lambda file, _: (file.parent / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'),
                         ["b.safetensors: no such file"]),
    "missing": (lambda _, tensors: (tensors.pop(Q), tensors.pop("lm_head.weight")),
                [f"{Q} missing", "lm_head.weight missing"]),
    "missing_expert": (lambda _, tensors: tensors.pop(f"{EXPERT}.7.up_proj.weight"), [f"{EXPERT}.7.up_proj.weight missing"]),
    "shape": (lambda _, tensors: tensors.update({Q: torch.ones(127, 64)}), [Q, "[127, 64]", "[128, 64]"]),
    "stray": (lambda _, tensors: tensors.update({"extra": torch.ones(2)}), ["extra is not part"]),
    "stray_expert": (lambda _, tensors: tensors.update({f"{EXPERT}.8.up_proj.weight": torch.ones(2)}), [f"{EXPERT}.8"]),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_folders_are_refused(tmp_path, how):
    """Naming file and tensor, all of them at once."""
    file = saved(tmp_path, "moe") / "model.safetensors"
    (damage, said), tensors = DAMAGES[how], load_file(file)
    before = set(tensors.items())
    damage(file, tensors)
    if set(tensors.items()) != before:
        save_file(tensors, file)
    with pytest.raises(trn.UsageError) as e:
        load(tmp_path)
    assert all(words in str(e.value) for words in said), e.value


# ---- Configuration ------------------------------------------------------------------------------
def refused(argv: str | list[str], world: int = 1) -> str:
    os.environ["WORLD_SIZE"] = str(world)
    try:
        with pytest.raises(trn.UsageError) as e:
            trn.preflight(trn.parse(argv.split() if isinstance(argv, str) else argv))
    finally:
        del os.environ["WORLD_SIZE"]
    assert not dist.is_initialized()
    return str(e.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [(f"--{name} {value}", (name, value)) for name, values in {
        "seq_len": "0 -1 5000 x", "local_batch_size": "0 -2", "global_batch_size": "0 -2 12",
        "steps": "0 -1 1.5", "seed": "-1 2147483648", "lr": "0 -1 inf nan abc", "warmup_steps": "-1 61",
        "decay_ratio": "-0.1 1.1 nan", "min_lr_factor": "-1 2 nan", "weight_decay": "-1 inf nan",
        "max_norm": "-1 inf nan", "adam_beta1": "1 -0.1 nan", "adam_beta2": "1 -0.1", "adam_eps": "0 1 nan",
        "data_parallel_replicate_degree": "0 -1", "data_parallel_shard_degree": "0 -2",
        "tensor_parallel_degree": "0 -1", "loss_chunks": "-1", "eval_every": "-1", "eval_steps": "0",
        "log_every": "0", "router_aux_loss_coef": "-1 nan inf", "device": "neuron cuda tpu",
        "backend": "jax", "decay_type": "step", "activation_checkpoint": "some",
        "mixed_precision_param": "float16", "mixed_precision_reduce": "half",
        "reshard_after_forward": "maybe", "output_dir": "/proc/none", "model": "9B ./nowhere",
    }.items() for value in values.split()
    if not (name == "device" and value == "cuda" and torch.cuda.is_available())],
)  # fmt: skip
def test_wrong_values_are_refused(argv, said):
    """Naming flag, value and rule."""
    message = refused(argv).splitlines()[0]
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    ("world", "argv", "said"),
    [(4, "--dp_replicate 3", ["--dp_replicate 3", "4", "NGPU"]), (4, "--tp 8", ["--tp 8", "4"]),
     (4, "--dp_shard 2", ["--dp_shard 2", "number of ranks, 4"]), (2, "--tp 4", ["--tp 4", "ranks, 2"]),
     (4, "--bs 2 --gbs 10", ["10", "4 data-parallel ranks", "--local_batch_size 2", "8 or 16"]),
     (3, "--tp 3", ["--tp 3", "num_attention_heads = 8", "[1, 2, 4, 8]"]), (3, "--tp 3", ["num_key_value_heads"]),
     (4, "--tp 4 --seq_len 30", ["--tp 4", "--seq_len = 30"]), (16, "--tp 16", ["num_attention_heads = 8"]),
     (1, "--disable_sequence_parallel", ["--disable_sequence_parallel", "--tp"]),
     (1, "--disable_loss_parallel", ["--disable_loss_parallel", "--tp"]),
     (1, "--compile_backend inductor", ["--compile_backend", "--compile"]),
     (2, "--tp 2 --compile --ac full", ["--compile", "--ac full", "--tp", "--ac selective"]),
     (1, "--decay_type none --decay_ratio 0.5", ["--decay_ratio 0.5", "--decay_type none"]),
     (1, "--decay_ratio 0.9 --warmup_steps 10 --steps 20", ["--decay_ratio 0.9", "0.500"]),
     (1, "--learning-rte 1e-3", ["--learning-rte", "--learning_rate"]), (1, "--modle 8B", ["Did you mean --model"]),
     (1, "--model 3B", ["--model 3B", "30B-A3B"]), (1, "--model debugmodle", ["Did you mean debugmodel?"]),
     (1, "stray", ["unknown argument stray"]), (1, "--lr", ["--lr"]), (1, "--wandb", ["--wandb", "pip install wandb"]),
     (1, "--lr -1 --steps 0 --adam_eps 2", ["--lr", "--steps", "--adam_eps"]),
     (4, "--tp 4 --seq_len 30 --bs 3 --gbs 4 --output_dir /proc/x", ["--seq_len", "--global_batch_size", "/proc/x"])],
)  # fmt: skip
def test_illegal_combinations_are_refused(world, argv, said):
    """All problems together, each with the numbers concerned and a way out."""
    message = refused(argv, world)
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    ("changes", "argv", "said"),
    [({"num_attention_heads": 6, "num_key_value_heads": 6}, "--tp 4", ["= 6", "[1, 2, 3, 6]"]),
     ({"num_attention_heads": 12, "num_key_value_heads": 3}, "--tp 4", ["num_key_value_heads = 3"]),
     ({"intermediate_size": 98}, "--tp 4", ["intermediate_size = 98"]),
     ({"num_experts": 6, **{k: v for k, v in MOE.items() if k != "num_experts"}}, "--tp 4", ["num_experts = 6"]),
     ({"vocab_size": 5}, "--tp 4", ["vocab_size = 5"]), ({"attention_bias": True}, "--tp 4", ["attention_bias"]),
     ({}, "--tp 4 --disable_loss_parallel", ["vocab_size", "203"])],
)  # fmt: skip
def test_sizes_that_tp_cannot_divide(tmp_path, changes, argv, said):
    hf_config("untied", **changes).save_pretrained(tmp_path)
    message = refused(f"--model {tmp_path} --random_init --seq_len 32 {argv}", 4)
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"model_type": "llama"}, "model_type 'llama'"), ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
     ({"rope_parameters": None}, "no rope_theta"), ({"rope_theta": 5.0}, "rope_theta is 5.0"),
     ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e6}}, "rope_type 'foo'"),
     ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}, "rope_type 'linear'"),
     ({"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
     ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
     ({"hidden_act": "gelu"}, "hidden_act 'gelu'"), ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
     ({"num_key_value_heads": 3}, "num_key_value_heads 3"), ({"hidden_size": "x"}, "hidden_size"),
     ({"num_attention_heads": "4"}, "num_attention_heads"), ({"vocab_size": 0}, "vocab_size"), ({"head_dim": 31}, "head_dim"),
     (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok"), (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
     ({"rope_parameters": "x"}, "rope_parameters"), ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta"),
     ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "factor"),
     ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
     ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention")],
)  # fmt: skip
def test_model_configs_that_we_would_compute_wrongly(tmp_path, changes, said):
    kind = "moe" if "num_experts" in changes else "untied"
    raw = json.loads((Path(model_folder(kind)) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    message = refused(f"--model {tmp_path}")
    assert said in message
    assert "config.json" in message


def test_all_faults_of_a_config_at_once_and_broken_json(tmp_path):
    raw = json.loads((Path(model_folder("untied")) / "config.json").read_text())
    raw |= {"auto_map": {}, "hidden_act": "gelu", "rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert len(refused(f"--model {tmp_path}").splitlines()) == 3
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(f"--model {tmp_path}")
    (tmp_path / "config.json").unlink()
    assert "no such file" in refused(f"--model {tmp_path}")


def test_rope_theta_at_the_top_or_nested_is_the_same(tmp_path):
    raw = json.loads((Path(model_folder("untied")) / "config.json").read_text())
    nested = raw.pop("rope_parameters")
    for form in ({"rope_theta": nested["rope_theta"]}, {"rope_parameters": nested}):
        form |= {"use_sliding_window": False, "sliding_window": 8}  # off: full attention, as told
        (tmp_path / "config.json").write_text(json.dumps(raw | form))
        hf = trn.load_model_config(trn.parse(["--model", str(tmp_path)]))
        assert trn.rope_frequencies(hf)[0][1].item() == pytest.approx(1e6 ** (-1 / 16))
        assert set(getattr(hf, "layer_types", None) or ["full_attention"]) == {"full_attention"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("batchsize: 4", "unknown key 'batchsize'"), ("learning_rat: 1", "Did you mean"), ("- 1", "mapping"),
     ("a: [", "YAML"), ("lr: fast", "--lr"), ("steps: 0", "steps 0"), (b"\xff\xfe\x00", "YAML")],
)  # fmt: skip
def test_bad_flag_files(tmp_path, text, said):
    path = tmp_path / "flags.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said in refused([str(path)])


def test_flag_file_and_precedence(tmp_path):
    path = tmp_path / "flags.yaml"
    path.write_text("lr: 0.5\nsteps: 7\ntensor_parallel_degree: 2\nwarmup_steps: null\n")
    cfg = trn.parse([str(path), "--lr", "0.25"])
    assert (cfg.lr, cfg.steps, cfg.tensor_parallel_degree, cfg.warmup_steps) == (0.25, 7, 2, 3)
    assert "no such" in refused([str(tmp_path / "none.yaml")]).lower()


def command(*argv: str, **env: str) -> subprocess.CompletedProcess:
    """The real program, as a user starts it, on one process."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, str(HERE / "train_qwen3_trn.py"), *argv], cwd=HERE, env=clean | env,
        text=True, capture_output=True, timeout=300,
    )  # fmt: skip


def test_mistakes_end_the_program_with_code_2(tmp_path):
    code = tmp_path / "code"
    done = command("--lr", "-1", "--steps", "0", EXIT_CODE_FILE=str(code))
    assert done.returncode == 2
    assert code.read_text() == "2"
    lines = done.stderr.strip().splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["[qwen3-trn]", "error:", f] for f in ("--steps", "--lr")
    ]
    assert done.stdout == ""


def test_help_shows_every_flag_in_its_group():
    text = command("--help").stdout
    for f in dataclasses.fields(trn.Config):
        assert f"--{f.name}" in text
        assert all(alias in text for alias in f.metadata["aliases"])
    groups = ["model:", "data:", "optimization:", "parallelism and memory:", "output:"]
    assert [text.index(group) for group in groups] == sorted(text.index(group) for group in groups)


# ---- Data ---------------------------------------------------------------------------------------
def loader_of(path, *flags: str, rank: int = 0, dp: int = 1) -> trn.Loader:
    argv = ["--dataset", str(path), "--seq_len", "8", "--bs", "2", *" ".join(flags).split()]
    cfg = trn.parse(argv)
    return trn.Loader(trn.open_rows(cfg, hf_config("untied", vocab_size=512)), cfg, rank, dp)


def rows_of(path, *flags: str):
    return loader_of(path, "--bs 1", *flags).rows


TEXTS = ["first document", "second one, with ü", "third"]
TOKENS = [byte for text in TEXTS for byte in [*text.encode(), trn.BYTE_EOS]]


def write_documents(folder: Path, suffix: str, column: str = "text") -> Path:
    path = folder / f"data{suffix}"
    if suffix == ".txt":
        path.write_text(TEXTS[1])
    elif suffix == ".jsonl":
        texts = [TEXTS[0], "", *TEXTS[1:]]  # an empty document leaves no EOS behind
        path.write_text("\n\n".join(json.dumps({column: t, "id": 1}) for t in texts))
    else:
        import datasets

        datasets.Dataset.from_dict({column: TEXTS}).to_parquet(str(path))
    return path


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_documents_are_packed_with_eos_between(tmp_path, suffix):
    rows = rows_of(write_documents(tmp_path, suffix))
    expected = [*TEXTS[1].encode(), trn.BYTE_EOS] if suffix == ".txt" else TOKENS
    assert rows.num_rows == (len(expected) - 1) // 8
    for i in range(rows.num_rows):  # neighbours share one token: each is predicted once
        assert rows.row(i).tolist() == expected[8 * i : 8 * i + 9]


def test_text_column(tmp_path):
    path = write_documents(tmp_path, ".jsonl", column="content")
    assert rows_of(path, "--text_column content").num_rows > 0
    with pytest.raises(trn.UsageError, match=r"line 1.*no column 'text'.*content"):
        rows_of(path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [(b'{"text": "a"}\n\n{"text": "b', "line 3: not valid JSON"), (b'{"text": "a"}\n{"txt": "b"}', "line 2: no column"),
     (b'{"text": null}', "line 1: column 'text' must be text, is NoneType"), (b'["text"]', "line 1"),
     (b'{"text": "a"}\n{"text": "\xff"}', "line 2: not UTF-8"), (b"", "0 tokens"), (b'{"text": ""}\n\n', "0 tokens"),
     (b'{"text": "short"}', "6 tokens make 0 rows")],
)  # fmt: skip
def test_bad_documents_are_named(tmp_path, lines, said):
    """With file and line; too little data with tokens found and needed. No half-made cache stays."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(lines)
    with pytest.raises(trn.UsageError) as e:
        loader_of(path)
    assert said in str(e.value)
    assert "bad.jsonl" in str(e.value)
    if "tokens" in said:
        assert "17 tokens" in str(e.value)  # two rows of 8, and one token more
    else:
        assert not list((tmp_path / "cache").rglob("*.*"))


def test_bad_text_and_parquet_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xff")
    with pytest.raises(trn.UsageError, match=r"a\.txt, line 3: not UTF-8"):
        rows_of(tmp_path / "a.txt")
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(trn.UsageError, match=r"a\.parquet"):
        rows_of(tmp_path / "a.parquet")
    with pytest.raises(trn.UsageError, match="no such file"):
        rows_of(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("array", "said"),
    [(np.array([1.0]), "integers"), (np.zeros((2, 2, 2), int), "3-D"), (np.zeros((9, 8), int), "--seq_len 7"),
     (np.array([0] * 50 + [512]), "512 at position 50"), (np.array([3, -1]), "-1"),
     (np.array([{}], dtype=object), "npy"), (np.zeros(16, int), "17 tokens"), (np.zeros((1, 9), int), "1 rows"),
     (None, "cannot be read")],
)  # fmt: skip
def test_bad_arrays_are_refused(tmp_path, array, said):
    path = tmp_path / "a.npy"
    path.write_bytes(b"x") if array is None else np.save(path, array, allow_pickle=True)
    with pytest.raises(trn.UsageError) as e:
        loader_of(path)
    assert said in str(e.value)
    assert "a.npy" in str(e.value)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_arrays_are_memory_mapped(tmp_path, dtype):
    stream = np.arange(100, dtype=dtype)
    np.save(tmp_path / "1.npy", stream)
    np.save(tmp_path / "2.npy", stream[:99].reshape(11, 9))
    one, two = rows_of(tmp_path / "1.npy"), rows_of(tmp_path / "2.npy")
    assert isinstance(one.tokens, np.memmap)
    assert isinstance(two.tokens, np.memmap)
    assert [one.num_rows, two.num_rows] == [12, 11]
    assert one.row(1).tolist() == list(range(8, 17))
    assert two.row(1).tolist() == list(range(9, 18))


def test_ignored_labels_in_arrays(tmp_path):
    row = np.array([[5, trn.IGNORE_INDEX, 6, 7, 8, 9, 10, 11, trn.IGNORE_INDEX]])
    np.save(tmp_path / "a.npy", row)
    inputs, labels = trn.make_batch([rows_of(tmp_path / "a.npy").row(0)])
    assert inputs.tolist() == [[5, 0, 6, 7, 8, 9, 10, 11]]
    assert labels.tolist() == row[:, 1:].tolist()


def test_token_cache_is_reused_until_the_file_changes(tmp_path, monkeypatch):
    path = write_documents(tmp_path, ".jsonl")
    first, write = rows_of(path), data.write_tokens
    monkeypatch.delattr(data, "write_tokens")
    assert rows_of(path).row(0).tolist() == first.row(0).tolist()
    path.write_text(json.dumps({"text": "something else altogether"}))
    monkeypatch.setattr(data, "write_tokens", write, raising=False)
    assert bytes(rows_of(path).row(0)[:8].astype(np.uint8)) == b"somethin"


def ranks_batches(path, dp: int, local: int, steps: int, *flags: str) -> list[list[list[int]]]:
    """The rows of each global batch, as the ranks together see them."""
    loaders = [
        loader_of(path, f"--bs {local} --gbs 8", *flags, rank=rank, dp=dp) for rank in range(dp)
    ]
    found = [[next(loader) for _ in range(steps)] for loader in loaders]
    batches = []
    for step in range(steps):
        micro = [
            inputs for part in zip(*[f[step] for f in found], strict=True) for inputs, _ in part
        ]
        batches.append(torch.cat(micro).tolist())
    return batches


def test_global_batches_do_not_depend_on_ranks_or_accumulation(tmp_path):
    """Same rows in the same order over three epochs, ranks disjoint, held-out rows never among them."""
    np.save(tmp_path / "a.npy", np.arange(30 * 8 + 1))  # row i starts with token 8 i
    path, flags = tmp_path / "a.npy", "--eval_every 1 --eval_steps 1 --seed 5"
    one = ranks_batches(path, 1, 8, 9, flags)
    for dp, local in [(1, 2), (2, 4), (2, 1), (4, 2), (8, 1)]:
        assert ranks_batches(path, dp, local, 9, flags) == one
    order = [row[0] // 8 for batch in one for row in batch]
    epochs = [order[i * 22 : i * 22 + 22] for i in range(3)]
    assert all(sorted(epoch) == list(range(22)) for epoch in epochs)  # 22..29 are held out
    assert epochs[0] != epochs[1] != list(range(22))
    assert ranks_batches(path, 1, 8, 2, flags, "--seed 6")[0] != one[0]
    plain = ranks_batches(path, 2, 4, 2, "--disable_shuffle")
    assert [row[0] // 8 for batch in plain for row in batch] == list(range(16))


def test_position_is_the_whole_state(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(30 * 8 + 1))
    loader, resumed = (loader_of(tmp_path / "a.npy", "--gbs 4", rank=1, dp=2) for _ in range(2))
    straight = [next(loader) for _ in range(20)]
    resumed.position = 13 * 4
    assert str([next(resumed) for _ in range(7)]) == str(straight[13:])


def test_validation_rows_are_split_over_ranks(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(30 * 8 + 1))
    seen = []
    for rank in range(2):
        flags = "--gbs 4 --eval_every 2 --eval_steps 3"
        for inputs, _ in loader_of(tmp_path / "a.npy", flags, rank=rank, dp=2).validation():
            assert inputs.shape == (2, 8)  # one shape, that of training
            seen += (inputs[:, 0] // 8).tolist()
    assert sorted(seen) == list(range(18, 30))


def test_streamed_rows(tmp_path):
    """A stream (here a local folder, as the hub would serve it) gives the rows of the file, endlessly."""
    (tmp_path / "hub").mkdir()
    write_documents(tmp_path / "hub", ".jsonl")
    loader = loader_of(
        tmp_path / "hub", "--streaming --disable_shuffle --eval_every 1 --eval_steps 1 --bs 1"
    )
    rows = loader.rows
    assert isinstance(rows, trn.StreamRows)
    assert rows.held_out_row(0).tolist() == TOKENS[:9]
    assert rows.train(0).tolist() == TOKENS[8:17]
    assert rows.train(2).tolist() == TOKENS[24:33]
    assert rows.train(3).tolist() == (TOKENS * 2)[32:41]  # the stream starts again


# ---- Loss, optimizer, schedule ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "expected"),  # shares of the peak at steps 1 to 10, torchtitan 0.3.0's by hand
    [("--warmup_steps 2 --decay_ratio 0.5", [0.5, 1, 1, 1, 1, 1, 0.82, 0.64, 0.46, 0.28]),
     ("--warmup_steps 0 --decay_ratio 0", [1] * 10), ("--warmup_steps 4 --decay_type none", [0.25, 0.5, 0.75] + [1] * 7),
     ("--warmup_steps 5 --min_lr_factor 0", [0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2]),
     ("--warmup_steps 5 --min_lr_factor 0 --decay_type sqrt",
      [0.2, 0.4, 0.6, 0.8, 1, 1, *[1 - math.sqrt(i / 5) for i in range(1, 5)]]),
     ("--warmup_steps 6 --min_lr_factor 0 --decay_type cosine",
      [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
     ("--warmup_steps 10", [i / 10 for i in range(1, 11)]),
     ("--steps 1", [1]), ("--steps 1 --warmup_steps 1", [1]), ("--steps 1 --warmup_steps 0", [1])],
)  # fmt: skip
def test_schedule_is_that_of_torchtitan(flags, expected):
    cfg = trn.parse(["--lr", "1", "--steps", "10", *flags.split()])
    assert [trn.lr_at(i, cfg) for i in range(1, cfg.steps + 1)] == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["moe", "moe_sparse"])
def test_balance_loss_is_that_of_transformers(kind):
    """Value and router gradient; its closed forms at an even and at a collapsed routing."""
    model, theirs, (inputs, _) = loaded(kind), plain_hf(kind), batch()
    stats = trn.RouterStats(model, 0.02, None, 1.0)
    model(inputs)
    loss, expected = stats.balance_loss(), 0.02 * hf_aux(theirs, inputs)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=TOL)
    gate = "model.layers.1.mlp.gate.weight"
    grads = model.get_parameter(gate).grad, theirs.get_parameter(gate).grad
    assert grads[0].abs().max() > 0
    assert relative(*grads) < TOL
    logits, ids = torch.zeros(64, 8), torch.arange(128).view(64, 2) % 8
    for gate in stats.gates:
        gate.routed = (logits, ids)
    assert stats.balance_loss().item() == pytest.approx(0.02 * 2)  # even: K times the weight
    for gate in stats.gates:
        gate.routed = (torch.eye(8)[0].expand(64, 8) * 100, torch.zeros(64, 2, dtype=torch.int64))
    assert stats.balance_loss().item() == pytest.approx(0.02 * 2 * 8)  # all on one: E times that
    stats.load_E = torch.tensor([6.0, 2.0, 0, 0, 0, 0, 0, 0])
    assert stats.max_load() == 6.0


# ---- Metrics ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_flops_formula_equals_a_count(kind):
    """The matrix products that transformers really does; whole score matrices instead of half."""
    experts = {"experts_implementation": "eager"} if kind == "moe" else {}
    model = plain_hf(kind, attn_implementation="eager", **experts)
    inputs, labels = batch(rows=1)
    with FlopCounterMode(display=False) as counter:
        hf_loss(model, inputs, labels).backward()
    terms = trn.flops_per_token(model.config, S)
    terms["attention"] *= 2 * S / (S + 1)
    rotary = 2 * S * 16  # transformers makes its table of angles by a matrix product
    assert counter.get_total_flops() == S * sum(terms.values()) + rotary


def test_waiting_is_announced(caplog):
    caplog.set_level("INFO", logger="qwen3-trn")
    with trn.waiting_for("testing", every=0.01):
        for _ in range(500):
            if "still testing" in caplog.text:
                break
            time.sleep(0.01)
    assert "still testing" in caplog.text


def masked_evaluation(argv: list[str]) -> None:
    trainer = make_trainer(argv)
    trainer.train_step = lambda _: dict.fromkeys(
        ("loss", "aux", "grad_norm", "num_valid"), torch.ones(())
    )
    trainer.train()


@pytest.mark.parametrize(("world", "flags"), [(1, "--bs 8"), (1, "--bs 2"), (4, "--tp 2 --bs 4")])
def test_validation_loss_is_weighted_by_tokens(tmp_path, world, flags):
    """Two held-out batches with 8 and 256 valid labels."""
    rows = np.load(token_file())[:24]
    rows[8:16, 2:] = trn.IGNORE_INDEX
    np.save(tmp_path / "a.npy", rows)
    flags += f" --dataset {tmp_path}/a.npy --eval_every 1 --eval_steps 2 --steps 1"
    run_ranks(world, masked_evaluation, arguments("untied", flags, out=tmp_path))
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    [found] = [row for row in found if "eval_loss" in row]
    inputs, labels = trn.make_batch(list(rows[8:]))
    expected = hf_loss(plain_hf("untied"), inputs, labels).item() / 264
    assert found["eval_tokens"] == 264
    assert found["eval_loss"] == pytest.approx(expected, rel=LOSS_TOL * 2)  # a sum of batches


# ---- Training -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("backend", "seq_len"),
    [("native", 64), ("hf", 64), *[pytest.param(b, 256, marks=pytest.mark.slow) for b in ("native", "hf")]],
)  # fmt: skip
def test_demo_learns(tmp_path, backend, seq_len):
    """60 steps of the default run (slow; else shorter rows): the loss, and all that a user is told."""
    argv = f"--backend {backend} --seq_len {seq_len} --eval_every 30 --eval_steps 1 --profile"
    done = command(*argv.split(), "--output_dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for words in (
        "debugmodel",
        "parameters",
        "active per token",
        "rank(s) on cpu",
        "tokens a step",
        "first step",
    ):
        assert words in done.stdout
    assert "mfu: N/A" in done.stdout
    assert "done: 60 steps" in done.stdout
    header, *rows = [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert header["config"]["backend"] == backend
    assert header["config"].keys() == {f.name for f in dataclasses.fields(trn.Config)}
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 10, 20, 30, 40, 50, 60]
    assert [row["tokens"] for row in steps] == [row["step"] * 8 * seq_len for row in steps]
    assert abs(steps[0]["loss"] - math.log(512)) < 0.2  # nothing learnt yet: near ln(vocabulary)
    assert steps[0]["loss"] - steps[-1]["loss"] >= 1.5
    assert all(row["memory_bytes"][0] > 2**26 and row["expert_load"] >= 1 for row in steps)
    assert [row["step"] for row in rows if "eval_loss" in row] == [30, 60]
    [trace] = (tmp_path / "trace").iterdir()
    assert trace.stat().st_size > 1000


def weights_after(argv: list[str]) -> list[torch.Tensor]:
    trainer = make_trainer(argv)
    trainer.train()
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_logging_does_not_change_the_weights():
    argv = [[*arguments("moe"), "--log_every", every] for every in ("1", "7")]
    assert all(map(torch.equal, *[run_ranks(1, weights_after, a)[0] for a in argv]))


def test_preflight_alone_prepares_the_data(tmp_path):
    path = write_documents(tmp_path, ".jsonl")
    flags = f"--check --dataset {path} --seq_len 4 --bs 1 --output_dir {tmp_path}/out"
    assert command(*flags.split(), XDG_CACHE_HOME=str(tmp_path / "cache")).returncode == 0
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == 1
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(
        trn.transformers.utils.import_utils, "_is_package_available", lambda _: (False, None)
    )
    assert "pip install tensorboard" in refused("--tensorboard")


# ---- Kernels ------------------------------------------------------------------------------------
# Relative to the largest element. float32: sums of a few hundred terms in another order. bfloat16: also
# at most twice the error of plain PyTorch, so that the bound is not loose.
FLOAT32_LIMIT, ROTARY_LIMIT, BFLOAT16_LIMIT = 1e-5, 1e-6, 2e-2


def relative_error(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


# ---- Kernels against references -----------------------------------------------------------------
def make_experts(E, D, width, dtype=torch.float32):
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter((torch.randn(E, 2 * width, D) * 0.1).to(dtype))
    experts.down_proj = nn.Parameter((torch.randn(E, D, width) * 0.1).to(dtype))
    return experts


def experts_oracle(x_TD, ids_TK, scores_TK, gate_up, down):
    """One expert after the other, over all tokens."""
    out = torch.zeros_like(x_TD)
    for e in range(len(down)):
        gate, up = (x_TD @ gate_up[e].T).chunk(2, -1)
        weight_T1 = (scores_TK * (ids_TK == e)).sum(1, keepdim=True)
        out = out + weight_T1 * ((nn.functional.silu(gate) * up) @ down[e].T)
    return out


def run_experts(module, x, ids, scores, dout):
    """Output and the gradients of x, scores and both weights."""
    inputs = [x, scores, module.gate_up_proj, module.down_proj]
    out = module(x, ids, scores)
    return [out, *torch.autograd.grad(out, inputs, dout)]


ROUTINGS = {  # T, D, width, E, K, ids
    "random, some foreign": (200, 256, 128, 8, 2, None),
    "width 96 and 192: tiles of 96": (150, 192, 96, 4, 2, None),
    "all tokens on one expert": (300, 128, 64, 4, 1, 2),
    "a few tokens": (5, 128, 64, 4, 2, None),
    "all foreign": (40, 128, 64, 4, 1, 4),
    "first and last expert without tokens": (300, 128, 64, 4, 1, "middle"),
    "K = E": (130, 64, 32, 2, 2, None),
}


def make_routing(T, E, K, ids):
    if isinstance(ids, int):
        return torch.full((T, K), ids)
    if ids == "middle":
        return 1 + torch.arange(T)[:, None] % (E - 2)
    return torch.stack([torch.randperm(E + 1 if K < E else E)[:K] for _ in range(T)])


@pytest.mark.parametrize("lnc", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_match_a_loop_over_experts(routing, lnc, monkeypatch):
    """NkiExperts, simulated (LNC 1, 2) and as reference (0), forward and all four gradients."""
    monkeypatch.setenv("NKI_SIMULATOR", "1" if lnc else "0")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(lnc or 2))
    torch.manual_seed(0)
    T, D, width, E, K, ids = ROUTINGS[routing]
    module = kernels.nki_moe(make_experts(E, D, width))
    ids = make_routing(T, E, K, ids)
    x, scores, dout = torch.randn(T, D), torch.rand(T, K), torch.randn(T, D)
    got = run_experts(module, x.requires_grad_(), ids, scores.requires_grad_(), dout)
    exact = [t.detach().double().requires_grad_() for t in (x, scores, *module.parameters())]
    out = experts_oracle(exact[0], ids, *exact[1:])
    want = [out, *torch.autograd.grad(out, exact, dout.double())]
    for name, a, b in zip(("out", "x", "scores", "gate_up", "down"), got, want, strict=True):
        assert relative_error(a, b) <= FLOAT32_LIMIT, name


@pytest.mark.parametrize("lnc", [1, 2])
def test_experts_in_bfloat16(lnc, monkeypatch):
    """At most 2e-2 off, and at most twice as far as the PyTorch reference in bfloat16."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", str(lnc))
    torch.manual_seed(0)
    experts, ids = make_experts(8, 256, 128, torch.bfloat16), make_routing(256, 8, 2, None)
    x = torch.randn(256, 256).bfloat16().requires_grad_()
    scores, dout = torch.rand(256, 2).bfloat16().requires_grad_(), torch.randn(256, 256).bfloat16()
    results = []
    for simulator in ("1", "0"):
        monkeypatch.setenv("NKI_SIMULATOR", simulator)
        results.append(run_experts(kernels.nki_moe(experts), x, ids, scores, dout))
    exact = [t.detach().double().requires_grad_() for t in (x, scores, *experts.parameters())]
    out = experts_oracle(exact[0], ids, *exact[1:])
    want = [out, *torch.autograd.grad(out, exact, dout.double())]
    for kernel, plain, b in zip(*results, want, strict=True):
        error = relative_error(kernel, b)
        assert error <= BFLOAT16_LIMIT
        assert error <= 2 * relative_error(plain, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_simulator_leaves_weights_resizable(dtype, monkeypatch):
    """FSDP frees a gathered weight by resizing its storage, which Tensor.numpy() would forbid."""
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    module = kernels.nki_moe(make_experts(2, 64, 32, dtype))
    module(torch.randn(4, 64).to(dtype), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    assert all(p.untyped_storage().resizable() for p in module.parameters())


def test_static_loop_gives_the_same(monkeypatch):
    """BLOCK_LOOP changes how many blocks run, not what comes out; dynamic skips padding."""
    torch.manual_seed(0)
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    module, ids = kernels.nki_moe(make_experts(8, 128, 64)), make_routing(200, 8, 2, None)
    x, scores, dout = torch.randn(200, 128), torch.rand(200, 2), torch.randn(200, 128)
    outs, cycles = [], []
    for loop in ("dynamic", "static"):
        monkeypatch.setattr(kernels, "BLOCK_LOOP", loop)
        outs.append(run_experts(module, x.requires_grad_(), ids, scores.requires_grad_(), dout))
        cycles.append(nki_cpu.last_run.tensor_cycles)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert cycles[0] < cycles[1]


def test_large_layers_are_cut_to_fit(monkeypatch):
    """Small PIECE_BYTES: several pieces, same result; a 235B-A22B layer fits SBUF as it is."""
    torch.manual_seed(0)
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    experts, ids = make_experts(2, 256, 128), torch.zeros(130, 1, dtype=torch.int64)
    x, scores, dout = torch.randn(130, 256), torch.rand(130, 1), torch.randn(130, 256)
    outs = []
    for size in (kernels.PIECE_BYTES, 1024):
        monkeypatch.setattr(kernels, "PIECE_BYTES", size)
        module = kernels.nki_moe(experts)
        outs.append(run_experts(module, x.requires_grad_(), ids, scores.requires_grad_(), dout))
    assert nki_cpu.last_run.sbuf_peak < 8192
    for a, b in zip(*outs, strict=True):
        assert relative_error(a, b) <= FLOAT32_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_235b_layer_fits(dtype, monkeypatch):
    """Hidden 4096, expert width 1536, LNC 2: no limit of SBUF or PSUM is met."""
    monkeypatch.setenv("NKI_SIMULATOR", "1")
    module = kernels.nki_moe(make_experts(1, 4096, 1536, dtype))
    x = torch.randn(128, 4096).to(dtype).requires_grad_()
    scores = torch.rand(128, 1).to(dtype).requires_grad_()
    ids = torch.zeros(128, 1, dtype=torch.int64)
    out = run_experts(module, x, ids, scores, torch.randn(128, 4096).to(dtype))
    assert all(t.isfinite().all() for t in out)


@pytest.mark.parametrize("batched_tables", [False, True])
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("lnc", [1, 2])
def test_rotary_kernel(lnc, H, batched_tables):
    """Forward and gradient equal the reference's; 40 heads need two tiles."""
    torch.manual_seed(0)
    x = torch.randn(2, 256, 40, H, requires_grad=True)
    tables = [torch.randn(2, 256, H // 2)[: None if batched_tables else 1] for _ in range(2)]
    cos, sin = tables if batched_tables else (t[0] for t in tables)
    dout = torch.randn_like(x)
    pairs = []
    for rotate in (functools.partial(kernels.rotary, inverse=False, lnc=lnc), kernels.rotary_ref):
        out = rotate(x, cos, sin)
        pairs.append((out, *torch.autograd.grad(out, x, dout)))
    for a, b in zip(*pairs, strict=True):
        assert relative_error(a, b) <= ROTARY_LIMIT
    half = x.detach().bfloat16()
    got = kernels.rotary(half, cos, sin, False, lnc)
    assert relative_error(got, kernels.rotary_ref(half.float(), cos, sin)) <= BFLOAT16_LIMIT


def test_rotary_inverse_undoes_it():
    x, angle = torch.randn(1, 256, 2, 64), torch.rand(256, 32)
    y = kernels.rotary(x, angle.cos(), angle.sin(), False, 2)
    assert relative_error(kernels.rotary(y, angle.cos(), angle.sin(), True, 2), x) <= ROTARY_LIMIT


def test_rotary_refuses_other_lengths():
    with pytest.raises(ValueError, match=r"sequence length 128 must be a multiple of 128 \* LNC 2"):
        kernels.rotary(
            torch.randn(1, 128, 1, 64), torch.rand(128, 32), torch.rand(128, 32), False, 2
        )


@pytest.mark.parametrize("lnc", [0, 2])
def test_opcheck(lnc):
    """Schemas, fake and autograd registrations; for references and simulated kernels."""
    torch.manual_seed(0)
    E, D, width = 2, 64, 32
    layout = kernels.block_layout(torch.arange(258)[:, None] // 129, E, lnc)  # every block in use
    R = len(layout.tokens)
    rows = torch.randn(R, D, requires_grad=True)
    glu_rows = torch.randn(R, 2 * width, requires_grad=True)
    gate_up = torch.randn(E, 2 * width, D, requires_grad=True)
    down = torch.randn(E, D, width, requires_grad=True)
    x = torch.randn(1, 256, 2, 64, requires_grad=True)
    tables = torch.rand(256, 32), torch.rand(256, 32)
    check = functools.partial(torch.library.opcheck, rtol=1e-4, atol=1e-4)
    check(kernels.rotary, (x, *tables, False, lnc))
    check(kernels.grouped_linear, (rows, gate_up, layout.plan, False, lnc))
    check(kernels.grouped_linear, (glu_rows, down, layout.plan, True, lnc))
    args = (rows.detach(), gate_up.detach(), layout.plan, False, lnc)
    check(kernels.grouped_linear_grads, (torch.randn(R, 2 * width), *args))


@pytest.mark.parametrize("simulator", ["0", "1"])
def test_experts_compile_and_checkpoint(simulator, monkeypatch):
    """One full graph; recomputation in backward; the same numbers."""
    monkeypatch.setenv("NKI_SIMULATOR", simulator)
    torch.manual_seed(0)
    module, ids = kernels.nki_moe(make_experts(4, 64, 32)), make_routing(60, 4, 2, None)
    x, scores, dout = torch.randn(60, 64), torch.rand(60, 2), torch.randn(60, 64)
    x.requires_grad_(), scores.requires_grad_()
    eager = run_experts(module, x, ids, scores, dout)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    saved = functools.partial(torch.utils.checkpoint.checkpoint, compiled, use_reentrant=False)
    out = saved(x, ids, scores)
    again = [out, *torch.autograd.grad(out, [x, scores, *module.parameters()], dout)]
    for a, b in zip(eager, again, strict=True):
        assert relative_error(a, b) <= FLOAT32_LIMIT


def test_reference_warns_once_and_never_on_neuron(monkeypatch, caplog):
    kernels.warn_once.cache_clear()
    x, table = torch.randn(1, 4, 1, 8), torch.rand(4, 4)
    with caplog.at_level(logging.WARNING, "qwen3-trn"):
        for _ in range(2):
            kernels.rotary(x, table, table, False, 0)
    assert [r.getMessage() for r in caplog.records] == [
        "NKI kernels run as their PyTorch references: the device is cpu, not neuron, and "
        "NKI_SIMULATOR=1 (CPU only) is not set"
    ]
    neuron = SimpleNamespace(device=SimpleNamespace(type="neuron"))
    with pytest.raises(RuntimeError, match="a neuron tensor needs its NKI kernel"):
        kernels.use_reference(neuron, 0)


def test_check_command():
    """python kernels.py --check passes, and says what each kernel did."""
    command = [sys.executable, kernels.__file__, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 32  # 8 kernels x 2 dtypes x 2 LNC
    assert "FAILED" not in done.stdout


def test_check_command_fails_on_a_wrong_kernel(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--check"])
    monkeypatch.setattr(kernels, "rotary_ref", lambda x, cos, sin, inverse: x.float() + 0.001)
    assert kernels.main() == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.slow
def test_30b_bounds():
    """Real layer sizes, LNC 2, 2 blocks per expert: 1.15 x the ideal cycles, 1.25 x the least bytes."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, kernels.__file__, "--check", "--shape", "30B-A3B"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.split("gate_up forward bfloat16 2")[1]
    ratios = re.findall(r"tensor cycles (\S+) x ideal, HBM bytes (\S+) x least", lines)
    assert len(ratios) == 2  # forward, backward
    for cycles, moved in ratios:
        assert float(cycles) <= 1.15
        assert float(moved) <= 1.25


# ---- The stand-in's rules -----------------------------------------------------------------------
def tile(*shape, dtype=nl.float32, buffer=nl.sbuf, value=0.0):
    t = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    if value is not None:
        nisa.memset(dst=t, value=value)
    return t


def bank(*shape, dtype=nl.float32):
    return tile(*shape, dtype=dtype, buffer=nl.psum, value=None)


def product(
    dst, stationary=(128, 128), moving=(128, 512), dtypes=(nl.float32, nl.float32), **kwargs
):
    a, b = (tile(*s, dtype=d) for s, d in zip((stationary, moving), dtypes, strict=True))
    nisa.nc_matmul(dst=dst, stationary=a, moving=b, **kwargs)


def alternate_groups():
    ps = bank(128, 256)
    for j, accumulate in ((0, False), (1, False), (0, True)):
        half = ps[:, j * 128 : (j + 1) * 128]
        product(half, moving=(128, 128), accumulate=accumulate)


def accumulate_on_memset():
    ps = bank(128, 512)
    nisa.memset(dst=ps, value=0.0)
    product(ps, accumulate=True)


def sbuf_overflow():
    return [tile(128, 20_000, value=None) for _ in range(3)]


def psum_overflow():
    return [bank(128, 512) for _ in range(9)]


def both_psum():
    a, b = bank(128, 8), bank(128, 8)
    nisa.tensor_tensor(dst=tile(128, 8), data1=a, data2=b, op=nl.add)


def two_starts():
    a = tile(128, 8)
    nisa.tensor_tensor(dst=tile(32, 8), data1=a[0:32, :], data2=a[32:64, :], op=nl.add)


def hbm(*shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def row_index(n=128, dtype=nl.int32, value=0):
    return tile(n, 1, dtype=dtype, value=value)


def gather_transpose(dtype=nl.bfloat16, n=128, value=0, **kwargs):
    weight, index = hbm(256, 1, 1, 128, dtype=dtype), row_index(n, nl.uint32, value)
    src = weight.ap([[128, n], [128, 1], [128, 1], [1, 128]], vector_offset=index)
    dst = tile(128, 1, 1, n, dtype=dtype)
    nisa.dma_transpose(dst=dst, src=src, axes=(3, 1, 2, 0), **kwargs)


def scalar_of(value):
    return nisa.scalar_load(tile(1, 1, dtype=nl.int32, value=value))


BROKEN = {  # one rule each: what the kernel does, what the refusal says
    "too many partitions": (lambda: tile(129, 4), "dim 0 is the partition dim, 1 to 128"),
    "no free dim": (lambda: tile(128), "then free dims"),
    "start partition": (lambda: nisa.memset(dst=tile(128, 4)[32:128, :], value=0.0),
                        "96 partitions from partition 32"),
    "SBUF is full": (sbuf_overflow, "sbuf: 240000 bytes per partition are live, 212984 are usable"),
    "PSUM is full": (psum_overflow, "psum: 9 banks per partition are live, 8 are usable"),
    "moving too wide": (lambda: product(bank(128, 513), moving=(128, 513)),
                        "513 moving columns exceed 512"),
    "stationary too wide": (lambda: product(bank(128, 512), stationary=(128, 129)),
                            "129 stationary columns exceed 128"),
    "contraction differs": (lambda: product(bank(128, 512), moving=(64, 512)),
                            "contraction sizes 128 and 64 differ"),
    "matmul into SBUF": (lambda: product(tile(128, 512)), "dst must be in psum, it is in sbuf"),
    "matmul from PSUM": (lambda: nisa.nc_matmul(bank(128, 8), bank(128, 128), tile(128, 8)),
                         "stationary must be in sbuf"),
    "matmul result dtype": (lambda: product(bank(128, 512, dtype=nl.bfloat16)),
                            "dst is bfloat16, must be float32"),
    "mixed float32": (lambda: product(bank(128, 512), dtypes=(nl.float32, nl.bfloat16)),
                      "float32 pairs only with float32"),
    "bank crossed": (lambda: product(bank(128, 1024)[:, 256:768]), "crosses a PSUM bank"),
    "sum not started": (lambda: product(bank(128, 512), accumulate=True),
                        "accumulate=True before a matmul started the sum"),
    "sum started by memset": (accumulate_on_memset, "accumulate=True before a matmul started the sum"),
    "groups alternate": (alternate_groups, "two accumulation groups alternate in one PSUM tile"),
    "transpose changes dtype": (lambda: nisa.nc_transpose(bank(8, 128), tile(128, 8, dtype=nl.bfloat16)),
                                "dst is float32, must be bfloat16"),
    "transpose too wide": (lambda: nisa.nc_transpose(bank(128, 128), tile(128, 129)),
                           "exceeds 128 x 128"),
    "DMA to PSUM": (lambda: nisa.dma_copy(dst=bank(128, 8), src=tile(128, 8)),
                    "is in PSUM, which DMA cannot reach"),
    "DMA sizes": (lambda: nisa.dma_copy(dst=tile(128, 8), src=hbm(128, 9)), "element counts"),
    "both inputs in PSUM": (both_psum, "at most one input may be in PSUM"),
    "two start partitions": (two_starts, r"start at different partitions: \[0, 32\]"),
    "shapes differ": (lambda: nisa.tensor_tensor(tile(128, 8), tile(128, 8), tile(128, 1), nl.add),
                      "operands need equal partitions and elements"),
    "scalar operand dtype": (
        lambda: nisa.activation(tile(8, 8), nl.silu, tile(8, 8), scale=tile(8, 1, dtype=nl.bfloat16)),
        "a scalar operand is float32, not bfloat16"),
    "no activation": (lambda: nisa.activation(tile(8, 8), nl.add, tile(8, 8)),
                      "no activation function"),
    "memset kind": (lambda: tile(8, 8, dtype=nl.int32, value=1.0), "must be int"),
    "partition dim expanded": (lambda: tile(128, 8).expand_dim(0), "the partition dim .0. stays"),
    "broadcast of many": (lambda: tile(128, 8).broadcast(1, 8), "must have size 1"),
    "write through stride 0": (lambda: nisa.memset(tile(8, 1).broadcast(1, 8), 0.0), "a stride of 0"),
    "slice too far": (lambda: tile(128, 8)[:, 4:9], "dim 1, which has size 8"),
    "ap leaves the tensor": (lambda: hbm(4, 8).ap([[8, 5], [1, 8]]), "leaves the tensor of 32"),
    "index out of bounds": (
        lambda: nisa.dma_copy(tile(1, 8), hbm(4, 8).ap([[8, 1], [1, 8]], scalar_offset=row_index(1, value=4))),
        "scalar_offset is out of bounds"),
    "float index": (lambda: hbm(4, 8).ap([[8, 1], [1, 8]], scalar_offset=tile(1, 1)),
                    "an int32 SBUF tile with one element"),
    "row index in HBM": (lambda: hbm(4, 8).ap([[8, 4], [1, 8]], vector_offset=hbm(4, 1, dtype=nl.int32)),
                         "an int32 or uint32 SBUF tile with one index per partition"),
    "4-byte DMA transpose": (lambda: gather_transpose(nl.float32), "has not 2 bytes"),
    "DMA transpose of 24 rows": (lambda: gather_transpose(n=24), "a multiple of 16"),
    "DMA transpose out of bounds": (lambda: gather_transpose(value=256), "index out of bounds"),
    "Python if on the device": (lambda: 1 if scalar_of(3) else 0, "not known while the kernel is built"),
    "Python range on the device": (lambda: range(scalar_of(3)), "not known while the kernel is built"),
    "loop body returns": (lambda: nl.fori_loop(0, 2, lambda i: 1), "the body returns nothing"),
    "program grid": (lambda: nl.program_id(1), "the grid has one axis"),
    "barrier on one core": (lambda: nisa.core_barrier(hbm(1, 1), (0, 1)), "of LNC 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_stand_in_refuses(name):
    """Every hardware rule is enforced, and the refusal names it."""
    body, rule = BROKEN[name]

    @nki_cpu.jit
    def kernel():
        body()
        return hbm(1, 1)

    with pytest.raises(nki_cpu.NkiValidationError, match=rule):
        nki_cpu.simulate(kernel)()


def test_stand_in_refuses_unknown_names_and_arguments():
    with pytest.raises(AttributeError, match=r"nki\.isa\.range_select is not modelled"):
        _ = nisa.range_select
    with pytest.raises(AttributeError, match=r"nki\.language\.softmax is not modelled"):
        _ = nl.softmax
    with pytest.raises(TypeError, match="perf_mode"):
        nisa.nc_matmul(dst=None, stationary=None, moving=None, perf_mode="double_row")
    with pytest.raises(nki_cpu.NkiValidationError, match="LNC is 1 or 2"):
        nki_cpu.jit(lambda: None)[3]


@pytest.mark.parametrize(
    ("result", "rule"),
    [
        (lambda x: nl.ndarray((8, 8), nl.float32), "returns tensors in nl.shared_hbm, not sbuf"),
        (lambda x: x, "cannot return its argument"),
        (lambda x: 1, "returns tensors, not int"),
        (lambda x: nisa.dma_copy(dst=x, src=tile(8, 8)), "kernel arguments are read-only"),
    ],
)
def test_stand_in_refuses_results(result, rule):
    with pytest.raises(nki_cpu.NkiValidationError, match=rule):
        nki_cpu.simulate(nki_cpu.jit(lambda x: result(x)))(np.zeros((8, 8), np.float32))


def test_uninitialised_reads_show():
    """Memory that nothing wrote is NaN in SBUF, PSUM and HBM, and 4 in integers."""

    @nki_cpu.jit
    def kernel():
        out, whole = hbm(128, 8), hbm(128, 8, dtype=nl.int32)
        a = tile(128, 8, value=None)
        nisa.memset(dst=a[:, 0:4], value=1.0)
        nisa.dma_copy(dst=out, src=a)
        nisa.dma_copy(dst=whole, src=tile(128, 8, dtype=nl.int32, value=None))
        return out, whole, hbm(2, 2)

    out, whole, fresh = nki_cpu.simulate(kernel)()
    assert (out[:, :4] == 1).all()
    assert np.isnan(out[:, 4:]).all()
    assert (whole == 4).all()
    assert np.isnan(fresh).all()


def test_views_share_memory_and_writes_round():
    @nki_cpu.jit
    def kernel():
        a, out = tile(128, 2, 4, dtype=nl.bfloat16), hbm(128, 2, 4, dtype=nl.bfloat16)
        nisa.memset(
            dst=a[:, 1, 0:3:2], value=1.00390625
        )  # between two bfloat16: rounds to even, 1.0
        nisa.dma_copy(dst=out, src=a)
        return out

    out = nki_cpu.simulate(kernel)().astype(np.float32)
    assert out[5].tolist() == [[0, 0, 0, 0], [1, 0, 1, 0]]


def exchange(barrier, first):
    """Each core writes its row and then reads the other's; `first` writes late."""

    @nki_cpu.jit
    def kernel():
        shared, out, me = hbm(2, 8), hbm(2, 8), nl.program_id(0)
        if me != first:
            nisa.dma_copy(dst=shared[me : me + 1, :], src=tile(1, 8, value=float(me)))
        if barrier:
            nisa.core_barrier(shared, (0, 1))
        t = tile(1, 8)
        if me == first:
            nisa.dma_copy(dst=t, src=shared[1 - me : 2 - me, :])
        nisa.dma_copy(dst=out[me : me + 1, :], src=t)
        return out

    return nki_cpu.simulate(kernel[2])


@pytest.mark.parametrize("first", [0, 1])
def test_missing_barrier_shows(first):
    """In whichever order the programs happen to run."""
    out = exchange(True, first)()
    assert out.tolist()[first] == [1 - first] * 8
    with pytest.raises(nki_cpu.NkiValidationError, match="core_barrier is missing"):
        exchange(False, first)()


def test_programs_must_agree():
    @nki_cpu.jit
    def trips():
        nl.fori_loop(0, 1 + nl.program_id(0), lambda i: None)
        return hbm(1, 1)

    @nki_cpu.jit
    def shapes():
        return hbm(1, 1 + nl.program_id(0))

    @nki_cpu.jit
    def barriers():
        out = hbm(1, 1)
        if nl.program_id(0) == 0:
            nisa.core_barrier(out, (0, 1))
        return out

    for kernel, rule in (
        (trips, "programs take different trip counts"),
        (shapes, "must allocate the same shared_hbm tensors"),
        (barriers, "every core must execute the same barriers"),
    ):
        with pytest.raises(nki_cpu.NkiValidationError, match=rule):
            nki_cpu.simulate(kernel[2])()


def test_counters():
    """One cycle per moving column, four in float32; HBM bytes by dtype; peaks."""

    @nki_cpu.jit
    def kernel(x):
        a = nl.ndarray((128, 64), nl.bfloat16)
        nisa.dma_copy(dst=a, src=x)
        ps = bank(64, 64)
        nisa.nc_matmul(dst=ps, stationary=a, moving=a)
        y, out = nl.ndarray((64, 64), nl.float32), hbm(64, 64)
        nisa.tensor_copy(dst=y, src=ps)
        product(bank(128, 512), moving=(128, 512))
        nisa.dma_copy(dst=out, src=y)
        return out

    x = torch.randn(128, 64).bfloat16()
    out = kernels.simulate_kernel(kernel, 1, x)
    run = nki_cpu.last_run
    assert relative_error(out, x.float().T @ x.float()) <= FLOAT32_LIMIT
    assert run.tensor_cycles == 64 + 4 * 512
    assert (run.hbm_read, run.hbm_written) == (128 * 64 * 2, 64 * 64 * 4)
    assert run.instructions == {"dma": 2, "tensor": 2, "vector": 3}
    assert run.sbuf_peak == 64 * 2 + 64 * 4 + (128 + 512) * 4
    assert run.psum_peak == 2


# ---- The override registry ----------------------------------------------------------------------
class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class New(Old):
    pass


class Other(nn.Linear):
    pass


@kernels.override("model.layers.*.mlp", description="for these tests")
def good(module, scale=1.0):
    return New()


@kernels.override("model.layers.[0-9].mlp", "nothing.*")
def rival(module):
    return New()


@kernels.override("model.layers.*.mlp")
def bad_shape(module):
    return Other(3, 3)


@kernels.override("model.layers.*.mlp")
def refuses(module):
    raise ValueError("it is not what I can replace")


@kernels.override("model.layers.*.mlp")
def not_a_module(module):
    return 3


@kernels.override("model.layers.*.mpl")
def misspelt(module):
    return New()


@kernels.override("model.layers.1")
def outer(module):
    return module


@kernels.override("model.layers.*.mlp")
def needs(module, size):
    return New()


def unregistered(module):
    return module


def toy_model():
    root = nn.Module()
    root.model = nn.Module()
    root.model.layers = nn.ModuleList(nn.Module() for _ in range(4))
    for layer in root.model.layers[1:]:
        layer.mlp = Old()
    return root


def apply(*names):
    model = toy_model()
    overrides = kernels.load_overrides([f"{__name__}.{n}" for n in names])
    kernels.apply_overrides(model, overrides, logging.getLogger("qwen3-trn"))
    return model


def test_override_replaces_and_logs(caplog):
    with caplog.at_level(logging.INFO, "qwen3-trn"):
        model = apply("good")
    assert all(type(layer.mlp) is New for layer in model.model.layers[1:])
    assert caplog.messages == [f"model.layers.1-3.mlp: 3 x New ({__name__}.good)"]


def test_override_log_line_names_gaps():
    names = [f"model.layers.{i}.mlp.experts" for i in (0, 2, 3, 7)]
    owner = kernels.load_override("kernels.nki_moe")
    lines = kernels.replaced_groups(dict.fromkeys(names, owner), {n: New() for n in names})
    assert lines == ["model.layers.0,2-3,7.mlp.experts: 4 x New (kernels.nki_moe)"]


def test_override_that_matches_nothing_warns(caplog):
    apply("misspelt")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no module matches model.layers.*.mpl; nearest: model.layers.*.mlp" in caplog.text


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["good", "rival"], "{m}.good and {m}.rival both replace model.layers.1.mlp"),
        (["good", "outer"], "{m}.good and {m}.outer both replace model.layers.1.mlp"),
        (["good", "good"], "{m}.good is named twice; name it once"),
        (["bad_shape"], "must keep its parameters {{'weight': (3,)}}, not have {{'weight': (3, 3)"),
        (
            ["refuses"],
            "{m}.refuses cannot replace model.layers.1.mlp: it is not what I can replace",
        ),
        (["not_a_module"], "{m}.not_a_module returned 3 for model.layers.1.mlp, not a module"),
        (["unregistered"], "unregistered in {m} is not registered with @kernels.override"),
        (["goood"], "goood in {m} does not exist; nearest: good"),
        (
            ['good={"scal": 2}'],
            "unexpected keyword argument 'scal'; it takes scale; nearest: scale",
        ),
        (["needs"], "missing a required argument: 'size'; it takes size"),
        (["good={"], "not JSON after the ="),
        (["good=3"], "a JSON object must follow the ="),
    ],
)
def test_override_stops(specs, message):
    """Each registry rule, by its message, and before anything is replaced."""
    with pytest.raises(kernels.OverrideError) as error:
        apply(*specs)
    assert message.format(m=__name__) in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kernel.nki_moe", "there is no module kernel; nearest: kernels"),
        ("nki_moe", "must be MODULE.FUNCTION[={json}]"),
        ("kernels.nki_mow", "nki_mow in kernels does not exist; nearest: nki_moe"),
    ],
)
def test_override_name_errors(spec, message):
    with pytest.raises(kernels.OverrideError, match=re.escape(message)):
        kernels.load_overrides([spec])


def test_override_named_twice_by_nki():
    with pytest.raises(kernels.OverrideError, match=r"named twice \(--nki names it already\)"):
        kernels.load_overrides([*kernels.NKI_OVERRIDES, "kernels.nki_moe"])


def test_override_module_that_fails_to_import(tmp_path, monkeypatch):
    (tmp_path / "broken_override.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kernels.OverrideError, match="importing broken_override failed: No module"):
        kernels.load_overrides(["broken_override.f"])


def test_override_from_a_users_file(tmp_path, monkeypatch):
    """Ten lines in a file of one's own."""
    (tmp_path / "my_override.py").write_text("""\
from torch import nn
import kernels

class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)

@kernels.override("*.proj", description="twice the projection")
def scaled(module):
    return Scaled(module.in_features, module.out_features)
""")
    monkeypatch.syspath_prepend(tmp_path)
    model = nn.Module()
    model.attn = nn.ModuleDict({"proj": nn.Linear(2, 3)})
    overrides = kernels.load_overrides(["my_override.scaled"])
    kernels.apply_overrides(model, overrides, logging.getLogger("qwen3-trn"))
    assert type(model.attn.proj).__name__ == "Scaled"


def test_override_of_the_readme(tmp_path):
    """The example file, as a user would paste it, changes the loss and nothing else."""
    code = (
        (HERE / "README.md").read_text().split("```python\n# my_overrides.py\n")[1].split("```")[0]
    )
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_overrides.py").write_text(code)
    argv = ["--steps", "1", "--bs", "1", "--output_dir", str(tmp_path)]
    argv += ["--override", "my_overrides.GeGLU"]
    done = command(*argv, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "model.layers.0.mlp: 1 x GeGLU (my_overrides.GeGLU)" in done.stdout


# ---- Training with kernels ----------------------------------------------------------------------
@functools.cache
def losses_of(world: int, flags: str, simulator: str = "0") -> list[float]:
    """Losses of ten steps of the debug model."""
    out = root() / f"run{time.perf_counter_ns()}"
    argv = f"--steps 10 --log_every 1 --lr 3e-3 --output_dir {out} {flags}".split()
    run_ranks(world, train_with_kernels, argv, simulator)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()[1:]]
    return [row["loss"] for row in rows]


def train_with_kernels(argv: list[str], simulator: str) -> None:
    os.environ["NKI_SIMULATOR"] = simulator
    train(argv)


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize(
    ("world", "flags"),
    [(1, "--bs 2"), (2, "--bs 1"), (2, "--bs 2 --tp 2"), (1, "--bs 2 --ac full"),
     pytest.param(1, "--bs 2 --compile --compile_backend aot_eager", marks=pytest.mark.slow)],
)  # fmt: skip
def test_kernels_train_as_without(world, flags, backend):
    """Ten steps; HF's rotary is a function, so there only the experts are replaced."""
    plain = losses_of(world, f"{flags} --backend {backend}")
    assert plain[0] - plain[-1] > 1
    # the reference path: other order of float32 sums; ten AdamW steps keep that far below 1e-6
    assert losses_of(world, f"{flags} --backend {backend} --nki") == pytest.approx(plain, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize(
    ("world", "flags"),
    [(1, "--bs 2"), (2, "--bs 1"), (2, "--bs 2 --tp 2"), (1, "--bs 2 --ac full"),
     (1, "--bs 2 --compile --compile_backend aot_eager")],
)  # fmt: skip
def test_simulated_kernels_train_as_without(world, flags, backend):
    plain = losses_of(world, f"{flags} --backend {backend}")
    # the kernels sum in blocks of 128 rows, and use NumPy's exp
    found = losses_of(world, f"{flags} --backend {backend} --nki", "1")
    assert found == pytest.approx(plain, rel=1e-4)


# ---- Start-up checks ----------------------------------------------------------------------------
def constraints(monkeypatch, seq_len=256, lnc="2", device="cpu", **config):
    sizes = {"head_dim": 64, "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8}
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    overrides = kernels.load_overrides(list(kernels.NKI_OVERRIDES))
    hf = SimpleNamespace(**(sizes | config))
    return kernels.check_constraints(hf, seq_len, 2, overrides, device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"num_experts": None}, None),
        ({"lnc": "1", "seq_len": 128}, None),
        ({"seq_len": 100}, "--seq_len 100 must be a multiple of 256 (128 rows x LNC 2) for "
                           "kernels.nki_rotary; nearest: 256"),
        ({"seq_len": 700}, "for kernels.nki_rotary; nearest: 768"),
        ({"head_dim": 80}, "--model: head_dim 80 must be 64 or 128 for kernels.nki_rotary; nearest: 64"),
        ({"hidden_size": 250}, "--model: hidden_size 250 must be a multiple of 32 (tile rows) for "
                               "kernels.nki_moe; nearest: 256"),
        ({"moe_intermediate_size": 8}, "moe_intermediate_size 8 must be a multiple of 32 (tile rows) "
                                       "for kernels.nki_moe; nearest: 32"),
        ({"lnc": "3"}, "NEURON_LOGICAL_NC_CONFIG 3 must be 1 or 2: physical cores per device; "
                       "nearest: 2"),
        ({"lnc": "", "device": "neuron"}, "NEURON_LOGICAL_NC_CONFIG (unset) must be 1 or 2"),
    ],
)  # fmt: skip
def test_constraint_messages(change, message, monkeypatch):
    """Flag, value, rule, nearest legal value; the default model passes."""
    problems = constraints(monkeypatch, **change)
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def test_kernels_use_only_documented_names():
    """Each nl. and nisa. name in kernels.py is one that nki_cpu.py models from the documentation."""
    text = Path(kernels.__file__).read_text()
    for space, name in set(re.findall(r"\b(nl|nisa)\.([a-z_0-9]+)", text)):
        getattr({"nl": nl, "nisa": nisa}[space], name)


# ---- run.sh -------------------------------------------------------------------------------------
# The script runs with a PATH that holds only what it may use, a `python3` that sees no installed packages but those
# that a test plants, and stand-ins for torchrun and the trainer that write down how they were called.
TOOLS = "bash cat chmod cksum date dirname flock getconf grep mkdir mktemp nproc pkill rm sed sleep tee touch tr uname"
PYTHON_STUB = r"""#!/usr/bin/env bash
case "$*" in
*"sys.version_info <"*) n=${2##*, }; n=${n%%)*}; [ "$FAKE_MINOR" -ge "$n" ]; exit ;;
*ensurepip*) [ -z "$NO_ENSUREPIP" ]; exit ;;
"-m venv"*) mkdir -p "${@: -1}/bin" && cat "$0" >"${@: -1}/bin/python"; chmod +x "${@: -1}/bin/python"; exit ;;
"-m pip --version") exit 0 ;;
"-m pip install"*)
    echo "pip $*" >>"$RECORD.pip"
    for a in "$@"; do case $a in */trainium.txt) cat "$a" >>"$RECORD.pip" ;; esac; done
    sleep "${PIP_SECONDS:-0}"; exit "${PIP_CODE:-0}" ;;
esac
exec REAL_PYTHON -S "$@"
"""
RECORDER = """
import json, os, signal, sys, time
with open(os.environ["RECORD"], "a") as f:
    f.write(json.dumps({"by": BY, "argv": sys.argv[1:], "env": dict(os.environ)}) + "\\n")
exec(os.environ.get("BEHAVE_" + BY, ""))
"""
IF_DIED = "open(os.environ['EXIT_CODE_FILE'], 'w').write('%d'); sys.exit(1)"


class Launcher:
    """A copy of run.sh in an empty folder, and what it called."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.bin, self.record = folder / "my repo", folder / "bin", folder / "record"
        self.packages, self.tmp = folder / "packages", folder / "tmp"
        for d in (self.repo, self.bin, self.packages / "torch/distributed", self.tmp):
            d.mkdir(parents=True)
        for name in ("run.sh", "requirements.txt"):
            shutil.copy(HERE / name, self.repo)
        for tool in TOOLS.split():
            if shutil.which(tool):
                (self.bin / tool).symlink_to(shutil.which(tool))
        self.program("python3", PYTHON_STUB.replace("REAL_PYTHON", sys.executable))
        (self.repo / "train_qwen3_trn.py").write_text('BY = "trainer"' + RECORDER)
        (self.packages / "torch/distributed/run.py").write_text('BY = "torchrun"' + RECORDER)
        for file in ("torch/__init__.py", "torch/distributed/__init__.py"):
            (self.packages / file).touch()
        self.pins = {}
        old = sys.version_info < (3, 12)
        for line in (self.repo / "requirements.txt").read_text().splitlines():
            pin = re.match(r'([\w-]+)==([\w.]+)(?:; python_version (<|>=) "3.(\d+)")?', line)
            if not pin:
                continue
            before = pin[4] and sys.version_info < (3, int(pin[4]))
            if not pin[4] or bool(before) == (pin[3] == "<"):
                self.pins[pin[1]] = pin[2]
        assert self.pins["torch"] == ("2.13.0" if old else "2.14.0")
        for name, version in self.pins.items():
            self.package(name, version)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def package(self, name: str, version: str | None) -> None:
        """Plants the metadata of an installed package; None takes it away."""
        for old in self.packages.glob(f"{name.replace('-', '_')}-*.dist-info"):
            shutil.rmtree(old)
        if version:
            folder = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    def trainium(self, chips: int) -> dict[str, str]:
        """A machine with so many Trainium2 chips and the Neuron packages; its environment."""
        for i in range(chips):
            (self.tmp.parent / f"neuron{i}").touch()
        self.package("torch-neuronx", "2.14.3.0.12")
        self.package("neuronx-cc", "2.28.7631.0+abc")
        self.package("nki", "0.7.0+xyz")
        return {"NEURON_DEVICE_PREFIX": str(self.tmp.parent / "neuron"), "FAKE_MINOR": "12"}

    def start(self, *args: str, **env: str) -> subprocess.Popen:
        minor = str(sys.version_info.minor)
        base = {
            "PATH": str(self.bin),
            "HOME": str(self.tmp.parent),
            "TMPDIR": str(self.tmp),
            "RECORD": str(self.record),
            "PYTHONPATH": str(self.packages),
            "FAKE_MINOR": minor,
            "NO_ENSUREPIP": "",
            "NEURON_DEVICE_PREFIX": str(self.tmp.parent / "none"),
        }
        return subprocess.Popen(
            ["bash", str(self.repo / "run.sh"), *args], cwd=self.tmp.parent, env=base | env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def __call__(self, *args: str, **env: str) -> subprocess.CompletedProcess:
        p = self.start(*args, **env)
        out, err = p.communicate(timeout=60)
        return subprocess.CompletedProcess(args, p.returncode, out, err)

    def calls(self) -> list[dict]:
        return [json.loads(s) for s in self.record.read_text().splitlines()] if self.record.exists() else []  # fmt: skip

    def pip(self) -> str:
        file = Path(f"{self.record}.pip")
        return file.read_text() if file.exists() else ""


@pytest.fixture
def launcher(tmp_path):
    return Launcher(tmp_path)


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def flag_value(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_run_one_process(launcher):
    """One process needs no launcher; arguments arrive unchanged; output is shown and kept."""
    args = ["--model", "a b", "--x=$HOME *", "", "--output_dir", "out dir"]
    p = launcher(*args, RANK="3", WORLD_SIZE="8", BEHAVE_trainer="print('hello'); print('oh', file=sys.stderr)")  # fmt: skip
    assert (p.returncode, p.stdout, p.stderr) == (0, "hello\n", "oh\n")
    (call,) = launcher.calls()
    assert call["by"] == "trainer"
    assert call["argv"] == args
    assert not {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS"} & set(call["env"])
    (log,) = (launcher.tmp.parent / "out dir/logs").iterdir()
    assert sorted(log.read_text().split()) == ["hello", "oh"]
    assert not launcher.pip()
    assert not (launcher.repo / ".venv").exists()
    assert not list(launcher.tmp.iterdir())


def test_run_several_processes(launcher):
    """A check of everything with the right world size, then torchrun with a free port of its own."""
    p = launcher("--tp", "2", "--output_dir=o", NGPU="4", LOG_RANK="0,3", MAX_RESTARTS="2")
    assert p.returncode == 0, p.stderr
    check, run = launcher.calls()
    assert (check["by"], run["by"]) == ("trainer", "torchrun")
    assert check["argv"] == ["--check", "--tp", "2", "--output_dir=o"]
    assert check["env"]["WORLD_SIZE"] == "4"
    assert "WORLD_SIZE" not in run["env"]
    assert int(run["env"]["OMP_NUM_THREADS"]) >= 1
    argv = run["argv"]
    assert argv[argv.index(str(launcher.repo / "train_qwen3_trn.py")) + 1 :] == ["--tp", "2", "--output_dir=o"]  # fmt: skip
    want = {"--nproc-per-node": "4", "--nnodes": "1", "--rdzv-endpoint": "localhost:0", "--max-restarts": "2"}  # fmt: skip
    want |= {"--local-ranks-filter": "0,3", "--log-dir": "o/logs", "--tee": "3"}
    assert {k: flag_value(argv, k) for k in want} == want


def test_run_restarts_need_the_launcher(launcher):
    """MAX_RESTARTS works for one process too."""
    assert launcher(MAX_RESTARTS="1").returncode == 0
    assert [c["by"] for c in launcher.calls()] == ["trainer", "torchrun"]


@pytest.mark.parametrize(
    ("env", "behave", "code"),
    [
        ({}, {"trainer": "sys.exit(7)"}, 7),
        ({}, {"trainer": "os.kill(os.getpid(), 9)"}, 137),
        ({"NGPU": "2"}, {"trainer": "sys.exit(2)"}, 2),  # --check: torchrun must not start
        ({"NGPU": "2"}, {"torchrun": "sys.exit(1)"}, 1),
        ({"NGPU": "2"}, {"torchrun": IF_DIED % 75}, 75),
        # A first attempt failed, a restarted one succeeded.
        ({"NGPU": "2"}, {"torchrun": (IF_DIED % 75).replace("sys.exit(1)", "")}, 0),
    ],
)
def test_run_exit_code(launcher, env, behave, code):
    """The script's exit code is the training's, not torchrun's."""
    p = launcher(**env, **{f"BEHAVE_{k}": v for k, v in behave.items()})
    assert p.returncode == code
    assert len(launcher.calls()) == (2 if "torchrun" in behave else 1)
    assert not list(launcher.tmp.iterdir())


@pytest.mark.parametrize("ngpu", ["1", "2"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_run_signal(launcher, name, ngpu):
    """Signals that come in numbers reach the training once, run.sh waits for it and takes its code."""
    got, by = launcher.tmp.parent / "got", "torchrun" if ngpu == "2" else "trainer"
    behave = f"""
def handler(n, frame):
    open({str(got)!r}, "a").write(signal.Signals(n).name + str(os.path.exists(os.environ["STOP_FILE"])) + " ")
signal.signal(signal.{name}, handler)
open({str(got)!r}, "w")
while not os.path.getsize({str(got)!r}): time.sleep(0.02)
time.sleep(0.5)
open(os.environ["EXIT_CODE_FILE"], "w").write("75")
sys.exit(1)
"""
    p = launcher.start(NGPU=ngpu, **{f"BEHAVE_{by}": behave})
    wait_for_file(got)
    for _ in range(3):
        os.killpg(p.pid, getattr(signal, name))  # as a terminal or `timeout` does
        time.sleep(0.05)
    p.communicate(timeout=30)
    assert p.returncode == 75
    assert got.read_text() == f"{name}True "
    assert not list(launcher.tmp.iterdir())


def test_run_second_signal(launcher):
    """A training that does not end after a signal is killed by a second one; without its own code: 128 + signal."""
    p = launcher.start(
        BEHAVE_trainer="signal.signal(15, lambda *_: None)\nwhile True: time.sleep(0.1)"
    )
    wait_for_file(launcher.record)
    time.sleep(0.3)
    p.send_signal(signal.SIGTERM)
    time.sleep(2.2)
    assert p.poll() is None
    p.send_signal(signal.SIGTERM)
    p.communicate(timeout=10)
    assert p.returncode == 143


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NGPU": "two"}, "NGPU=two must be a whole number from 1"),
        ({"NGPU": "0"}, "NGPU=0 must be"),
        ({"NGPU": "08"}, "NGPU=08 must be"),
        ({"NGPU": "1", "MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1 must be"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 must be a whole number from 1 to 65535"),
        ({"NNODES": "x"}, "NNODES=x must be"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "needs MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "h"}, "NODE_RANK=unset must be a whole number from 0 to 1"),
        ({"NNODES": "2", "MASTER_ADDR": "h", "NODE_RANK": "2"}, "NODE_RANK=2 must be"),
        ({"NGPU": "2", "LOG_RANK": "all"}, "LOG_RANK=all must be local ranks"),
        ({"NGPU": "2", "LOG_RANK": "0,2"}, "local ranks 0 to 1"),
    ],
)
def test_run_wrong_numbers(launcher, env, message):
    p = launcher(**env)
    assert p.returncode == 2
    assert message in p.stderr
    assert p.stderr.count("\n") == p.stderr.count("[qwen3-trn] error:")
    assert not launcher.calls()


def test_run_wrong_numbers_together(launcher):
    """All problems in one go."""
    p = launcher(NGPU="-4", LOG_RANK="a", NNODES="2")
    assert all(f"error: {s}" in p.stderr for s in ("NGPU", "LOG_RANK", "NODE_RANK", "NNODES=2 needs MASTER_ADDR"))  # fmt: skip


def test_run_port_in_use(launcher):
    """A MASTER_PORT that another job holds is named (field case F70)."""
    import socket

    with socket.create_server(("", 0)) as s:
        port = str(s.getsockname()[1])
        p = launcher(NGPU="2", MASTER_PORT=port)
    assert p.returncode == 2
    assert f"MASTER_PORT={port} is in use" in p.stderr


def test_run_nodes(launcher):
    env = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "1234", "NGPU": "4"}  # fmt: skip
    assert launcher(**env).returncode == 0
    check, run = launcher.calls()
    assert check["env"]["WORLD_SIZE"] == "8"
    want = {"--nnodes": "2", "--rdzv-endpoint": "host0:1234", "--rdzv-conf": "is_host=0"}
    assert {k: flag_value(run["argv"], k) for k in want} == want
    assert "--local-addr" not in run["argv"]
    assert "FI_PROVIDER" not in run["env"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("trn[007-009,12],x1", "trn007"), ("a-1,b", "a-1"), ("n[3,5]", "n3"), ("solo", "solo")],
)
def test_run_slurm(launcher, nodes, first):
    """Under srun everything comes from Slurm; what the user sets wins."""
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "3", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": nodes}  # fmt: skip
    assert launcher(**slurm, NGPU="2").returncode == 0
    check, run = launcher.calls()
    assert check["env"]["WORLD_SIZE"] == "6"
    want = {"--nnodes": "3", "--rdzv-endpoint": f"{first}:24711", "--rdzv-conf": "is_host=0", "--rdzv-id": "4711"}  # fmt: skip
    assert {k: flag_value(run["argv"], k) for k in want} == want
    assert launcher(**slurm, NNODES="1").returncode == 0
    assert launcher.calls()[-1]["by"] == "trainer"


def test_run_slurm_tasks(launcher):
    p = launcher(SLURM_JOB_ID="1", SLURM_STEP_NUM_TASKS="8", SLURM_STEP_NUM_NODES="2")
    assert p.returncode == 2
    assert "--ntasks-per-node=1" in p.stderr


@pytest.mark.parametrize(
    ("chips", "env", "ranks"),
    [
        (16, {}, "64"),
        (1, {}, "4"),
        (1, {"NEURON_LOGICAL_NC_CONFIG": "1"}, "8"),
        (16, {"NGPU": "8"}, "8"),
    ],
)
def test_run_trainium(launcher, chips, env, ranks):
    """Processes and environment of a trn2.48xlarge and a trn2.3xlarge."""
    p = launcher(**launcher.trainium(chips), **env)
    assert p.returncode == 0, p.stderr
    _, run = launcher.calls()
    assert flag_value(run["argv"], "--nproc-per-node") == ranks
    want = {
        "NEURON_LOGICAL_NC_CONFIG": env.get("NEURON_LOGICAL_NC_CONFIG", "2"),
        "TORCH_NEURONX_NEFF_CACHE_DIR": f"{launcher.tmp.parent}/.cache/qwen3-trn/neff",
        "PG_TIMEOUT_MINUTES": "90",
        "NEURON_RT_EXEC_TIMEOUT": "5400",
    }
    assert {k: run["env"].get(k) for k in want} == want
    assert "FI_PROVIDER" not in run["env"]


def test_run_trainium_values_that_win(launcher):
    mine = {"TORCH_NEURONX_NEFF_CACHE_DIR": "/x", "PG_TIMEOUT_MINUTES": "5", "NEURON_RT_EXEC_TIMEOUT": "9"}  # fmt: skip
    mine |= {"FI_PROVIDER": "tcp", "OMP_NUM_THREADS": "3"}
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h"}
    assert launcher(**launcher.trainium(1), **mine, **nodes).returncode == 0
    env = launcher.calls()[-1]["env"]
    assert {k: env[k] for k in mine} == mine
    assert (env["FI_EFA_USE_DEVICE_RDMA"], env["FI_EFA_FORK_SAFE"]) == ("1", "1")


def test_run_trainium_more_than_there_are(launcher):
    p = launcher(**launcher.trainium(1), NGPU="5")
    assert p.returncode == 2
    assert "NGPU=5 must be a whole number from 1 to 4" in p.stderr


def test_run_cpu_on_an_accelerator_machine(launcher):
    """--device cpu does not start a process per NeuronCore."""
    assert launcher("--device", "cpu", **launcher.trainium(16)).returncode == 0
    assert [c["by"] for c in launcher.calls()] == ["trainer"]


def test_run_gpus(launcher):
    launcher.program("nvidia-smi", "#!/usr/bin/env bash\nprintf 'GPU 0: H200\\n  MIG 1g\\nGPU 1: H200\\n'\n")  # fmt: skip
    assert launcher().returncode == 0
    assert flag_value(launcher.calls()[-1]["argv"], "--nproc-per-node") == "2"
    assert launcher(CUDA_VISIBLE_DEVICES="1").returncode == 0
    assert launcher.calls()[-1]["by"] == "trainer"


@pytest.mark.parametrize("args", [["--help"], ["--dry_run", "--world_size", "64"]])
def test_run_without_devices(launcher, args):
    """Help and dry run: the trainer alone, whatever the environment says."""
    p = launcher(*args, NNODES="2", BEHAVE_trainer="print('help')")
    assert (p.returncode, p.stdout) == (0, "help\n")
    assert [c["argv"] for c in launcher.calls()] == [args]


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("torch-neuronx", "1.0", "placeholder"),
        ("torch-neuronx", "2.9.0.2.15.32035", "old XLA package"),
        ("neuronx-cc", "1.0.post1", "placeholder"),
        ("nki", "0.0.1", "placeholder"),
    ],
)
def test_run_refuses_wrong_packages(launcher, name, version, message):
    env = launcher.trainium(1)
    launcher.package(name, version)
    p = launcher(**env)
    assert p.returncode == 2
    assert f"error: {name} {version}" in p.stderr
    assert message in p.stderr
    assert p.stderr.count("\n") == 1
    assert not launcher.calls()
    assert not launcher.pip()


@pytest.mark.parametrize("minor", ["11", "9"])
def test_run_refuses_old_python(launcher, minor):
    env = launcher.trainium(1) if minor == "11" else {}
    p = launcher(**(env | {"FAKE_MINOR": minor}))
    assert p.returncode == 2
    want = "Trainium needs Python 3.12 to 3.14" if env else "Python 3.10 or newer"
    assert want in p.stderr
    assert p.stderr.count("\n") == 1
    assert not launcher.pip()


def test_run_refuses_python_without_venv(launcher):
    launcher.package("torch", None)
    p = launcher(NO_ENSUREPIP="1")
    assert p.returncode == 2
    assert "apt install python3-venv" in p.stderr


def test_run_installs_once(launcher):
    """.venv is made when the active environment differs; again only after a change or an interruption."""
    launcher.package("torch", "2.9.0")
    p = launcher(VIRTUAL_ENV="/somewhere", PIP_CODE="1")
    assert p.returncode == 2
    assert "torch 2.9.0 (wanted" in p.stdout
    assert "will try again" in p.stderr
    for _ in range(2):
        p = launcher()
        assert p.returncode == 0, p.stderr
    assert launcher.pip().count("pip install") == 2
    assert "amazonaws" not in launcher.pip()
    with (launcher.repo / "requirements.txt").open("a") as f:
        f.write("# changed\n")
    assert launcher().returncode == 0
    assert launcher.pip().count("pip install") == 3


def test_run_installs_for_trainium(launcher):
    """The packages of the Neuron repository come with its address, in versions that no placeholder has."""
    env = launcher.trainium(1)
    launcher.package("nki", None)
    assert launcher(**env).returncode == 0
    assert "--extra-index-url https://pip.repos.neuron.amazonaws.com" in launcher.pip()
    assert launcher.pip().splitlines()[1:] == ["torch-neuronx==2.14.3.0.*", "neuronx-cc==2.28.7631.0", "nki==0.7.0"]  # fmt: skip


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock")
def test_run_two_at_once(launcher):
    """Only one of two installs."""
    launcher.package("torch", None)
    runs = [launcher.start(PIP_SECONDS="1") for _ in range(2)]
    out = [p.communicate(timeout=60)[0] for p in runs]
    assert [p.returncode for p in runs] == [0, 0]
    assert launcher.pip().count("pip install") == 1
    assert "waiting for another" in "".join(out)


def test_run_tests(launcher):
    """--test hands its arguments to pytest."""
    (launcher.packages / "pytest.py").write_text('BY = "pytest"' + RECORDER)
    assert launcher("--test", "--slow", "-k", "a or b").returncode == 0
    (call,) = launcher.calls()
    assert call["argv"][0] == "-n"
    assert call["argv"][2:] == ["test_train.py", "--slow", "-k", "a or b"]
    launcher.package("pytest", None)  # the active environment may do for training but not for this
    assert launcher("--test").returncode == 0
    assert launcher.pip().count("pip install") == 1


# ---- Conversations and packing ------------------------------------------------------------------
# Shaped like Qwen3's template: only turns after the last user message show their thinking, and the
# last one always has a block for it, so that the beginning of a conversation renders differently.
TEMPLATE = r"""
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{ '<|im_start|>system\nTools: ' + tools|tojson + '<|im_end|>\n' }}{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- set parts = m.content.split('</think>') -%}
    {%- set thought = m.reasoning_content or (parts[0].split('<think>')[1] if parts|length > 1 else '') -%}
    {%- if loop.index0 > ns.last and (thought or loop.last) -%}
      {{- '<think>\n' + thought|trim + '\n</think>\n\n' -}}
    {%- endif -%}
    {{- parts[-1].lstrip('\n') -}}
    {%- for call in m.tool_calls or [] -%}{{- '<call>' + call.function|tojson + '</call>' -}}{%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
""".strip()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
CHAT_VOCAB = 272  # 256 bytes, one merge, SPECIAL, and rows that no token uses


def chat_tokenizer(template: str | None = TEMPLATE, **special: str) -> PreTrainedTokenizerFast:
    """Bytes, and two newlines as one token, which would straddle the start of some answers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL])
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


@functools.cache
def chat_folder(kind: str) -> str:
    """A seeded model with a tokenizer and a chat template."""
    folder = root() / f"chat_{kind}"
    if not folder.exists():  # else made by the process that started this rank
        torch.manual_seed(1)
        config = hf_config(kind, vocab_size=CHAT_VOCAB)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        chat_tokenizer().save_pretrained(folder)
    return str(folder)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def reply(text: str | None, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def chat_flags(kind: str, path, *flags: str) -> list[str]:
    argv = ["--model", chat_folder(kind), "--dataset", str(path), "--disable_shuffle"]
    if "--task" not in " ".join(flags):
        argv += ["--task", "sft"]
    return [*argv, "--output_dir", str(root() / "out"), *" ".join(flags).split()]


def chat_loader(path, *flags: str, kind: str = "untied", rank: int = 0, dp: int = 1) -> trn.Loader:
    cfg = trn.parse(chat_flags(kind, path, "--seq_len 96 --bs 1", *flags))
    return trn.Loader(trn.open_rows(cfg, hf_config(kind, vocab_size=CHAT_VOCAB)), cfg, rank, dp)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATIONS = {  # name -> messages, tools, what is trained on by hand
    "single": (
        [user("Hi"), reply("Hello.")], None,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\nHello.<|im_end|>⟧",
    ),
    "multi-turn": (
        [user("Hi"), reply("Hello."), user("Bye"), reply("So long.")], None,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\nSo long.<|im_end|>⟧",
    ),
    "system, and a question without an answer": (
        [{"role": "system", "content": "Be brief."}, user("ü?"), reply("Ü."), user("Really?")], None,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nü?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Ü.<|im_end|>⟧",
    ),
    "tool": (
        [user("1+1"), reply(None, tool_calls=[CALL]), {"role": "tool", "content": "2"}, reply("Two")],
        [{"type": "function", "function": {"name": "add"}}],
        '<|im_start|>system\nTools: [{"type": "function", "function": {"name": "add"}}]<|im_end|>\n'
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
        '⟦<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>⟧\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nTwo<|im_end|>⟧",
    ),
    "thinking moved out of earlier turns": (
        [user("a"), reply("<think>\nhm\n</think>\n\nA"), user("b"), reply("B", reasoning_content="b?")],
        None,
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>⟧\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n⟦<think>\nb?\n</think>\n\nB<|im_end|>⟧",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_labels_of_conversations(tmp_path, name):
    """The assistant's tokens and its end of turn, also where EOS is the padding token; nothing else."""
    messages, tools, marked = CONVERSATIONS[name]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages, "tools": tools}])
    loader = chat_loader(path, "--seq_len 256")
    [text] = list(data.inspect(loader, data.Encoder("", lambda: chat_folder("untied")), 1))[1:]
    assert text == marked
    [(inputs, labels, starts)] = next(loader)
    tokenizer, expected, context = AutoTokenizer.from_pretrained(chat_folder("untied")), [], []
    for i, piece in enumerate(marked.replace("⟧", "⟦").split("⟦")):
        ids = tokenizer(piece)["input_ids"]
        context += ids
        expected += ids if i % 2 else [trn.IGNORE_INDEX] * len(ids)
    n = len(expected) - 1
    assert inputs[0, :n].tolist() == context[:-1]
    assert labels[0, :n].tolist() == expected[1:]
    whole = tokenizer.apply_chat_template(
        [data.checked_message(m, "") for m in messages], tools=tools, return_dict=False
    )
    assert whole[: n + 1] == context
    assert (labels[0, n:] == trn.IGNORE_INDEX).all()
    assert starts[0].tolist() == [0] * n + [-1] * (256 - n)


def test_first_token_of_an_answer_is_the_one_that_generation_predicts(tmp_path):
    """A newline at its start stays apart from the prompt's last one, as it is when generating."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    )
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    chat = data.ChatTemplate(chat_tokenizer(template), "m")
    pieces = chat.split([user("a"), reply("\nb")], None, "", Counter())
    assert pieces == ["<|im_start|>user\na<|im_end|><|im_start|>assistant\n", "\nb<|im_end|>"]


def test_prompt_that_opens_the_thinking(tmp_path):
    """Templates of models that always think: the prompt gives <think>, so it is not predicted."""
    thinks = TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    assert thinks != TEMPLATE
    chat = data.ChatTemplate(chat_tokenizer(thinks), "m")
    messages = [user("a"), reply("A"), user("b"), reply("B", reasoning_content="t")]
    pieces = chat.split(messages, None, "", Counter())
    assert pieces[1] == "A<|im_end|>"
    assert pieces[2].endswith("assistant\n<think>\n")
    assert pieces[3] == "t\n</think>\n\nB<|im_end|>"


@pytest.mark.parametrize(
    ("template", "said"),
    [(None, "no chat template"), (TEMPLATE.split("{%- if add_gen")[0], "where the assistant's turns begin"),
     (TEMPLATE.replace("<|im_end|>", "<end>"), "special token"), ("{{ messages.x.y }}", "refuses it"),
     (TEMPLATE.replace("m.tool_calls or []", "[]").replace("parts[-1]", "'ANSWER'"), "does not show 'hello'")],
)  # fmt: skip
def test_templates_that_cannot_be_followed_are_refused(template, said):
    messages = [user("a"), reply("hello")]
    with pytest.raises(trn.UsageError, match=said):
        data.ChatTemplate(chat_tokenizer(template), "m").split(messages, None, "row", Counter())


def test_code_in_a_tokenizer_folder_is_not_run(tmp_path):
    chat_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        "tokenizer_class": "Evil",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\nclass Evil: pass")
    with pytest.raises(
        trn.UsageError, match=r"--model m: no usable tokenizer: .*contains custom code"
    ):
        data.Encoder("m", lambda: tmp_path).encode(["a"])
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("row", "said"),
    [({"text": "a"}, "no column 'messages'; columns: ['text']"), ({"messages": "a"}, "must be a list"),
     ({"messages": [{"from": "human", "value": "a"}]}, "message 0: must be an object with role and content; rename"),
     ({"messages": [{"role": "asistant", "content": "a"}]}, "Did you mean assistant?"),
     ({"messages": [user("a"), user(None)]}, "message 1: content must be text, is NoneType"),
     ({"messages": [user("a"), reply(["b"])]}, "message 1: content must be text, is list"),
     ({"messages": [user("<|im_start|>assistant\nyes"), reply("b")]}, "message 0: contains the chat template's own"),
     ({"messages": [user("a"), reply("b<|im_end|>c")]}, "message 1: contains the chat template's own '<|im_end|>'"),
     ({"messages": [user("a"), reply("b")], "tools": "[{"}, "'tools' is not valid JSON"),
     ({"messages": [user("a"), reply("b")], "tools": 3}, "'tools' must be a list")],
)  # fmt: skip
def test_bad_conversations_are_named(tmp_path, row, said):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [user("a"), reply("b")]}, row])
    with pytest.raises(trn.UsageError) as e:
        chat_loader(path)
    assert said in str(e.value)
    assert "a.jsonl, line 2" in str(e.value)


def test_tokens_outside_the_vocabulary_are_named(tmp_path):
    """Of an answer, and EOS, which no text contains; half a surrogate pair in JSON is replaced."""
    path = write_rows(
        tmp_path / "a.jsonl", [{"messages": [user("\ud800"), reply("z")], "text": "ab"}]
    )
    config = hf_config("untied", vocab_size=259)  # the end of turn is 259
    chat_loader(path)
    for task in ("sft", "pretrain"):
        cfg = trn.parse(chat_flags("untied", path, f"--task {task} --seq_len 8"))
        with pytest.raises(
            trn.UsageError, match=r"a.jsonl, line 1: token id (258|259) .* wrong tokenizer"
        ):
            trn.open_rows(cfg, config)


def small_talk(n: int) -> list[dict]:
    """Conversations of one to three turns, with and without system prompt and thinking."""
    rng, rows = np.random.default_rng(3), []
    for i in range(n):
        messages = [{"role": "system", "content": f"s{i}"}] if i % 3 == 0 else []
        for turn in range(1 + i % 3):
            messages += [user("q" * int(rng.integers(1, 20))), reply(f"answer {i}.{turn}")]
        if i % 4 == 0:
            messages[-1]["reasoning_content"] = f"thought {i}"
        rows.append({"messages": messages})
    return rows


def test_over_long_and_empty_conversations_are_counted(tmp_path, caplog):
    """Left out, not cut: a cut one would teach the model not to stop. Said again when read from cache."""
    rows = small_talk(6)
    rows[1:1] = [{"messages": []}, {"messages": [user("a")]}, {"messages": [user("a"), reply("")]}]
    rows += [{"messages": [user("q"), reply("long " * 40)]}] * 2
    path = write_rows(tmp_path / "a.jsonl", rows)
    for packing in ("none", "isolate"):
        caplog.clear()
        loader = chat_loader(path, "--seq_len 160 --packing", packing)
        assert "2 of them longer than --seq_len 160" in caplog.text
        assert "3 empty conversations left out" in caplog.text
        text = "\n".join(
            data.inspect(
                loader, data.Encoder("", lambda: chat_folder("untied")), loader.rows.num_rows
            )
        )
        assert all(
            f"{m['content']}<|im_end|>⟧" in text
            for r in small_talk(6)
            for m in r["messages"][1::2]
            if m["role"] == "assistant"
        )
        assert "long" not in text
    with pytest.raises(
        trn.UsageError, match="8 conversations are too long: use a larger --seq_len"
    ):
        chat_loader(path, "--seq_len 16")


def test_packing_loses_and_splits_nothing():
    rng = np.random.default_rng(0)
    for room in (1, 7, 64):
        places = rng.integers(1, room + 1, size=200).tolist()
        rows = data.pack(places, room)
        assert sorted(i for row in rows for i in row) == list(range(200))
        used = [sum(places[i] for i in row) for row in rows]
        assert max(used) <= room
        assert sum(used) >= 0.85 * room * len(rows)
    assert data.pack([3, 1, 2, 4], 4) == [[0, 1], [2], [3]]
    assert data.pack([], 4) == []


def test_isolated_texts(tmp_path):
    """Long texts are cut to rows, and each token but a text's first is predicted once."""
    texts = ["a" * 30, "bc", "d" * 9, "", "efg"]
    path = write_rows(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    for packing in ("isolate", "none"):
        cfg = trn.parse(f"--dataset {path} --seq_len 8 --bs 1 --packing {packing}".split())
        rows = trn.open_rows(cfg, hf_config("untied", vocab_size=512))
        inputs, labels, starts = trn.make_batch([rows.row(i) for i in range(rows.num_rows)])
        assert inputs.shape == (8 if packing == "none" else 6, 8)
        trained = labels[labels != trn.IGNORE_INDEX].tolist()
        expected = [x for t in texts if t for x in [*t.encode()[1:], trn.BYTE_EOS]]
        assert sorted(trained) == sorted(expected)
        assert (labels[starts < 0] == trn.IGNORE_INDEX).all()
        for row in starts:
            begins = [i for i in range(8) if row[i] == i]
            assert set(row.tolist()) <= {*begins, -1}


@pytest.mark.parametrize("packing", ["none", "isolate"])
def test_streamed_conversations_are_those_of_the_file(tmp_path, packing):
    (tmp_path / "hub").mkdir()
    path = write_rows(tmp_path / "hub" / "a.jsonl", small_talk(30))
    file = chat_loader(path, "--seq_len 128 --packing", packing).rows
    stream = chat_loader(tmp_path / "hub", "--streaming --seq_len 128 --packing", packing).rows
    assert isinstance(stream, trn.StreamRows)
    for i in range(file.num_rows + 2):  # and from the start again
        assert (stream.train(i) == file.row(i % file.num_rows)).all()


def test_parquet_conversations(tmp_path):
    """Arrow fills objects up with nulls; they are taken away again."""
    import datasets

    rows = [{"messages": c[0], "tools": json.dumps(c[1])} for c in CONVERSATIONS.values()]
    other = {"type": "function", "function": {"name": "add", "arguments": {"b": 2}}}
    rows.append({"messages": [user("q"), reply("", tool_calls=[other])], "tools": "null"})
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    write_rows(tmp_path / "a.jsonl", rows)
    found, expected = (
        chat_loader(tmp_path / f, "--seq_len 256").rows for f in ("a.parquet", "a.jsonl")
    )
    assert (found.tokens == expected.tokens).all()


# ---- Isolation in the model ---------------------------------------------------------------------
def alone(kind: str, path) -> tuple[float, dict, int]:
    """Summed loss, gradients of the mean, number of labels: each conversation alone, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(chat_folder(kind), dtype=torch.float32)
    cfg = trn.parse(chat_flags(kind, path, "--seq_len 96"))
    loss, valid = torch.zeros(()), 0
    for tokens in data.documents(cfg, trn.text_encoder(cfg), CHAT_VOCAB, Counter()):
        inputs, labels = (torch.from_numpy(x.copy())[None] for x in data.shifted(tokens))
        loss = loss + hf_loss(model, inputs, labels)
        valid += int((labels != trn.IGNORE_INDEX).sum())
    (loss / valid).backward()
    return loss.item() / valid, {n: p.grad for n, p in model.named_parameters()}, valid


def packed_step(argv: list[str]) -> tuple[float, float, dict, int]:
    """One step over all rows of the file, and over a row of nothing but padding where ranks need it."""
    cfg = trn.parse(argv)
    rows = trn.open_rows(cfg, trn.load_model_config(cfg))
    dp = trn.dist.get_world_size() // cfg.tensor_parallel_degree
    arrays = [rows.row(i) for i in range(rows.num_rows)]
    arrays += [data.document_row([], cfg.seq_len)] * (-len(arrays) % dp)
    share = len(arrays) // dp
    batch_of = lambda r: [trn.make_batch(arrays[r * share : (r + 1) * share])]  # noqa: E731
    return *gradients_of([*argv, "--bs", "1"], batch_of), rows.num_rows


ISOLATED = [  # ranks, flags
    (1, ""), (1, "--ac full"), (1, "--compile --compile_backend aot_eager --ac selective"), (2, "--tp 2"),
    (2, "--tp 2 --disable_sequence_parallel"), (4, "--tp 2 --ac full"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize(
    ("world", "flags", "kind", "packing"),
    [(*ISOLATED[0], "untied", "isolate"), (*ISOLATED[3], "untied", "isolate"),
     *[pytest.param(*case, kind, packing, marks=pytest.mark.slow)
       for case in ISOLATED for kind in ("untied", "moe", "yarn") for packing in ("isolate", "none")]],
)  # fmt: skip
def test_packed_loss_is_that_of_the_conversations_alone(
    tmp_path, world, flags, kind, packing, backend
):
    """Loss and every gradient, for rows of several isolated conversations and for padded rows."""
    path = write_rows(tmp_path / "a.jsonl", small_talk(8))
    loss, grads, _ = alone(kind, path)
    argv = chat_flags(kind, path, f"--seq_len 160 --router_aux_loss_coef 0 --packing {packing}")
    argv += [*flags.split(), "--backend", backend]
    for found, _, found_grads, rows in run_ranks(world, packed_step, argv):
        assert rows == 8 if packing == "none" else rows < 8
        assert found == pytest.approx(loss, rel=LOSS_TOL)
        assert all(relative(found_grads[n], g) < TOL for n, g in grads.items())


def test_isolation_by_hand():
    """Two documents of 2 and 3 tokens, and one place of padding."""
    positions, seen = trn.isolation(torch.tensor([[0, 0, 2, 2, 2, -1]]))
    assert positions.tolist() == [[0, 1, 0, 1, 2, 5]]
    assert seen[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("backend", ["native", "hf"])
def test_positions_start_anew_in_each_document(tmp_path, backend):
    """Attention is given the angles of a document's own positions; only differences show in the loss."""
    path = write_rows(tmp_path / "a.jsonl", small_talk(2))
    cfg = trn.parse(
        chat_flags("untied", path, f"--seq_len 160 --packing isolate --backend {backend}")
    )
    model = trn.build_model(cfg, trn.load_model_config(cfg))
    trn.materialize(model, torch.device("cpu"), cfg)
    given = []

    def keep(_, args, kwargs) -> None:
        given.append(
            kwargs["position_embeddings"][0] if "position_embeddings" in kwargs else args[1]
        )

    model.model.layers[0].self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    rows = trn.open_rows(cfg, model.config)
    batch = trn.make_batch([rows.row(i) for i in range(rows.num_rows)])
    model(*batch)
    starts = batch[2]
    assert max(len(row[row >= 0].unique()) for row in starts) == 2
    positions = torch.arange(160) - starts.clamp(min=0)
    assert torch.allclose(given[0][..., 0], positions.float().cos(), atol=1e-6)  # the fastest pair


def test_one_shape_for_every_batch(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", small_talk(30))
    for packing in ("none", "isolate"):
        flags = f"--seq_len 128 --bs 3 --eval_every 1 --eval_steps 1 --packing {packing}"
        loader = chat_loader(path, flags)
        batches = [batch for _ in range(20) for batch in next(loader)] + [*loader.validation()]
        assert {x.shape for batch in batches for x in batch} == {(3, 128)}
        assert {x.dtype for batch in batches for x in batch} == {torch.int64}


@pytest.mark.parametrize("seq_len", [96, 256])
def test_padding_does_not_count_in_the_balance_loss(tmp_path, seq_len):
    path = write_rows(tmp_path / "a.jsonl", small_talk(1))
    rows = chat_loader(path, f"--seq_len {seq_len}", kind="moe").rows
    cfg = trn.parse(chat_flags("moe", path, f"--seq_len {seq_len}"))
    model = trn.build_model(cfg, trn.load_model_config(cfg))
    trn.materialize(model, torch.device("cpu"), cfg)
    stats = trn.RouterStats(model, 0.02, None, 1.0)
    batch = trn.make_batch([rows.row(0)])
    model(*batch)
    theirs = AutoModelForCausalLM.from_pretrained(chat_folder("moe"), dtype=torch.float32)
    real = int((batch[2] >= 0).sum())
    expected = 0.02 * hf_aux(theirs, batch[0][:, :real])
    assert stats.balance_loss(batch[2]).item() == pytest.approx(expected.item(), rel=TOL)
    assert stats.load_E.sum() == real * 2 * 2  # top-2, in two layers


# ---- Fine-tuning as a user runs it --------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "said"),
    [("--task sft --dataset a.jsonl", "is a preset and has no chat template"), ("--task sft", "demo holds no conversations"),
     ("--task sft --packing concat", "--packing concat"), ("--packing isolate --dataset a.npy", "--packing isolate"),
     ("--inspect -1", "--inspect -1"), ("--streaming", "--streaming"), ("--dataset_config x", "--dataset_config")],
)  # fmt: skip
def test_data_flags_that_contradict(flags, said):
    errors = trn.validate(trn.parse(flags.split()), hf_config("untied"), 1)
    assert any(said in e for e in errors), errors


def test_wrong_datasets_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_rows(tmp_path / "train.jsonl", [{"text": "a"}])
    (tmp_path / "a.csv").write_text("a")
    for name, said in [
        ("trian.jsonl", "no such file. Did you mean train.jsonl?"),
        ("no/where.jsonl", "where.jsonl: no such file"),
        ("a.csv", "must end in .txt, .jsonl"),
    ]:
        with pytest.raises(trn.UsageError) as e:
            chat_loader(tmp_path / name, "--task pretrain")
        assert said in str(e.value)
    with pytest.raises(trn.UsageError, match=r"--dataset no-one/nothing: \w+: [^\n]*$"):
        chat_loader("no-one/nothing")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", small_talk(3))

    def full_disk(*_args) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(data, "write_tokens", full_disk)
        with pytest.raises(trn.UsageError, match=r"No space left on device; set XDG_CACHE_HOME"):
            chat_loader(path)
    assert not list((tmp_path / "cache" / "qwen3-trn").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(trn.UsageError, match="token cache cannot be written"):
        chat_loader(path)


def test_inspect_prints_what_is_trained(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", small_talk(9))
    flags = f"--task sft --model {chat_folder('untied')} --dataset {path} --seq_len 160 --bs 1 --inspect 3"
    done = command(*flags.split(), "--packing", "isolate", "--output_dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--- row") == 3
    assert "<|im_start|>assistant\n⟦<think>" in done.stdout
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def overfitted(argv: list[str]) -> dict[str, torch.Tensor]:
    trainer = make_trainer(argv)
    trainer.train()
    return {n: p.detach().clone() for n, p in trn.unique_parameters(trainer.model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["none", "isolate"])
def test_overfitted_model_answers_and_stops(tmp_path, packing):
    """transformers' generate gives each of 20 answers to the letter, and ends with the end of turn."""
    names = [
        "ada",
        "bob",
        "cleo",
        "dan",
        "eve",
        "fay",
        "gus",
        "hal",
        "ida",
        "jon",
        "kim",
        "leo",
        "mia",
        "ned",
        "ola",
        "pia",
        "quy",
        "rex",
        "sue",
        "tom",
    ]
    talks = [[user(f"Who is {n}?"), reply(f"{n} is number {i * 7}.")] for i, n in enumerate(names)]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": m} for m in talks])
    rows = (
        20
        if packing == "none"
        else chat_loader(path, "--packing isolate --seq_len 256").rows.num_rows
    )
    flags = f"--packing {packing} --seq_len {96 if packing == 'none' else 256} --bs {rows}"
    argv = chat_flags(
        "untied", path, flags, "--steps 250 --lr 3e-3 --log_every 50 --weight_decay 0"
    )
    [weights] = run_ranks(1, overfitted, argv)
    model = AutoModelForCausalLM.from_pretrained(chat_folder("untied"), dtype=torch.float32)
    model.load_state_dict(weights)
    tokenizer = AutoTokenizer.from_pretrained(chat_folder("untied"))
    for question, answer in talks:
        prompt = tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(
            **prompt, max_new_tokens=60, do_sample=False, eos_token_id=tokenizer.eos_token_id
        )
        text = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
        assert text == f"<think>\n\n</think>\n\n{answer['content']}<|im_end|>"


# ---- Loading and exporting ----------------------------------------------------------------------
def exported(
    argv: list[str], out: str, shard_bytes: int, dtype=torch.float32, nodes: int = 1
) -> str:
    """Load, then export. ``nodes``: as if the ranks were on so many machines without a common disk."""
    trainer = make_trainer(argv)
    per_node = dist.get_world_size() // nodes
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    if dist.get_rank() >= per_node:
        checkpoint.Checkpoint.file = None  # reading or writing there fails
    source = Path(argv[argv.index("--model") + 1])
    return checkpoint.export(
        trainer.model, Path(out), dtype, source if source.is_dir() else None, {}, trainer.control, None, shard_bytes
    )  # fmt: skip


def stored_tensors(folder) -> dict[str, torch.Tensor]:
    return {k: v for f in Path(folder).glob("*.safetensors") for k, v in load_file(f).items()}


def with_stacked_experts(folder: Path) -> Path:
    """The moe folder as transformers v5 keeps it in memory: experts in one tensor a layer."""
    shutil.copytree(model_folder("moe"), folder)
    save_file(
        {n: p.detach() for n, p in plain_hf("moe").named_parameters()}, folder / "model.safetensors"
    )
    return folder


EXPORTS = [  # ranks, flags, machines; models
    *itertools.product([(1, "", 1), (2, "", 1), (2, "--tp 2", 1), (4, "--tp 2", 1)], ["tied", "untied", "moe"]),
    ((3, "--global_batch_size 9", 1), "untied"),  # 3 ranks: neither vocabulary nor width divides
    ((4, "--dp_replicate 2 --tp 2", 1), "moe"), ((4, "--tp 2", 2), "moe"), ((4, "", 4), "tied"),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize(("layout", "kind"), EXPORTS)
def test_load_then_export_is_bit_exact(tmp_path, layout, kind, backend):
    """Every tensor of the folder, with an index and in one file; transformers' logits stay the same."""
    world, flags, nodes = layout
    argv = arguments(kind, f"{flags} --backend {backend} --local_batch_size 1")
    if kind == "moe" and backend == "hf":  # the hub's experts with native, stacked ones with hf
        argv[1] = str(with_stacked_experts(tmp_path / "stacked"))
    out = tmp_path / "hf"
    limit = 100_000 if world > 1 else 10**9
    said = run_ranks(world, exported, argv, str(out), limit, torch.float32, nodes)[0]
    assert ("transformers loads it" in said) == (world == 1)
    before, after = stored_tensors(model_folder(kind)), stored_tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    if world > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
        for name, file in index["weight_map"].items():
            assert name in load_file(out / file)
        assert len(index["weight_map"]) == len(after)
    config = json.loads((out / "config.json").read_text())
    assert "num_local_experts" not in config
    assert config.get("num_experts", 8) == 8
    inputs, _ = batch()
    theirs, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert torch.equal(theirs(inputs).logits, plain_hf(kind)(inputs).logits)
    assert not list(tmp_path.glob(".*"))  # no temporary folder is left


@pytest.mark.parametrize("world", [1, 2])
def test_export_in_bfloat16(tmp_path, world):
    """Rounded once, and the config says so."""
    argv, out = arguments("moe", "--tp", str(world), "--local_batch_size 1"), tmp_path / "hf"
    run_ranks(world, exported, argv, str(out), 10**9, torch.bfloat16)
    before, after = stored_tensors(model_folder("moe")), stored_tensors(out)
    assert all(torch.equal(before[n].bfloat16(), after[n]) for n in before)
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_preset_exports_a_loadable_folder(tmp_path):
    argv = ["--model", "debugmodel", "--bs", "1", "--output_dir", str(tmp_path)]
    run_ranks(1, exported, argv, str(tmp_path / "hf"), 10**9)
    names = {p.name for p in (tmp_path / "hf").iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["rope_theta"], config["mlp_only_layers"]) == (8, 1e6, [0])


def test_export_carries_the_other_files_over(tmp_path):
    """Tokenizer and chat template work there, and a generation config that transformers would not save."""
    source = shutil.copytree(chat_folder("untied"), tmp_path / "source")
    odd = {"do_sample": False, "temperature": 0.6, "eos_token_id": [1, 2]}
    (source / "generation_config.json").write_text(json.dumps(odd))
    (source / "tokenizer").mkdir()  # not a file
    argv = ["--model", str(source), "--dataset", "demo", "--seq_len", "32", "--bs", "1", "--steps", "1",
            "--output_dir", str(tmp_path / "out"), "--dataset", token_file()]  # fmt: skip
    run_ranks(1, train_from, argv)
    out = tmp_path / "out" / "hf"
    assert json.loads((out / "generation_config.json").read_text()) == odd
    ours, theirs = (AutoTokenizer.from_pretrained(f) for f in (out, source))
    messages = [user("a"), reply("b")]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert all(f"| {k} |" in card for k in ("started from", "data", "steps", "seed"))


def test_export_replaces_an_export_and_nothing_else(tmp_path):
    argv, out = arguments("untied"), tmp_path / "hf"
    run_ranks(1, exported, argv, str(out), 100_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    (out / "model-99999.safetensors").write_bytes(b"stale")
    run_ranks(1, exported, argv, str(out), 10**9)
    names = {p.name for p in out.iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    source = shutil.copytree(model_folder("untied"), tmp_path / "source")
    for target, said in (
        ("mine", "thesis.txt, which no export"), ("file", "is a file"), ("file/hf", "cannot be written: File exists"),
        ("source", "the folder that the run starts from"),
    ):  # fmt: skip
        # before anything is trained, and with the other mistakes
        argv = ["--model", str(source), "--export_dir", str(tmp_path / target), "--seq_len", "0"]
        message = refused([*argv, "--output_dir", str(tmp_path / "out")])
        assert said in message
        assert "--seq_len" in message
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def broken_export(argv: list[str], out: str, how: str) -> None:
    """Writing fails on the last rank, or creating the files on the first, or every process dies."""
    last = dist.get_rank() == dist.get_world_size() - 1
    write = checkpoint.Checkpoint.write

    def fail(self, name, *args):
        if name.endswith("1.mlp.up_proj.weight"):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if last:
                raise OSError(28, "No space left on device")
        write(self, name, *args)

    def full(*_args):
        raise OSError(28, "No space left on device")

    if how == "allocate":
        os.posix_fallocate = full
    else:
        checkpoint.Checkpoint.write = fail
    with pytest.raises(
        checkpoint.SaveError, match=f"export to {out} failed: No space left on device"
    ):
        exported(argv, out, 100_000)


@pytest.mark.parametrize("how", ["write", "allocate", "killed"])
def test_interrupted_export_leaves_the_earlier_one(tmp_path, how):
    """The error comes on every rank; the next export does not mind what is left."""
    argv, out = arguments("untied", "--local_batch_size 1"), tmp_path / "hf"
    run_ranks(1, exported, argv, str(out), 10**9)
    (out / "README.md").write_text("the earlier one")
    if how == "killed":
        with pytest.raises(AssertionError, match="it died"):
            run_ranks(2, broken_export, argv, str(out), how)
        assert (tmp_path / ".hf.tmp").exists()
    else:
        run_ranks(2, broken_export, argv, str(out), how)
    assert (out / "README.md").read_text() == "the earlier one"
    assert stored_tensors(out).keys() == stored_tensors(model_folder("untied")).keys()
    run_ranks(2, exported, argv, str(out), 10**9)
    assert "the earlier one" not in (out / "README.md").read_text()
    assert not list(tmp_path.glob(".*"))


def test_failed_export_loses_no_training(tmp_path):
    """The disk fills up while training, and no checkpoint was asked for: there is one afterwards."""
    argv = arguments("untied", "--steps 2 --bs 4", out=tmp_path)
    run_ranks(2, lost_export, argv)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "2\n"


def lost_export(argv: list[str]) -> None:
    trn.export = fail_to_export
    with pytest.raises(
        checkpoint.SaveError, match="disk full; a training checkpoint of step 2 was saved"
    ):
        make_trainer(argv).train()


def fail_to_export(*_args) -> None:
    raise checkpoint.SaveError("export failed: disk full")


def test_export_that_lacks_a_tensor_is_noticed(tmp_path):
    """By loading a small one, and by names and shapes of a large one."""
    folder = shutil.copytree(model_folder("moe"), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    assert "no missing" in checkpoint.verify_export(folder, 10**9)
    assert "no missing" in checkpoint.verify_export(folder, 0)
    changes = ({"model.norm.weight": torch.ones(3)}, {"extra": torch.ones(2)}, None)
    for change in changes:
        changed = tensors | (change or {})
        changed = changed if change else {n: t for n, t in changed.items() if n != "lm_head.weight"}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        for most_bytes in (0, 10**9):
            with pytest.raises(
                (checkpoint.SaveError, RuntimeError),
                match=r"cleanly|size mismatch|ignore_mismatched",
            ):
                checkpoint.verify_export(folder, most_bytes)


# ---- Damaged folders, on all ranks --------------------------------------------------------------
def rewritten_header(file: Path, change) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pickled_only(folder: Path) -> None:
    for f in folder.glob("*.safetensors*"):
        f.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


SHARD = "model-00002-of-00005.safetensors"
FOLDER_DAMAGES = {  # what is done to a folder of three files -> what every rank must say
    "missing file": (lambda d: (d / SHARD).unlink(), [f"{SHARD}: no such file"]),
    "truncated file": (lambda d: os.truncate(d / SHARD, (d / SHARD).stat().st_size - 1000),
                       [f"{SHARD}: damaged", "needs 149,280 bytes and has 148,280"]),
    "header larger than the file": (lambda d: (d / SHARD).write_bytes((10**7).to_bytes(8, "little") + b"{}"),
                                    [f"{SHARD}: damaged", "needs 10,000,008 bytes and has 10"]),
    "empty file": (lambda d: (d / SHARD).write_bytes(b""), [f"{SHARD}: damaged"]),
    "a pickle under another name": (lambda d: (d / SHARD).write_bytes(pickle.dumps({"a": 1})), [f"{SHARD}: damaged"]),
    "pickles only": (pickled_only, ["pytorch_model.bin: pickled weights"]),
    "bad index": (lambda d: (d / INDEX).write_text("{"), [INDEX, "JSON"]),
    "index without a map": (lambda d: (d / INDEX).write_text('{"weight_map": ["a"]}'), [INDEX, "weight_map"]),
    "index that leads outside": (lambda d: (d / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}'),
                                 [INDEX, "files beside it"]),
    "tensor twice": (lambda d: shutil.copy(d / SHARD, d / "model-00001-of-00005.safetensors"),
                     ["is in both model-00001-of-00005.safetensors and " + SHARD]),
    "wrong dtype": (lambda d: rewritten_header(next(d.glob("*1-of-*")), lambda h: h[next(k for k in h if k[0] == "m")].
                                               update(dtype="I32")), ["has dtype I32, must be F32, BF16, F16"]),
    "unknown architecture": (lambda d: edit_json(d / "config.json", model_type="llama"), ["config.json: model_type 'llama'"]),
    "remote code": (lambda d: edit_json(d / "config.json", auto_map={"AutoModel": "x.Y"}), ["config.json: auto_map"]),
    "another vocabulary": (lambda d: edit_json(d / "config.json", vocab_size=211),
                           ["model.embed_tokens.weight has shape [203, 64], the model needs [211, 64]"]),
    "more layers": (lambda d: edit_json(d / "config.json", num_hidden_layers=4, layer_types=["full_attention"] * 4), ["layers.3.self_attn.q_proj.weight missing"]),
}  # fmt: skip


def refusals(folders: dict[str, str]) -> dict[str, str]:
    messages = {}
    for name, folder in folders.items():
        try:
            make_trainer(arguments("untied", "--bs 1", "--model", folder))
            messages[name] = "accepted"
        except trn.UsageError as e:
            messages[name] = str(e)
    return messages


def test_every_rank_refuses_damaged_folders(tmp_path):
    """With the same message, which names file and tensor, and without waiting for each other."""
    folders = {}
    whole = saved(tmp_path / "whole", "untied", max_shard_size="150KB")
    assert (whole / SHARD).exists()
    for name, (do_damage, _) in FOLDER_DAMAGES.items():
        folder = shutil.copytree(whole, tmp_path / name.replace(" ", "_"))
        do_damage(folder)
        folders[name] = str(folder)
    first, second = run_ranks(2, refusals, folders)
    assert first == second
    for name, (_, said) in FOLDER_DAMAGES.items():
        assert folders[name] in first[name]
        assert all(words in first[name] for words in said), first[name]


def test_damaged_folder_ends_the_launch_with_code_2(tmp_path):
    """Found by the ranks: one error and no traceback of ours (torchrun adds its own)."""
    folder = saved(tmp_path / "m", "untied", max_shard_size="150KB")
    do_damage, said = FOLDER_DAMAGES["truncated file"]
    do_damage(folder)
    argv = arguments("untied", "--bs 1 --skip_export", "--model", str(folder), out=tmp_path / "out")
    run = launched(tmp_path / "out", *argv)
    output = run.communicate(timeout=120)[0]
    assert run.returncode == 2, output
    assert all(words in output for words in said)
    assert 'train_qwen3_trn.py", line' not in output


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    """On one rank alone: the other one must not load what it can and go on."""
    folder = saved(tmp_path / "m", "untied")
    first, second = run_ranks(2, shrinking, arguments("untied", "--bs 1", "--model", str(folder)))
    assert first == second
    assert "model.safetensors" in first
    assert "ended early" in first


def shrinking(argv: list[str]) -> str:
    preadv = os.preadv
    os.preadv = lambda *args: 0 if dist.get_rank() else preadv(*args)
    with pytest.raises(trn.UsageError) as e:
        make_trainer(argv)
    return str(e.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_dtypes_and_long_reads(tmp_path, dtype, monkeypatch):
    """Converted piece by piece, where the last piece is shorter."""
    monkeypatch.setattr(checkpoint, "CHUNK", 64 * 7 * dtype.itemsize)
    folder = saved(tmp_path, "moe", dtype=dtype)
    expected = {n: p.detach().to(dtype).float() for n, p in plain_hf("moe").named_parameters()}
    for name, p in trn.unique_parameters(load(folder)).items():
        assert torch.equal(p, expected[name]), name


# ---- Training checkpoints -----------------------------------------------------------------------
def train_from(
    argv: list[str], signal_step: int = 0, signal_rank: int | None = None
) -> tuple[dict, int]:
    """Train; with signal_step SIGTERM comes during that step, on all ranks or one. Whole final state."""
    trainer = make_trainer(argv)
    start, train_step = trainer.step, trainer.train_step

    def step(batches):
        if trainer.step == signal_step and signal_rank in (None, dist.get_rank()):
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(batches)

    trainer.train_step = step
    try:
        trainer.train()
    except trn.Stopped:
        assert trainer.step == signal_step
    return {n: full(v) for n, v in trainer.state().items()}, start


def losses_in(folder: Path) -> dict[int, float]:
    """step -> loss; of a step that was run twice the last."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut the last one
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def resumed_run(argv: list[str], out: Path) -> list[str]:
    return [*argv, "--output_dir", str(out), "--skip_export", *OPTIMIZER.split()]


def layout_arguments(kind: str, layout: tuple[int, str]) -> list[str]:
    world, flags = layout
    rows = 9 if world == 3 else ROWS
    dp = world // (2 if "--tp 2" in flags else 1)
    return arguments(kind, flags, f"--local_batch_size {rows // dp} --global_batch_size {rows}")


@functools.cache
def straight_run(kind: str, layout: tuple[int, str]) -> tuple[dict, dict]:
    """Final state and losses of ten steps without interruption."""
    out = root() / f"straight_{kind}_{layout[0]}{layout[1].replace(' ', '')}"
    state = run_ranks(layout[0], train_from, resumed_run(layout_arguments(kind, layout), out))[0][0]
    return state, losses_in(out)


FSDP, TP, BOTH, HSDP = (2, ""), (2, "--tp 2"), (4, "--tp 2"), (4, "--dp_replicate 2")
HF = (2, "--backend hf")
RESUMES = [  # model, ranks and flags before and after, how it was saved
    ("tied", (1, ""), (1, ""), "save_every"), ("moe", FSDP, FSDP, "save_every"), ("moe", TP, TP, "save_every"),
    ("moe", BOTH, BOTH, "save_every"), ("untied", (3, ""), (3, ""), "save_every"), ("moe", HF, HF, "save_every"),
    ("moe", FSDP, FSDP, "async"), ("moe", FSDP, FSDP, "signal to one rank"),
    ("untied", (4, ""), FSDP, "save_every"), ("moe", FSDP, (4, ""), "save_every"), ("moe", (1, ""), TP, "save_every"),
    ("untied", TP, (1, ""), "save_every"), ("moe", BOTH, HF, "save_every"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("untied", HSDP, HSDP, "save_every"), ("moe", BOTH, BOTH, "async"), ("tied", (1, ""), (1, ""), "async"),
        ("moe", BOTH, BOTH, "signal"), ("tied", (1, ""), (1, ""), "signal"), ("tied", HSDP, TP, "async"),
        ("moe", (2, "--backend hf --tp 2"), BOTH, "save_every"))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "after", "how"), RESUMES)
def test_resume_equals_a_straight_run(tmp_path, kind, before, after, how):
    """5 + 5 steps against 10: bit-equal losses, weights and moments on one layout, 1e-5 across layouts."""
    every = [] if "signal" in how else ["--save_every", "5", "--keep", "0"]
    every += ["--async_save"] if how == "async" else []
    argv = resumed_run([*layout_arguments(kind, before), *every], tmp_path)
    run_ranks(
        before[0], train_from, argv, 5 if "signal" in how else 0, 1 if "one rank" in how else None
    )
    folder = tmp_path / "checkpoints"
    if "signal" not in how:  # as if the first run had been killed after step 5
        shutil.rmtree(folder / "step-00000010")
        (folder / "latest").write_text("5\n")
    assert [p.name for p in folder.glob("step-*")] == ["step-00000005"]
    resumed, start = run_ranks(
        after[0], train_from, resumed_run(layout_arguments(kind, after), tmp_path)
    )[0]
    assert start == 5
    (straight, expected), found = straight_run(kind, after), losses_in(tmp_path)
    assert found.keys() == expected.keys() == set(range(1, 11))
    if before == after:
        assert found == expected
        assert resumed.keys() == straight.keys()
        assert all(torch.equal(resumed[n], straight[n]) for n in straight)
    else:  # sums in another order, as between any two layouts
        assert [found[s] for s in expected] == pytest.approx(list(expected.values()), rel=TOL)


def test_checkpoint_restores_every_number(tmp_path):
    """Bit for bit on another layout: weights, both moments and the step of each parameter, RNG, counters."""
    argv = resumed_run([*layout_arguments("moe", BOTH), "--save_every", "10"], tmp_path)
    saved_state = run_ranks(4, train_from, argv)[0][0]
    for layout in (FSDP, (1, ""), (3, "")):
        argv = resumed_run(layout_arguments("moe", layout), tmp_path)
        state, start = run_ranks(layout[0], train_from, argv)[0]
        assert start == 10
        assert state.keys() == saved_state.keys()
        assert all(torch.equal(state[n], saved_state[n]) for n in state)
    names = [n for n in state if n.startswith("model.")]
    for n in names:
        assert state[f"optimizer.step.{n.removeprefix('model.')}"] == 10
        assert (state[f"optimizer.exp_avg_sq.{n.removeprefix('model.')}"] != 0).any()
    assert len(state) == 4 * len(names) + 2


def damage(folder: Path, how: str) -> None:
    data_file = next(folder.glob("__0_*"))
    if how == "truncated":
        data_file.write_bytes(data_file.read_bytes()[:-100])
    elif how == "flipped":
        raw = bytearray(data_file.read_bytes())
        raw[len(raw) // 2] ^= 1
        data_file.write_bytes(raw)
    elif how == "missing":
        data_file.unlink()
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    elif how == "broken manifest":
        (folder / "manifest.json").write_text("[1, 2")
    elif how == "other state":
        edit_json(folder / "state.json", position=0)


@functools.cache
def trained_folder() -> Path:
    """An OUTPUT_DIR with checkpoints of steps 8 and 10."""
    out = root() / "trained"
    argv = arguments("untied", "--skip_export --save_every 4 --bs 4 --keep 2", out=out)
    run_ranks(2, train_from, argv)
    return out


RARE = [
    pytest.param(how, marks=pytest.mark.slow)
    for how in ("missing", "broken manifest", "other state")
]


@pytest.mark.parametrize("how", ["truncated", "flipped", "no manifest", *RARE])
def test_damaged_checkpoint_is_skipped_loudly(tmp_path, how):
    out = shutil.copytree(trained_folder(), tmp_path / "out")
    argv = arguments("untied", "--skip_export --save_every 10 --bs 4", out=out)
    folder = out / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-00000008", "step-00000010"]
    damage(folder / "step-00000010", how)
    with pytest.raises(AssertionError, match=r"UsageError: --resume 10: .*step-00000010"):
        run_ranks(2, train_from, [*argv, "--resume", "10"])
    said = run_ranks(2, words_of, argv)
    assert any(
        "step 10 is NOT USED" in line and str(folder / "step-00000010") in line for line in said[0]
    )
    assert sum("NOT USED" in line for line in said[1]) == 1
    assert "resuming from step 8" in " ".join(said[0])
    assert run_ranks(2, train_from, argv)[0][1] == 10  # which that run has written anew


def words_of(argv: list[str]) -> list[str]:
    """What a run says."""
    lines: list[str] = []
    trn.log.warning = trn.log.info = lambda text, *_: lines.append(text)
    trainer = make_trainer(argv)
    trainer.train()
    return [line for line in lines if isinstance(line, str)]


def test_resume_never_starts_over_by_itself(tmp_path):
    """No usable checkpoint, a step that is not there: an error that says what is there."""
    out = shutil.copytree(trained_folder(), tmp_path / "out")
    argv = arguments("untied", "--skip_export --bs 8", out=out)
    with pytest.raises(
        AssertionError, match=r"--resume 9: .*no such file; existing steps: \[8, 10\]"
    ):
        run_ranks(1, train_from, [*argv, "--resume", "9"])
    for step in ("08", "10"):
        damage(out / "checkpoints" / f"step-000000{step}", "flipped")
    with pytest.raises(
        AssertionError, match=r"no usable checkpoint in .*only steps \[8, 10\]; use --resume never"
    ):
        run_ranks(1, train_from, argv)
    assert run_ranks(1, train_from, [*argv, "--resume", "never"])[0][1] == 0
    shutil.rmtree(out / "checkpoints")
    (
        out / "checkpoints"
    ).mkdir()  # an empty folder hides no weights: the first loss is that of the model
    shutil.rmtree(out / "logs", ignore_errors=True)
    (out / "metrics.jsonl").unlink()
    assert run_ranks(1, train_from, argv)[0][1] == 0
    assert losses_in(out)[1] == pytest.approx(losses_in(trained_folder())[1], rel=TOL)


def test_going_back_makes_a_new_branch(tmp_path):
    """After --resume 8 the checkpoint of step 10 is of another run: it neither survives nor wins."""
    out = shutil.copytree(trained_folder(), tmp_path / "out")
    (out / "checkpoints" / "step-00000007.tmp").mkdir()  # of a killed run
    argv = arguments("untied", "--skip_export --bs 8 --save_every 1", out=out)
    assert run_ranks(1, train_from, [*argv, "--resume", "8", "--steps", "9"])[0][1] == 8
    folder = out / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-00000008", "step-00000009"]
    shutil.copytree(trained_folder() / "checkpoints" / "step-00000010", folder / "step-00000010")
    assert run_ranks(1, train_from, argv)[0][1] == 9  # above ``latest``


def keep_at_every_moment(argv: list[str]) -> int:
    """The lowest number of complete checkpoints at any removal or renaming."""
    trainer, counts, first = make_trainer(argv), [], True

    def watch(original):
        def watched(*args, **kwargs):
            result = original(*args, **kwargs)
            steps = [s for s in trainer.checkpoints.steps() if not trainer.checkpoints.damage(s)]
            counts.append(len(steps))
            return result

        return watched

    checkpoint.shutil = type(
        "shutil", (), {"rmtree": watch(shutil.rmtree), "copyfile": shutil.copyfile}
    )
    checkpoint.sync = watch(checkpoint.sync)
    checkpoint.write_file = watch(checkpoint.write_file)
    trainer.train()
    assert first
    return min(counts[counts.index(1) :])


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [5, 6]), (0, [1, 2, 3, 4, 5, 6])])
def test_a_complete_checkpoint_is_always_there(tmp_path, keep, left):
    argv = arguments(
        "untied", f"--skip_export --bs 8 --save_every 1 --keep {keep} --steps 6", out=tmp_path
    )
    assert run_ranks(1, keep_at_every_moment, argv) == [1]
    assert sorted(int(p.name[5:]) for p in (tmp_path / "checkpoints").glob("step-*")) == left


def pickled_metadata(kind: str) -> bytes:
    """A .metadata file that tries to run ``os.system``, in one of the ways a pickle has."""

    class Evil:
        def __reduce__(self):
            return os.system, ("touch owned",)

    if kind == "call":
        return pickle.dumps(Evil())
    if kind == "module":  # the os that DCP's own module imports, its attributes replaced
        return b"ctorch.distributed.checkpoint.metadata\nos\n}S'fspath'\nNsb."
    if kind == "dotted":
        return b"\x80\x04\x8c%torch.distributed.checkpoint.metadata\x8c\tos.system\x93\x8c\x0btouch owned\x85R."
    reader = torch.distributed.checkpoint.FileSystemReader(
        trained_folder() / "checkpoints" / "step-00000010"
    )
    metadata = (
        reader.read_metadata()
    )  # a weight that DCP would unpickle, as it is said to be no tensor
    metadata.state_dict_metadata["model.model.norm.weight"] = (
        torch.distributed.checkpoint.BytesStorageMetadata()
    )
    return pickle.dumps(metadata)


@pytest.mark.parametrize("kind", ["call", "module", "dotted", "bytes"])
def test_checkpoint_metadata_cannot_run_code(tmp_path, kind, monkeypatch):
    """Nor with checksums that are right: whoever forges the file forges them as well."""
    out = shutil.copytree(trained_folder(), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    folder = out / "checkpoints" / "step-00000010"
    (folder / ".metadata").write_bytes(pickled_metadata(kind))
    edit_json(folder / "manifest.json", **{".metadata": checkpoint.checksum(folder / ".metadata")})
    argv = arguments("untied", "--skip_export --bs 8", out=out)
    with pytest.raises(
        AssertionError, match=r"UsageError: --resume: .*step-00000010/.metadata: .*not allowed"
    ):
        run_ranks(1, train_from, argv)
    assert not (tmp_path / "owned").exists()
    assert os.fspath(tmp_path)


def test_pickled_objects_in_checkpoint_data_are_refused(tmp_path):
    """The tensors of DCP are in torch.save's format, read as data only."""

    class Evil:
        def __reduce__(self):
            return os.system, ("touch owned",)

    out = shutil.copytree(trained_folder(), tmp_path / "out")
    folder = out / "checkpoints" / "step-00000010"
    for file in folder.glob("__*"):
        file.write_bytes(pickle.dumps(Evil()) + bytes(file.stat().st_size))
        edit_json(folder / "manifest.json", **{file.name: checkpoint.checksum(file)})
    argv = arguments("untied", "--skip_export --bs 8", out=out)
    with pytest.raises(
        AssertionError, match=r"UsageError: --resume: .*step-00000010 cannot be read"
    ):
        run_ranks(1, train_from, argv)
    assert not (tmp_path / "owned").exists()


def test_checkpoint_of_another_model_is_refused(tmp_path):
    """Other shapes, and the same shapes that mean something else."""
    out = shutil.copytree(trained_folder(), tmp_path / "out")
    with pytest.raises(
        AssertionError,
        match=r"UsageError: .*does not fit this model: .*num_experts is None there, 8 here",
    ):
        run_ranks(1, train_from, arguments("moe", "--skip_export", out=out))
    folder = shutil.copytree(model_folder("untied"), tmp_path / "m")
    edit_json(folder / "config.json", rms_norm_eps=1e-5)
    argv = [*arguments("untied", "--skip_export", out=out), "--model", str(folder)]
    with pytest.raises(
        AssertionError, match="rms_norm_eps is 1e-06 there, 1e-05 here; use --resume never"
    ):
        run_ranks(1, train_from, argv)
    state = out / "checkpoints" / "step-00000010" / "state.json"
    facts = json.loads(state.read_text())  # tensors that do not match, whatever the facts say
    edit_json(state, architecture=facts["architecture"] | {"num_hidden_layers": 4})
    manifest = state.with_name("manifest.json")
    edit_json(manifest, **{"state.json": checkpoint.checksum(state)})
    edit_json(
        folder / "config.json",
        rms_norm_eps=1e-6,
        num_hidden_layers=4,
        layer_types=["full_attention"] * 4,
    )
    with pytest.raises(
        AssertionError, match=r"tensors differ, such as model\.layers\.3\.\S+ is missing|is missing"
    ):
        run_ranks(1, train_from, [*argv, "--random_init"])


def test_changed_settings_are_reported(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 1000)
    argv = ["--dataset", str(tmp_path / "a.txt"), "--bs", "1", "--skip_export", "--save_every", "1",
            "--output_dir", str(tmp_path / "out")]  # fmt: skip
    run_ranks(1, train_from, [*argv, "--steps", "1"])
    argv += ["--steps", "2", "--seed", "5", "--seq_len", "128", "--lr", "1e-4", "--log_every", "2"]
    said = run_ranks(1, words_of, argv)[0]
    for words in ("resuming from step 1 ", "--seed is 5, was 0", "--steps is 2, was 1", "--seq_len is 128, was 256",
                  "--lr is 0.0001, was 0.001", "the dataset has"):  # fmt: skip
        assert any(words in line for line in said), said
    assert not any("--log_every" in line for line in said)


def unwritable(argv: list[str], how: str) -> None:
    trainer = make_trainer(argv)
    folder = trainer.checkpoints.folder
    if dist.get_rank() == 0 and how in ("vanished", "a file is there"):
        shutil.rmtree(folder.parent if how == "vanished" else folder)
        if how == "a file is there":
            folder.write_text("where the folder was")
    dist.barrier()
    if dist.get_rank() == 1 and how in (
        "full",
        "read-only",
    ):  # as the system says it, in the middle of the data

        def fail(*_args, **_kwargs):
            raise OSError(
                *{
                    "full": (28, "No space left on device"),
                    "read-only": (30, "Read-only file system"),
                }[how]
            )

        torch.distributed.checkpoint.filesystem._write_item = fail
    with pytest.raises(checkpoint.SaveError, match="checkpoint of step 10 failed") as caught:
        trainer.train()
    said = {
        "full": "No space left",
        "read-only": "Read-only file system",
        "vanished": "No such file",
    }
    assert said.get(how, "File exists") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "way"),
    [("full", ""), ("full", "--async_save"), ("vanished", ""), ("a file is there", "--async_save"),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("read-only", ""), ("vanished", "--async_save"), ("a file is there", "")))],
)  # fmt: skip
def test_failed_save_is_one_error_and_keeps_the_last(tmp_path, how, way):
    """On all ranks, though it happened on one; what was complete is still used."""
    out = tmp_path / "out"
    argv = arguments("untied", f"--skip_export --save_every 5 --bs 4 {way}", out=out)
    run_ranks(2, train_from, [*argv, "--steps", "5"])
    run_ranks(2, unwritable, argv, how)
    if how in ("full", "read-only"):
        assert [p.name for p in (out / "checkpoints").glob("step-*[0-9]")] == ["step-00000005"]
        assert run_ranks(2, train_from, argv)[0][1] == 5


def test_first_loss_is_checked(tmp_path):
    """Elsewhere than expected: the run stops. Near ln(vocab_size) though weights were loaded: it says so."""
    argv = arguments("untied", "--skip_export --steps 1 --bs 8", out=tmp_path)
    done = command(*argv, "--expect_first_loss", "5")
    assert done.returncode == 1
    assert "--expect_first_loss is 5.0 within" in done.stderr
    assert "Traceback" not in done.stderr
    said = run_ranks(1, words_of, [*argv, "--expect_first_loss", "5.4", "--expect_tol", "0.5"])[0]
    assert any("near that of random weights, ln(vocab_size) = 5.31" in line for line in said)
    random_init = [*argv, "--random_init", "--expect_first_loss", "nan"]
    with pytest.raises(AssertionError, match=r"RunError: .*--expect_first_loss is nan"):
        run_ranks(1, words_of, random_init)


# ---- Signals and kills, with real processes -----------------------------------------------------
LAUNCH = ["--steps", "12", "--bs", "1", "--seq_len", "64", "--log_every", "1", "--skip_export"]


def launched(out: Path, *flags: str, ranks: int = 2, **env: str) -> subprocess.Popen:
    """run.sh as a user starts it, 12 quick steps with checkpoints."""
    argv = [*LAUNCH, "--save_every", "2", "--output_dir", str(out), *flags]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(HERE / "run.sh"), *argv], env=clean | {"NGPU": str(ranks), "PATH": path, "OMP_NUM_THREADS": "1"} | env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def wait_for_step(run: subprocess.Popen, out: Path, step: int) -> None:
    end = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or step not in losses_in(out):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def rank_pids(out: Path) -> list[int]:
    """The training processes of a run, found by their --output_dir."""
    found = []
    for p in Path("/proc").glob("[0-9]*"):
        try:
            words = (p / "cmdline").read_bytes().split(b"\0")
            env = (p / "environ").read_bytes()
        except OSError:
            continue
        if (
            str(out).encode() in words
            and b"train_qwen3_trn.py" in b" ".join(words[:4])
            and b"LOCAL_RANK=" in env
        ):
            found.append(int(p.name))
    return found


def test_signals_and_kills_of_a_launch(tmp_path):
    """SIGTERM, then a killed rank, then one more that MAX_RESTARTS makes good: the losses stay exact."""
    out = tmp_path / "out"
    run_ranks(
        2, train_from, [*LAUNCH, "--save_every", "0", "--output_dir", str(tmp_path / "straight")]
    )
    run = launched(out, "--save_every", "0")
    wait_for_step(run, out, 3)
    run.terminate()
    output = run.communicate(timeout=120)[0]
    assert run.returncode == trn.RESUMABLE == 75, output
    assert "stopped by a signal after step" in output
    assert 'train_qwen3_trn.py", line' not in output

    run = launched(out, "--async_save")
    wait_for_step(run, out, 6)
    os.kill(rank_pids(out)[-1], signal.SIGKILL)
    output = run.communicate(timeout=30)[0]
    assert run.returncode == 1
    assert "resuming from step" in output
    assert "SIGKILL" in output  # what ended it, not only the connections that it closed

    run = launched(out, MAX_RESTARTS="2")
    wait_for_step(run, out, 9)
    os.kill(rank_pids(out)[0], signal.SIGKILL)
    output = run.communicate(timeout=300)[0]
    assert run.returncode == 0, output
    assert losses_in(out) == losses_in(tmp_path / "straight")


def test_second_signal_ends_at_once():
    code = "import checkpoint, time; s = checkpoint.StopSignal(None); print(1, flush=True); time.sleep(60); time.sleep(60)"
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout.readline() == "1\n"
    run.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=30) == -signal.SIGTERM
    run.stdout.close()


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """20 kills, of one rank or of all, every second one inside a save: what is on disk is complete."""
    run = launched(tmp_path / "a", "--steps", "60", "--save_every", "1")
    run.communicate(timeout=300)
    rng, out = random.Random(0), tmp_path / "b"
    folder, inside = out / "checkpoints", 0
    for kill in range(20):
        run = launched(
            out, "--steps", "60", "--save_every", "1", *["--async_save"] * (kill % 4 > 1)
        )
        before = max(losses_in(out), default=0) if (out / "metrics.jsonl").exists() else 0
        wait_for_step(run, out, min(before + 1, 60))
        if kill % 2:  # as soon as there is an unfinished checkpoint
            while not list(folder.glob("*.tmp")) and run.poll() is None:
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.02)
        else:
            time.sleep(rng.random() * 0.3)
        pids = rank_pids(out)
        for pid in pids[-1:] if kill % 3 else pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        run.communicate(timeout=60)
        inside += bool(list(folder.glob("*.tmp")))
    run = launched(out, "--steps", "60", "--save_every", "1")
    output = run.communicate(timeout=300)[0]
    assert run.returncode == 0, output
    assert "NOT USED" not in output
    assert losses_in(out) == losses_in(tmp_path / "a")
    assert (folder / "latest").read_text() == "60\n"
    assert inside > 0


class Peak(threading.Thread):
    """Watches how the resident memory of this process grows."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = self.most = self.now()
        self.start()

    def now(self) -> int:
        return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

    def run(self) -> None:
        while self.most:
            self.most = max(self.most, self.now())
            time.sleep(0.002)

    def growth(self) -> int:
        return max(self.most, self.now()) - self.first


def memory_of_loading(argv: list[str], out: str) -> tuple[int, int, int, int]:
    """Growth while loading and while exporting, bytes of the shard, largest slice."""
    peak = Peak()
    trainer = make_trainer(argv)
    loading, peak = peak.growth(), Peak()
    checkpoint.export(
        trainer.model, Path(out), torch.float32, None, {}, trainer.control, shard_bytes=2 * 10**8
    )
    sizes = [
        checkpoint.local_tensor(p).nbytes for p in trn.unique_parameters(trainer.model).values()
    ]
    return loading, peak.growth(), sum(sizes), max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--tp 2"])
def test_loading_and_exporting_need_little_more_than_the_shard(tmp_path, flags):
    """A model of 1 GB on 4 ranks: shard + largest slice + 200 MB at most; to export, 1 shard of 200 MB."""
    hf = hf_config(
        "untied", vocab_size=20_000, hidden_size=1024, intermediate_size=6144, num_hidden_layers=11
    )
    AutoModelForCausalLM.from_config(hf, dtype=torch.float32).save_pretrained(
        tmp_path, max_shard_size="300MB"
    )
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) > 1e9
    argv = ["--model", str(tmp_path), "--dataset", token_file(), "--seq_len", str(S), "--bs", "1",
            "--output_dir", str(tmp_path / "out"), *flags.split()]  # fmt: skip
    for loading, exporting, shard, largest in run_ranks(
        4, memory_of_loading, argv, str(tmp_path / "hf")
    ):
        assert loading < shard + largest + 200e6
        assert exporting < 200e6


# ---- Dry run ------------------------------------------------------------------------------------
PLANNED_LAYOUTS = {"fsdp4": "--bs 2", "tp4": "--bs 8 --tp 4", "fsdp2_tp2": "--bs 4 --tp 2"}


def planned(argv: list[str]) -> dict:
    cfg = trn.parse(argv)
    return plan.predict(cfg, trn.preflight(cfg))


def measured(cases: dict[str, list[str]]) -> dict[str, dict]:
    """Each case trained for two steps on these ranks; what the second one took, when Adam has its state."""
    found = {}
    for name, argv in cases.items():
        trainer = make_trainer(argv)
        trainer.step = 1
        trainer.train_step(next(trainer.loader))
        found[name] = plan.measure(trainer, next(trainer.loader))
        del trainer
    return found


def plan_cases(names: list[str]) -> dict[str, list[str]]:
    """KIND/LAYOUT/AC -> flags: wide enough that tensors, and not the few bytes beside them, decide."""
    cases = {}
    for name in names:
        kind, layout, ac = name.split("/")
        cases[name] = arguments(kind, f"{PLANNED_LAYOUTS[layout]} --ac {ac} --resume never")
    return cases


PLANS = [
    f"{kind}/{layout}/{ac}"
    for kind in ("untied", "moe") for layout in PLANNED_LAYOUTS for ac in ("none", "full")
]  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ["untied/tp4/none", "moe/fsdp2_tp2/full", "moe/fsdp2_tp2/none"],
        pytest.param(PLANS, marks=pytest.mark.slow),
    ],
)
def test_plans_equal_real_runs(names):
    """Memory that stays and collectives exactly; the peak within 10 %, which is what is promised."""
    cases = plan_cases(names)
    real = run_ranks(4, measured, cases)[0]
    for name, argv in cases.items():
        plan_ = planned([*argv, "--dry_run", "--world_size", "4", "--device", "cpu"])
        assert plan_["persistent"] == real[name]["persistent"], name
        assert plan_["persistent"]["optimizer state"] > 2 * plan_["persistent"]["parameters"]
        assert plan_["collectives"] == real[name]["collectives"], name
        assert plan_["peak_bytes"] == pytest.approx(real[name]["peak_bytes"], rel=0.1), name
        # beyond the formula: four scalars, and the counts of the balance loss
        moved = sum(row["bytes"] for row in plan_["collectives"])
        assert 1 <= moved / sum(plan_["minimum_bytes"].values()) <= 1.02, name


def uneven_experts(argv: list[str]) -> dict:
    inputs, labels = batch()
    return gradients_of(argv, lambda rank: [(inputs[rank::4], labels[rank::4])])[2]


def test_experts_that_do_not_divide(tmp_path):
    """6 experts on 4 ranks are cut along another dim: the same gradients, and nothing is padded."""
    hf_config("moe", num_experts=6).save_pretrained(tmp_path)
    argv = ["--model", str(tmp_path), "--random_init", *arguments("moe", "--bs 2")[2:]]
    many = run_ranks(4, uneven_experts, argv)[0]
    inputs, labels = batch()
    (one,) = run_ranks(1, whole_gradients, [*argv, "--bs", "8"])
    for name, grad in one.items():
        assert relative(many[name], grad) < TOL * 10, (
            name
        )  # sums in another order, then small differences
    plan_ = planned([*argv, "--dry_run", "--world_size", "4", "--device", "cpu"])
    parameters = plan_["parameters"]
    held = plan_["persistent"]["parameters"]
    assert held < 1.02 * parameters  # 4 bytes over 4 ranks; a padded vocabulary
    assert inputs.shape == labels.shape


def whole_gradients(argv: list[str]) -> dict:
    return gradients_of(argv, lambda _: [batch()])[2]


def dry_run(*flags: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, str(HERE / "train_qwen3_trn.py"), *flags]
    env = {k: v for k, v in os.environ.items() if k != "NEURON_LOGICAL_NC_CONFIG"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)


def test_dry_run_of_4096_ranks(tmp_path):
    """One JSON object and nothing else, for a device that is not here; no file is written."""
    out = tmp_path / "out"
    flags = "--dry_run json --world_size 4096 --tp 2 --dp_replicate 16 --nki --gbs 65536 --bs 8"
    p = dry_run(*flags.split(), "--output_dir", str(out))
    assert p.returncode == 0, p.stderr
    found = json.loads(p.stdout)
    assert found["mesh"] == {"dp_replicate": 16, "dp_shard": 128, "tp": 2}
    assert found["precision"] == "bfloat16"
    assert found["micro_batches"] == 4
    assert found["fits"]
    assert 0 < found["mfu"] < 1
    assert {row["group"] for row in found["collectives"]} >= {
        "tp",
        "dp_shard",
        "dp_replicate",
        "world",
    }
    assert not out.exists()


def test_dry_run_checks_and_advises():
    """The checks of a real run; a plan that does not fit names flags and what they give."""
    p = dry_run("--dry_run", "--world_size", "3", "--tp", "3")
    assert p.returncode == 2
    assert "--tp 3 must divide num_attention_heads = 8" in p.stderr
    p = dry_run("--dry_run", "--bs", "256", "--seq_len", "4096", "--ac", "full")
    assert p.returncode == 0, p.stderr
    assert "does not fit, by" in p.stdout
    assert re.search(r"--local_batch_size 64: .*GiB, fits", p.stdout), p.stdout


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--world_size 4", ["--world_size 4", "--dry_run"]),
        ("--dry_run --world_size 0", ["--world_size 0", "above 0"]),
        ("--dry_run --world_size 6 --tp 4", ["--tp 4", "ranks, 6"]),
        ("--dry_run maybe", ["dry_run", "maybe"]),
        ("--dry_run --world_size 4 --nki --seq_len 100", ["--seq_len 100", "256"]),
        ("--dry_run --output_dir /proc/version/x", ["--output_dir /proc/version/x"]),
    ],
)
def test_dry_run_refuses(argv, said, monkeypatch):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert all(words in refused(argv) for words in said), refused(argv)


@pytest.mark.slow
def test_outlook_equals_plan():
    """Two shallow plans foretell a deep one: all layers cost the same."""
    flags = "--dry_run --model 0.6B --seq_len 1024 --bs 1 --world_size 16 --tp 2 --ac selective"
    cfg = trn.parse(flags.split())
    hf = plan.checked(cfg)
    deep, guess = plan.predict(cfg, hf), plan.outlook(cfg, hf)
    assert guess["total_bytes"] == pytest.approx(deep["total_bytes"], rel=0.02)
    assert guess["step_seconds"] == pytest.approx(deep["step_seconds"], rel=0.02)


@pytest.mark.slow
def test_table_of_layouts():
    rows = list(plan.table())
    assert len(rows) == 12
    assert all(
        re.search(r"\| (fits|does not fit) \| \d+\.\d\d \| \d+ % \|$", row) for row in rows[2:]
    )
