# pyright: reportMissingImports=false
"""MXFP8 quantization as one CuTeDSL kernel, whose static choices are a :class:`Spec`.

A warp makes 32 rows x 64 columns as csrc/cuda/kernels/mxfp8_sink.cuh does: lane % 8
chooses 8 columns, lane / 8 the rows, so that two shuffles join a block of either kind.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8, Uint32

from te_flax.backends import cutedsl_ptx as ptx
from te_flax.backends.cutedsl_functions import FUNCTIONS, numbers
from te_flax.backends.cutedsl_spec import Spec

ROWS = 8  # of a lane, 4 apart
WARPS = 8
TILE = 64  # columns of a warp
SUM_ROWS = 128  # in one partial sum, as kSumRows of column_sum.cuh
FORMAT_BIAS = {"e4m3": 8, "e5m2": 15}


def ceil(n, d: int):
    """``n / d``, rounded up."""
    return (n + (d - 1)) // d


def _swizzled(r, c, columns):
    """Place of scale (r, c) in tiles of 128 x 4: SwizzledIndex of mxfp8_sink.cuh."""
    tile = r // 128 * ceil(columns, 4) + c // 4
    return tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


@cute.jit
def _scale(amax, bias: cutlass.Constexpr):
    """The e8m0 byte of a block: BlockScale of numerics.cuh, which says why."""
    e = ptx.max_words((amax + Uint32(0x1FFFFF)) >> 23, Uint32(bias)) - Uint32(bias)
    e = Uint32(254) if amax >= ptx.INF else e
    e = Uint32(255) if amax > ptx.INF else e
    return e


@cute.jit
def _factor(e):
    """2^(127 - e); 2^-63 for a block with an infinity, NaN for one with a NaN."""
    bits = (Uint32(254) - e) << 23
    bits = Uint32(64 << 23) if e == 254 else bits
    bits = Uint32(ptx.QUIET_NAN) if e == 255 else bits
    return bits.bitcast(Float32)


class Quantizer:
    """The launches of one kernel: clear amax, all tiles, the sums over the rows."""

    def __init__(self, spec: Spec):
        """Reads the static choices."""
        self.spec = spec
        self.words = 8 if spec.dtype == "float32" else 4  # of eight numbers

    def _bits(self, words, j: int):
        """The float32 bits of number j of eight."""
        if self.spec.dtype == "float32":
            return words[j]
        word = words[j // 2]
        if self.spec.dtype == "float16":
            return ptx.half_bits(word, bool(j % 2))
        return word & Uint32(0xFFFF0000) if j % 2 else word << 16

    def _larger(self, a, b):
        wide = self.spec.dtype == "float32"
        return ptx.max_words(a, b) if wide else ptx.max_halves(a, b)

    def _abs(self, word):
        wide = self.spec.dtype == "float32"
        return word & Uint32(ptx.ABS if wide else 0x7FFF7FFF)

    def _largest(self, words):
        """The float32 bits of the largest of eight magnitudes."""
        top = self._abs(words[0])
        for w in range(1, self.words):
            top = self._larger(top, self._abs(words[w]))
        if self.spec.dtype == "float32":
            return top
        top = [top]
        return ptx.max_words(self._bits(top, 0), self._bits(top, 1))

    @cute.jit
    def _load(self, source, index, valid, words):
        if valid:
            at = cute.assume(index // 8 * self.words, divby=4)
            cute.autovec_copy(
                cute.make_tensor(source.iterator + at, cute.make_layout(self.words)),
                words,
            )
        else:
            words.fill(Uint32(0))

    def _widen(self, words):
        found = numbers()
        for j in range(8):
            found[j] = self._bits(words, j).bitcast(Float32)
        return found

    def _round(self, values, words):
        for w in range(self.words):
            if self.spec.dtype == "float32":
                words[w] = values[w].bitcast(Uint32)
            else:
                lo, hi = values[2 * w], values[2 * w + 1]
                words[w] = ptx.pair(lo, hi, self.spec.dtype)

    def _pack(self):
        return cute.make_rmem_tensor((self.words,), Uint32)

    def _make(self, dy, x, m, k, r, c, valid, packs, i):
        """Makes pack i of each slice of h from what it is a function of."""
        spec = self.spec
        if not spec.activation:
            return self._load(x, Int64(r) * k + c, valid, packs[0][None, i])
        names = spec.activation.split(",")
        found, slopes = [], []
        for s, name in enumerate(names):
            words, value = self._pack(), numbers()
            slope = numbers() if spec.backward else None
            self._load(x, (Int64(r) * len(names) + s) * k + c, valid, words)
            FUNCTIONS[name](self._widen(words), value, slope)
            found.append(value)
            slopes.append(slope)
        if not spec.backward:
            return self._round(self._product(*found), packs[0][None, i])
        words = self._pack()
        self._load(dy, Int64(r) * k + c, valid, words)
        dh = self._widen(words)
        if len(names) == 1:
            return self._round(self._product(dh, slopes[0]), packs[0][None, i])
        first = self._product(self._product(dh, slopes[0]), found[1])
        second = self._product(self._product(dh, found[0]), slopes[1])
        self._round(first, packs[0][None, i])
        return self._round(second, packs[1][None, i])

    def _product(self, a, b=None):
        if b is None:
            return a
        found = numbers()
        for j in range(8):
            found[j] = ptx.mul_ftz(a[j], b[j])
        return found

    @cute.jit
    def _codes(self, words, scales, target, index, valid, format: cutlass.Constexpr):
        """Stores eight codes; scales: one, or one for each number."""
        y = numbers()
        infinite = Uint32(0)
        for j in cutlass.range_constexpr(8):
            e = scales[j % len(scales)]
            y[j] = ptx.mul_ftz(self._bits(words, j).bitcast(Float32), _factor(e))
            infinite = Uint32(1) if e == 254 else infinite
        if infinite != 0:  # 2^-127 is no normal number: the other half of it
            for j in cutlass.range_constexpr(8):
                if scales[j % len(scales)] == 254:
                    y[j] = ptx.mul_ftz(y[j], 2.0**-64)
        out = cute.make_rmem_tensor((2,), Uint32)
        out[0] = ptx.codes(y[0], y[1], y[2], y[3], format)
        out[1] = ptx.codes(y[4], y[5], y[6], y[7], format)
        if valid:
            self._store(out, target, index, 2)

    def _store(self, words, target, index, count: int):
        at = cute.assume(index // 8 * count, divby=count if count < 4 else 4)
        layout = cute.make_layout(count)
        cute.autovec_copy(words, cute.make_tensor(target.iterator + at, layout))

    @cute.jit
    def _rows(self, packs, row, row_scale, s, m, k, r0, c):
        """Row codes and scales; every 32 numbers of a row are four lanes."""
        stride = k * self.spec.slices
        for i in cutlass.range_constexpr(ROWS):
            r = Int64(r0 + 4 * i)
            top = self._largest(packs[None, i])
            top = ptx.max_words(top, cute.arch.shuffle_sync_bfly(top, 1))
            top = ptx.max_words(top, cute.arch.shuffle_sync_bfly(top, 2))
            e = _scale(top, FORMAT_BIAS[self.spec.row_format])
            valid = (r < m) & (c < k)
            index = r * stride + s * k + c
            args = (row, index, valid, self.spec.row_format)
            self._codes(packs[None, i], [e], *args)
            block = (s * k + c) // 32
            if cutlass.const_expr(self.spec.swizzled):
                if (c % 32 == 0) & (r < ceil(m, 128) * 128):
                    row_scale[_swizzled(r, block, stride // 32)] = Uint8(e)
            else:
                if (c % 32 == 0) & valid:
                    row_scale[r * (stride // 32) + block] = Uint8(e)

    @cute.jit
    def _columns(self, packs, col, col_scale, s, m, k, r0, c):
        """Column codes and scales; every 32 numbers of a column are four lanes."""
        stride = k * self.spec.slices
        tops = self._pack()
        for w in cutlass.range_constexpr(self.words):
            tops[w] = self._abs(packs[w, 0])
            for i in cutlass.range_constexpr(1, ROWS):
                tops[w] = self._larger(tops[w], self._abs(packs[w, i]))
            for distance in cutlass.range_constexpr(8, 24, 8):  # 8 and 16
                other = cute.arch.shuffle_sync_bfly(tops[w], distance)
                tops[w] = self._larger(tops[w], other)
        bias = FORMAT_BIAS[self.spec.col_format]
        scales = [_scale(self._bits(tops, j), bias) for j in range(8)]
        for i in cutlass.range_constexpr(ROWS):
            r = Int64(r0 + 4 * i)
            valid = (r < m) & (c < k)
            args = (col, r * stride + s * k + c, valid, self.spec.col_format)
            self._codes(packs[None, i], scales, *args)
        first = r0 // 32
        if cutlass.const_expr(self.spec.swizzled):
            columns = m // 32
            inside = (r0 < ceil(m, 128) * 128) & (c < ceil(k, 128) * 128)
            if inside & (r0 % 32 == 0):
                for j in cutlass.range_constexpr(8):
                    at = _swizzled(Int64(c + j), Int64(first), columns)
                    col_scale[at] = Uint8(scales[j])
        else:
            if (r0 % 32 == 0) & (r0 < m) & (c < k):
                out = cute.make_rmem_tensor((2,), Uint32)
                for half in cutlass.range_constexpr(2):
                    a, b, d, e = scales[4 * half : 4 * half + 4]
                    out[half] = a | (b << 8) | (d << 16) | (e << 24)
                self._store(out, col_scale, Int64(first) * stride + s * k + c, 2)

    @cute.jit
    def _join_amax(self, slices, amax):
        """Joins what a warp has seen into amax[2], which starts as zeros."""
        finite, bad = Uint32(0), Uint32(0)
        for packs in slices:
            for i in cutlass.range_constexpr(ROWS):
                finite = ptx.max_words(finite, self._largest(packs[None, i]))
        if finite >= ptx.INF:  # rare: look again for the largest finite one
            finite, bad = Uint32(0), Uint32(ptx.ONE)
            for packs in slices:
                for i in cutlass.range_constexpr(ROWS):
                    for j in cutlass.range_constexpr(8):
                        a = self._bits(packs[None, i], j) & Uint32(ptx.ABS)
                        a = a if a < ptx.INF else Uint32(0)
                        finite = ptx.max_words(finite, a)
        finite, bad = ptx.warp_max(finite), ptx.warp_max(bad)
        if cute.arch.lane_idx() == 0:
            if finite >= ptx.MIN_NORMAL:
                ptx.raise_to(amax.iterator.toint(), finite)
            if bad != 0:
                ptx.raise_to((amax.iterator + 1).toint(), bad)

    @cute.jit
    def _partial_sums(self, slices, sums, k, shared, down, across):
        """Sums of 128 rows, in the order that column_sum.cuh lays down."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, tid // 32
        for s in cutlass.range_constexpr(self.spec.slices):
            for j in cutlass.range_constexpr(8):
                total = Float32(0.0)
                for i in cutlass.range_constexpr(ROWS):
                    bits = self._bits(slices[s][None, i], j)
                    total = ptx.add_ftz(total, bits.bitcast(Float32))
                for distance in cutlass.range_constexpr(8, 24, 8):
                    other = cute.arch.shuffle_sync_bfly(total, distance)
                    total = ptx.add_ftz(total, other)
                if lane < 8:
                    shared[s, warp // 2, warp % 2 * TILE + lane * 8 + j] = total
        cute.arch.sync_threads()
        s, column = tid // 128, tid % 128
        place = across * 128 + column
        if (s < self.spec.slices) & (place < k):
            total = shared[s, 0, column]
            for b in cutlass.range_constexpr(1, 4):
                total = ptx.add_ftz(total, shared[s, b, column])
            sums[(Int64(down) * self.spec.slices + s) * k + place] = total
