"""NKI kernels that train Qwen3 on Trainium2, and the registry that puts them into a model.

| op (qwen3_trn::)     | reference          | NKI kernel              | needs                      |
|----------------------|--------------------|-------------------------|----------------------------|
| rotary               | rotary_ref         | rotary_kernel           | S % (128 * LNC), H 64, 128 |
| grouped_linear       | grouped_linear_ref | grouped_forward_kernel  | D, F % 32                  |
| grouped_linear_grads | grouped_grads_ref  | grouped_backward_kernel | D, F % 32                  |

rotary is its own backward (inverse=True). An expert layer is two grouped_linear calls, gate/up and
down. Routing, sorting and weighting of rows are PyTorch: the router's top-k is a [T, E] problem whose
backward is PyTorch's anyway, so a kernel would not pay. An op's last argument, lnc, says where it runs:
  1. on a neuron device: the NKI kernel, always;
  2. on CPU with NKI_SIMULATOR=1: the same kernel, in nki.simulate if the nki wheel is installed, else
     in nki_cpu.py;
  3. otherwise (lnc = 0): the PyTorch reference, with one warning that says so.
`python kernels.py --check` compares every kernel with its reference.

Shape letters are those of train_qwen3_trn.py: T tokens, D hidden, F expert width, E experts held here,
K top-k, R routed rows, B batch, S sequence, N heads, H head dim. A grouped product is [R, C] x [E, M, C]
-> [R, M]. LNC: how many physical NeuronCores (1 or 2) act as one device and run one kernel together.
"""

import argparse
import difflib
import fnmatch
import functools
import importlib
import inspect
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import nki
    import nki.isa as nisa
    import nki.language as nl
except ImportError:  # the wheel exists only on the Neuron package index
    import nki_cpu as nki
    from nki_cpu import isa as nisa
    from nki_cpu import language as nl
try:
    from torch_neuronx import nki_op, wrap_nki

    NEURON_IMPORT_ERROR: ImportError | None = None
except ImportError as error:  # raised again if an op meets a neuron tensor
    nki_op = wrap_nki = None
    NEURON_IMPORT_ERROR = error

log = logging.getLogger("qwen3-trn")

# Hardware sizes of Trainium2 (NeuronCore-v3), from the architecture guide.
P = 128  # SBUF and PSUM partitions: rows of a tile, and the longest contraction of one matmul
BANK = 512  # float32 columns of a PSUM bank: the widest result of one matmul
# SBUF bytes per partition for what a kernel keeps between blocks (weights, float32 gradients); the rest
# of its roughly 200 KiB holds the tiles of two blocks in flight. Larger layers are cut.
PIECE_BYTES = 128 * 1024
ROTARY_HEADS = 32  # heads per tile; 32 heads of 128 in float32 take 80 KiB with their temporaries

# How a kernel walks over its blocks of 128 rows:
#   dynamic  a device loop that stops after the blocks in use; padding costs nothing
#   static   a device loop over all blocks; use it if a data-dependent trip count hangs
BLOCK_LOOP = "dynamic"

NKI_OVERRIDES = ("kernels.nki_rotary", "kernels.nki_moe")  # what --nki turns on


# ---- Override registry --------------------------------------------------------------------------
class OverrideError(ValueError):
    """An override that cannot be used as asked; the message is for the user and may have lines."""


Constraints = Callable[[Any, int, int, int], list[str]]


@dataclass(frozen=True)
class Override:
    """A registered factory; once the user names it, with keyword arguments."""

    name: str  # MODULE.FUNCTION
    build: Callable[..., nn.Module]
    globs: tuple[str, ...]
    description: str
    constraints: Constraints | None
    kwargs: dict[str, Any] = field(default_factory=dict)


