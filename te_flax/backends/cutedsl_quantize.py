# pyright: reportMissingImports=false
"""MXFP8 quantization as one CuTeDSL kernel, whose static choices are a :class:`Spec`.

A warp makes 32 rows x 64 columns as csrc/cuda/kernels/mxfp8_sink.cuh does: lane % 8
chooses 8 columns, lane / 8 the rows, so that two shuffles join a block of either kind.
"""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from te_flax.backends import cutedsl_ptx as ptx
from te_flax.backends.cutedsl_functions import FUNCTIONS, numbers
from te_flax.backends.cutedsl_spec import Spec

ROWS = 8  # of a lane, 4 apart
WARPS = 8
TILE = 64  # columns of a warp
FORMAT_BIAS = {"e4m3": 8, "e5m2": 15}


def ceil(n, d: int):
    """``n / d``, rounded up."""
    return (n + (d - 1)) // d


def _swizzled(r, c, columns):
    """Place of scale (r, c) in tiles of 128 x 4: SwizzledIndex of mxfp8_sink.cuh."""
    tile = (r >> 7) * ((columns + 3) >> 2) + (c >> 2)
    return tile * 512 + (r & 31) * 16 + ((r >> 5) & 3) * 4 + (c & 3)


@cute.jit
def _scale(amax, bias: cutlass.Constexpr):
    """The e8m0 byte of a block: BlockScale of numerics.cuh, which says why."""
    e = max((amax + Uint32(0x1FFFFF)) >> 23, Uint32(bias)) - Uint32(bias)
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


@cute.jit
def _max(a, b):
    return max(a, b)


@cute.jit
def word(condition):
    """1 where a condition holds, else 0."""
    return Uint32(1) if condition else Uint32(0)


class Place(NamedTuple):
    """Where a lane works. Packs are eight columns, counted along one slice.

    Attributes:
        m: rows of h.
        packs: in a row of one slice.
        r: its first row.
        pack: its pack.
        valid: words, of each of its rows: whether it has that row and the pack.
    """

    m: Any
    packs: Any
    r: Any
    pack: Any
    valid: list


