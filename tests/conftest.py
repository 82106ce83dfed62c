"""Eight CPU devices, strict dtype promotion, and ``examples`` importable.

Compiling takes most of the suite's time, and half of that are optimizations. XLA leaves
them out here, but not in the files of OPTIMIZED, whose bits have to be the same in the
programs that a user compiles; with JAX_DISABLE_MOST_OPTIMIZATIONS=0 in none.
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Last, so that an installed te_flax is the one under test.
sys.path.append(str(Path(__file__).resolve().parents[1]))

FAST = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
applied = {"fast": FAST}
OPTIMIZED = (
    "layers/test_fused_state.py",
    "ops/",
    "quantize/",
    "recipe/test_mailbox.py",
    "recipe/test_state_trajectory.py",
)


@pytest.fixture(autouse=True, scope="module")
def _optimized(request):
    file = request.path.relative_to(Path(__file__).parent).as_posix()
    fast = FAST and not file.startswith(OPTIMIZED)
    if applied["fast"] != fast:
        applied["fast"] = fast
        jax.config.update("jax_disable_most_optimizations", fast)
        jax.clear_caches()  # which do not tell the two apart
