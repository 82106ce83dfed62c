"""What a compiled program launches: by its HLO, and by a profile of its steps."""

import collections
import re
from collections.abc import Callable

import jax

# They launch nothing.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
    *("after-all", "opt-barrier", "iota"),
}
_OPCODE = re.compile(r"= (?:\(.*?\)|\S+) ([a-z][\w-]*)\(")
GEMM = re.compile(r"gemm|nvjet|xmma|cutlass|splitk|matmul", re.IGNORECASE)
LIBRARY = "memset of a product"
QUANTIZE = re.compile(r"quantize|TensorTile|Mxfp8Kernel", re.IGNORECASE)
_LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperative|Mem(set|cpy)\w*Async)")


def launches_in_hlo(text: str) -> list[str]:
    """Custom calls by target and other instructions by opcode, as the thunks run them.

    Args:
        text: the optimized module; calls (command buffers among them) are followed.
    """
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            current = head[2]
            entry = current if head[1] else entry
            bodies[current] = []
        elif current:
            bodies[current].append(line)
    return list(_walk(bodies, entry))


def _walk(bodies, name):
    for line in bodies[name]:
        found = _OPCODE.search(line)
        if not found or found[1] in FREE:
            continue
        target = re.search(r'custom_call_target="([^"]*)"', line)
        callee = re.search(r"to_apply=%?([\w.-]+)", line)
        if found[1] == "call" and callee:
            yield from _walk(bodies, callee[1])
        elif target:
            yield target[1]
        else:
            yield line.split(" = ")[0].strip().removeprefix("ROOT ")


def profiled(step: Callable, folder, steps: int = 4) -> tuple[list[str], list[str]]:
    """The device's events of one step, and the host's launches of one kernel each.

    Args:
        step: runs one step; the same in every call.
        folder: takes the trace.
        steps: how many are traced.

    Returns:
        Names of kernels, memsets and copies, each as often as a step has it; names of
        the host's calls that launch one of them, or a graph, in all the steps.
    """
    for _ in range(8):  # XLA makes its command buffers
        jax.block_until_ready(step())
    with jax.profiler.trace(str(folder)):
        for _ in range(steps):
            last = step()
        jax.block_until_ready(last)
    (file,) = folder.rglob("*.xplane.pb")
    events, host = [], []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        on_device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if on_device and line.name.startswith("Stream"):
                events += [(event.start_ns, event.name) for event in line.events]
            elif not on_device:
                names = [event.name for event in line.events]
                host += [n for n in names if _LAUNCH.match(n) or "GraphLaunch" in n]
    assert events, "the profile has no events of the device"
    device = collections.Counter(_named([name for _, name in sorted(events)]))
    for name, count in device.items():
        assert count % steps == 0, (name, count, dict(device))
    return [n for n, count in device.items() for _ in range(count // steps)], host


def _named(names: list[str]) -> list[str]:
    """Names in order; a memset right before a product is cuBLASLt's."""
    follows = [*names[1:], ""]
    pairs = zip(names, follows, strict=True)
    own = [n.startswith("Memset") and bool(GEMM.search(next)) for n, next in pairs]
    return [LIBRARY if o else n for n, o in zip(names, own, strict=True)]


def kinds(names: list[str]) -> dict[str, list[str]]:
    """The names of products and their memsets, of quantizers, and of all else."""
    found: dict[str, list[str]] = {"gemm": [], "quantize": [], "small": [], LIBRARY: []}
    for name in names:
        if name == LIBRARY:
            found[LIBRARY].append(name)
            continue
        quantize = QUANTIZE.search(name) and "dequantize" not in name.lower()
        kind = "quantize" if quantize else "gemm" if GEMM.search(name) else "small"
        found[kind].append(name)
    return found
