"""The helpers of the CPU tests, which the GPU tests run once more."""

import sys
from pathlib import Path

FOLDERS = ("attention", "collective", "examples", "layers", "ops")
sys.path += [str(Path(__file__).parents[1] / name) for name in FOLDERS]
