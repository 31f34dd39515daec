"""A NumPy stand-in for the part of NKI 0.7 that kernels.py uses, for machines without the nki wheel.

    import nki_cpu as nki
    from nki_cpu import isa as nisa, language as nl

It offers jit, simulate, language and isa as the real package does, executes each instruction at once,
and refuses what Trainium2 (NeuronCore-v3) would refuse: NkiValidationError states the rule. It is
meant to be trusted about results and limits, so:

- views share memory, as on the device; reading never copies what a later write should reach;
- fresh memory is NaN (4 in integers), so reading what nothing wrote shows in the result;
- arithmetic is float32 and rounds when it is written, to the dtype of the destination;
- live SBUF bytes and PSUM banks are counted, per partition; a tile lives as long as Python holds it,
  so a loop's tiles overlap with those of its next round, and peaks are on the high side;
- with LNC 2 both programs run, one at a time, switching at nisa.core_barrier; a location of shared HBM
  that one program writes and the other one touches without a barrier in between is an error;
- names and arguments that are not modelled raise; none is ignored.

It says nothing about the compiler, scheduling, time, or the accuracy of activation tables. `last_run`
holds the counters of the latest kernel run.

Rules and signatures: the NKI documentation of SDK 2.32 and 2.33, nki.isa and nki.language at
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/, and the Trainium2 architecture guide.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

PARTITIONS = 128
SBUF_BYTES = 212_984  # usable bytes per partition
BANK_BYTES, BANKS = 2048, 8  # PSUM, per partition
MOVING, STATIONARY = 512, 128  # columns of a matmul's operands

# In SBUF and PSUM all float dtypes are float32 arrays of rounded values; HBM holds the true bits.
FLOATS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
INTS = {"int32": np.int32, "uint32": np.uint32}
DTYPES = {**FLOATS, **INTS}
NAMES = {np.dtype(t): name for name, t in DTYPES.items()}


class NkiValidationError(Exception):
    """A kernel does what the hardware cannot; the message states the rule and the offending value."""


def check(ok: bool, rule: str) -> None:
    if not ok:
        raise NkiValidationError(rule)


# ---- Counters and program state -----------------------------------------------------------------
@dataclass
class Run:
    """What one kernel run did, both programs together; peaks are the higher program's."""

    instructions: Counter = field(default_factory=Counter)  # by engine
    tensor_cycles: int = 0  # one per moving column of a matmul or transpose, four in float32
    hbm_read: int = 0  # bytes
    hbm_written: int = 0
    sbuf_peak: int = 0  # bytes per partition
    psum_peak: int = 0  # banks


class Program(threading.local):
    """The program that this thread runs."""

    def __init__(self) -> None:
        self.start(0, None, Run())

    def start(self, pid: int, launch: "Launch | None", run: Run) -> None:
        self.pid, self.launch, self.run = pid, launch, run
        self.live = {"sbuf": 0, "psum": 0}
        self.shared = 0  # shared HBM tensors that this program has allocated
        self.trips: list[tuple[int, int]] = []


program = Program()
last_run = Run()


class Launch:
    """Two programs that take turns: one runs until it ends or waits in a barrier."""

    def __init__(self, lnc: int) -> None:
        self.lnc, self.shared = lnc, []
        self.turn = threading.Condition()
        self.running, self.arrived, self.done = 0, [0] * lnc, [False] * lnc

    def wait_for_turn(self, pid: int) -> None:
        with self.turn:
            self.turn.wait_for(lambda: self.running == pid)

    def pass_turn(self, pid: int) -> None:
        with self.turn:
            if not self.done[other := self.lnc - 1 - pid]:
                self.running = other
            self.turn.notify_all()

    def barrier(self, pid: int) -> None:
        other = 1 - pid
        self.arrived[pid] += 1
        if self.arrived[other] == self.arrived[pid]:  # both are here: all writes are visible
            for storage in self.shared:
                storage.touched[...] = 0
        while self.arrived[other] < self.arrived[pid]:
            check(not self.done[other], "core_barrier: every core must execute the same barriers")
            self.pass_turn(pid)
            self.wait_for_turn(pid)