class Quantizer:
    """What a lane does with its eight packs of each slice of h."""

    def __init__(self, spec: Spec):
        """Reads the static choices."""
        self.spec = spec
        self.wide = spec.dtype == "float32"
        self.words = 8 if self.wide else 4  # of a pack

    def _bits(self, words, j: int):
        """The float32 bits of number j of eight."""
        if self.wide:
            return words[j]
        word = words[j // 2]
        if self.spec.dtype == "float16":
            return ptx.half_bits(word, bool(j % 2))
        return word & Uint32(0xFFFF0000) if j % 2 else word << 16

    def _larger(self, a, b):
        return _max(a, b) if self.wide else ptx.max_halves(a, b)

    def _abs(self, word):
        return word & Uint32(ptx.ABS if self.wide else 0x7FFF7FFF)

    def _largest(self, words):
        """The float32 bits of the largest of eight magnitudes."""
        top = self._abs(words[0])
        for w in range(1, self.words):
            top = self._larger(top, self._abs(words[w]))
        return top if self.wide else _max(self._bits([top], 0), self._bits([top], 1))

    def _load(self, source, index, valid):
        """The words of a pack, zeros where it is not valid."""
        address = source.iterator.toint() + index * (4 * self.words)
        words = ptx.load(address, valid)
        return (*words, *ptx.load(address + 16, valid)) if self.wide else words

    def _store(self, target, index, words, valid):
        """Stores the words of a pack of codes or numbers."""
        address = target.iterator.toint() + index * (4 * len(words))
        for first in range(0, len(words), 4):
            ptx.store(address + 4 * first, words[first : first + 4], valid)

    def _widen(self, words):
        found = numbers()
        for j in range(8):
            found[j] = self._bits(words, j).bitcast(Float32)
        return found

    def _round(self, values):
        """The words of eight float32 in the dtype of h."""
        if self.wide:
            return tuple(values[j].bitcast(Uint32) for j in range(8))
        pairs = ((values[j], values[j + 1]) for j in range(0, 8, 2))
        return tuple(ptx.pair(lo, hi, self.spec.dtype) for lo, hi in pairs)

    def read(self, dy, x, at: Place, i: int):
        """Loads row i of what h is made of: the slices of x, then dy."""
        r, count = Int64(at.r + 4 * i), self.spec.read_slices
        places = [(r * count + s) * at.packs + at.pack for s in range(count)]
        found = [self._load(x, place, at.valid[i]) for place in places]
        if self.spec.backward:
            found.append(self._load(dy, r * at.packs + at.pack, at.valid[i]))
        return found

    def make(self, raw) -> list:
        """The pack of each slice of h from what ``read`` returned."""
        if not self.spec.activation:
            return raw
        values, slopes = [], []
        for name, words in zip(self.spec.activation.split(","), raw, strict=False):
            values.append(numbers())
            slopes.append(numbers() if self.spec.backward else None)
            FUNCTIONS[name](self._widen(words), values[-1], slopes[-1])
        if not self.spec.backward:
            return [self._round(functools.reduce(_product, values))]
        dy = self._widen(raw[-1])
        if len(values) == 1:
            return [self._round(_product(dy, slopes[0]))]
        first = _product(_product(dy, slopes[0]), values[1])
        second = _product(_product(dy, values[0]), slopes[1])
        return [self._round(first), self._round(second)]

    @cute.jit
    def _codes(self, words, scales, format: cutlass.Constexpr):
        """The words of eight codes; scales: one, or one for each number."""
        y = numbers()
        infinite = Uint32(0)
        for e in scales:
            infinite = Uint32(1) if e == 254 else infinite
        factors = [_factor(e) for e in scales]
        for j in cutlass.range_constexpr(8):
            v = self._bits(words, j).bitcast(Float32)
            y[j] = ptx.mul_ftz(v, factors[j % len(scales)])
        if infinite != 0:  # 2^-127 is no normal number: the other half of it
            for j in cutlass.range_constexpr(8):
                if scales[j % len(scales)] == 254:
                    y[j] = ptx.mul_ftz(y[j], 2.0**-64)
        low = ptx.codes(y[0], y[1], y[2], y[3], format)
        return low, ptx.codes(y[4], y[5], y[6], y[7], format)

    @cute.jit
    def _values(self, codes, scales, format: cutlass.Constexpr):
        """The words of eight codes' values in bfloat16: exact, or 0, or infinite."""
        halves = [h for word in codes for h in ptx.decoded(word, format)]
        found = []
        for j in cutlass.range_constexpr(8):
            e = scales[j % len(scales)]
            first = (e >> 1) + Uint32(127 - 63)  # 2^(e - 127) in two normal factors
            second = e - (e >> 1) + Uint32(127 - 64)
            v = ptx.half_bits(halves[j // 2], bool(j % 2)).bitcast(Float32)
            v = ptx.mul(v, (first << 23).bitcast(Float32))
            bits = ptx.mul_ftz(v, (second << 23).bitcast(Float32)).bitcast(Uint32)
            nan = (e == 255) | ((bits & Uint32(ptx.ABS)) > ptx.INF)
            bits = Uint32(ptx.QUIET_NAN) if nan else bits
            found.append(bits)
        return [(found[j] >> 16) | found[j + 1] for j in range(0, 8, 2)]

    def _copy(self, words, scales, format: str, values: bool):
        """The words of a pack in a copy: eight codes, or their values."""
        codes = self._codes(words, scales, format)
        return self._values(codes, scales, format) if values else codes

    def rows(self, packs, tops, row, row_scale, s: int, at: Place):
        """Stores row codes and scales; every 32 numbers of a row are four lanes."""
        spec, format = self.spec, self.spec.row_format or ""
        stride, pack = at.packs * spec.slices, s * at.packs + at.pack
        first = word(at.pack % 4 == 0)  # of the lanes of a block
        for i in range(ROWS):
            r, top = Int64(at.r + 4 * i), tops[i]
            top = _max(top, cute.arch.shuffle_sync_bfly(top, 1))
            top = _max(top, cute.arch.shuffle_sync_bfly(top, 2))
            e = _scale(top, FORMAT_BIAS[format])
            copy = self._copy(packs[i], [e], format, spec.row_values)
            self._store(row, r * stride + pack, copy, at.valid[i])
            blocks, valid = stride >> 2, first & at.valid[i]
            place = r * blocks + (pack >> 2)
            if spec.swizzled:  # bytes of padding are zeros, and so is an empty block's
                place = _swizzled(r, pack >> 2, blocks)
                valid = first & word(r < ceil(at.m, 128) * 128)
            ptx.store_byte(row_scale.iterator.toint() + place, e, valid)

    def columns(self, packs, col, col_scale, s: int, at: Place):
        """Stores column codes and scales; 32 numbers of a column are four lanes."""
        spec, format = self.spec, self.spec.col_format or ""
        stride, pack = at.packs * spec.slices, s * at.packs + at.pack
        tops = []
        for w in range(self.words):
            top = functools.reduce(self._larger, [self._abs(p[w]) for p in packs])
            for distance in (8, 16):
                top = self._larger(top, cute.arch.shuffle_sync_bfly(top, distance))
            tops.append(top)
        bias = FORMAT_BIAS[format]
        scales = [_scale(self._bits(tops, j), bias) for j in range(8)]
        for i in range(ROWS):
            copy = self._copy(packs[i], scales, format, spec.col_values)
            index = Int64(at.r + 4 * i) * stride + pack
            self._store(col, index, copy, at.valid[i])
        first, block = word(at.r % 32 == 0), Int64(at.r >> 5)
        if not spec.swizzled:
            words = [
                a | (b << 8) | (c << 16) | (d << 24)
                for a, b, c, d in (scales[:4], scales[4:])
            ]
            self._store(col_scale, block * stride + pack, words, first & at.valid[0])
            return
        valid = first & word(at.r < ceil(at.m, 128) * 128)
        for j in range(8):  # of the transpose: the columns are its rows
            place = _swizzled(pack * 8 + j, block, at.m >> 5)
            ptx.store_byte(col_scale.iterator.toint() + place, scales[j], valid)

    @cute.jit
    def join_amax(self, packs, tops, amax):
        """Joins what a warp has seen into amax[2], which starts as zeros."""
        finite, bad = Uint32(0), Uint32(0)
        for top in tops:
            finite = max(finite, top)
        if finite >= ptx.INF:  # rare: look again for the largest finite one
            finite, bad = Uint32(0), Uint32(ptx.ONE)
            for words in packs:
                for j in cutlass.range_constexpr(8):
                    a = self._bits(words, j) & Uint32(ptx.ABS)
                    a = a if a < ptx.INF else Uint32(0)
                    finite = max(finite, a)
        finite, bad = ptx.warp_max(finite), ptx.warp_max(bad)
        if cute.arch.lane_idx() == 0:
            if finite >= ptx.MIN_NORMAL:
                ptx.raise_to(amax.iterator.toint(), finite)
            if bad != 0:
                ptx.raise_to(amax.iterator.toint() + 4, bad)

    @cute.jit
    def partial_sums(self, packs, s: cutlass.Constexpr, shared):
        """Sums of 32 rows, in the order that column_sum.cuh lays down."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, tid // 32
        for j in cutlass.range_constexpr(8):
            total = Float32(0.0)
            for words in packs:
                total = ptx.add_ftz(total, self._bits(words, j).bitcast(Float32))
            for distance in (8, 16):
                other = cute.arch.shuffle_sync_bfly(total, distance)
                total = ptx.add_ftz(total, other)
            if lane < 8:
                shared[s, warp // 2, warp % 2 * TILE + lane * 8 + j] = total

    @cute.jit
    def store_sums(self, shared, sums, k, down, across):
        """Stores the sums of 128 rows."""
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.sync_threads()
        s, column = tid // 128, tid % 128
        place = across * 128 + column
        if (s < self.spec.slices) & (place < k):
            total = shared[s, 0, column]
            for b in cutlass.range_constexpr(1, 4):
                total = ptx.add_ftz(total, shared[s, b, column])
            sums[(Int64(down) * self.spec.slices + s) * k + place] = total


def _product(a, b):
    found = numbers()
    for j in range(8):
        found[j] = ptx.mul_ftz(a[j], b[j])
    return found
