"""House rules that the sources must keep: import direction, sizes, private names."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "te_flax"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FREE = {"typing", "errors", "config", "_version"}
ALLOWED = {
    "convert": {"adapters", "fusion", "paths", "recipe"},
    "report": {"adapters", "fusion", "paths", "recipe"},
    "inspect": {"paths", "quantize", "recipe"},
    "recording": {"inspect", "paths", "quantize", "recipe"},
    "fusion": {"adapters", "paths", "recipe"},
    "adapters": {"layers", "paths", "recipe"},
    "paths": set(),
    "plot": set(),
    "checkpoint_policies": {"functional"},
    "kernel_cache": {"layers", "recipe"},
    "layers": {"functional", "recipe", "sharding"},
    "functional": {"quantize", "ops", "sharding"},
    "recipe": {"quantize"},
    "quantize": {"ops"},
    "ops": {"backends"},
    "sharding": set(),
    "backends": set(),
}
ALSO = {("layers", "ops._choice")}  # a layer reads the kernel rules once and hands on
LIMIT = 400


def _imports(path: Path):
    """The dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{a.name}" for a in node.names)


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_direction(path):
    part = _part(path)
    if part in ("__init__", "testing"):
        return
    for name in _imports(path):
        if not name.startswith("te_flax."):
            continue
        to = name.split(".")[1]
        if to == part or to in FREE:
            assert part not in FREE, f"{path}: {part} imports nothing of ours"
            continue
        also = any(part == a and name.startswith(f"te_flax.{b}.") for a, b in ALSO)
        assert to in ALLOWED.get(part, set()) or also, f"{path} imports {name}"


def test_compiled_modules_have_one_importer():
    pattern = re.compile(r"te_flax\.(_C|_cuda)\b|import_module")
    users = {p.name for p in SOURCES if pattern.search(p.read_text())}
    assert users <= {"_extension.py"}


def test_private_jax_has_two_importers():
    users = {
        (p.name, n) for p in SOURCES for n in _imports(p) if n.startswith("jax._src")
    }
    assert users == {
        ("_op.py", "jax._src.dispatch.prim_requires_devices_during_lowering"),
        ("agreement.py", "jax._src.distributed.global_state"),  # as orbax reads it
    }


def test_assert_guards_nothing():
    for path in SOURCES:
        if _part(path) == "testing":  # asserts for tests
            continue
        lines = [
            n.lineno
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Assert)
        ]
        assert not lines, f"{path}: assert in lines {lines}; raise an error instead"


def _code():
    kinds = ("*.py", "*.cc", "*.cu", "*.cuh", "*.h", "*.inc")
    folders = ("te_flax", "csrc", "tests", "benchmarks", "examples", "docs")
    files = [p for f in folders for k in kinds for p in (ROOT / f).rglob(k)]
    return [*files, *ROOT.glob("*.py")]


def test_files_are_short():
    long = {}
    for path in _code():
        n = len(path.read_text().splitlines())
        if n > LIMIT and "build" not in path.relative_to(ROOT).parts:
            long[str(path.relative_to(ROOT))] = n
    assert not long


def test_functions_are_short():
    long = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                doc = node.body[0]
                text = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
                first = node.body[1].lineno if text and node.body[1:] else doc.lineno
                lines = (node.end_lineno or first) - first + 1
                if lines > 50:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert not long


def test_test_modules_have_names_of_their_own():
    """Their folders are no packages: pytest imports each name once."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    twice = {n for n in names if names.count(n) > 1} - {"conftest.py", "__init__.py"}
    assert not twice


def test_kernels_know_neither_xla_nor_nanobind():
    for path in (ROOT / "csrc").rglob("*"):
        if path.is_file() and "kernels" in path.relative_to(ROOT / "csrc").parts[:-1]:
            found = re.findall(r'#include [<"](?:xla|nanobind)[^>"]*', path.read_text())
            assert not found, f"{path}: {found}"


CPU_KERNELS = ("kernels*", "simd*.inc", "lanes_*.h", "scalar.h", "flush.h", "fp6.h")


def test_compiled_modules_use_no_streams():
    """A libstdc++ linked statically crashes in them (gcc 13 of a developer toolset)."""
    for path in (ROOT / "csrc").rglob("*.[hc]*"):
        headers = re.findall(r"#include <(\w*stream|iomanip|locale)>", path.read_text())
        assert not headers, (path, headers)


def test_cpu_kernels_include_only_themselves():
    """A vector kernel that shares inline code may run it on a CPU that lacks it."""
    csrc = ROOT / "csrc"
    groups = [list((csrc / "cpu").glob(pattern)) for pattern in CPU_KERNELS]
    assert all(groups), "a pattern of CPU_KERNELS names no file"
    closed = {csrc / "common" / "formats.h", *(p for group in groups for p in group)}
    free = {"<stdint.h>", "<string.h>", "<immintrin.h>"}
    allowed = free | {f'"{p.relative_to(csrc).as_posix()}"' for p in closed}
    for path in closed:
        found = re.findall(r"^\s*#\s*include\s*(\S+)", path.read_text(), re.MULTILINE)
        assert set(found) <= allowed, f"{path}: {set(found) - allowed}"


def test_every_setting_is_read():
    from te_flax.config import Config

    text = "".join(p.read_text() for p in SOURCES)
    unread = [f.name for f in fields(Config) if f"CONFIG.{f.name}" not in text]
    assert not unread


def test_handler_table_equals_the_declared_ops():
    from te_flax.ops._op import KernelOp

    declared = {op.handler for op in KernelOp.registry.values() if op.handler}
    tables = {}
    for table in ("handlers.def", "handlers_cuda.def"):
        path = ROOT / "csrc" / "common" / table
        names = re.findall(r"^X\((\w+),", path.read_text(), re.MULTILINE)
        tables[table] = set(names)
        assert len(names) == len(tables[table])
    assert set().union(*tables.values()) == declared
    only_cuda = tables["handlers_cuda.def"] - tables["handlers.def"]
    only_cuda -= {"gemm", "history_to_scale", "push_amaxes", "push_letter"}
    assert all(name.endswith("_values") for name in only_cuda)