# ---- Memory -------------------------------------------------------------------------------------
class Storage:
    """One allocation. On-chip sizes are counted while it lives."""

    def __init__(self, shape: tuple[int, ...], dtype: str, buffer: str, data: Any = None) -> None:
        self.shape, self.dtype, self.buffer = shape, dtype, buffer
        self.itemsize = np.dtype(DTYPES[dtype]).itemsize
        self.on_chip, self.read_only = buffer in ("sbuf", "psum"), data is not None
        if data is None:
            kind = np.float32 if self.on_chip and dtype in FLOATS else DTYPES[dtype]
            data = np.full(shape, np.nan if dtype in FLOATS else 4, kind)
        # ml_dtypes arrays cannot be a buffer for views; their bits can
        self.array = data.view(np.uint16) if data.dtype == ml_dtypes.bfloat16 else data
        self.free_size = int(np.prod(shape[1:]))
        if self.on_chip:
            self.account()
        if buffer == "psum":
            self.started = np.zeros(shape, bool)  # written by a matmul, so that one can add to it
            self.group: Any = None  # the region that the latest matmul wrote
        if buffer == "shared_hbm" and not self.read_only:
            self.touched = np.zeros(shape, np.uint8)  # bit p: program p wrote, bit 2 + p: read

    def account(self) -> None:
        check(
            len(self.shape) >= 2 and 1 <= self.shape[0] <= PARTITIONS,
            f"{self.buffer} tile {self.shape}: dim 0 is the partition dim, 1 to {PARTITIONS}, then free "
            "dims",
        )
        size, peak = self.free_size * self.itemsize, f"{self.buffer}_peak"
        if self.buffer == "psum":
            size = -(-size // BANK_BYTES)
        live, run = program.live, program.run
        live[self.buffer] += size
        weakref.finalize(self, _release, live, self.buffer, size)
        setattr(run, peak, max(getattr(run, peak), live[self.buffer]))
        limit, unit = (SBUF_BYTES, "bytes") if self.buffer == "sbuf" else (BANKS, "banks")
        check(
            live[self.buffer] <= limit,
            f"{self.buffer}: {live[self.buffer]} {unit} per partition are live, {limit} are usable",
        )


def _release(live: dict[str, int], buffer: str, size: int) -> None:
    live[buffer] -= size


class NkiScalar:
    """An integer on the device, for addresses and trip counts; Python cannot decide by it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def _unknown(self, *_: Any) -> Any:
        raise NkiValidationError("NkiScalar: its value is not known while the kernel is built")

    __bool__ = __int__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _unknown
    __hash__ = None


class NkiTensor:
    """A strided view of a Storage; strides and offset count elements."""

    def __init__(
        self,
        storage: Storage,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        rows: np.ndarray | None = None,
        outside: bool = False,
    ) -> None:
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides
        self.rows = rows  # vector_offset: which row each entry of dim 0 is
        self.outside = outside  # scalar_offset left the tensor; only a DMA may skip that

    dtype = property(lambda self: self.storage.dtype)
    buffer = property(lambda self: self.storage.buffer)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: int(np.prod(self.shape)))
    on_chip = property(lambda self: self.storage.on_chip)
    indirect = property(lambda self: self.rows is not None)

    def _of(self, array: np.ndarray) -> np.ndarray:
        """The part of an array shaped like the storage that this view shows; shares its memory."""
        size, shape = array.itemsize, self.shape
        if self.indirect:  # every row, to be indexed by self.rows
            shape = (self.storage.shape[0], *shape[1:])
        strides = [s * size for s in self.strides]
        return np.ndarray(shape, array.dtype, array, self.offset * size, strides)

    def _view(self, shape: Any, strides: Any, offset: int | None = None) -> "NkiTensor":
        check(not self.indirect and not self.outside, "an indirect view cannot be viewed further")
        offset = self.offset if offset is None else offset
        return NkiTensor(self.storage, offset, tuple(shape), tuple(strides))

    def _free_dim(self, dim: int, what: str) -> None:
        check(0 <= dim < max(self.ndim, 1) + 1, f"{what}: no dim {dim} in {self.shape}")
        check(not (self.on_chip and dim == 0), f"{what}: the partition dim (0) stays as it is")

    def __getitem__(self, key: Any) -> "NkiTensor":
        key = key if isinstance(key, tuple) else (key,)
        check(len(key) <= self.ndim, f"{len(key)} indices for shape {self.shape}")
        shape, strides, offset = [], [], self.offset
        for dim, n in enumerate(self.shape):
            k = key[dim] if dim < len(key) else slice(None)
            if isinstance(k, slice):
                start = 0 if k.start is None else k.start
                stop, step = n if k.stop is None else k.stop, k.step or 1
                check(
                    0 <= start < stop <= n and step > 0,
                    f"slice {k} of dim {dim}, which has size {n}",
                )
                shape.append(-(-(stop - start) // step))
                strides.append(self.strides[dim] * step)
                offset += start * self.strides[dim]
            else:
                check(
                    isinstance(k, int),
                    f"index {k!r} of dim {dim}: Python int or slice; use ap for more",
                )
                check(0 <= k < n, f"index {k} of dim {dim}, which has size {n}")
                offset += k * self.strides[dim]
                if self.on_chip and dim == 0:  # a tile keeps its partition dim
                    shape.append(1)
                    strides.append(self.strides[dim])
        if self.on_chip and len(shape) == 1:
            shape, strides = [*shape, 1], [*strides, 1]
        return self._view(shape, strides, offset)

    def expand_dim(self, dim: int) -> "NkiTensor":
        self._free_dim(dim, "expand_dim")
        put = [*self.shape[:dim], 1, *self.shape[dim:]]
        return self._view(put, [*self.strides[:dim], 0, *self.strides[dim:]])

    def broadcast(self, dim: int, size: int) -> "NkiTensor":
        self._free_dim(dim, "broadcast")
        check(self.shape[dim] == 1, f"broadcast: dim {dim} of {self.shape} must have size 1")
        put = [*self.shape[:dim], size, *self.shape[dim + 1 :]]
        return self._view(put, [*self.strides[:dim], 0, *self.strides[dim + 1 :]])

    def ap(
        self,
        pattern: list[list[int]],
        offset: int = 0,
        scalar_offset: Any = None,
        vector_offset: "NkiTensor | None" = None,
        indirect_dim: int = 0,
    ) -> "NkiTensor":
        """Raw pattern [[stride, count], ...]. The docs give two readings of ap on a view (offset from
        the tensor's start or the view's, its own strides or the tensor's), so only whole tensors."""
        storage, total = self.storage, int(np.prod(self.storage.shape))
        check(self.shape == storage.shape and not self.offset, "ap: not modelled on a view")
        check(
            scalar_offset is None or vector_offset is None, "ap: scalar or vector offset, not both"
        )
        strides, shape = zip(*pattern, strict=True)
        if self.on_chip:
            check(strides[0] == storage.free_size, "ap: on chip dim 0 steps over partitions")
        extent = sum(s * (n - 1) for s, n in pattern)
        step = int(np.prod(storage.shape[indirect_dim + 1 :]))
        if vector_offset is not None:
            check(not self.on_chip, "ap: vector_offset needs the indexed tensor in HBM")
            check(indirect_dim == 0 and strides[0] == step, "ap: vector_offset steps over dim 0")
            check(
                vector_offset.buffer == "sbuf"
                and vector_offset.dtype in INTS
                and vector_offset.shape == (shape[0], 1),
                "ap: vector_offset is an int32 or uint32 SBUF tile with one index per partition",
            )
            inner = extent - strides[0] * (shape[0] - 1)
            check(offset + inner < step, f"ap: pattern {pattern} from {offset} leaves its row")
            rows = vector_offset._of(vector_offset.storage.array)[:, 0].astype(np.int64)
            return NkiTensor(storage, offset, shape, strides, rows=rows)
        outside = False
        if scalar_offset is not None:
            index = _index(scalar_offset)
            outside = not 0 <= index < storage.shape[indirect_dim]
            offset += 0 if outside else index * step
        inside = offset >= 0 and offset + extent < total
        check(inside, f"ap: pattern {pattern} from {offset} leaves the tensor of {total} elements")
        return NkiTensor(storage, offset, shape, strides, outside=outside)

    def numbers(self) -> np.ndarray:
        """The values, as float32 or integers; a view where nothing has to be converted."""
        if self.outside:
            raise NkiValidationError("scalar_offset is out of bounds; oob_mode.skip skips it")
        self._touch(write=False)
        array = self._of(self.storage.array)
        if self.indirect:
            array = array[self.rows]
        if self.dtype == "bfloat16" and not self.on_chip:
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array

    def floats(self) -> np.ndarray:
        return self.numbers().astype(np.float32, copy=False)

    def write(self, value: Any) -> None:
        """Round to the dtype and store, through whatever view this is."""
        storage = self.storage
        check(not storage.read_only, "kernel arguments are read-only: write to nl.shared_hbm")
        repeated = any(s == 0 and k > 1 for s, k in zip(self.strides, self.shape, strict=True))
        check(not repeated, "cannot write through a stride of 0: elements would fall together")
        self._touch(write=True)
        value = np.asarray(value).reshape(self.shape)
        kind = DTYPES[self.dtype]
        if self.dtype in INTS and value.dtype.kind == "f":  # round to nearest even, saturate
            value = np.clip(np.rint(value), np.iinfo(kind).min, np.iinfo(kind).max)
        value = value.astype(kind, copy=False)
        if storage.on_chip and self.dtype in FLOATS:
            value = value.astype(np.float32, copy=False)
        elif kind is ml_dtypes.bfloat16:
            value = value.view(np.uint16)
        if self.buffer == "psum":
            self._of(storage.started)[...] = False
        self._of(storage.array)[self.rows if self.indirect else ...] = value

    def _touch(self, write: bool) -> None:
        """Refuse what depends on the order of two programs in shared HBM."""
        storage, pid = self.storage, program.pid
        if storage.read_only or self.buffer != "shared_hbm" or program.launch is None:
            return
        touched = self._of(storage.touched)
        other = 1 << (1 - pid) if not write else 0b0101 << (1 - pid)
        check(
            not (touched & other).any(),
            f"core {pid} {'writes' if write else 'reads'} shared HBM that core {1 - pid} touches too: "
            "core_barrier is missing",
        )
        touched |= 1 << (pid if write else 2 + pid)


def _index(x: Any) -> int:
    if isinstance(x, NkiScalar):
        return x.value
    check(
        isinstance(x, NkiTensor) and x.buffer == "sbuf" and x.size == 1 and x.dtype in INTS,
        "scalar_offset is an NkiScalar or an int32 SBUF tile with one element",
    )
    return int(x.numbers().reshape(-1)[0])


# ---- nki.language -------------------------------------------------------------------------------
class Op(NamedTuple):
    """A math operator: of two operands, or an activation function of one."""

    name: str
    fn: Callable[..., np.ndarray]
    unary: bool = False


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


OPS = [
    *(Op(n, getattr(np, n)) for n in ("add", "subtract", "multiply")),
    Op("silu", lambda x: x * _sigmoid(x), unary=True),
    Op("silu_dx", lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x))), unary=True),
]


