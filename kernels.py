"""NKI kernels that train Qwen3 on Trainium2, and the registry that puts them into a model.

| op (qwen3_trn::)       | reference          | NKI kernel              | needs                      |
|------------------------|--------------------|-------------------------|----------------------------|
| rotary                 | rotary_ref         | rotary_kernel           | S % (128 * LNC), H 64, 128 |
| grouped_linear         | grouped_linear_ref | grouped_forward_kernel  | D, F % 32                  |
| grouped_linear_grads   | grouped_grads_ref  | grouped_backward_kernel | D, F % 32                  |

rotary is its own backward (inverse=True). An expert layer is two grouped_linear calls, gate/up and
down. Routing, sorting and weighting of rows are plain PyTorch: the router's top-k is a [T, E] problem
whose backward is PyTorch's anyway, so a kernel would not pay.

Where an op runs is decided once, by `lnc`, its last argument:
  1. on a neuron device: the NKI kernel, always;
  2. on CPU with NKI_SIMULATOR=1: the same kernel, in nki.simulate if the nki wheel is installed, else
     in nki_cpu.py;
  3. otherwise (lnc = 0): the PyTorch reference, with one warning that says so.

`python kernels.py --check` compares every kernel with its reference. Shape letters are those of
train_qwen3_trn.py: T tokens, D hidden, F expert width, E experts held here, K top-k, R routed rows,
B batch, S sequence, N heads, H head dim. In a grouped product [R, C] x [E, M, C] -> [R, M]. LNC is the
number of physical NeuronCores (1 or 2) that act as one device and run one kernel together.
"""

import argparse
import difflib
import fnmatch
import functools
import importlib
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

try:
    import nki
    import nki.isa as nisa
    import nki.language as nl

    NKI_IMPORT_ERROR: ImportError | None = None
except ImportError as error:  # the wheel exists only on the Neuron package index
    import nki_cpu as nki
    from nki_cpu import isa as nisa
    from nki_cpu import language as nl

    NKI_IMPORT_ERROR = error
try:
    from torch_neuronx import nki_op, wrap_nki

    NEURON_IMPORT_ERROR: ImportError | None = None
except ImportError as error:  # raised again if an op meets a neuron tensor
    nki_op = wrap_nki = None
    NEURON_IMPORT_ERROR = error

log = logging.getLogger("qwen3-trn")

# Hardware sizes of Trainium2 (NeuronCore-v3), from nl.tile_size and its architecture guide.
P = 128  # SBUF and PSUM partitions: rows of a tile, and the longest contraction of one matmul
BANK = 512  # float32 columns of a PSUM bank: the widest result of one matmul
# SBUF bytes per partition given to what a kernel keeps between blocks (weights, float32 gradients);
# the rest of its roughly 200 KiB holds the tiles of two blocks in flight. Larger layers are cut.
PIECE_BYTES = 128 * 1024
ROTARY_HEADS = 32  # heads per tile; 32 heads of 128 in float32 take 80 KiB with their temporaries

# How a kernel walks over its blocks of 128 rows:
#   dynamic  a device loop that stops after the blocks in use; padding costs nothing
#   static   a device loop over all blocks; use it if a data-dependent trip count hangs
#   unrolled no device loop at all: large code, long compiles
BLOCK_LOOP = "dynamic"

NKI_OVERRIDES = ("kernels.nki_rotary", "kernels.nki_moe")  # what --nki turns on


# ---- Override registry --------------------------------------------------------------------------
class OverrideError(ValueError):
    """An override that cannot be used as asked; the message is for the user and may have lines."""


@dataclass(frozen=True)
class Registration:
    """What @override knows about a factory."""

    globs: tuple[str, ...]
    description: str
    constraints: Callable[[Any, int, int, int], list[str]] | None


@dataclass(frozen=True)
class Override:
    """A factory that the user named, with its keyword arguments."""

    name: str  # MODULE.FUNCTION
    build: Callable[..., nn.Module]
    registration: Registration
    kwargs: dict[str, Any] = field(default_factory=dict)


REGISTRY: dict[str, Registration] = {}


