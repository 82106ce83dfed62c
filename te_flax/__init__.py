"""te_flax: Flax NNX layers for low-precision training.

The whole public surface: ``import te_flax as te``.
"""

from te_flax import backends as backends
from te_flax import checkpoint_policies as checkpoint_policies
from te_flax._version import __version__ as __version__
from te_flax.convert import convert as convert
from te_flax.convert import revert as revert
from te_flax.functional.activation import activation as activation
from te_flax.functional.attention.api import (
    dot_product_attention as dot_product_attention,
)
from te_flax.functional.attention.fp8 import AttentionConfig as AttentionConfig
from te_flax.functional.attention.fp8 import AttentionState as AttentionState
from te_flax.functional.collective import GatheredNorm as GatheredNorm
from te_flax.functional.collective import allgather_rms_norm as allgather_rms_norm
from te_flax.functional.config import ActivationConfig as ActivationConfig
from te_flax.functional.config import DenseConfig as DenseConfig
from te_flax.functional.config import GemmState as GemmState
from te_flax.functional.config import NormConfig as NormConfig
from te_flax.functional.config import Scales as Scales
from te_flax.functional.dense import dense as dense
from te_flax.functional.dense import layernorm_dense as layernorm_dense
from te_flax.functional.layernorm_mlp import MLPConfig as MLPConfig
from te_flax.functional.layernorm_mlp import MLPParams as MLPParams
from te_flax.functional.layernorm_mlp import layernorm_mlp as layernorm_mlp
from te_flax.functional.lora import Lora as Lora
from te_flax.functional.norm import norm as norm
from te_flax.functional.rotary import rotary_embedding as rotary_embedding
from te_flax.fusion import Fuse as Fuse
from te_flax.inspect import Inspection as Inspection
from te_flax.inspect import OperandRow as OperandRow
from te_flax.inspect import inspect as inspect
from te_flax.kernel_cache import cache_quantized as cache_quantized
from te_flax.layers.attention import DotProductAttention as DotProductAttention
from te_flax.layers.dense_general import DenseGeneral as DenseGeneral
from te_flax.layers.einsum import Einsum as Einsum
from te_flax.layers.layer_norm_dense_general import (
    LayerNormDenseGeneral as LayerNormDenseGeneral,
)
from te_flax.layers.layer_norm_mlp import LayerNormMLP as LayerNormMLP
from te_flax.layers.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from te_flax.layers.norm import LayerNorm as LayerNorm
from te_flax.layers.norm import RMSNorm as RMSNorm
from te_flax.layers.relative_position_biases import (
    RelativePositionBiases as RelativePositionBiases,
)
from te_flax.layers.transformer_layer import TransformerLayer as TransformerLayer
from te_flax.ops._choice import kernels as kernels
from te_flax.ops._report import kernel_report as kernel_report
from te_flax.quantize.block import BlockQuantizer as BlockQuantizer
from te_flax.quantize.gemm import gemm as gemm
from te_flax.quantize.mxfp6 import MXFP6Quantizer as MXFP6Quantizer
from te_flax.quantize.mxfp8 import MXFP8Quantizer as MXFP8Quantizer
from te_flax.quantize.nvfp4 import NVFP4Quantizer as NVFP4Quantizer
from te_flax.quantize.per_tensor import TensorQuantizer as TensorQuantizer
from te_flax.quantize.quantizer import Identity as Identity
from te_flax.quantize.quantizer import Quantized as Quantized
from te_flax.quantize.quantizer import Quantizer as Quantizer
from te_flax.quantize.quantizer import Scale as Scale
from te_flax.quantize.tensor import ScaledTensor as ScaledTensor
from te_flax.recipe.attention import Fp8AttentionState as Fp8AttentionState
from te_flax.recipe.base import Recipe as Recipe
from te_flax.recipe.block import Float8BlockScaling as Float8BlockScaling
from te_flax.recipe.checkpoint import checkpoint_filter as checkpoint_filter
from te_flax.recipe.checkpoint import restore_state as restore_state
from te_flax.recipe.context import HIGH_PRECISION as HIGH_PRECISION
from te_flax.recipe.context import autocast as autocast
from te_flax.recipe.context import current_recipe as current_recipe
from te_flax.recipe.context import is_recipe_supported as is_recipe_supported
from te_flax.recipe.current import Float8CurrentScaling as Float8CurrentScaling
from te_flax.recipe.delayed import DelayedScaling as DelayedScaling
from te_flax.recipe.mxfp6 import MXFP6BlockScaling as MXFP6BlockScaling
from te_flax.recipe.mxfp8 import MXFP8BlockScaling as MXFP8BlockScaling
from te_flax.recipe.nvfp4 import NVFP4BlockScaling as NVFP4BlockScaling
from te_flax.recipe.presets import load_recipe as load_recipe
from te_flax.recipe.state import Fp8Mailbox as Fp8Mailbox
from te_flax.recipe.state import Fp8Record as Fp8Record
from te_flax.recipe.state import Fp8Rounding as Fp8Rounding
from te_flax.recipe.state import Fp8Stat as Fp8Stat
from te_flax.recipe.state import Fp8State as Fp8State
from te_flax.recipe.transforms import absorb as absorb
from te_flax.recipe.transforms import diff_filter as diff_filter
from te_flax.recipe.transforms import grad as grad
from te_flax.recipe.transforms import track_gradients as track_gradients
from te_flax.recipe.transforms import value_and_grad as value_and_grad
from te_flax.recording import Recorder as Recorder
from te_flax.recording import record as record
from te_flax.report import Report as Report
from te_flax.report import report as report
from te_flax.sharding import logical_axis_rules as logical_axis_rules
