# pyright: reportMissingImports=false
"""Single instructions whose rounding is named, as csrc/cuda/kernels has them.

``.ftz`` stands only where the library's definition makes zeros of subnormal numbers.
"""

import cutlass.cute as cute
from cutlass import Float32, Uint32

ABS = 0x7FFFFFFF
INF = 0x7F800000
MIN_NORMAL = 0x00800000
QUIET_NAN = 0x7FC00000
ONE = 0x3F800000


def _float(ptx: str, *values):
    return cute.arch.inline_ptx(
        ptx, write_only_types=[Float32], read_only_args=[Float32(v) for v in values]
    )


def _word(ptx: str, *values):
    return cute.arch.inline_ptx(
        ptx, write_only_types=[Uint32], read_only_args=list(values)
    )


def mul(a, b):
    """A product, subnormal factors and products included."""
    return _float("mul.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def mul_ftz(a, b):
    """A product, where subnormal factors and products are zeros of their sign."""
    return _float("mul.rn.ftz.f32 {$w0}, {$r0}, {$r1};", a, b)


def add(a, b):
    """A sum."""
    return _float("add.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def add_ftz(a, b):
    """A sum, where subnormal terms and sums are zeros."""
    return _float("add.rn.ftz.f32 {$w0}, {$r0}, {$r1};", a, b)


def subtract(a, b):
    """A difference."""
    return _float("sub.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def fma(a, b, c):
    """``a b + c``, rounded once."""
    return _float("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)


def negative(a):
    """``-a``."""
    return _float("neg.f32 {$w0}, {$r0};", a)


def absolute(a):
    """``|a|``."""
    return _float("abs.f32 {$w0}, {$r0};", a)


def maximum(a, b):
    """The larger number; NaN if one is."""
    return _float("max.NaN.f32 {$w0}, {$r0}, {$r1};", a, b)


def minimum(a, b):
    """The smaller number; NaN if one is."""
    return _float("min.NaN.f32 {$w0}, {$r0}, {$r1};", a, b)


def larger(a, b):
    """The larger one, a number before NaN."""
    return _float("max.f32 {$w0}, {$r0}, {$r1};", a, b)


def smaller(a, b):
    """The smaller one, a number before NaN."""
    return _float("min.f32 {$w0}, {$r0}, {$r1};", a, b)


def exp2(a):
    """The hardware's ``2^a``."""
    return _float("ex2.approx.ftz.f32 {$w0}, {$r0};", a)


def reciprocal(a):
    """The hardware's ``1 / a``."""
    return _float("rcp.approx.ftz.f32 {$w0}, {$r0};", a)


def max_halves(a, b):
    """The larger ones of two pairs of 16-bit numbers."""
    return _word("max.u16x2 {$w0}, {$r0}, {$r1};", a, b)


def warp_max(a):
    """The largest word of a warp, in all its lanes."""
    return _word("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", a)


def half_bits(word, high: bool):
    """The float32 bits of one of two float16 numbers."""
    lanes = "mov.b32 {{l, h}}, {{$r0}}; cvt.f32.f16 f, {};".format("h" if high else "l")
    return _word(
        "{ .reg .b16 l, h; .reg .f32 f; " + lanes + " mov.b32 {$w0}, f; }", word
    )


def pair(lo, hi, dtype: str):
    """Two numbers rounded to nearest even, ``lo`` in the low half of the word."""
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    ptx = f"cvt.rn.{short}x2.f32 " + "{$w0}, {$r1}, {$r0};"
    return _word(ptx, Float32(lo), Float32(hi))


def codes(a, b, c, d, format: str):
    """Four FP8 codes in a word, that of ``a`` lowest: nearest even, NaN to 0x7f."""
    convert = f"cvt.rn.satfinite.{format}x2.f32"
    ptx = f"{{ .reg .b16 l, h; {convert} l, " + "{$r1}, {$r0}; "
    ptx += f"{convert} h, " + "{$r3}, {$r2}; mov.b32 {$w0}, {l, h}; }"
    return _word(ptx, *(Float32(v) for v in (a, b, c, d)))


def decoded(word, format: str):
    """The four numbers of a word of FP8 codes, as two words of float16 pairs."""
    convert = f"cvt.rn.f16x2.{format}x2"
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r0}; "
        + convert
        + " {$w0}, l; "
        + convert
        + " {$w1}, h; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
    )


def load(address, valid):
    """Four words; zeros unless ``valid``, a word, is one."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; "
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@p ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, valid],
    )


def store(address, words, valid):
    """Two or four words, if ``valid`` is one."""
    place = ", ".join(f"{{$r{i + 2}}}" for i in range(len(words)))
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; "
        f"@p st.global.v{len(words)}.b32 [{{$r0}}], {{{place}}}; }}",
        read_only_args=[address, valid, *words],
    )


def store_byte(address, word, valid):
    """The lowest byte of a word, if ``valid`` is one."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; @p st.global.b8 [{$r0}], {$r2}; }",
        read_only_args=[address, valid, word],
    )


def raise_to(address, word):
    """``*address = max(*address, word)``: integers, so in any order."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .u32 t; ld.global.cg.u32 t, [{$r0}]; "
        "setp.gt.u32 p, {$r1}, t; @p red.global.max.u32 [{$r0}], {$r1}; }",
        read_only_args=[address, word],
    )
