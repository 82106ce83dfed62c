"""Launches a compiled CuTeDSL kernel's PTX on numpy arrays, and what it must give."""

import ml_dtypes
import numpy as np
from _ptx import Grid, entries

from te_flax.backends.cutedsl_spec import ROW_SUMS, Spec
from te_flax.testing import oracle

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
ORDER = ("noop", "dy", "x", "h", "row", "row_scale", "col", "col_scale", "amax", "sums")
FILL = 0xA5  # of memory that nothing may write


def spec(**fields) -> Spec:
    """A kernel; by default of bfloat16, with no result but amax."""
    plain = dict.fromkeys(Spec._fields, False)
    plain |= {"dtype": "bfloat16", "activation": ""}
    return Spec(**plain | {"row_format": None, "col_format": None} | fields)


def ptx(of: Spec, folder, arch="sm_90a") -> str:
    """The text that it is compiled to."""
    from te_flax.backends.cutedsl_launch import compile_kernel

    compile_kernel(of, arch, f"--keep-ptx --dump-dir={folder}")
    (file,) = folder.glob("*.ptx")
    return file.read_text()


def _up(a: int, b: int) -> int:
    return -(-a // b)


def arrays_of(of: Spec, x: np.ndarray) -> dict[str, np.ndarray]:
    """Operands and results, the latter filled with what must not stay."""
    m, k = x.shape[0], x.shape[1] // of.read_slices
    width = k * of.slices
    tiles = lambda r, c: (_up(r, 128) * _up(c, 4) * 512,)
    scales = {
        "row_scale": tiles(m, width // 32) if of.swizzled else (m, width // 32),
        "col_scale": tiles(width, m // 32) if of.swizzled else (m // 32, width),
    }
    rng, found = np.random.default_rng(1), {"x": x}
    if of.noop:
        found["noop"] = np.zeros(1, np.float32)
    if of.backward:
        found["dy"] = rng.standard_normal((m, k)).astype(x.dtype)
    for name in of.results:
        if name in scales:
            found[name] = np.full(scales[name], 9, np.uint8)
        elif name in ("row", "col"):
            kind = np.uint16 if getattr(of, f"{name}_values") else np.uint8
            found[name] = np.full((m, width), 9, kind)
        elif name == "h":
            found[name] = np.full((m, width), 9, x.dtype)
        else:
            found[name] = np.full(2 if name == "amax" else width, 9, np.float32)
    if of.dbias:
        found["sums"] = np.zeros(_up(m, ROW_SUMS) * width, np.float32)
    return found


def launch(of: Spec, text: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All launches, on copies; nothing outside of the arrays may be written."""
    places, end = {}, 256
    for name, array in arrays.items():
        places[name] = slice(end, end + array.nbytes)
        end += _up(array.nbytes, 256) * 256 + 256
    memory = np.full(end, FILL, np.uint8)
    for name, place in places.items():
        memory[place] = arrays[name].reshape(-1).view(np.uint8)
    m, k = arrays["x"].shape[0], arrays["x"].shape[1] // of.read_slices
    if of.dbias:
        blocks = _up(m, ROW_SUMS) * _up(k, 128)
    elif of.swizzled:
        blocks = _up(_up(m, 128) * 4 * _up(k, 128) * 2, 8)
    else:
        blocks = _up(_up(m, 32) * _up(k, 64), 8)
    kernels = {entry[0]: entry for entry in entries(text)}
    width = k * of.slices
    for name, names, more, grid, block in (
        ("_clear_", ("noop", "amax"), [], 1, (2, 1)),
        ("_tiles_", ORDER, [m, k], blocks, (256, 1)),
        ("_join_", ("noop", "sums", "dbias"), [_up(m, 128), width], width, (32, 8)),
    ):
        entry = next((e for n, e in kernels.items() if name in n), None)
        if entry is not None:
            values = [places[n].start for n in names if n in places]
            grid = _up(grid, 32) if name == "_join_" else grid
            Grid(entry, grid, block, memory, [*values, *more]).run()
    used = np.zeros(end, bool)
    for place in places.values():
        used[place] = True
    assert (memory[~used] == FILL).all(), "written outside of the results"
    return {
        n: memory[places[n]].view(a.dtype).reshape(a.shape) for n, a in arrays.items()
    }


def quantized(of: Spec, h: np.ndarray) -> dict[str, np.ndarray]:
    """Codes, scales and amax that the oracle makes of h."""
    formats = {f"{c}_format": getattr(of, f"{c}_format") for c in ("row", "col")}
    formats = {name: format for name, format in formats.items() if format}
    found = oracle.quantize_mxfp8(h, k_ndim=1, **formats, swizzled=of.swizzled)
    names = [n for n in of.results if n not in ("h", "dbias")]
    return dict(zip(names, map(np.asarray, found), strict=True))
