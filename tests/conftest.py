"""Eight CPU devices, strict dtype promotion, and ``examples`` importable."""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Last, so that an installed te_flax is the one under test.
sys.path.append(str(Path(__file__).resolve().parents[1]))