def ndarray(shape: Any, dtype: str, buffer: str = "sbuf") -> NkiTensor:
    """Uninitialised memory. Programs share the shared_hbm tensors that they allocate in one order."""
    shape = tuple(shape)
    check(dtype in DTYPES, f"ndarray: dtype {dtype!r} is not modelled, only {', '.join(DTYPES)}")
    check(buffer in ("sbuf", "psum", "shared_hbm"), f"ndarray: buffer {buffer!r} is not modelled")
    check(all(n > 0 for n in shape), f"ndarray: sizes of {shape} must be positive")
    strides = tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
    if buffer != "shared_hbm" or program.launch is None:
        return NkiTensor(Storage(shape, dtype, buffer), 0, shape, strides)
    shared, number = program.launch.shared, program.shared
    program.shared += 1
    if number == len(shared):
        shared.append(Storage(shape, dtype, buffer))
    same = (shared[number].shape, shared[number].dtype) == (shape, dtype)
    check(same, "ndarray: both programs must allocate the same shared_hbm tensors in one order")
    return NkiTensor(shared[number], 0, shape, strides)


def program_id(axis: int) -> int:
    check(axis == 0, f"program_id: axis {axis}; the grid has one axis")
    return program.pid


def num_programs(axes: int) -> int:
    check(axes == 0, f"num_programs: axis {axes}; the grid has one axis")
    return program.launch.lnc if program.launch else 1


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[NkiScalar], None]) -> None:
    """A loop of the device; its bounds may be values of the device."""
    bounds = [b.value if isinstance(b, NkiScalar) else b for b in (lower, upper)]
    check(all(type(b) is int for b in bounds), "fori_loop: bounds are ints or NkiScalars")
    program.trips.append(tuple(bounds))
    for i in range(*bounds):
        check(body_fun(NkiScalar(i)) is None, "fori_loop: the body returns nothing")


