"""Runs PTX on numpy arrays: all threads of a grid at once, the lowest address first.

Enough of PTX for the kernels here. A barrier needs nothing: a thread comes to it only
when all others are there or beyond. ``ex2`` and ``rcp`` are exact, as no GPU's are.
"""

import re

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
TYPES = {"b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
TYPES |= {"u32": np.uint32, "u64": np.uint64, "s32": np.int32, "s64": np.int64}
WIDE = {"u32": np.uint64, "s32": np.int64}
TYPES |= {"f32": np.float32, "u16": np.uint16}


def _flush(x):
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(0, x), x).astype(
        "f4"
    )


def _codes(a, dtype):
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    found = np.clip(a, -largest, largest).astype(dtype).view(np.uint8)
    return np.where(np.isnan(a), 0x7F, found).astype(np.uint16)


def _halves(a, b, of):
    return np.concatenate([a.view(of), b.view(of)]).view(np.uint32)


def _max_halves(a, b):
    return np.maximum(a.view("u2"), b.view("u2")).view("u4")


def _nan_first(pick):
    return lambda a, b: np.where(
        np.isnan(a) | np.isnan(b), np.float32("nan"), pick(a, b)
    )


def _fma(a, b, c):
    return (a.astype("f8") * b + c).astype("f4")


def _pair(dtype):
    return lambda hi, lo: (
        lo.astype(dtype).view("u2").astype("u4")
        | (hi.astype(dtype).view("u2").astype("u4") << 16)
    )


def _shift(a, n, way):
    bits = 8 * a.dtype.itemsize
    n = n.astype(a.dtype)
    return way(a, np.minimum(n, bits - 1)) * (
        n < bits if way is not np.right_shift else 1
    )