def override(
    *globs: str,
    description: str = "",
    constraints: Callable[[Any, int, int, int], list[str]] | None = None,
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register a factory (module, **kwargs) -> module for the modules whose names match a glob.

    Nothing happens until the user names the factory (--override MODULE.FUNCTION). The replacement must
    have the same parameters, by name and shape; reusing the old module's Parameters does that.

    Args:
        globs: patterns over names from model.named_modules(), such as "model.layers.*.mlp.experts"
        description: one line for people
        constraints: (model config, seq_len, tp, LNC) -> problems, as check_constraints returns them
    """

    def register(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        REGISTRY[f"{build.__module__}.{build.__qualname__}"] = build.registration = Registration(
            globs, description, constraints
        )
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
        if any(new.name == old.name for old in overrides):
            hint = " (--nki names it already)" if new.name in NKI_OVERRIDES else ""
            raise OverrideError(f"--override {new.name} is named twice{hint}; name it once")
        overrides.append(new)
    return overrides


def load_override(spec: str) -> Override:
    name, _, text = spec.partition("=")
    module_name, _, function = name.rpartition(".")
    if not module_name or not function:
        raise OverrideError(f"--override {spec} must be MODULE.FUNCTION or MODULE.FUNCTION={{json}}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise OverrideError(f"--override {name}: importing {module_name} failed: {e}") from e
        known = [n.rpartition(".")[0] for n in REGISTRY] + [p.stem for p in Path().glob("*.py")]
        hint = closest(module_name, known)
        raise OverrideError(f"--override {name}: there is no module {module_name}{hint}") from e
    build = getattr(module, function, None)
    registration = getattr(build, "registration", None)
    if not isinstance(registration, Registration):
        what = "is not registered with @kernels.override" if build else "does not exist"
        registered = [n for n, f in vars(module).items() if hasattr(f, "registration")]
        hint = closest(function, registered)
        raise OverrideError(f"--override {name}: {function} in {module_name} {what}{hint}")
    return Override(name, build, registration, parse_keywords(name, text, build))


def parse_keywords(name: str, text: str, build: Callable[..., nn.Module]) -> dict[str, Any]:
    """The JSON object after "=", checked against the factory's signature."""
    try:
        kwargs = json.loads(text) if text else {}
    except json.JSONDecodeError as e:
        raise OverrideError(f"--override {name}={text}: not JSON: {e}") from e
    if not isinstance(kwargs, dict):
        raise OverrideError(f'--override {name}={text}: must be a JSON object such as {{"a": 1}}')
    _, *parameters = inspect.signature(build).parameters.values()
    names = [p.name for p in parameters]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for word in kwargs.keys() - set(names):
            takes = f"it takes {', '.join(names)}" if names else "it takes none"
            hint = closest(word, names)
            raise OverrideError(f"--override {name}: unknown keyword {word!r}; {takes}{hint}")
    for p in parameters:
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            if p.name not in kwargs:
                raise OverrideError(f"--override {name}: keyword {p.name!r} is missing")
    return kwargs


def apply_overrides(model: nn.Module, overrides: list[Override], log: logging.Logger) -> None:
    """Replace modules of a built model (on meta, or with weights) by what the overrides make of them.

    Everything is matched, built and checked before the first module is replaced. Raises OverrideError
    with all problems; warns of an override that matches no module; logs one line per replaced group.
    """
    modules = dict(model.named_modules())
    claims: dict[str, Override] = {}
    problems: list[str] = []
    for o in overrides:
        matches = [
            n for n in modules if any(fnmatch.fnmatchcase(n, g) for g in o.registration.globs)
        ]
        if not matches:
            globs = ", ".join(o.registration.globs)
            near = closest(globs, (re.sub(r"\.\d+\b", ".*", n) for n in modules if n), 3)
            log.warning(f"override {o.name} changes nothing: no module matches {globs}{near}")
        for name in matches:
            if name in claims:
                problems.append(f"--override: {claims[name].name} and {o.name} both replace {name}")
            claims.setdefault(name, o)
    problems += [
        f"--override: {o.name} replaces {name}, inside {outer}, which {claims[outer].name} replaces"
        for name, o in claims.items()
        for outer in claims
        if name.startswith(f"{outer}.")
    ]
    if problems:
        raise OverrideError("\n".join(problems))
    new = {name: build_replacement(name, modules[name], o) for name, o in claims.items()}
    for name, module in new.items():
        model.set_submodule(name, module)
    for group, (count, kind, owner) in replaced_groups(claims, new).items():
        log.info(f"{group}: {count} x {kind} ({owner})")


def build_replacement(name: str, old: nn.Module, o: Override) -> nn.Module:
    """Call the factory; insist on a module with the old one's parameters and buffers."""
    try:
        new = o.build(old, **o.kwargs)
    except ValueError as e:
        raise OverrideError(f"--override {o.name} cannot replace {name}: {e}") from e
    if not isinstance(new, nn.Module):
        raise OverrideError(f"--override {o.name} returned {new!r} for {name}, not a module")

    def contents(module: nn.Module) -> dict[str, tuple[int, ...]]:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        return {n: tuple(t.shape) for n, t in tensors}

    before, after = contents(old), contents(new)
    if before != after:
        raise OverrideError(
            f"--override {o.name}: the replacement of {name} must keep its parameters; "
            f"it has {after}, not {before}"
        )
    return new.train(old.training)


def replaced_groups(
    claims: dict[str, Override], new: dict[str, nn.Module]
) -> dict[str, tuple[int, str, str]]:
    """Log text: names that differ in one number only (the layer) become one, as in layers.1-47.mlp."""
    members: dict[tuple[str, str, str, str], list[int | None]] = {}
    for name, module in new.items():
        head, number, tail = re.fullmatch(r"(.*?)(?:\.(\d+)(?=\.|$)(.*))?", name).groups()
        key = (head, tail or "", type(module).__name__, claims[name].name)
        members.setdefault(key, []).append(None if number is None else int(number))
    groups = {}
    for (head, tail, kind, owner), numbers in members.items():
        spans: list[list[int]] = []
        for n in sorted(n for n in numbers if n is not None):
            if spans and n == spans[-1][1] + 1:
                spans[-1][1] = n
            else:
                spans.append([n, n])
        text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
        groups[f"{head}.{text}{tail}" if text else head] = (len(numbers), kind, owner)
    return groups


def configured_lnc() -> int:
    """LNC that kernels are built for: NEURON_LOGICAL_NC_CONFIG, or Trainium2's default of 2."""
    text = os.environ.get("NEURON_LOGICAL_NC_CONFIG") or "2"
    if text not in ("1", "2"):
        raise OverrideError(
            f"NEURON_LOGICAL_NC_CONFIG {text} must be 1 or 2: physical cores per device; nearest: 2"
        )
    return int(text)


def multiple_rule(flag: str, value: int, step: int, why: str, kernel: str) -> list[str]:
    """The problem, if any, with a size that must be a positive multiple of step."""
    if value > 0 and value % step == 0:
        return []
    nearest = max(1, (value + step // 2) // step) * step
    rule = f"must be a multiple of {step}{why} for {kernel}"
    return [f"{flag} {value} {rule}; nearest: {nearest}"]


def check_constraints(
    config: Any, seq_len: int, tp: int, overrides: list[Override], device_type: str
) -> list[str]:
    """What the kernels cannot do with this model and run, each as flag, value, rule, nearest value.

    Args:
        config: the model's transformers config
        device_type: "neuron", "cpu", ...; the rules are the same everywhere, so that a run that was
            tried on a laptop starts on Trainium too
    """
    wanted = [o.registration.constraints for o in overrides if o.registration.constraints]
    if not wanted:
        return []
    try:
        lnc = configured_lnc()
    except OverrideError as e:
        return [str(e)]
    problems = [text for constraints in wanted for text in constraints(config, seq_len, tp, lnc)]
    if device_type == "neuron" and not os.environ.get("NEURON_LOGICAL_NC_CONFIG"):
        # https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.1/nki/get-started/about/lnc.html
        problems.append(
            "NEURON_LOGICAL_NC_CONFIG (unset) must be 1 or 2: unset, kernels are built for 1 core and "
            "the compiler for 2; nearest: 2"
        )
    return problems


# ---- Running a kernel ---------------------------------------------------------------------------
def simulating() -> bool:
    """Whether NKI_SIMULATOR=1 asks for kernels to run on CPU tensors."""
    return os.environ.get("NKI_SIMULATOR") == "1"


def lnc_for(x: torch.Tensor, simulate: bool) -> int:
    """The ops' lnc argument: LNC where a kernel runs, 0 where the reference does."""
    on_cpu = simulate and x.device.type == "cpu"
    return configured_lnc() if on_cpu or x.device.type == "neuron" else 0


@functools.cache
def warn_reference(device_type: str) -> None:
    """Say once per process that no kernel runs here."""
    log.warning(
        f"NKI kernels run as their PyTorch references: the device is {device_type} and "
        "NKI_SIMULATOR=1 is not set for a CPU"
    )


def use_reference(x: torch.Tensor, lnc: int) -> bool:
    """True on path 3 of the module docstring. On a neuron device there is no such path."""
    if lnc:
        return False
    if x.device.type == "neuron":
        raise RuntimeError("a neuron tensor needs its NKI kernel: lnc must be 1 or 2, not 0")
    warn_reference(x.device.type)
    return True


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

    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")  # else nki assumes trn3's limits

    def to_numpy(a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return a
        a = a.detach().contiguous()
        if a.dtype == torch.bfloat16:
            return a.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return a.numpy()

    def to_torch(a: Any) -> torch.Tensor:
        if a.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(a.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(a)

    out = nki.simulate(kernel[lnc])(*map(to_numpy, args))
    return tuple(map(to_torch, out)) if isinstance(out, (tuple, list)) else to_torch(out)


def define(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the op qwen3_trn::name: nki_op where torch_neuronx is, else torch.library's.

    Args:
        fake: the same call, giving empty tensors of the result's shapes and dtypes
    """

    def wrap(run: Callable[..., Any]) -> Any:
        full = f"qwen3_trn::{name}"
        if nki_op is not None:  # makes torch.compile see the kernel inside
            op = nki_op(full, mutates_args={})(run)
        else:
            op = torch.library.custom_op(full, mutates_args=())(run)
        op.register_fake(fake)
        return op

    return wrap


# ---- Rotary embedding ---------------------------------------------------------------------------
# With x1, x2 the halves of a head:  y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin: a rotation, so the
# backward pass rotates dy by the opposite angle. cos and sin are saved, nothing is recomputed.


def rotary_ref(
    x_BSNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
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
    Args: x [B, S, N, H] @ HBM; cos, sin [S, H/2] or [B, S, H/2] float32 @ HBM; inverse: bool
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
            if len(cos.shape) == 3:
                tables = _load(cos[b, rows, :]), _load(sin[b, rows, :])
            elif b == 0:  # one table serves every sequence
                tables = _load(cos[rows, :]), _load(sin[rows, :])
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


def _rotary_fake(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, lnc: int
) -> torch.Tensor:
    return x.new_empty(x.shape)


@define("rotary", _rotary_fake)
def rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, lnc: int
) -> torch.Tensor:
    """The op; arguments of rotary_ref, and lnc as in the module docstring."""
    if use_reference(x, lnc):
        return rotary_ref(x, cos, sin, inverse)
    if x.shape[1] % (P * lnc):
        raise ValueError(f"sequence length {x.shape[1]} must be a multiple of 128 * LNC {lnc}")
    return run_kernel(rotary_kernel, lnc, x.contiguous(), cos, sin, inverse)


def _rotary_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, cos, sin, ctx.inverse, ctx.lnc = inputs
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    return rotary(grad.contiguous(), cos, sin, not ctx.inverse, ctx.lnc), None, None, None, None


rotary.register_autograd(_rotary_backward, setup_context=_rotary_save)


class NkiRotary(nn.Module):
    """Takes the place of the native model's Rotary."""

    def __init__(self) -> None:
        super().__init__()
        self.simulate = simulating()

    def forward(
        self, q_BSNH: torch.Tensor, k_BSKH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [S, H/2] or [B, S, H/2] -> rotated q and k."""
        lnc = lnc_for(q_BSNH, self.simulate)
        return rotary(q_BSNH, cos, sin, False, lnc), rotary(k_BSKH, cos, sin, False, lnc)


def _rotary_constraints(config: Any, seq_len: int, tp: int, lnc: int) -> list[str]:
    why = f" (128 rows x LNC {lnc})"
    problems = multiple_rule("--seq_len", seq_len, P * lnc, why, "kernels.nki_rotary")
    if config.head_dim not in (64, 128):
        near = 64 if config.head_dim < 96 else 128
        problems.append(
            f"--model: head_dim {config.head_dim} must be 64 or 128 for kernels.nki_rotary; "
            f"nearest: {near}"
        )
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
    """Where each token-expert assignment goes, and what each block of the kernels does.

    Rows are sorted by expert. For the kernels each expert's rows start at a multiple of 128, so a
    block of 128 rows has one expert; the number of blocks NB is the most that any routing can need.
    """

    token_R: torch.Tensor  # [R] int64: the token that a row holds; T (a row of zeros) for padding
    row_TK: torch.Tensor  # [T, K] int64: the row of an assignment; 0 for foreign ones
    ends_E: torch.Tensor  # [E] int32: end of each expert's rows
    forward_plan: torch.Tensor  # int32 [LNC * (L + 1), 4], see forward_plan; empty for lnc = 0
    backward_plan: torch.Tensor  # int32 [NB + E + 1, 4], see backward_plan


@torch.no_grad()
def block_layout(ids_TK: torch.Tensor, num_experts: int, lnc: int) -> Layout:
    """Sort assignments by expert; ids of num_experts and more are foreign and get no row.

    All shapes are static: nothing here depends on the routing but values.
    """
    (T, K), E, device = ids_TK.shape, num_experts, ids_TK.device
    A, align = T * K, P if lnc else 1
    sorted_A, order_A = ids_TK.flatten().sort(stable=True)
    counts_E = (sorted_A[:, None] == torch.arange(E, device=device)).sum(0)
    padded_E = (counts_E + align - 1) // align * align
    ends_E = padded_E.cumsum(0)
    R = A if not lnc else num_blocks(A, E, lnc) * P
    # where an expert's rows start, less where they start in the sorted list
    shift_E = F.pad(ends_E - padded_E - (counts_E.cumsum(0) - counts_E), (0, 1))
    here_A = sorted_A < E
    row_A = torch.arange(A, device=device) + shift_E[sorted_A.clamp(max=E)]
    token_R = torch.full((R + 1,), T, device=device)  # foreign assignments all land in row R
    token_R = token_R.scatter(0, torch.where(here_A, row_A, R), order_A // K)[:R]
    row_TK = torch.zeros_like(row_A).scatter(0, order_A, torch.where(here_A, row_A, 0)).view(T, K)
    if not lnc:
        none = torch.empty(0, 4, dtype=torch.int32, device=device)
        return Layout(token_R, row_TK, ends_E.int(), none, none)
    used = ends_E[-1] // P
    start_b = torch.arange(0, R, P, device=device)
    expert_b = (start_b[:, None] >= ends_E).sum(1).clamp(max=E - 1)
    live_b = start_b < ends_E[-1]
    first_b = F.pad(expert_b[1:] != expert_b[:-1], (1, 0), value=True)
    plans = (
        forward_plan(expert_b, first_b & live_b, used, E, lnc),
        backward_plan(expert_b, first_b, live_b, counts_E == 0, used),
    )
    return Layout(token_R, row_TK, ends_E.int(), *plans)


def num_blocks(A: int, E: int, lnc: int) -> int:
    """Blocks of 128 rows that are enough for any routing of A assignments, a multiple of lnc."""
    owners = min(A, E)  # experts with a partly filled block
    return -(-((A - owners) // P + owners) // lnc) * lnc


def forward_plan(
    expert_b: torch.Tensor, first_b: torch.Tensor, used: torch.Tensor, E: int, lnc: int
) -> torch.Tensor:
    """Each program takes one half of the blocks, so that it loads most experts alone.

    Returns: int32 [LNC * (L + 1), 4]. Per program L blocks (block, expert, expert to load, 0), then
    (number of blocks to process, 0, 0, 0). An expert to load of E means: still in SBUF, load nothing.
    """
    L, device = expert_b.numel() // lnc, expert_b.device
    count = (used + lnc - 1) // lnc if BLOCK_LOOP == "dynamic" else torch.full_like(used, L)
    i = torch.arange(L, device=device)
    block = torch.arange(lnc, device=device)[:, None] * count + i
    block = block.clamp(max=expert_b.numel() - 1)
    load = torch.where((i == 0) | first_b[block], expert_b[block], E)
    plan = torch.stack((block, expert_b[block], load, torch.zeros_like(block)), -1)
    last = F.pad(count.view(1, 1, 1), (0, 3)).expand(lnc, 1, 4)
    return torch.cat((plan, last), 1).view(-1, 4).int()


def backward_plan(
    expert_b: torch.Tensor,
    first_b: torch.Tensor,
    live_b: torch.Tensor,
    empty_E: torch.Tensor,
    used: torch.Tensor,
) -> torch.Tensor:
    """Every program visits every block, and owns some columns of the weights and their gradients.

    Returns: int32 [NB + E + 1, 4]. NB blocks (block, expert to load or E, expert whose gradient to
    store or E, 1 to go on summing or 0 to start anew), E rows (expert without tokens or E, 0, 0, 0),
    then (blocks in use, experts without tokens, 0, 0).
    """
    NB, E, device = expert_b.numel(), empty_E.numel(), expert_b.device
    b = torch.arange(NB, device=device)
    starts = (first_b & live_b) | (b == 0)
    ends = live_b & F.pad(first_b[1:] | ~live_b[1:], (0, 1), value=True)
    load, store = torch.where(starts, expert_b, E), torch.where(ends, expert_b, E)
    blocks = torch.stack((b, load, store, (~starts).long()), 1)
    place_E = torch.where(empty_E, empty_E.cumsum(0) - 1, E)  # the empty ones first
    empty = torch.full((E + 1,), E, device=device)
    empty = empty.scatter(0, place_E, torch.arange(E, device=device))[:E]
    totals = torch.stack((used, empty_E.sum()))
    return torch.cat((blocks, F.pad(empty[:, None], (0, 3)), F.pad(totals[None], (0, 2)))).int()


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


def grouped_linear_ref(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, swiglu: bool
) -> torch.Tensor:
    """Rows [R, C] (SwiGLU: [R, 2C] as gate | up) sorted by expert, weight [E, M, C] -> [R, M].

    Args:
        ends: int32 [E], the end of each expert's rows; rows past the last one come back undefined
    """
    a = swiglu_ref(rows) if swiglu else rows
    return F.grouped_mm(a, weight.transpose(1, 2), offs=ends)


def swiglu_ref(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_grads_ref(
    dout: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, swiglu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
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
    parts = range(1, total // step + 1)
    sizes = (total // n for n in parts if total % n == 0 and total // n % step == 0)
    fits = (s for s in sizes if s * bytes_per_column <= PIECE_BYTES)
    size = next(fits, None)
    assert size, f"{total} columns of {bytes_per_column} bytes do not fit SBUF in any equal pieces"
    return size


def _for_blocks(count, limit, body):
    """Call body(i) for the blocks in use; count [1, 1] int32 @ HBM says how many, limit is the most."""
    if BLOCK_LOOP == "unrolled":
        for i in range(limit):
            body(i)
    elif BLOCK_LOOP == "static":
        nl.fori_loop(0, limit, body)
    else:  # https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/deep-dives/nki-scalar.html
        nl.fori_loop(0, nisa.scalar_load(_load(count)), body)


def _plan_row(plan, first, i):
    """Row first + i of a plan [rows, 4] @ HBM, as an int32 tile [1, 4]."""
    tile = nl.ndarray((1, 4), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=_dynamic(plan, [[4, 1], [1, 4]], first * 4, i))
    return tile


def _plan_lanes(plan, first, i, column):
    """One number of that row in every partition, as a float32 tile [128, 1]."""
    number = nl.ndarray((P, 1), dtype=nl.int32, buffer=nl.sbuf)
    lanes = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=_dynamic(plan, [[0, P], [1, 1]], first * 4 + column, i))
    nisa.tensor_copy(dst=lanes, src=number)
    return lanes


def _dynamic(tensor, pattern, offset, index):
    """tensor[index] @ HBM through [[stride, count], ...]; index: a loop's or in a [1, 1] tile.

    ap rather than select, because it takes both. Its index steps over dim 0 of the whole tensor:
    https://awsdocs-neuron.readthedocs-hosted.com/en/v2.31.0/nki/deep-dives/nki-aps.html
    """
    if isinstance(index, int):  # an unrolled loop
        step = 1
        for n in tensor.shape[1:]:
            step *= n
        return tensor.ap(pattern, offset=offset + index * step)
    return tensor.ap(pattern, offset=offset, scalar_offset=index, indirect_dim=0)


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
    """dst [k, C/k, 1, m] @ SBUF = rows index [m, 1] of weight [E * M, C/k, 1, k] @ HBM, transposed.

    Rows past the end are skipped, which leaves dst as it was.
    https://awsdocs-neuron.readthedocs-hosted.com/en/v2.30.0/nki/api/generated/nki.isa.dma_transpose.html
    """
    _, n, _, k = weight.shape
    m = index.shape[0]
    if weight.dtype != nl.float32:
        src = weight.ap(
            [[n * k, m], [k, n], [k, 1], [1, k]], offset=0, vector_offset=index, indirect_dim=0
        )
        nisa.dma_transpose(dst=dst, src=src, axes=(3, 1, 2, 0), oob_mode=nisa.oob_mode.skip)
    else:
        tile = nl.ndarray((m, n * k), dtype=weight.dtype, buffer=nl.sbuf)
        src = weight.ap([[n * k, m], [1, n * k]], offset=0, vector_offset=index, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=src)
        _transpose(dst[:, :, 0, :], tile, k)


def _block(tensor, block, first, columns):
    """Columns first .. first + columns of a block of tensor [NB, 128, W] @ HBM, as an access pattern."""
    return _dynamic(tensor, [[tensor.shape[2], P], [1, columns]], first, block)


def _load_block(tensor, block, first, columns):
    tile = nl.ndarray((P, columns), dtype=tensor.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=_block(tensor, block, first, columns))
    return tile


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
        columns; L blocks at most per program. NKI's library calls D "H" and F "I".
    Args:
        rows [NB, 128, C] @ HBM, with swiglu [NB, 128, 2C] (gate | up)
        weight [E * M, n, 1, k] @ HBM: [E, M, C] seen as gather-transpose wants it
        plan [LNC * (L + 1), 4] int32 @ HBM: see forward_plan
    Returns: [NB, 128, M] @ HBM; blocks not in use are not written
    Constraints: 32 | C, M; E * M < 2**24 (row numbers pass through float32)
    Reference: grouped_linear_ref
    Pseudocode:
        for each piece of M that fits SBUF; for each of this program's blocks:
            if the expert is new: wt[c, m] = weight[expert * M + m, c]
            out[block, :, piece] = transpose(a)^T wt
    """
    NB = rows.shape[0]
    EM, n, _, k = weight.shape
    assert EM < 2**24, f"{EM} weight rows must be fewer than 2**24"
    assert k % 32 == 0 and tile_of(M), f"C tile {k} and M {M} must be multiples of 32"
    out = nl.ndarray((NB, P, M), dtype=rows.dtype, buffer=nl.shared_hbm)
    piece = cut(M, n * (4 if weight.dtype == nl.float32 else 2), tile_of(M))
    for m0 in range(0, M, piece):
        _forward_piece(out, rows, weight, plan, m0, piece, swiglu)
    return out


def _forward_piece(out, rows, weight, plan, m0, piece, swiglu):
    """Columns m0 .. m0 + piece of the result, for every block of this program."""
    M, C = out.shape[2], weight.shape[1] * weight.shape[3]
    n, k, m = weight.shape[1], weight.shape[3], tile_of(M)
    L = plan.shape[0] // nl.num_programs(0) - 1
    first = nl.program_id(0) * (L + 1)  # this program's rows of the plan
    wt = nl.ndarray((k, n, 1, piece), dtype=weight.dtype, buffer=nl.sbuf)
    # Which row of an expert each weight tile starts with: number[p, s] = m0 + s * m + p
    number = nl.ndarray((m, piece // m), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=number, pattern=[[m, piece // m]], offset=m0, channel_multiplier=1)
    column = 1 if weight.dtype == nl.float32 else 2  # float32 loads for every block, see above

    def body(i):
        block = _plan_row(plan, first, i)[:, 0:1]
        expert = _plan_lanes(plan, first, i, column)[0:m, :].broadcast(1, piece // m)
        index = nl.ndarray((m, piece // m), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=index, data=expert, op0=nl.multiply, operand0=float(M), op1=nl.add, operand1=number
        )
        for s in range(piece // m):
            _load_transposed(wt[:, :, :, s * m : (s + 1) * m], weight, index[:, s : s + 1])
        if swiglu:
            a = nl.ndarray((P, C), dtype=rows.dtype, buffer=nl.sbuf)
            _swiglu(a, _load_block(rows, block, 0, C), _load_block(rows, block, C, C))
        else:
            a = _load_block(rows, block, 0, C)
        at = nl.ndarray((k, n, P), dtype=rows.dtype, buffer=nl.sbuf)
        _transpose(at, a, k)
        y = nl.ndarray((P, piece), dtype=rows.dtype, buffer=nl.sbuf)
        for c in range(0, piece, BANK):
            columns = slice(c, min(c + BANK, piece))
            ps = nl.ndarray((P, columns.stop - c), dtype=nl.float32, buffer=nl.psum)
            for j in range(n):
                nisa.nc_matmul(
                    dst=ps,
                    stationary=at[:, j, :],
                    moving=wt[:, j, 0, columns],
                    accumulate=j > 0,
                )
            nisa.tensor_copy(dst=y[:, columns], src=ps)
        nisa.dma_copy(dst=_block(out, block, m0, piece), src=y)

    _for_blocks(plan[first + L : first + L + 1, 0:1], L, body)


@nki.jit
def grouped_backward_kernel(dout, rows, weight, plan, swiglu):
    """Gradients of grouped_forward_kernel for rows and weights.

    Dims: M = n * m contracted in n tiles of m; each program owns C / LNC columns of weight and rows,
        so programs write disjoint columns, and need no barrier and no partial sums.
    Args:
        dout [NB, 128, M], rows as in forward, weight [E, M, C] @ HBM
        plan [NB + E + 1, 4] int32 @ HBM: see backward_plan
    Returns: (like rows, like weight) @ HBM; blocks not in use are not written
    Constraints: 32 | C, M; LNC | C
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
    lnc = nl.num_programs(0)
    assert tile_of(M) and tile_of(C), f"M {M} and C {C} must be multiples of 32"
    drows = nl.ndarray(rows.shape, dtype=rows.dtype, buffer=nl.shared_hbm)
    dweight = nl.ndarray((E, M, C), dtype=weight.dtype, buffer=nl.shared_hbm)
    # a weight and its float32 gradient for each column
    each = M // tile_of(M) * (4 + (4 if weight.dtype == nl.float32 else 2))
    piece = cut(C // lnc, each, 16)
    first = nl.program_id(0) * (C // lnc)
    for c0 in range(first, first + C // lnc, piece):
        _backward_piece(drows, dweight, dout, rows, weight, plan, c0, piece, swiglu)
    return drows, dweight


def _backward_piece(drows, dweight, dout, rows, weight, plan, c0, piece, swiglu):
    """Columns c0 .. c0 + piece of both gradients, for every block."""
    NB, (E, M, C) = rows.shape[0], weight.shape
    m = tile_of(M)
    n = M // m
    w = nl.ndarray((m, n, piece), dtype=weight.dtype, buffer=nl.sbuf)
    acc = nl.ndarray((m, n, piece), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=acc, value=0.0)
    matrix = [[C, m], [m * C, n], [1, piece]]  # an expert's [M, piece] as [m, n, piece]

    def store(expert):  # nothing for expert E, which is past the end
        dst = _dynamic(dweight, matrix, c0, expert)
        nisa.dma_copy(dst=dst, src=acc, oob_mode=nisa.oob_mode.skip)

    def no_tokens(i):
        store(_plan_row(plan, NB, i)[:, 0:1])

    def body(i):
        row = _plan_row(plan, 0, i)
        block, keep = row[:, 0:1], _plan_lanes(plan, 0, i, 3)
        src = _dynamic(weight, matrix, c0, row[:, 1:2])
        nisa.dma_copy(dst=w, src=src, oob_mode=nisa.oob_mode.skip)
        d = _load_block(dout, block, 0, M)
        dt = nl.ndarray((m, n, P), dtype=dout.dtype, buffer=nl.sbuf)
        _transpose(dt, d, m)
        if swiglu:
            gate = _load_block(rows, block, c0, piece)
            up = _load_block(rows, block, C + c0, piece)
            a = nl.ndarray((P, piece), dtype=rows.dtype, buffer=nl.sbuf)
            act = _swiglu(a, gate, up)
            dgate, dup = _input_grads(dt, w, (gate, up, act))
            nisa.dma_copy(dst=_block(drows, block, c0, piece), src=dgate)
            nisa.dma_copy(dst=_block(drows, block, C + c0, piece), src=dup)
        else:
            a = _load_block(rows, block, c0, piece)
            nisa.dma_copy(dst=_block(drows, block, c0, piece), src=_input_grads(dt, w, ())[0])
        _add_weight_grads(acc, keep, d, a)
        store(row[:, 2:3])

    end = NB + E
    _for_blocks(plan[end : end + 1, 1:2], E, no_tokens)
    _for_blocks(plan[end : end + 1, 0:1], NB, body)


def _input_grads(dt, w, glu):
    """da = dout w; through SwiGLU if glu = (gate, up, silu(gate)).

    dt [m, n, 128], w [m, n, piece] @ SBUF -> tiles [128, piece] @ SBUF: (da,) or (dgate, dup)
    """
    _, n, piece = w.shape
    outs = [nl.ndarray((P, piece), dtype=dt.dtype, buffer=nl.sbuf) for _ in glu[0:2] or (0,)]
    for c in range(0, piece, BANK):
        columns = slice(c, min(c + BANK, piece))
        width = columns.stop - c
        ps = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.psum)
        for j in range(n):
            nisa.nc_matmul(
                dst=ps, stationary=dt[:, j, :], moving=w[:, j, columns], accumulate=j > 0
            )
        if not glu:
            nisa.tensor_copy(dst=outs[0][:, columns], src=ps)
            continue
        gate, up, act = (t[:, columns] for t in glu)
        slope = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.sbuf)
        both = nl.ndarray((P, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=slope, op=nl.silu_dx, data=gate)
        nisa.tensor_tensor(dst=both, data1=slope, data2=up, op=nl.multiply)
        nisa.tensor_tensor(dst=outs[0][:, columns], data1=both, data2=ps, op=nl.multiply)
        nisa.tensor_tensor(dst=outs[1][:, columns], data1=act, data2=ps, op=nl.multiply)
    return outs


def _add_weight_grads(acc, keep, d, a):
    """acc = acc keep + d^T a. acc [m, n, piece] float32, keep [128, 1], d [128, M], a [128, piece]."""
    m, n, piece = acc.shape
    for j in range(n):
        for c in range(0, piece, BANK):
            columns = slice(c, min(c + BANK, piece))
            ps = nl.ndarray((m, columns.stop - c), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=ps,
                stationary=d[:, j * m : (j + 1) * m],
                moving=a[:, columns],
                accumulate=False,  # the sum over blocks is in SBUF: PSUM is too small for it
            )
            nisa.scalar_tensor_tensor(
                dst=acc[:, j, columns],
                data=acc[:, j, columns],
                op0=nl.multiply,
                operand0=keep[0:m, :],
                op1=nl.add,
                operand1=ps,
            )


def _linear_fake(
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    forward_plan: torch.Tensor,
    backward_plan: torch.Tensor,
    swiglu: bool,
    lnc: int,
) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@define("grouped_linear", _linear_fake)
def grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    forward_plan: torch.Tensor,
    backward_plan: torch.Tensor,
    swiglu: bool,
    lnc: int,
) -> torch.Tensor:
    """The op; arguments of grouped_linear_ref, the plans of block_layout, and lnc.

    Rows of blocks that are not in use come back undefined, as past the last expert in the reference.
    """
    if use_reference(rows, lnc):
        return grouped_linear_ref(rows, weight, ends, swiglu)
    E, M, C = weight.shape
    gathered = weight.contiguous().view(E * M, -1, 1, tile_of(C) or C)
    blocks = rows.contiguous().view(-1, P, rows.shape[1])
    out = run_kernel(grouped_forward_kernel, lnc, blocks, gathered, forward_plan, M, swiglu)
    return out.view(-1, M)


def _grads_fake(
    dout: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    backward_plan: torch.Tensor,
    swiglu: bool,
    lnc: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


@define("grouped_linear_grads", _grads_fake)
def grouped_linear_grads(
    dout: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    backward_plan: torch.Tensor,
    swiglu: bool,
    lnc: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op behind grouped_linear's backward; arguments of grouped_grads_ref, the plan, and lnc."""
    if use_reference(rows, lnc):
        return grouped_grads_ref(dout, rows, weight, ends, swiglu)
    blocks = [t.contiguous().view(-1, P, t.shape[1]) for t in (dout, rows)]
    drows, dweight = run_kernel(
        grouped_backward_kernel, lnc, *blocks, weight.contiguous(), backward_plan, swiglu
    )
    return drows.view(rows.shape), dweight


def _linear_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, weight, ends, _, backward_plan, ctx.swiglu, ctx.lnc = inputs
    ctx.save_for_backward(rows, weight, ends, backward_plan)


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    return *grouped_linear_grads(grad.contiguous(), *saved, ctx.swiglu, ctx.lnc), *(None,) * 5


grouped_linear.register_autograd(_linear_backward, setup_context=_linear_save)


class NkiExperts(nn.Module):
    """Takes the place of the native Experts or of transformers' Qwen3MoeExperts.

    The number of experts is read from the weights at run time: under tensor parallelism the module
    runs on its rank's experts, and ids from there on are foreign and contribute nothing.
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.simulate = simulating()

    def forward(
        self, hidden_TD: torch.Tensor, top_k_index_TK: torch.Tensor, top_k_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, D], expert ids [T, K] int64, their weights [T, K] -> [T, D]."""
        num_experts, lnc = self.gate_up_proj.shape[0], lnc_for(hidden_TD, self.simulate)
        token_R, row_TK, *how = block_layout(top_k_index_TK, num_experts, lnc)
        routed_RD = F.pad(hidden_TD, (0, 0, 0, 1))[token_R]
        gate_up_RF = grouped_linear(routed_RD, self.gate_up_proj, *how, False, lnc)
        out_RD = grouped_linear(gate_up_RF, self.down_proj, *how, True, lnc)
        # where, not a product: a foreign assignment's row may hold anything, NaN included
        here_TK1 = (top_k_index_TK < num_experts)[..., None]
        out_TKD = torch.where(here_TK1, out_RD[row_TK], 0) * top_k_weights_TK[..., None]
        return out_TKD.sum(1).to(hidden_TD.dtype)


def _moe_constraints(config: Any, seq_len: int, tp: int, lnc: int) -> list[str]:
    experts = getattr(config, "num_experts", None)
    if not experts:
        return []  # a dense model; apply_overrides warns that nothing matches
    D, width = config.hidden_size, config.moe_intermediate_size
    problems = []
    for name, value in (("hidden_size", D), ("moe_intermediate_size", width)):
        why = " (rows of a tile)"
        problems += multiple_rule(f"--model: {name}", value, 32, why, "kernels.nki_moe")
        if value > 8192:
            problems.append(
                f"--model: {name} {value} must be at most 8192 (SBUF) for kernels.nki_moe; "
                "nearest: 8192"
            )
    rows = -(-experts // tp) * max(D, 2 * width)
    if rows >= 2**24:
        problems.append(
            f"--model: num_experts {experts} makes {rows} weight rows per device, must be fewer than "
            f"{2**24} for kernels.nki_moe; nearest: {2**24 // max(D, 2 * width) * tp}"
        )
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
    if act is not None and not isinstance(act, nn.SiLU) and "silu" not in type(act).__name__.lower():
        raise ValueError(f"its activation is {type(act).__name__}; the kernel computes SiLU")
    return NkiExperts(module)