# ---- nki.isa ------------------------------------------------------------------------------------
oob_mode = Enum("oob_mode", "error skip")


def _issue(on: str) -> Run:
    program.run.instructions[on] += 1
    return program.run


def _tile(name: str, t: Any, *buffers: str) -> tuple[int, int]:
    """Check one on-chip operand; returns (partitions, elements per partition)."""
    check(isinstance(t, NkiTensor), f"{name} must be a tensor, not {type(t).__name__}")
    buffers = buffers or ("sbuf", "psum")
    check(t.buffer in buffers, f"{name} must be in {' or '.join(buffers)}, it is in {t.buffer}")
    n, start = t.shape[0], t.offset // t.storage.free_size
    most = {0: 128, 32: 32, 64: 64, 96: 32}.get(start, 0)
    check(
        n <= most,
        f"{name}: {n} partitions from partition {start}; allowed are 128 from 0, 64 from 0 or 64, 32 "
        "from 0, 32, 64 or 96",
    )
    check(t.ndim <= 5, f"{name}: shape {t.shape} has more than 4 free dims")
    return n, t.size // n


def _same(dst: NkiTensor, *sources: NkiTensor) -> None:
    for s in sources:
        check(
            (s.shape[0], s.size) == (dst.shape[0], dst.size),
            f"operands need equal partitions and elements: {s.shape} and {dst.shape}",
        )


