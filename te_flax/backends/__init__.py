"""Kernels that are generated at run time, by backends that can be added.

Nothing here is needed to install, build or import te_flax: a backend imports what it
needs when the first kernel is asked for. docs/backends.md says how to add one.
"""

from te_flax.backends.protocol import Call as Call
from te_flax.backends.protocol import JitKey as JitKey
from te_flax.backends.protocol import KernelBackend as KernelBackend
from te_flax.backends.protocol import View as View
from te_flax.backends.registry import agree as agree
from te_flax.backends.registry import ensure as ensure
from te_flax.backends.registry import register_backend as register_backend
from te_flax.backends.registry import reset as reset