FTZ = lambda op: lambda *x: _flush(op(*map(_flush, x)))
ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "mul.rn": np.multiply,
    "add.rn": np.add,
    "sub.rn": np.subtract,
    "mul.rn.ftz": FTZ(np.multiply),
    "add.rn.ftz": FTZ(np.add),
    "fma.rn": _fma,
    "mad.lo": lambda a, b, c: a * b + c,
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda a, n: _shift(a, n, np.left_shift),
    "shr": lambda a, n: _shift(a, n, np.right_shift),
    "max": np.fmax,
    "min": np.fmin,
    "max.NaN": _nan_first(np.maximum),
    "min.NaN": _nan_first(np.minimum),
    "div": lambda a, b: (a.astype("f8") / b).astype("i8").astype(a.dtype),
    "ex2.approx.ftz": FTZ(np.exp2),
    "rcp.approx.ftz": FTZ(lambda a: np.float32(1) / a),
    "mov": lambda a: a,
}
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "leu": lambda a, b: ~(a > b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


def entries(text: str) -> list[tuple[str, list[str], list[list[str]], dict[str, int]]]:
    """Name, parameters, instructions and labels of each kernel."""
    found = []
    for name, head, body in re.findall(
        r"\.entry (\w+)\((.*?)\).*?\n\{\n(.*?)\n\}\n", text, re.S
    ):
        params, code, labels = re.findall(r"(\w+_param_\d+)", head), [], {}
        for line in body.splitlines():
            line = line.split("//")[0].strip()
            if label := re.match(r"(\$\w+):", line):
                labels[label[1]] = len(code)
                continue
            if line.startswith("{ "):
                line = line[2:].removesuffix("}")
            for part in line.split(";"):
                if part.strip() and not part.strip().startswith("."):
                    code.append(part.strip().split(None, 1))
        found.append((name, params, code, labels))
    return found


class Grid:
    """One launch: registers are arrays over all threads."""

    def __init__(self, entry, grid: int, block: tuple[int, int], memory, values):
        self.name, params, self.code, self.labels = entry
        self.params = dict(zip(params, values, strict=True))
        self.memory, self.block = memory, block
        threads = block[0] * block[1]
        n = np.arange(grid * threads)
        self.registers = {
            "%tid.x": n % threads % block[0],
            "%tid.y": n % threads // block[0],
            "%ctaid.x": n // threads,
            "%laneid": n % 32,
        }
        self.tid = n % threads
        self.pc = np.zeros(n.size, np.int64)
        self.shared = np.zeros((grid, 1 << 14), np.uint8)

    def run(self):
        with np.errstate(all="ignore"):
            while (at := self.pc.min()) < len(self.code):
                self.lanes = np.flatnonzero(self.pc == at)
                self.pc[self.lanes] += 1
                self.step(*self.code[at])

    def step(self, op, rest=""):
        if op.startswith("@"):
            wanted = self.read(op.lstrip("@!"), "pred") != op.startswith("@!")
            self.lanes = self.lanes[wanted]
            op, rest = rest.split(None, 1)
        args = [a.strip() for a in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)]
        if not self.lanes.size:
            return
        if op == "ret":
            self.pc[self.lanes] = len(self.code)
        elif op == "bra":
            self.pc[self.lanes] = self.labels[args[0]]
        elif not op.startswith("bar"):
            self.compute(op, args)

    def read(self, name, kind):
        if name == "__dynamic_shmem__0":
            return np.zeros(self.lanes.size, TYPES[kind])
        if re.match(r"-?\d|0x|0f", name):
            value = int(name, 0) if name[:2] != "0f" else int(name[2:], 16)
            if kind == "f32":
                return np.full(self.lanes.size, value, np.uint32).view(np.float32)
            wide = np.full(self.lanes.size, value & (2**64 - 1), np.uint64)
            return wide.astype(TYPES.get(kind, bool))
        got = self.registers[name][self.lanes]
        if kind == "pred":
            return got
        return got.astype(f"u{TYPES[kind]().itemsize}").view(TYPES[kind])

    def write(self, name, value):
        if value.dtype != bool:
            value = value.view(f"u{value.dtype.itemsize}")
        held = self.registers.setdefault(name, np.zeros(self.pc.size, np.uint64))
        held[self.lanes] = value

    def address(self, text, shared=False):
        base, _, offset = text.strip("[]").partition("+")
        return self.read(base, "b32" if shared else "b64").astype("i8") + int(
            offset or 0
        )

    def compute(self, op, args):
        words = op.split(".")
        name, kind = ".".join(words[:-1]), words[-1]
        if words[0] in ("ld", "st", "red"):
            return self.access(words, args)
        if words[0] == "setp":
            a, b = (self.read(x, kind) for x in args[1:])
            return self.write(args[0], COMPARE[words[1]](a, b))
        if words[0] == "selp":
            a, b = (self.read(x, kind) for x in args[1:3])
            return self.write(args[0], np.where(self.read(args[3], "pred"), a, b))
        if words[0] == "shfl":
            return self.shuffle(words[2], args)
        if name == "redux.sync.max":
            warps = self.registers[args[1]].reshape(-1, 32).max(1)
            return self.write(args[0], np.repeat(warps, 32)[self.lanes].astype("u4"))
        if words[0] == "cvt":
            return self.convert(op, args)
        if op == "max.u16x2":
            a, b = (self.read(x, "b32") for x in args[1:])
            return self.write(args[0], _max_halves(a, b))
        if words[:2] == ["mul", "wide"]:
            a, b = (self.read(x, kind).astype(WIDE[kind]) for x in args[1:])
            return self.write(args[0], a * b)
        if "{" in args[0]:
            word = np.asarray(self.read(args[1], "b32"), np.uint32)
            for i, part in enumerate(args[0].strip("{}").split(",")):
                self.write(part.strip(), (word >> (16 * i)).astype("u2"))
            return None
        if args[1].startswith("{"):
            lo, hi = (
                self.read(p.strip(), "b16") for p in args[1].strip("{}").split(",")
            )
            return self.write(args[0], lo.astype("u4") | (hi.astype("u4") << 16))
        counts = {"shl": "b32", "shr": "b32"}
        kinds = [kind, counts.get(name, kind), kind]
        values = [self.read(x, k) for x, k in zip(args[1:], kinds, strict=False)]
        return self.write(args[0], np.asarray(ARITHMETIC[name](*values)))

    def shuffle(self, how, args):
        lane = self.lanes % 32
        source = (
            lane ^ int(args[2]) if how == "bfly" else np.full_like(lane, int(args[2]))
        )
        all_threads = self.lanes - lane + source
        self.write(args[0], self.registers[args[1]][all_threads].astype("u4"))

    def convert(self, op, args):
        words = op.split(".")
        if "e4m3x2" in words or "e5m2x2" in words:
            dtype = E4M3 if "e4m3x2" in words else E5M2
            if words[-1] != "f32":
                codes = self.read(args[1], "b16").view(np.uint8).view(dtype)
                halves = codes.astype(np.float16).view(np.uint32)
                return self.write(args[0], halves)
            hi, lo = (_codes(self.read(x, "f32"), dtype) for x in args[1:])
            return self.write(args[0], (lo | (hi << 8)).astype("u2"))
        if words[2] in ("bf16x2", "f16x2"):
            dtype = ml_dtypes.bfloat16 if words[2] == "bf16x2" else np.float16
            hi, lo = (self.read(x, "f32") for x in args[1:])
            return self.write(args[0], _pair(dtype)(hi, lo))
        if words[1:] == ["f32", "f16"]:
            found = self.read(args[1], "b16").view(np.float16).astype(np.float32)
            return self.write(args[0], found)
        to, of = TYPES[words[-2]], words[-1]
        return self.write(args[0], self.read(args[1], of).astype(to))

    def access(self, words, args):
        if words[:2] == ["ld", "param"]:
            value = self.params[re.match(r"\[(\w+?)(?:\+\d+)?\]", args[1])[1]]
            return self.write(args[0], np.full(self.lanes.size, value, np.uint64))
        load = words[0] == "ld"
        kind, shared = TYPES[words[-1]], words[1] == "shared"
        place = self.address(args[1] if load else args[0], shared)
        registers = re.findall(r"[%\w]+", args[0] if load else args[1])
        size = kind().itemsize
        assert not (place % (size * len(registers))).any(), "misaligned"
        view = self.memory.view(kind)
        if shared:
            block = self.lanes // (self.block[0] * self.block[1])
            view = self.shared.view(kind).reshape(-1)
            place = place + block * self.shared.shape[1]
        assert place.min() >= 0
        assert place.max() < view.nbytes
        for i, register in enumerate(registers):
            index = place // size + i
            if load:
                self.write(register, view[index])
            elif words[0] == "red":
                np.maximum.at(view, index, self.read(register, words[-1]))
            else:
                view[index] = self.read(register, words[-1])
        return None
