"""Makes the modules of tests/ops importable: the same expectations hold on the GPU."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "ops"))