def _one_psum(a: NkiTensor, b: NkiTensor) -> None:
    check(not a.buffer == b.buffer == "psum", "at most one input may be in PSUM")
    if a.buffer == b.buffer:
        starts = [t.offset // t.storage.free_size for t in (a, b)]
        check(starts[0] == starts[1], f"SBUF inputs start at different partitions: {starts}")


def _in_bank(dst: NkiTensor) -> None:
    first = dst.offset % dst.storage.free_size
    last = first + sum(s * (n - 1) for s, n in zip(dst.strides[1:], dst.shape[1:], strict=True))
    banks = [e * dst.storage.itemsize // BANK_BYTES for e in (first, last)]
    check(banks[0] == banks[1], f"dst {dst.shape} crosses a PSUM bank of {BANK_BYTES} bytes")


def _transfer(dst: NkiTensor, src: NkiTensor, value: np.ndarray, size: int) -> None:
    dst.write(value)
    program.run.hbm_read += 0 if src.on_chip else size * src.storage.itemsize
    program.run.hbm_written += 0 if dst.on_chip else size * dst.storage.itemsize


def dma_copy(dst: NkiTensor, src: NkiTensor, oob_mode: Any = oob_mode.error) -> None:
    """dst = src between HBM and SBUF, with a cast through float32 where dtypes differ."""
    _issue("dma")
    skip = oob_mode.name == "skip"
    for name, t in (("dst", dst), ("src", src)):
        check(t.buffer != "psum", f"dma_copy: {name} is in PSUM, which DMA cannot reach")
        if t.on_chip:
            _tile(f"dma_copy {name}", t)
    check(dst.size == src.size, f"dma_copy: element counts of {dst.shape} and {src.shape} differ")
    same = [tuple(n for n in t.shape if n > 1) for t in (dst, src)]
    check(same[0] == same[1], f"dma_copy: shapes {dst.shape} and {src.shape} differ")
    if dst.outside or src.outside:
        check(skip, "dma_copy: scalar_offset is out of bounds; oob_mode.skip skips it")
        return
    valid = [(t.rows >= 0) & (t.rows < t.storage.shape[0]) for t in (dst, src) if t.indirect]
    if valid and not np.all(valid):
        check(skip, "dma_copy: vector_offset is out of bounds; oob_mode.skip skips it")
        raise NotImplementedError("dma_copy that skips single rows is not modelled")
    _transfer(dst, src, src.numbers(), dst.size)


def dma_transpose(
    dst: NkiTensor, src: NkiTensor, axes: tuple[int, ...], oob_mode: Any = oob_mode.error
) -> None:
    """dst[d, b, c, a] = src[a, b, c, d], with rows a of HBM picked by a vector_offset."""
    _issue("dma")
    n = src.shape[0]
    _tile("dma_transpose dst", dst, "sbuf")
    check(axes == (3, 1, 2, 0), f"dma_transpose: axes {axes} are not modelled, only (3, 1, 2, 0)")
    check(src.indirect, "dma_transpose: only src with a vector_offset is modelled")
    check(src.storage.itemsize == 2, f"dma_transpose: dtype {src.dtype} has not 2 bytes")
    check(dst.dtype == src.dtype, "dma_transpose: dst and src have one dtype")
    check(n % 16 == 0 and 16 <= n <= 128, f"dma_transpose: {n} rows; a multiple of 16 up to 128")
    check(1 in src.shape[1:3], f"dma_transpose: dim 1 or 2 of {src.shape} must have size 1")
    check(src.shape[3] <= 128, f"dma_transpose: last dim of {src.shape} must be at most 128")
    check(
        dst.shape == tuple(src.shape[a] for a in axes), f"dma_transpose: {src.shape} to {dst.shape}"
    )
    valid = ((src.rows >= 0) & (src.rows < src.storage.shape[0])).reshape(-1, 16)
    if not valid.all():
        check(oob_mode.name == "skip", "dma_transpose: index out of bounds; oob_mode.skip skips it")
        # 2.33.1 release notes: anything else stops the core
        whole = (valid.all(1) | ~valid.any(1)).all()
        check(whole, "dma_transpose: indices must be valid or not in whole groups of 16")
        check(not valid.any(), "dma_transpose that skips some groups of 16 is not modelled")
        return
    _transfer(dst, src, src.numbers().transpose(axes), dst.size)


def tensor_copy(dst: NkiTensor, src: NkiTensor) -> None:
    _issue("vector")
    _tile("tensor_copy dst", dst)
    _tile("tensor_copy src", src)
    _same(dst, src)
    dst.write(src.numbers())


def memset(dst: NkiTensor, value: float) -> None:
    _issue("vector")
    _tile("memset dst", dst)
    kind = int if dst.dtype in INTS else float
    check(
        type(value) is kind,
        f"memset: value {value!r} of a {dst.dtype} tile must be {kind.__name__}",
    )
    dst.write(np.full(dst.shape, value))


def iota(
    dst: NkiTensor, pattern: list[list[int]], offset: int = 0, channel_multiplier: int = 0
) -> None:
    """dst[p, i, ...] = offset + p * channel_multiplier + i * step + ..., in int32."""
    _issue("gpsimd")
    n, _ = _tile("iota dst", dst, "sbuf")
    check(len(pattern) <= 4, "iota: at most 4 [step, count] pairs")
    check((n, *(c for _, c in pattern)) == dst.shape, f"iota: pattern {pattern} for {dst.shape}")
    value = offset + np.arange(n, dtype=np.int32) * channel_multiplier
    for step, count in pattern:
        value = value[..., None] + np.arange(count, dtype=np.int32) * step
    dst.write(value)


def nc_matmul(
    dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, accumulate: bool | None = None
) -> None:
    """dst[m, n] = sum over k of stationary[k, m] moving[k, n]; k on the partitions of both."""
    _tile("nc_matmul dst", dst, "psum")
    k, m = _tile("nc_matmul stationary", stationary, "sbuf")
    k2, n = _tile("nc_matmul moving", moving, "sbuf")
    check(k == k2, f"nc_matmul: contraction sizes {k} and {k2} differ")
    check(m <= STATIONARY, f"nc_matmul: {m} stationary columns exceed {STATIONARY}")
    check(n <= MOVING, f"nc_matmul: {n} moving columns exceed {MOVING}")
    check((dst.shape[0], dst.size) == (m, m * n), f"nc_matmul: dst {dst.shape} is not ({m}, {n})")
    check(dst.dtype == "float32", f"nc_matmul: dst is {dst.dtype}, must be float32")
    for t in (stationary, moving):
        check(t.dtype in FLOATS, f"nc_matmul: {t.dtype} operand")
    wide = [t.dtype == "float32" for t in (stationary, moving)]
    check(wide[0] == wide[1], "nc_matmul: float32 pairs only with float32")
    _in_bank(dst)
    storage, region = dst.storage, (dst.offset, dst.shape, dst.strides)
    started = dst._of(storage.started)
    if accumulate is None:
        check(started.all() or not started.any(), "nc_matmul: dst is partly written")
        accumulate = bool(started.all())
    if accumulate:
        check(started.all(), "nc_matmul: accumulate=True before a matmul started the sum")
        check(
            storage.group == region,
            "nc_matmul: two accumulation groups alternate in one PSUM tile; give each its own",
        )
    _issue("tensor").tensor_cycles += n * (4 if wide[0] else 1)
    product = stationary.floats().reshape(k, m).T @ moving.floats().reshape(k, n)
    before = dst.numbers().reshape(m, n) if accumulate else 0
    dst.write(before + product)
    started[...] = True
    storage.group = region


def nc_transpose(dst: NkiTensor, data: NkiTensor) -> None:
    """Tensor engine transpose, SBUF to PSUM: a matmul whose moving operand is the identity."""
    n, m = _tile("nc_transpose data", data, "sbuf")
    _tile("nc_transpose dst", dst, "psum")
    check(m <= 128, f"nc_transpose: {data.shape} exceeds 128 x 128")
    check(
        (dst.shape[0], dst.size) == (m, m * n), f"nc_transpose: dst {dst.shape} is not ({m}, {n})"
    )
    check(
        dst.dtype == data.dtype, f"nc_transpose: dst is {dst.dtype}, must be {data.dtype} as data"
    )
    _in_bank(dst)
    _issue("tensor").tensor_cycles += n * (4 if data.dtype == "float32" else 1)
    dst.write(data.numbers().reshape(n, m).T)


def _scalar(x: Any, data: NkiTensor) -> Any:
    """A constant, or one float32 per partition."""
    if not isinstance(x, NkiTensor):
        check(isinstance(x, (int, float)), f"scalar operand {x!r}: a number or a tile")
        return np.float32(x)
    _tile("scalar operand", x)
    check(x.dtype == "float32", f"a scalar operand is float32, not {x.dtype}")
    check(x.shape == (data.shape[0], 1), f"scalar operand {x.shape} is not ({data.shape[0]}, 1)")
    return x.numbers().reshape(-1, *[1] * (data.ndim - 1))


def tensor_tensor(dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Op) -> None:
    _issue("vector")
    for name, t in (("dst", dst), ("data1", data1), ("data2", data2)):
        _tile(f"tensor_tensor {name}", t)
    check(isinstance(op, Op) and not op.unary, f"tensor_tensor: {op} does not take two operands")
    _same(dst, data1, data2)
    _one_psum(data1, data2)
    dst.write(op.fn(data1.floats(), data2.floats().reshape(data1.shape)))


def scalar_tensor_tensor(
    dst: NkiTensor, data: NkiTensor, op0: Op, operand0: Any, op1: Op, operand1: NkiTensor
) -> None:
    """dst = (data op0 operand0) op1 operand1; operand0 a number or (P, 1), operand1 a tile."""
    _issue("vector")
    for name, t in (("dst", dst), ("data", data), ("operand1", operand1)):
        _tile(f"scalar_tensor_tensor {name}", t)
    _same(dst, data, operand1)
    _one_psum(data, operand1)
    value = op0.fn(data.floats(), _scalar(operand0, data))
    dst.write(op1.fn(value, operand1.floats().reshape(data.shape)))


def activation(dst: NkiTensor, op: Op, data: NkiTensor, bias: Any = None, scale: Any = 1.0) -> None:
    """dst = op(data * scale + bias)"""
    _issue("scalar")
    _tile("activation dst", dst)
    _tile("activation data", data)
    _same(dst, data)
    check(isinstance(op, Op) and op.unary, f"activation: {op} is no activation function")
    value = data.floats() * _scalar(scale, data)
    dst.write(op.fn(value if bias is None else value + _scalar(bias, data)))


def scalar_load(src: NkiTensor) -> NkiScalar:
    _issue("sync")
    check(src.size == 1 and src.dtype == "int32", "scalar_load: an int32 tensor with one element")
    return NkiScalar(int(src.numbers().reshape(-1)[0]))


def core_barrier(data: NkiTensor, cores: tuple[int, ...]) -> None:
    """Both programs get here before either goes on; what they wrote to shared HBM is visible then."""
    _issue("gpsimd")
    check(data.buffer == "shared_hbm", f"core_barrier: data is in {data.buffer}, not shared HBM")
    check(cores == (0, 1) and program.launch is not None, "core_barrier: cores (0, 1) of LNC 2")
    program.launch.barrier(program.pid)


# ---- nki.jit and nki.simulate -------------------------------------------------------------------
class Namespace:
    """A module of the real package, limited to what is modelled."""

    def __init__(self, name: str, members: dict[str, Any]) -> None:
        self.__dict__.update(members, __name__=name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__}.{name} is not modelled by nki_cpu.py")


language = Namespace(
    "nki.language",
    {
        **{name: name for name in DTYPES},
        **{op.name: op for op in OPS},
        **{name: name for name in ("sbuf", "psum", "shared_hbm")},
        **{f.__name__: f for f in (ndarray, program_id, num_programs, fori_loop, NkiTensor)},
    },
)
isa = Namespace(
    "nki.isa",
    {
        f.__name__: f
        for f in (
            dma_copy, dma_transpose, tensor_copy, memset, iota, nc_matmul, nc_transpose, tensor_tensor,
            scalar_tensor_tensor, activation, scalar_load, core_barrier, oob_mode,
            NkiScalar, NkiValidationError,
        )
    },
)  # fmt: skip


class Kernel:
    """What @nki.jit makes of a function; kernel[lnc] runs it on one or two physical cores."""

    def __init__(self, func: Callable[..., Any], lnc: int = 1) -> None:
        self.func, self.lnc, self.__doc__ = func, lnc, func.__doc__

    def __getitem__(self, grid: Any) -> "Kernel":
        lnc = grid[0] if isinstance(grid, tuple) and len(grid) == 1 else grid
        check(lnc in (1, 2), f"grid {grid!r}: LNC is 1 or 2")
        return Kernel(self.func, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _launch(self, args, kwargs)


def jit(func: Callable[..., Any]) -> Kernel:
    return Kernel(func)


def simulate(kernel: Kernel) -> Callable[..., Any]:
    """A callable that runs the kernel on NumPy arrays and returns NumPy arrays."""
    return kernel


def _argument(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    check(value.dtype in NAMES, f"an argument of dtype {value.dtype} is not modelled")
    value = np.ascontiguousarray(value)
    storage = Storage(value.shape, NAMES[value.dtype], "shared_hbm", value)
    return NkiTensor(storage, 0, value.shape, tuple(s // value.itemsize for s in value.strides))


def _result(t: Any) -> np.ndarray:
    check(isinstance(t, NkiTensor), f"a kernel returns tensors, not {type(t).__name__}")
    check(t.buffer == "shared_hbm", f"a kernel returns tensors in nl.shared_hbm, not {t.buffer}")
    check(not t.storage.read_only, "a kernel cannot return its argument")
    array = t._of(t.storage.array)
    return array.view(ml_dtypes.bfloat16) if t.dtype == "bfloat16" else array


def _launch(kernel: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run every program; keep the counters in last_run."""
    global last_run
    args, kwargs = [_argument(a) for a in args], {k: _argument(v) for k, v in kwargs.items()}
    launch = Launch(kernel.lnc) if kernel.lnc > 1 else None
    runs, trips = [Run() for _ in range(kernel.lnc)], [None] * kernel.lnc
    results: list[Any] = [None] * kernel.lnc
    errors: list[BaseException] = []

    def run(pid: int) -> None:
        program.start(pid, launch, runs[pid])
        try:
            if launch:
                launch.wait_for_turn(pid)
            if not errors:
                with np.errstate(over="ignore", invalid="ignore"):
                    results[pid] = kernel.func(*args, **kwargs)
        except BaseException as e:  # of either program: raised below, in the caller's thread
            errors.append(e)
        finally:
            trips[pid] = program.trips
            if launch:
                launch.done[pid] = True
                launch.pass_turn(pid)

    threads = [threading.Thread(target=run, args=(pid,)) for pid in range(kernel.lnc)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    check(trips[0] == trips[-1], f"fori_loop: programs take different trip counts: {trips}")
    last_run = Run(
        sum((r.instructions for r in runs), Counter()),
        *(sum(getattr(r, n) for r in runs) for n in ("tensor_cycles", "hbm_read", "hbm_written")),
        *(max(getattr(r, n) for r in runs) for n in ("sbuf_peak", "psum_peak")),
    )
    out = results[0]
    return tuple(map(_result, out)) if isinstance(out, (tuple, list)) else _result(out)
