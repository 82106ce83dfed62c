# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
"""The launches of the MXFP8 quantizers, and how they are compiled without a GPU."""

import ctypes

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from te_flax.backends import cutedsl_ptx as ptx
from te_flax.backends.cutedsl_quantize import (
    ROWS,
    TILE,
    WARPS,
    Place,
    Quantizer,
    ceil,
    word,
)
from te_flax.backends.cutedsl_spec import ROW_SUMS, Spec

JOIN_COLUMNS, JOIN_ROWS = 32, 8  # of a block that joins sums, as JoinSums has them
PASSED = ("noop", "dy", "x", "h", "row", "row_scale", "col", "col_scale")
PASSED += ("amax", "sums")
VIEWS = {"noop": Uint32, "amax": Uint32, "dbias": Float32, "sums": Float32}
TYPES = {
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}


def _flat(tensor, dtype):
    """A tensor as a flat array of another type."""
    pointer = cute.recast_ptr(tensor.iterator, dtype=dtype)
    return cute.make_tensor(pointer, cute.make_layout(1 << 30, stride=1))


def _chained(lists) -> list:
    return [item for one in lists for item in one]


class Kernels(Quantizer):
    """Clears amax, makes all tiles, and joins the sums over the rows."""

    @cute.kernel
    def _clear(self, noop, amax):
        tid, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(noop is None):
            amax[tid] = Uint32(0)
        else:
            if (noop[0] & Uint32(ptx.ABS)) < Uint32(ptx.MIN_NORMAL):
                amax[tid] = Uint32(0)

    @cute.kernel
    def _tiles(self, noop, dy, x, h, row, row_scale, col, col_scale, amax, sums, m, k):
        args = (dy, x, h, row, row_scale, col, col_scale, amax, sums, m, k)
        if cutlass.const_expr(noop is None):
            self._tile(*args)
        else:
            if (noop[0] & Uint32(ptx.ABS)) < Uint32(ptx.MIN_NORMAL):
                self._tile(*args)

    @cute.jit
    def _tile(self, dy, x, h, row, row_scale, col, col_scale, amax, sums, m, k):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = tid % 32, tid // 32
        down, across = block, block
        if cutlass.const_expr(spec.dbias):  # 4 warps down, 2 across
            groups = Int32((k + 127) >> 7)
            down, across = block // groups, block % groups
            r, pack = down * ROW_SUMS + warp // 2 * 32, across * 16 + warp % 2 * 8
        else:
            tiles = Int32((k + 127) >> 7) * 2 if spec.swizzled else Int32((k + 63) >> 6)
            tile = block * WARPS + warp
            r, pack = tile // tiles * 32, tile % tiles * 8
        r, pack = r + lane // 8, Int64(pack + lane % 8)
        valid = [word((r + 4 * i < m) & (pack * 8 < k)) for i in range(ROWS)]
        at = Place(m, k >> 3, r, pack, valid)
        made = self._made(dy, x, at)
        slices = [[packs[s] for packs in made] for s in range(spec.slices)]
        tops = [[self._largest(words) for words in packs] for packs in slices]
        self.join_amax(_chained(slices), _chained(tops), amax)
        if cutlass.const_expr(spec.dbias):
            layout = cute.make_layout((spec.slices, 4, 128), stride=(512, 128, 1))
            shared = SmemAllocator().allocate_tensor(Float32, layout)
        for s in cutlass.range_constexpr(spec.slices):
            if cutlass.const_expr(spec.h):
                for i in cutlass.range_constexpr(ROWS):
                    place = (Int64(r + 4 * i) * spec.slices + s) * at.packs + pack
                    self._store(h, place, slices[s][i], valid[i])
            if cutlass.const_expr(spec.row_format is not None):
                self.rows(slices[s], tops[s], row, row_scale, s, at)
            if cutlass.const_expr(spec.col_format is not None):
                self.columns(slices[s], col, col_scale, s, at)
            if cutlass.const_expr(spec.dbias):
                self.partial_sums(slices[s], s, shared)
        if cutlass.const_expr(spec.dbias):
            self.store_sums(shared, sums, k, down, across)

    def occupancy(self) -> int:
        """Blocks on a multiprocessor; one more would make registers spill."""
        spec = self.spec
        both = spec.row_format and spec.col_format
        if spec.slices > 1 or (self.wide and (both or spec.activation)):
            return 1
        return 2 if self.wide or both or spec.activation else 3

    def _made(self, dy, x, at: Place) -> list:
        """The slices of each row; the loads of some rows are in flight together."""
        group = max(1, ROWS // (self.spec.read_slices + self.spec.backward))
        made = []
        for first in range(0, ROWS, group):
            rows = range(first, min(first + group, ROWS))
            raw = [self.read(dy, x, at, i) for i in rows]
            made += [self.make(found) for found in raw]
        return made

    @cute.kernel
    def _join(self, noop, sums, dbias, n, width):
        if cutlass.const_expr(noop is None):
            self._join_column(sums, dbias, n, width)
        else:
            if (noop[0] & Uint32(ptx.ABS)) < Uint32(ptx.MIN_NORMAL):
                self._join_column(sums, dbias, n, width)

    @cute.jit
    def _join_column(self, sums, dbias, n, width):
        x, y, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        column = Int64(block) * JOIN_COLUMNS + x
        total = Float32(0.0)
        if column < width:
            for r in cutlass.range(y, n, JOIN_ROWS, unroll=8):
                total = ptx.add_ftz(total, sums[Int64(r) * width + column])
        layout = cute.make_layout((JOIN_ROWS, JOIN_COLUMNS), stride=(JOIN_COLUMNS, 1))
        shared = SmemAllocator().allocate_tensor(Float32, layout)
        shared[y, x] = total
        cute.arch.sync_threads()
        if (y == 0) & (column < width):
            for r in cutlass.range_constexpr(1, JOIN_ROWS):
                total = ptx.add_ftz(total, shared[r, x])
            nan = Uint32(ptx.QUIET_NAN).bitcast(Float32)
            dbias[column] = total if total == total else nan

    @cute.jit
    def __call__(self, stream: cuda.CUstream, *tensors):
        """Launches all of it."""
        spec = self.spec
        given = dict(zip(spec.tensors, tensors, strict=True))
        flat = {
            name: _flat(given[name], VIEWS[name]) if name in VIEWS else given[name]
            for name in given
        }
        read, width = cute.size(given["x"], mode=[1]), spec.read_slices
        m, k = Int64(cute.size(given["x"], mode=[0])), Int64(read) // width
        self._clear(flat.get("noop"), flat["amax"]).launch(
            grid=[1, 1, 1], block=[2, 1, 1], stream=stream
        )
        if cutlass.const_expr(spec.dbias):
            blocks = ceil(m, ROW_SUMS) * ceil(k, 2 * TILE)
        elif cutlass.const_expr(spec.swizzled):
            blocks = ceil(ceil(m, 128) * 4 * ceil(k, 128) * 2, WARPS)
        else:
            blocks = ceil(ceil(m, 32) * ceil(k, TILE), WARPS)
        self._tiles(*(flat.get(name) for name in PASSED), m, k).launch(
            grid=[Int32(blocks), 1, 1],
            block=[32 * WARPS, 1, 1],
            min_blocks_per_mp=self.occupancy(),
            preferred_smem_carveout=0 if spec.slices == 1 else 10,  # asks no GPU
            stream=stream,
        )
        if cutlass.const_expr(spec.dbias):
            parts, total = Int32(ceil(m, ROW_SUMS)), k * spec.slices
            self._join(
                flat.get("noop"),
                flat["sums"],
                flat["dbias"],
                parts,
                total,
            ).launch(
                grid=[Int32(ceil(total, JOIN_COLUMNS)), 1, 1],
                block=[JOIN_COLUMNS, JOIN_ROWS, 1],
                stream=stream,
            )


def _fakes(spec: Spec) -> list:
    """Operands and results of any shape: rank, dtype and divisibility alone."""
    m, k = cute.sym_int64(symbol="M"), cute.sym_int64(divisibility=32, symbol="K")
    given = k if spec.read_slices == 1 else cute.sym_int64(divisibility=64, symbol="X")
    width = k if spec.slices == 1 else given
    dtype = TYPES[spec.dtype]

    def fake(kind, *shape):
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            kind, shape, stride_order=order, assumed_align=16
        )

    def kind_of(format, values):
        return TYPES["bfloat16" if values else format]

    def free(count):
        return [cute.sym_int64() for _ in range(count)]

    made = {
        "noop": lambda: fake(Float32, 1),
        "dy": lambda: fake(dtype, m, k),
        "x": lambda: fake(dtype, m, given),
        "h": lambda: fake(dtype, m, width),
        "row": lambda: fake(kind_of(spec.row_format, spec.row_values), m, width),
        "col": lambda: fake(kind_of(spec.col_format, spec.col_values), m, width),
        "row_scale": lambda: fake(Uint8, *free(1 if spec.swizzled else 2)),
        "col_scale": lambda: fake(Uint8, *free(1 if spec.swizzled else 2)),
        "dbias": lambda: fake(Float32, width),
        "amax": lambda: fake(Float32, 2),
        "sums": lambda: fake(Uint8, *free(1)),
    }
    return [made[name.removeprefix("prev_")]() for name in spec.tensors]


def compile_kernel(spec: Spec, arch: str, options: str = ""):
    """Returns the tvm_ffi.Function of the launches; needs no GPU."""
    for library in cute.runtime.find_runtime_libraries(enable_tvm_ffi=True):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # else: "Symbols not found"
    return cute.compile(
        Kernels(spec),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        *_fakes(spec),
        options=f"--enable-tvm-ffi --gpu-arch={arch} {options}",
    )
