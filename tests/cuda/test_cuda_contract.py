"""The contract of the ops, and the fused ops' own tests, on the CUDA platform."""

from _gpu import GPU
from test_contract import (
    test_dtypes_and_sizes as test_dtypes_and_sizes,
)
from test_contract import (
    test_native_by_name as test_native_by_name,
)
from test_contract import (
    test_vmap as test_vmap,
)

pytestmark = GPU
