"""The helpers of the CPU tests, which the GPU tests run once more."""

import sys
from pathlib import Path

sys.path += [
    str(Path(__file__).parents[1] / name) for name in ("attention", "ops", "layers")
]