def override(
    *globs: str, description: str = "", constraints: Constraints | None = None
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register a factory (module, **kwargs) -> module for the modules whose names match a glob.

    Nothing happens until the user names the factory (--override MODULE.FUNCTION). The replacement must
    have the same parameters, by name and shape; reusing the old module's Parameters does that.

    globs are over names from model.named_modules(), such as "model.layers.*.mlp.experts"; constraints is
    (model config, seq_len, tp, LNC) -> problems, as check_constraints returns them.
    """

    def register(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        name = f"{build.__module__}.{build.__qualname__}"
        build.override = Override(name, build, globs, description, constraints)
        return build

    return register


def closest(word: str, choices: Iterable[str], number: int = 1) -> str:
    """The most similar choices, as "; nearest: a, b"; empty if there is none to offer."""
    found = difflib.get_close_matches(word, sorted(set(choices)), number, cutoff=0.0)
    return f"; nearest: {', '.join(found)}" if found else ""


def load_overrides(specs: list[str]) -> list[Override]:
    """Parse MODULE.FUNCTION[={json keywords}], import and validate. Raises OverrideError."""
    overrides: list[Override] = []
    for spec in specs:
        new = load_override(spec)
        if any(new.build is old.build for old in overrides):
            hint = " (--nki names it already)" if new.name in NKI_OVERRIDES else ""
            raise OverrideError(f"--override {new.name} is named twice{hint}; name it once")
        overrides.append(new)
    return overrides


def load_override(spec: str) -> Override:
    name, _, text = spec.partition("=")
    module_name, _, function = name.rpartition(".")
    if not module_name or not function:
        raise OverrideError(f"--override {spec} must be MODULE.FUNCTION[={{json}}]")
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        if not f"{module_name}.".startswith(f"{e.name}."):
            raise OverrideError(f"--override {name}: importing {module_name} failed: {e}") from e
        hint = closest(module_name, ["kernels", *(p.stem for p in Path().glob("*.py"))])
        raise OverrideError(f"--override {name}: there is no module {module_name}{hint}") from e
    build = getattr(module, function, None)
    registered = getattr(build, "override", None)
    if not isinstance(registered, Override):
        what = "is not registered with @kernels.override" if build else "does not exist"
        hint = closest(function, (n for n, f in vars(module).items() if hasattr(f, "override")))
        raise OverrideError(f"--override {name}: {function} in {module_name} {what}{hint}")
    try:
        kwargs = json.loads(text or "{}")
        if not isinstance(kwargs, dict):
            raise OverrideError(f"--override {spec}: a JSON object must follow the =")
        inspect.signature(build).bind(None, **kwargs)
    except json.JSONDecodeError as e:
        raise OverrideError(f"--override {spec}: not JSON after the =: {e}") from e
    except TypeError as e:  # names the unknown or missing keyword
        _, *names = inspect.signature(build).parameters
        hint = closest(next((w for w in kwargs if w not in names), ""), names)
        takes = ", ".join(names) or "no keywords"
        raise OverrideError(f"--override {name}: {e}; it takes {takes}{hint}") from e
    return replace(registered, name=name, kwargs=kwargs)


def apply_overrides(model: nn.Module, overrides: list[Override], log: logging.Logger) -> None:
    """Replace modules of a built model (on meta, or with weights) by what the overrides make of them.

    Everything is matched, built and checked before the first module is replaced. Raises OverrideError;
    warns of an override that matches no module; logs one line per replaced group.
    """
    modules = dict(model.named_modules())
    claims: dict[str, Override] = {}
    problems: list[str] = []
    for o in overrides:
        matches = [n for n in modules if any(fnmatch.fnmatchcase(n, g) for g in o.globs)]
        if not matches:
            globs = ", ".join(o.globs)
            near = closest(globs, (re.sub(r"\.\d+\b", ".*", n) for n in modules if n), 3)
            log.warning(f"override {o.name} changes nothing: no module matches {globs}{near}")
        for name in matches:
            for other, owner in claims.items():  # the same module, or one inside the other
                if f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
                    inner = max(name, other, key=len)
                    problems.append(f"--override: {owner.name} and {o.name} both replace {inner}")
            claims.setdefault(name, o)
    if problems:
        raise OverrideError("\n".join(problems))
    new = {name: build_replacement(name, modules[name], o) for name, o in claims.items()}
    for name, module in new.items():
        model.set_submodule(name, module)
    for line in replaced_groups(claims, new):
        log.info(line)


def build_replacement(name: str, old: nn.Module, o: Override) -> nn.Module:
    """Call the factory; insist on a module with the old one's parameters and buffers."""
    try:
        new = o.build(old, **o.kwargs)
    except ValueError as e:
        raise OverrideError(f"--override {o.name} cannot replace {name}: {e}") from e
    if not isinstance(new, nn.Module):
        raise OverrideError(f"--override {o.name} returned {new!r} for {name}, not a module")
    before, after = ({n: tuple(t.shape) for n, t in m.state_dict().items()} for m in (old, new))
    if before != after:
        rule = f"must keep its parameters {before}, not have {after}"
        raise OverrideError(f"--override {o.name}: the replacement of {name} {rule}")
    return new.train(old.training)


def replaced_groups(claims: dict[str, Override], new: dict[str, nn.Module]) -> list[str]:
    """Log lines: names that differ only in their first number (the layer) share one."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, module in new.items():
        number = re.search(r"\.(\d+)(?=\.|$)", name)
        text = re.sub(r"\.\d+(?=\.|$)", ".{}", name, count=1)
        key = (text, type(module).__name__, claims[name].name)
        groups.setdefault(key, []).append(int(number[1]) if number else 0)
    lines = []
    for (text, kind, owner), numbers in groups.items():
        spans = []
        for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
            first, *_, last = [n for _, n in run] * 2  # consecutive numbers keep that difference
            spans.append(str(first) if first == last else f"{first}-{last}")
        lines.append(f"{text.format(','.join(spans))}: {len(numbers)} x {kind} ({owner})")
    return lines


def configured_lnc() -> int:
    """LNC that kernels are built for: NEURON_LOGICAL_NC_CONFIG, or Trainium2's default of 2."""
    if (text := os.environ.get("NEURON_LOGICAL_NC_CONFIG") or "2") not in ("1", "2"):
        rule = "must be 1 or 2: physical cores per device; nearest: 2"
        raise OverrideError(f"NEURON_LOGICAL_NC_CONFIG {text} {rule}")
    return int(text)


def multiple_rule(flag: str, value: int, step: int, why: str, kernel: str) -> list[str]:
    """The problem, if any, with a size that must be a positive multiple of step."""
    if value > 0 and value % step == 0:
        return []
    nearest = max(1, (value + step // 2) // step) * step
    return [f"{flag} {value} must be a multiple of {step} ({why}) for {kernel}; nearest: {nearest}"]


def check_constraints(
    config: Any, seq_len: int, tp: int, overrides: list[Override], device_type: str
) -> list[str]:
    """What the kernels cannot do with this model's config and run: flag, value, rule, nearest value.

    The rules are the same on every device, so that a run that was tried on a laptop starts on Trainium.
    """
    wanted = [o.constraints for o in overrides if o.constraints]
    try:
        lnc = configured_lnc()
    except OverrideError as e:
        return [str(e)] if wanted else []
    problems = [text for constraints in wanted for text in constraints(config, seq_len, tp, lnc)]
    if wanted and device_type == "neuron" and not os.environ.get("NEURON_LOGICAL_NC_CONFIG"):
        # https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.1/nki/get-started/about/lnc.html
        rule = "must be 1 or 2: unset, NKI builds for 1 core and the compiler for 2; nearest: 2"
        problems.append(f"NEURON_LOGICAL_NC_CONFIG (unset) {rule}")
    return problems


# ---- Running a kernel ---------------------------------------------------------------------------
class KernelModule(nn.Module):
    """Decides where its ops run."""

    def __init__(self) -> None:
        super().__init__()
        self.lnc, self.simulate = configured_lnc(), os.environ.get("NKI_SIMULATOR") == "1"

    def lnc_for(self, x: Tensor) -> int:
        """The ops' lnc argument: LNC where a kernel runs, 0 where the reference does."""
        return self.lnc if x.device.type == "neuron" or (self.simulate and x.is_cpu) else 0


warn_once = functools.cache(log.warning)


def use_reference(x: Tensor, lnc: int) -> bool:
    """True on path 3 of the module docstring. On a neuron device there is no such path."""
    if x.device.type == "neuron" and not lnc:
        raise RuntimeError("a neuron tensor needs its NKI kernel: lnc must be 1 or 2, not 0")
    if not lnc:
        text = "NKI kernels run as their PyTorch references: the device is %s, not neuron, and %s"
        warn_once(text, x.device.type, "NKI_SIMULATOR=1 (CPU only) is not set")
    return not lnc


def run_kernel(kernel: Any, lnc: int, *args: Any) -> Any:
    """Run on the first argument's device: neuron hardware, or a simulator on the CPU."""
    if args[0].device.type != "neuron":
        return simulate_kernel(kernel, lnc, *args)
    if wrap_nki is None:
        raise ImportError("torch_neuronx cannot be imported") from NEURON_IMPORT_ERROR
    return wrap_nki(kernel)[(lnc,)](*args)  # a tuple: older releases iterate over the grid


def simulate_kernel(kernel: Any, lnc: int, *args: Any) -> Any:
    """nki.simulate between torch tensors; bfloat16 crosses as bits, because NumPy has none."""
    import ml_dtypes
    import numpy as np

    # unset, nki simulates the limits of trn3
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")

    def to_numpy(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        # not a.numpy(): that would forbid FSDP to free the storage of a gathered weight
        half = a.dtype == torch.bfloat16
        array = np.from_dlpack(a.detach().view(torch.int16) if half else a.detach())
        return array.view(ml_dtypes.bfloat16) if half else array

    def to_torch(a: Any) -> Tensor:
        if a.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(a.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(a)

    out = nki.simulate(kernel[lnc])(*map(to_numpy, args))
    return tuple(map(to_torch, out)) if isinstance(out, (tuple, list)) else to_torch(out)


def define(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the op qwen3_trn::name: nki_op where torch_neuronx is, else torch.library's.

    fake takes the same arguments and gives empty tensors of the results' shapes and dtypes.
    """

    def wrap(run: Callable[..., Any]) -> Any:
        # nki_op lets torch.compile see the kernel inside
        register = nki_op or torch.library.custom_op
        op = register(f"qwen3_trn::{name}", mutates_args={})(run)
        op.register_fake(fake)
        return op

    return wrap


# ---- Rotary embedding ---------------------------------------------------------------------------
# With x1, x2 the halves of a head:  y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin: a rotation, so the
# backward pass rotates dy by the opposite angle. cos and sin are saved, nothing is recomputed.


def rotary_ref(x_BSNH: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the pairs (x[i], x[i + H/2]) of each head.

    Args:
        x_BSNH: [B, S, N, H]
        cos, sin: float32 [S, H/2] or [B, S, H/2]
        inverse: turn the other way, as the backward pass does
    Returns: [B, S, N, H] in x's dtype, computed in float32
    """
    x1, x2 = x_BSNH.chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for every head
    if inverse:
        sin = -sin
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_BSNH.dtype)


@nki.jit
def rotary_kernel(x, cos, sin, inverse):
    """Rotary embedding; each program takes a contiguous part of the sequence.

    Dims: S in tiles of 128 on the partitions; N and H in the free dimension.
    Args: x [B, S, N, H] @ HBM; cos, sin [1 or B, S, H/2] float32 @ HBM; inverse: bool
    Returns: like x @ HBM
    Constraints: S % (128 * LNC) == 0; H even; nothing on a core depends on the other one
    Reference: rotary_ref
    """
    B, S, N, H = x.shape
    tiles = S // P // nl.num_programs(0)
    assert tiles * P * nl.num_programs(0) == S, f"S {S} must be a multiple of 128 * LNC"
    out = nl.ndarray((B, S, N, H), dtype=x.dtype, buffer=nl.shared_hbm)
    for t in range(nl.program_id(0) * tiles, (nl.program_id(0) + 1) * tiles):
        rows = slice(t * P, (t + 1) * P)
        for b in range(B):
            if b < cos.shape[0]:  # else one table serves every sequence
                tables = _load(cos[b, rows, :]), _load(sin[b, rows, :])
            for n in range(0, N, ROTARY_HEADS):
                heads = slice(n, min(n + ROTARY_HEADS, N))
                _rotate_tile(out[b, rows, heads, :], x[b, rows, heads, :], *tables, inverse)
    return out


def _load(src):
    """Copy from HBM into a new SBUF tile, same shape and dtype."""
    tile = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src)
    return tile


def _rotate_tile(dst, src, cos, sin, inverse):
    """dst, src [128, n, H] @ HBM; cos, sin [128, H/2] @ SBUF."""
    _, n, H = src.shape
    x = _load(src)
    y = nl.ndarray((P, n, H), dtype=src.dtype, buffer=nl.sbuf)
    # Stride 0 over heads: tensor_tensor wants equal shapes and broadcasts nothing itself.
    c, s = cos.expand_dim(1).broadcast(1, n), sin.expand_dim(1).broadcast(1, n)
    x1, x2 = x[:, :, 0 : H // 2], x[:, :, H // 2 : H]
    y1, y2 = y[:, :, 0 : H // 2], y[:, :, H // 2 : H]
    first, second = (nl.add, nl.subtract) if inverse else (nl.subtract, nl.add)
    for dst_half, direct, crossed, op in ((y1, x1, x2, first), (y2, x2, x1, second)):
        u = nl.ndarray((P, n, H // 2), dtype=nl.float32, buffer=nl.sbuf)
        v = nl.ndarray((P, n, H // 2), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=u, data1=direct, data2=c, op=nl.multiply)
        nisa.tensor_tensor(dst=v, data1=crossed, data2=s, op=nl.multiply)
        nisa.tensor_tensor(dst=dst_half, data1=u, data2=v, op=op)  # rounds once, to y's dtype
    nisa.dma_copy(dst=dst, src=y)


@define("rotary", lambda x, cos, sin, inverse, lnc: x.new_empty(x.shape))
def rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool, lnc: int) -> Tensor:
    """The op; arguments of rotary_ref, and lnc as in the module docstring."""
    if use_reference(x, lnc):
        return rotary_ref(x, cos, sin, inverse)
    if x.shape[1] % (P * lnc):
        raise ValueError(f"sequence length {x.shape[1]} must be a multiple of 128 * LNC {lnc}")
    cos, sin = (t.contiguous().view(-1, *t.shape[-2:]) for t in (cos, sin))
    return run_kernel(rotary_kernel, lnc, x.contiguous(), cos, sin, inverse)


def _rotary_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse, ctx.lnc = inputs
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    return rotary(grad.contiguous(), cos, sin, not ctx.inverse, ctx.lnc), None, None, None, None


rotary.register_autograd(_rotary_backward, setup_context=_rotary_save)


class NkiRotary(KernelModule):
    """Takes the place of the native model's Rotary."""

    def forward(
        self, q_BSNH: Tensor, k_BSKH: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """cos, sin float32 [S, H/2] or [B, S, H/2] -> rotated q and k."""
        lnc = self.lnc_for(q_BSNH)
        return rotary(q_BSNH, cos, sin, False, lnc), rotary(k_BSKH, cos, sin, False, lnc)


def _rotary_constraints(config: Any, seq_len: int, tp: int, lnc: int) -> list[str]:
    kernel, H = "kernels.nki_rotary", config.head_dim
    problems = multiple_rule("--seq_len", seq_len, P * lnc, f"128 rows x LNC {lnc}", kernel)
    if H not in (64, 128):
        near = 64 if H < 96 else 128
        problems.append(f"--model: head_dim {H} must be 64 or 128 for {kernel}; nearest: {near}")
    return problems


@override(
    "model.layers.*.self_attn.rotary",
    description="rotary embedding of queries and keys, forward and backward",
    constraints=_rotary_constraints,
)
def nki_rotary(module: nn.Module) -> nn.Module:
    return NkiRotary()


# ---- Mixture-of-experts: the layout of routed rows ----------------------------------------------
class Layout(NamedTuple):
    """Where each token-expert assignment goes. Rows are sorted by expert; for the kernels each expert
    starts at a multiple of 128, and the number of rows is the most that any routing can need."""

    tokens: Tensor  # [R] int64: the token that a row holds; T (a row of zeros) for padding
    rows: Tensor  # [T, K] int64: the row of an assignment; 0 for foreign ones
    ends: Tensor  # [E] int32: end of each expert's rows
    plan: Tensor  # int32 [.., 4], see block_plan; ends for lnc = 0


@torch.no_grad()
def block_layout(ids_TK: Tensor, num_experts: int, lnc: int) -> Layout:
    """Sort assignments by expert; ids of num_experts and more are foreign and get no row.

    All shapes are static: nothing here depends on the routing but values.
    """
    (T, K), E, device = ids_TK.shape, num_experts, ids_TK.device
    A, align = T * K, P if lnc else 1
    owners = min(A, E)  # as many experts can have a partly filled block
    R = -(-((A - owners) // P + owners) // lnc) * lnc * P if lnc else A
    sorted_A, order_A = ids_TK.flatten().sort(stable=True)
    counts_E = (sorted_A[:, None] == torch.arange(E, device=device)).sum(0)
    padded_E = (counts_E + align - 1) // align * align
    ends_E = padded_E.cumsum(0)
    # where an expert's rows start, less where they start in the sorted list
    shift_E = F.pad(ends_E - padded_E - (counts_E.cumsum(0) - counts_E), (0, 1))
    here_A = sorted_A < E
    row_A = torch.arange(A, device=device) + shift_E[sorted_A.clamp(max=E)]
    tokens_R = torch.full((R + 1,), T, device=device)  # foreign assignments all land in row R
    tokens_R = tokens_R.scatter(0, torch.where(here_A, row_A, R), order_A // K)[:R]
    row_A = torch.zeros_like(row_A).scatter(0, order_A, torch.where(here_A, row_A, 0))
    plan = block_plan(counts_E == 0, ends_E, R // P, lnc) if lnc else ends_E.int()
    return Layout(tokens_R, row_A.view(T, K), ends_E.int(), plan)


def block_plan(empty_E: Tensor, ends_E: Tensor, NB: int, lnc: int) -> Tensor:
    """What the kernels do, block by block. Expert E, out of bounds, stands for none: DMA skips it.

    Returns: int32 [NB + LNC + NB + E + 1, 4]
        forward, for each program NB / LNC blocks and a total, so that it loads most experts alone:
            (block, expert, expert to load or E, 0) ... (blocks to process, 0, 0, 0)
        backward, NB blocks, E experts without tokens, and a total; all for every program:
            (block, expert to load or E, expert to store or E, 1: go on summing, 0: start anew) ...
            (expert or E, 0, 0, 0) ... (blocks in use, experts without tokens, 0, 0)
    """
    E, L, device = empty_E.numel(), NB // lnc, empty_E.device
    b, used = torch.arange(NB, device=device), ends_E[-1] // P
    live = b < used
    expert = (b[:, None] * P >= ends_E).sum(1).clamp(max=E - 1)
    first = F.pad(expert[1:] != expert[:-1], (1, 0), value=True) & live
    last = F.pad(first[1:] | ~live[1:], (0, 1), value=True) & live

    count = (used + lnc - 1) // lnc if BLOCK_LOOP == "dynamic" else torch.full_like(used, L)
    block = (torch.arange(lnc, device=device)[:, None] * count + b[:L]).clamp(max=NB - 1)
    load = torch.where(first[block] | (b[:L] == 0), expert[block], E)
    forward = torch.stack((block, expert[block], load, torch.zeros_like(block)), -1)
    forward = torch.cat((forward, F.pad(count.view(1, 1, 1), (0, 3)).expand(lnc, 1, 4)), 1)

    starts = first | (b == 0)  # what is multiplied must be numbers even where no block is in use
    backward = (b, torch.where(starts, expert, E), torch.where(last, expert, E), (~starts).long())
    place_E = torch.where(empty_E, empty_E.cumsum(0) - 1, E)  # those without tokens come first
    empty = torch.full((E + 1,), E, device=device)
    empty = empty.scatter(0, place_E, torch.arange(E, device=device))[:E, None]
    total = torch.stack((used, empty_E.sum()))[None]
    rest = torch.stack(backward, 1), F.pad(empty, (0, 3)), F.pad(total, (0, 2))
    return torch.cat((forward.view(-1, 4), *rest)).int()


# ---- Mixture-of-experts: grouped linear layers --------------------------------------------------
# For the rows of expert e:  out = a W[e]^T,  with a = rows, or for the down projection a = silu(g) u
# of rows = [g | u]. Backward, given dout:
#     da = dout W[e],   dW[e] = sum over its rows of dout^T a       (float32 sums, rounded once)
#     with SwiGLU:  du = da silu(g),  dg = da u silu'(g)
# Saved: rows and weights. Recomputed: a (elementwise). g and u are kept in HBM, as PyTorch would:
# recomputing them would repeat a third of the matrix products and need the transposed weight again.
#
# Weights stay in the model's layout [E, M, C]. A matmul contracts over partitions, so the forward pass
# needs C on the partitions and transposes; the backward pass contracts over M and takes them as they
# are. The transpose happens on the way from HBM, by the DMA engines (2-byte dtypes only): once per
# expert and program, no HBM traffic of its own. On the tensor engine it would cost 128 cycles per
# 128 x 128 tile: with two blocks per expert half as much again as the matmuls, and in this block loop
# (no branches on the device) it would run for every block. float32, a dtype for checks, does just that.


def grouped_linear_ref(rows: Tensor, weight: Tensor, ends: Tensor, swiglu: bool) -> Tensor:
    """Rows [R, C] (SwiGLU: [R, 2C] as gate | up) sorted by expert, weight [E, M, C] -> [R, M].

    Args:
        ends: int32 [E], the end of each expert's rows; rows past the last one come back undefined
    """
    if swiglu:
        gate, up = rows.chunk(2, dim=-1)
        rows = F.silu(gate) * up
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def grouped_grads_ref(
    dout: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, swiglu: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of grouped_linear_ref: (like rows, like weight)."""
    da = F.grouped_mm(dout, weight, offs=ends)
    if not swiglu:
        return da, F.grouped_mm(dout.t(), rows, offs=ends)
    gate, up = rows.chunk(2, dim=-1)
    sigmoid, act = torch.sigmoid(gate), F.silu(gate)
    dgate = da * up * (sigmoid + act * (1 - sigmoid))
    return torch.cat((dgate, da * act), -1), F.grouped_mm(dout.t(), act * up, offs=ends)


def tile_of(n: int) -> int:
    """Size of the tiles that cut n into equal parts for the partitions: at most 128, 32 divides it."""
    return next((t for t in (128, 96, 64, 32) if n % t == 0), 0)


def cut(total: int, bytes_per_column: int, step: int) -> int:
    """Columns of a piece: the largest equal part of total, a multiple of step, within PIECE_BYTES."""
    sizes = (total // n for n in range(1, total // step + 1) if total % (n * step) == 0)
    size = next((s for s in sizes if s * bytes_per_column <= PIECE_BYTES), None)
    assert size, f"{total} columns of {bytes_per_column} bytes do not fit SBUF in equal pieces"
    return size


def _for_blocks(count, limit, body):
    """Call body(i) for the blocks in use; count [1, 1] int32 @ HBM says how many, limit is the most."""
    # https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/deep-dives/nki-scalar.html
    stop = nisa.scalar_load(_load(count)) if BLOCK_LOOP == "dynamic" else limit
    nl.fori_loop(0, stop, body)


def _at(tensor, pattern, offset, index):
    """tensor[index] @ HBM through [[stride, count], ...]; index: a loop's or in a [1, 1] tile.

    ap rather than select, because it takes both. Its index steps over dim 0 of the whole tensor:
    https://awsdocs-neuron.readthedocs-hosted.com/en/v2.31.0/nki/deep-dives/nki-aps.html
    """
    return tensor.ap(pattern, offset=offset, scalar_offset=index, indirect_dim=0)


def _plan_row(plan, first, i):
    """Row first + i of a plan @ HBM, as an int32 tile [1, 4]."""
    tile = nl.ndarray((1, 4), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=_at(plan, [[4, 1], [1, 4]], first * 4, i))
    return tile


def _plan_lanes(plan, first, i, column):
    """One number of that row in every partition, as a float32 tile [128, 1]."""
    number = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
    lanes = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=_at(plan, [[0, P], [1, 1]], first * 4 + column, i))
    nisa.tensor_copy(dst=lanes, src=number)
    return lanes


def _block(tensor, block, first, columns):
    """Columns first .. first + columns of a block of tensor [NB, 128, W] @ HBM, as an access pattern."""
    return _at(tensor, [[tensor.shape[2], P], [1, columns]], first, block)


def _load_block(tensor, block, first, columns):
    tile = nl.ndarray((P, columns), dtype=tensor.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=_block(tensor, block, first, columns))
    return tile


def _transpose(dst, src, t):
    """dst [t, n, rows] = src [rows, n * t] transposed in tiles, both @ SBUF, on the tensor engine."""
    rows, n = src.shape[0], src.shape[1] // t
    for k in range(0, n, 4):  # four results share a PSUM bank and leave it in one copy
        m = min(4, n - k)
        ps = nl.ndarray((t, m, rows), dtype=src.dtype, buffer=nl.psum)
        for j in range(m):
            nisa.nc_transpose(dst=ps[:, j, :], data=src[:, (k + j) * t : (k + j + 1) * t])
        nisa.tensor_copy(dst=dst[:, k : k + m, :], src=ps)


def _load_transposed(dst, weight, index):
    """dst [k, n, m] @ SBUF = rows index [m, 1] of weight [E * M, n, 1, k] @ HBM, transposed.

    Indices past the end are skipped, which leaves dst as it was.
    https://awsdocs-neuron.readthedocs-hosted.com/en/v2.30.0/nki/api/generated/nki.isa.dma_transpose.html
    """
    (_, n, _, k), m = weight.shape, index.shape[0]
    if weight.dtype != nl.float32:
        pattern = [[n * k, m], [k, n], [k, 1], [1, k]]
        src = weight.ap(pattern, offset=0, vector_offset=index, indirect_dim=0)
        skip = nisa.oob_mode.skip
        nisa.dma_transpose(dst=dst.expand_dim(2), src=src, axes=(3, 1, 2, 0), oob_mode=skip)
    else:
        tile = nl.ndarray((m, n * k), dtype=weight.dtype, buffer=nl.sbuf)
        src = weight.ap([[n * k, m], [1, n * k]], offset=0, vector_offset=index, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=src)
        _transpose(dst, tile, k)


def _products(left, right):
    """left [k, n, 128], right [k, n, W] @ SBUF: the sum over k and n [128, W], a PSUM bank at a time.

    Yields (columns, tile [128, up to 512] float32 @ PSUM).
    """
    _, n, width = right.shape
    for c in range(0, width, BANK):
        columns = slice(c, min(c + BANK, width))
        ps = nl.ndarray((P, columns.stop - c), dtype=nl.float32, buffer=nl.psum)
        for j in range(n):
            moving = right[:, j, columns]
            nisa.nc_matmul(dst=ps, stationary=left[:, j, :], moving=moving, accumulate=j > 0)
        yield columns, ps


def _swiglu(dst, gate, up):
    """dst = silu(gate) up; returns silu(gate) in float32."""
    act = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=act, op=nl.silu, data=gate)
    nisa.tensor_tensor(dst=dst, data1=act, data2=up, op=nl.multiply)
    return act


@nki.jit
def grouped_forward_kernel(rows, weight, plan, M, swiglu):
    """out = a W[e]^T for blocks of 128 rows that belong to one expert each.

    Dims: NB blocks, of which each program takes half; C = n * k contracted in n tiles of k; M output
        columns. NKI's own library calls D "H" and F "I".
    Args:
        rows [NB, 128, C] @ HBM, with swiglu [NB, 128, 2C] (gate | up)
        weight [E * M, n, 1, k] @ HBM: [E, M, C] in the form that gather-transpose wants
        plan [.., 4] int32 @ HBM: see block_plan
    Returns: [NB, 128, M] @ HBM; blocks not in use are not written
    Constraints: 32 | C, M; E * M < 2**24 (row numbers pass through float32)
    Reference: grouped_linear_ref
    Pseudocode:
        for each piece of M that fits SBUF; for each of this program's blocks:
            if the expert is new: wt[c, m] = weight[expert * M + m, c]
            out[block, :, piece] = transpose(a)^T wt
    """
    NB, (EM, n, _, k) = rows.shape[0], weight.shape
    assert EM < 2**24, f"{EM} weight rows must be fewer than 2**24"
    assert tile_of(k), f"the contraction's tile {k} must be a multiple of 32"
    assert tile_of(M), f"M {M} must be a multiple of 32"
    out = nl.ndarray((NB, P, M), dtype=rows.dtype, buffer=nl.shared_hbm)
    piece = cut(M, n * (4 if weight.dtype == nl.float32 else 2), tile_of(M))
    for m0 in range(0, M, piece):
        _forward_piece(out, rows, weight, plan, m0, piece, swiglu)
    return out


def _forward_piece(out, rows, weight, plan, m0, piece, swiglu):
    """Columns m0 .. m0 + piece of the result, for every block of this program."""
    NB, _, M = out.shape
    (_, n, _, k), m = weight.shape, tile_of(M)
    L, tiles = NB // nl.num_programs(0), piece // m
    first = nl.program_id(0) * (L + 1)  # this program's rows of the plan
    wt = nl.ndarray((k, n, piece), dtype=weight.dtype, buffer=nl.sbuf)
    # the rows of an expert that each weight tile holds: number[p, s] = m0 + s * m + p
    number = nl.ndarray((m, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=number, pattern=[[m, tiles]], offset=m0, channel_multiplier=1)
    column = 1 if weight.dtype == nl.float32 else 2  # float32 loads for every block, see above

    def body(i):
        block = _plan_row(plan, first, i)[:, 0:1]
        expert = _plan_lanes(plan, first, i, column)[0:m, :].broadcast(1, tiles)
        index = nl.ndarray((m, tiles), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=index, data=expert, op0=nl.multiply, operand0=float(M), op1=nl.add, operand1=number
        )
        for s in range(tiles):
            _load_transposed(wt[:, :, s * m : (s + 1) * m], weight, index[:, s : s + 1])
        if swiglu:
            gate, up = (_load_block(rows, block, c, n * k) for c in (0, n * k))
            a = nl.ndarray((P, n * k), dtype=rows.dtype, buffer=nl.sbuf)
            _swiglu(a, gate, up)
        else:
            a = _load_block(rows, block, 0, n * k)
        at = nl.ndarray((k, n, P), dtype=rows.dtype, buffer=nl.sbuf)
        _transpose(at, a, k)
        y = nl.ndarray((P, piece), dtype=rows.dtype, buffer=nl.sbuf)
        for columns, ps in _products(at, wt):
            nisa.tensor_copy(dst=y[:, columns], src=ps)
        nisa.dma_copy(dst=_block(out, block, m0, piece), src=y)

    _for_blocks(plan[first + L : first + L + 1, 0:1], L, body)


@nki.jit
def grouped_backward_kernel(dout, rows, weight, plan, swiglu):
    """Gradients of grouped_forward_kernel for rows and weights.

    Dims: M = n * m contracted in n tiles of m; each program owns C / LNC columns of weight and rows,
        so programs write disjoint columns, and need no barrier and no partial sums.
    Args: dout [NB, 128, M], rows as in forward, weight [E, M, C] @ HBM; plan as in forward
    Returns: (like rows, like weight) @ HBM; blocks not in use are not written
    Constraints: 32 | C, M
    Reference: grouped_grads_ref
    Pseudocode:
        for each piece of this program's columns:
            store zeros as the gradient of every expert without tokens
            for each block:
                if the expert is new: w = weight[expert], acc = 0
                da = dout w; acc += dout^T a
                if this is the expert's last block: dweight[expert] = acc
    """
    E, M, C = weight.shape
    assert tile_of(M), f"M {M} must be a multiple of 32"
    assert tile_of(C), f"C {C} must be a multiple of 32"
    drows = nl.ndarray(rows.shape, dtype=rows.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((E, M, C), dtype=weight.dtype, buffer=nl.shared_hbm)
    own = C // nl.num_programs(0)
    # a weight and its float32 gradient for each column
    each = M // tile_of(M) * (4 + (4 if weight.dtype == nl.float32 else 2))
    piece = cut(own, each, 16)
    for c0 in range(nl.program_id(0) * own, (nl.program_id(0) + 1) * own, piece):
        _backward_piece(drows, dweight, dout, rows, weight, plan, c0, piece, swiglu)
    return drows, dweight


def _backward_piece(drows, dweight, dout, rows, weight, plan, c0, piece, swiglu):
    """Columns c0 .. c0 + piece of both gradients, for every block."""
    NB, (E, M, C), m = rows.shape[0], weight.shape, tile_of(weight.shape[1])
    w = nl.ndarray((m, M // m, piece), dtype=weight.dtype, buffer=nl.sbuf)
    acc = nl.ndarray((m, M // m, piece), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=acc, value=0.0)
    first, end = NB + nl.num_programs(0), plan.shape[0] - 1  # the backward part of the plan
    matrix = [[C, m], [m * C, M // m], [1, piece]]  # an expert's [M, piece], in w's shape
    skip = nisa.oob_mode.skip

    def no_tokens(i):
        expert = _plan_row(plan, first + NB, i)[:, 0:1]
        nisa.dma_copy(dst=_at(dweight, matrix, c0, expert), src=acc, oob_mode=skip)

    def body(i):
        row, keep = _plan_row(plan, first, i), _plan_lanes(plan, first, i, 3)
        block, load, store = (row[:, j : j + 1] for j in range(3))
        nisa.dma_copy(dst=w, src=_at(weight, matrix, c0, load), oob_mode=skip)
        d = _load_block(dout, block, 0, M)
        dt = nl.ndarray((m, M // m, P), dtype=dout.dtype, buffer=nl.sbuf)
        _transpose(dt, d, m)
        if swiglu:
            gate, up = (_load_block(rows, block, c0 + c, piece) for c in (0, C))
            a = nl.ndarray((P, piece), dtype=rows.dtype, buffer=nl.sbuf)
            grads = _swiglu_grads(_products(dt, w), gate, up, _swiglu(a, gate, up))
        else:
            a = _load_block(rows, block, c0, piece)
            grads = [nl.ndarray((P, piece), dtype=rows.dtype, buffer=nl.sbuf)]
            for columns, ps in _products(dt, w):
                nisa.tensor_copy(dst=grads[0][:, columns], src=ps)
        for j, grad in enumerate(grads):
            nisa.dma_copy(dst=_block(drows, block, c0 + j * C, piece), src=grad)
        _add_weight_grads(acc, keep, d, a)
        nisa.dma_copy(dst=_at(dweight, matrix, c0, store), src=acc, oob_mode=skip)

    _for_blocks(plan[end : end + 1, 1:2], E, no_tokens)
    _for_blocks(plan[end : end + 1, 0:1], NB, body)


def _swiglu_grads(da, gate, up, act):
    """The gradients of gate and up, from da in pieces @ PSUM and act = silu(gate)."""
    dgate = nl.ndarray(gate.shape, dtype=gate.dtype, buffer=nl.sbuf)
    dup = nl.ndarray(gate.shape, dtype=gate.dtype, buffer=nl.sbuf)
    for columns, ps in da:
        slope = nl.ndarray(ps.shape, dtype=nl.float32, buffer=nl.sbuf)
        product = nl.ndarray(ps.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=slope, op=nl.silu_dx, data=gate[:, columns])
        nisa.tensor_tensor(dst=product, data1=slope, data2=up[:, columns], op=nl.multiply)
        nisa.tensor_tensor(dst=dgate[:, columns], data1=product, data2=ps, op=nl.multiply)
        nisa.tensor_tensor(dst=dup[:, columns], data1=act[:, columns], data2=ps, op=nl.multiply)
    return dgate, dup


def _add_weight_grads(acc, keep, d, a):
    """acc = acc keep + d^T a. acc [m, n, piece] float32, keep [128, 1], d [128, M], a [128, piece]."""
    m, n, piece = acc.shape
    for j in range(n):
        left = d[:, j * m : (j + 1) * m]
        for c in range(0, piece, BANK):
            right, total = a[:, c : min(c + BANK, piece)], acc[:, j, c : min(c + BANK, piece)]
            ps = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.psum)
            # one block's share; the sum over blocks is in SBUF, because PSUM is too small for it
            nisa.nc_matmul(dst=ps, stationary=left, moving=right, accumulate=False)
            nisa.scalar_tensor_tensor(
                dst=total,
                data=total,
                op0=nl.multiply,
                operand0=keep[0:m, :],
                op1=nl.add,
                operand1=ps,
            )


@define("grouped_linear", lambda rows, w, *_: rows.new_empty(rows.shape[0], w.shape[1]))
def grouped_linear(rows: Tensor, weight: Tensor, plan: Tensor, swiglu: bool, lnc: int) -> Tensor:
    """The op; arguments of grouped_linear_ref with a Layout's plan for ends, and lnc.

    Rows of blocks that are not in use come back undefined, as past the last expert in the reference.
    """
    if use_reference(rows, lnc):
        return grouped_linear_ref(rows, weight, plan, swiglu)
    E, M, C = weight.shape
    gathered = weight.contiguous().view(E * M, -1, 1, tile_of(C) or C)
    blocks = rows.contiguous().view(-1, P, rows.shape[1])
    out = run_kernel(grouped_forward_kernel, lnc, blocks, gathered, plan, M, swiglu)
    return out.view(-1, M)


@define(
    "grouped_linear_grads",
    lambda dout, rows, w, *_: (rows.new_empty(rows.shape), w.new_empty(w.shape)),
)
def grouped_linear_grads(
    dout: Tensor, rows: Tensor, weight: Tensor, plan: Tensor, swiglu: bool, lnc: int
) -> tuple[Tensor, Tensor]:
    """The op behind grouped_linear's backward; arguments of grouped_grads_ref likewise."""
    if use_reference(rows, lnc):
        return grouped_grads_ref(dout, rows, weight, plan, swiglu)
    blocks = [t.contiguous().view(-1, P, t.shape[1]) for t in (dout, rows)]
    weight = weight.contiguous()
    drows, dweight = run_kernel(grouped_backward_kernel, lnc, *blocks, weight, plan, swiglu)
    return drows.view(rows.shape), dweight


def _linear_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.swiglu, ctx.lnc = inputs
    ctx.save_for_backward(*tensors)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = grouped_linear_grads(grad.contiguous(), *ctx.saved_tensors, ctx.swiglu, ctx.lnc)
    return *grads, None, None, None


grouped_linear.register_autograd(_linear_backward, setup_context=_linear_save)


class NkiExperts(KernelModule):
    """Takes the place of the native Experts or of transformers' Qwen3MoeExperts.

    The number of experts is read from the weights at run time: under tensor parallelism the module
    runs on its rank's experts, and ids from there on are foreign and contribute nothing.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(
        self, hidden_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """hidden [T, D], expert ids [T, K] int64, their weights [T, K] -> [T, D]."""
        num_experts, lnc = self.gate_up_proj.shape[0], self.lnc_for(hidden_TD)
        tokens_R, rows_TK, _, plan = block_layout(top_k_index_TK, num_experts, lnc)
        routed_RD = F.pad(hidden_TD, (0, 0, 0, 1))[tokens_R]
        gate_up_RF = grouped_linear(routed_RD, self.gate_up_proj, plan, False, lnc)
        out_RD = grouped_linear(gate_up_RF, self.down_proj, plan, True, lnc)
        # where, not a product: a foreign assignment's row may hold anything, NaN included
        here_TK1 = (top_k_index_TK < num_experts)[..., None]
        out_TKD = torch.where(here_TK1, out_RD[rows_TK], 0) * top_k_weights_TK[..., None]
        return out_TKD.sum(1).to(hidden_TD.dtype)


def _moe_constraints(config: Any, seq_len: int, tp: int, lnc: int) -> list[str]:
    if not getattr(config, "num_experts", None):
        return []  # a dense model; apply_overrides warns that nothing matches
    problems = []
    for name in ("hidden_size", "moe_intermediate_size"):
        size = (f"--model: {name}", getattr(config, name), 32)
        problems += multiple_rule(*size, "tile rows", "kernels.nki_moe")
    return problems


@override(
    "model.layers.*.mlp.experts",
    description="mixture-of-experts feed-forward, forward and backward",
    constraints=_moe_constraints,
)
def nki_moe(module: nn.Module) -> nn.Module:
    names = sorted(n for n, _ in module.named_parameters())
    if names != ["down_proj", "gate_up_proj"]:
        raise ValueError(f"it has parameters {names}, not stacked gate_up_proj and down_proj")
    act = getattr(module, "act_fn", None)  # transformers' class has one; the native one is SwiGLU
    if act is not None and "silu" not in type(act).__name__.lower():
        raise ValueError(f"its activation is {type(act).__name__}; the kernel computes SiLU")
    return NkiExperts(module)


# ---- python kernels.py --check ------------------------------------------------------------------
SHAPES = {  # tokens T, hidden D, expert width F, experts E, top-k K, sequence S, heads N
    "small": (200, 256, 192, 8, 2, 512, 6),
    "30B-A3B": (4096, 2048, 768, 128, 8, 4096, 32),
}


def compare(name: str, ops: Any, x: list[Tensor], extra: Any, used: int, macs: int) -> list[float]:
    """Run (op, reference) on tensors x and print a line; rows from `used` on have no expert.

    Returns: [failed, tensor cycles, cycles that the products of all tokens need without padding, HBM
    bytes, bytes of operands and results less what an earlier kernel of the pass made]
    """

    def own(tensors: Iterable[Tensor]) -> list[Tensor]:
        return [t[:used] if len(t) == len(x[0]) else t for t in tensors]

    outs = [f(*x, *e) for f, e in zip(ops, extra, strict=True)]
    outs.append(ops[1](*(t.float() for t in x), *extra[1]))
    got, plain, want = (own(out if isinstance(out, tuple) else (out,)) for out in outs)
    error, torch_error = (
        max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(some, want, strict=True))
        for some in (got, plain)
    )
    exact = 1e-5 if macs else 1e-6
    limit = exact if x[0].dtype == torch.float else min(2e-2, 2 * torch_error)
    failed = not error <= limit or any(t.isnan().any() for t in got)
    verdict = "FAILED" if failed else "ok"
    text = f"{name:30} {error:.1e}  {limit:.1e}  {torch_error:.1e}  {verdict:8}"
    cycles = moved = 0
    if c := getattr(nki, "last_run", None):  # only nki_cpu counts
        cycles, moved = c.tensor_cycles, c.hbm_read + c.hbm_written
        text += f"{cycles:8}  {c.hbm_read / 1e6:7.1f}  {c.hbm_written / 1e6:7.1f}  {c.sbuf_peak:6}"
        text += f"  {c.psum_peak:5}  {' '.join(f'{k} {v}' for k, v in c.instructions.items())}"
    print(text, flush=True)
    made = name.startswith(("down forward", "gate_up backward"))  # their first operand
    return [failed, cycles, macs / P**2, moved, sum(t.nbytes for t in [*own(x)[made:], *got])]


def compare_all(shape: str, dtype: torch.dtype, lnc: int, device: str) -> bool:
    """Every kernel, forward and backward; returns whether one failed. Routing is balanced if that
    fills whole blocks; else expert 0 has no tokens, and some assignments are foreign."""
    T, D, width, E, K, S, N = SHAPES[shape]
    if shape != "small" and (dtype, lnc) != (torch.bfloat16, 2):
        T, E, S = 256, 8, 512  # the same layer, fewer experts and tokens
    what, failed = f"{str(dtype)[6:]} {lnc}", False
    for H, way in itertools.product((64, 128), ("forward", "backward")):
        x, angles = torch.randn(1, S, N, H).to(device, dtype), 6.28 * torch.rand(S, H // 2)
        more = (angles.cos().to(device), angles.sin().to(device), way == "backward")
        ops, extra = (rotary, rotary_ref), ((*more, lnc), more)
        failed |= compare(f"rotary {H} {way} {what}", ops, [x], extra, 1, 0)[0]
    ids_TK = ((torch.arange(T)[:, None] * K + torch.arange(K)) % E).to(device)
    if T * K % (P * E):
        ids_TK = torch.where(ids_TK == 0, E, ids_TK)
    layout, tokens = block_layout(ids_TK, E, lnc), int((ids_TK < E).sum())
    used, padding = int(layout.ends[-1]), layout.tokens[:, None] == T
    rows = F.pad(torch.randn(T, D), (0, 0, 0, 1)).to(device, dtype)[layout.tokens]
    totals = {"forward": [0.0] * 5, "backward": [0.0] * 5}
    for name, M, C, swiglu in (("gate_up", 2 * width, D, False), ("down", D, width, True)):
        weight = (torch.randn(E, M, C) * C**-0.5).to(device, dtype)
        dout = torch.randn(len(rows), M).to(device, dtype).masked_fill(padding, 0)
        extra, macs = ((layout.plan, swiglu, lnc), (layout.ends, swiglu)), tokens * M * C
        for way, total in totals.items():
            ops, x = (grouped_linear, grouped_linear_ref), [rows, weight]
            if way == "backward":
                ops, x = (grouped_linear_grads, grouped_grads_ref), [dout, rows, weight]
            new = compare(f"{name} {way} {what}", ops, x, extra, used, macs * (len(x) - 1))
            total[:] = [a + b for a, b in zip(total, new, strict=True)]
        rows = grouped_linear(rows, weight, *extra[0])
    for way, (bad, cycles, ideal, moved, least) in totals.items():
        failed |= bad > 0
        ratios = f"{cycles / ideal:.3f} x ideal, HBM bytes {moved / least:.3f} x least"
        print(f"  experts {way}: tensor cycles {ratios}")
    return failed


def main() -> int:
    """Compare every kernel in both dtypes on one and two cores; returns the exit code."""
    parser = argparse.ArgumentParser(description="compare every kernel with its PyTorch reference")
    parser.add_argument("--check", action="store_true", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="default: small")
    shape = parser.parse_args().shape
    found = torch.accelerator.current_accelerator()
    device = "neuron" if found and found.type == "neuron" else "cpu"
    print(f"{shape} on {device} with {nki.__name__}; errors are relative to the largest element")
    head = "error    limit    torch    verdict   cycles  MB read  written  SBUF B  banks"
    print(f"{'kernel, dtype, LNC':30} {head}  instructions")
    failed = False
    for dtype, lnc in itertools.product((torch.float32, torch.bfloat16), (1, 2)):
        if device == "cpu" or lnc == configured_lnc():
            torch.manual_seed(0)
            failed |= compare_all(shape, dtype, lnc, device)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
