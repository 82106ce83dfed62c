"""DenseGeneral: nnx.LinearGeneral whose product follows the recipe."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.sharding import NamedSharding, PartitionSpec

from te_flax import sharding
from te_flax.errors import message, part_of
from te_flax.layers import _arguments, _gemm
from te_flax.layers._params import init_param
from te_flax.recipe.base import Recipe
from te_flax.recipe.context import check_recipe
from te_flax.recipe.state import Fp8State
from te_flax.typing import Array, Axes, Initializer

DEFAULT_KERNEL_INIT = nnx.initializers.lecun_normal()
ZEROS = nnx.initializers.zeros_init()


class DenseGeneral(nnx.Module):
    """Linear map over one or several axes: ``y = x . kernel + bias``.

    Without a recipe it equals :class:`flax.nnx.LinearGeneral`. Under one, x, kernel
    and dy are quantized, each in one pass, and all three products read the codes.

    Args:
        in_features: size of each contracted axis; int or tuple.
        out_features: size of each new axis; int or tuple.
        axis: contracted axes of the input, as many as ``in_features``; as in nnx they
            are taken in ascending order.
        use_bias: whether to add a bias.
        dtype: of the computation and of y; None promotes the input's with the
            parameters'. A recipe reads the kernel in ``param_dtype`` all the same.
        param_dtype: of the parameters.
        precision: of the product without a recipe: None, "default", "high",
            "highest" or a ``jax.lax.Precision``.
        kernel_init: called with the kernel's 2-D shape.
        bias_init: called with the bias's 1-D shape.
        promote_dtype: as in :class:`flax.nnx.LinearGeneral`.
        preferred_element_type: dtype of y; None takes the computation's.
        kernel_axes: a logical axis, or None, for each dim of the kernel.
        bias_axes: a logical axis, or None, for each dim of the bias.
        input_axes: a logical axis, or None, for each dim of the input.
        dot_input_axes: likewise as the product reads it, where that differs: what
            travels is its codes.
        transpose_batch_sequence: whether inputs are ``[sequence, batch, ...]``;
            axes of inputs stay in batch-first order and are turned round.
        enable_low_rank_adaptation: whether ``scale * (x . lora_a) . lora_b`` is added.
        low_rank_adaptation_dim: its rank, >= 1.
        low_rank_adaptation_alpha: its scale is alpha / rank; None is a scale of 1.
        quantization_checkpoint_name: of the quantized copies, for the policies of
            ``jax.checkpoint``; None is "te_quantized".
        recipe: beats the recipe of :func:`te_flax.autocast`; None follows it;
            ``te_flax.HIGH_PRECISION`` never quantizes.
        amax_history_len: entries of the amax histories; None takes the recipe's in
            context, else 1024.
        kernel_metadata: metadata of the kernel's variable.
        bias_metadata: metadata of the bias's variable.
        rngs: keys for the parameters, and of the stream "sr" for stochastic rounding.

    Raises:
        ValueError: ``in_features`` and ``axis`` differ in length, a feature is < 1, or
            an ``*_axes`` names another number of dims.
        TypeError: ``recipe`` is no recipe, a dtype no float, a flag no bool, a name no
            str, or logical axes no tuple.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> from flax import nnx
        >>> layer = te.DenseGeneral(128, 256, rngs=nnx.Rngs(0))
        >>> with te.autocast(te.DelayedScaling()):
        ...     layer(jnp.ones((8, 128))).shape
        (8, 256)

    Source: TransformerEngine's and flax.nnx's layers of the same role; Micikevicius et
    al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433), section 2.
    """

    kernel_order: tuple[int, ...] | None = None  # of the kernel's dims, where another

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = DEFAULT_KERNEL_INIT,
        bias_init: Initializer = ZEROS,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        kernel_axes: Axes | None = None,
        bias_axes: Axes | None = None,
        input_axes: Axes | None = None,
        dot_input_axes: Axes | None = None,
        transpose_batch_sequence: bool = False,
        enable_low_rank_adaptation: bool = False,
        low_rank_adaptation_dim: int = 32,
        low_rank_adaptation_alpha: float | None = None,
        quantization_checkpoint_name: str | None = None,
        recipe: Recipe | None = None,
        amax_history_len: int | None = None,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
    ):
        where = type(self).__name__
        _arguments.check_options(where, locals())
        self.in_features, self.out_features = _arguments.features(
            where, in_features=in_features, out_features=out_features
        )
        self.axis = _arguments.axes(where, axis, len(self.in_features))
        check_recipe(where, recipe)
        _arguments.check_float_dtypes(
            where,
            dtype=dtype,
            param_dtype=param_dtype,
            preferred_element_type=preferred_element_type,
        )
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = _arguments.precision(where, precision)
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type
        self.input_axes, self.dot_input_axes = input_axes, dot_input_axes
        self.transpose_batch_sequence = transpose_batch_sequence
        self.recipe = recipe
        n_in, n_out = math.prod(self.in_features), math.prod(self.out_features)
        make = functools.partial(init_param, where, dtype=param_dtype, rngs=rngs)
        self.kernel = make(
            kernel_init,
            (*self.in_features, *self.out_features),
            (n_in, n_out),
            kernel_axes=kernel_axes,
            metadata=kernel_metadata,
        )
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = make(
                bias_init,
                self.out_features,
                (n_out,),
                bias_axes=bias_axes,
                metadata=bias_metadata,
            )
        self.quantization_checkpoint_name = quantization_checkpoint_name
        self._init_lora(
            enable_low_rank_adaptation,
            low_rank_adaptation_dim,
            low_rank_adaptation_alpha,
            kernel_init,
            make,
        )
        with part_of(where):
            self.fp8 = Fp8State(amax_history_len, recipe=recipe, rngs=rngs)

    def __call__(
        self, x: Array, out_sharding: PartitionSpec | NamedSharding | None = None
    ) -> Array:
        """Applies the layer.

        Args:
            x: float array that holds ``in_features`` at ``axis``.
            out_sharding: wanted of y.

        Returns:
            ``[*batch, *out_features]``, batch being the axes of x that remain.

        Raises:
            ValueError: the rank or the contracted sizes of x do not fit.
            TypeError: x is no float32, bfloat16 or float16 array (float64 with
                ``jax_enable_x64`` goes through without a recipe).
        """
        x, axes = self._contracted_last(x)
        return _gemm.apply(self, x, axes=axes, out_sharding=out_sharding)[0]

    def matrix(self, kernel: Array) -> Array:
        """The kernel as ``[*in, *out]``, behind the dims of stacked layers.

        Args:
            kernel: the layer's, or some of those that are stacked in it.

        Returns:
            The same numbers; the same array unless the layer keeps another order.
        """
        if self.kernel_order is None:
            return kernel
        stacked = kernel.ndim - len(self.kernel_order)
        order = (*range(stacked), *(stacked + i for i in self.kernel_order))
        return jnp.transpose(kernel, order)

    def _contracted_last(
        self, x: Array
    ) -> tuple[Array, tuple[Axes | None, Axes | None]]:
        """Checks x and moves its contracted axes to the end."""
        where = type(self).__name__
        x = _arguments.float_array(where, x)
        if any(not -x.ndim <= a < x.ndim for a in self.axis):
            raise ValueError(
                message(
                    where,
                    "x",
                    f"have the axes {self.axis}",
                    f"rank {x.ndim}, shape {x.shape}",
                    "add the missing dims or change axis",
                )
            )
        axis = tuple(sorted(a % x.ndim for a in self.axis))
        if len(set(axis)) != len(axis):
            raise ValueError(
                message(
                    where,
                    "axis",
                    f"name different axes of x of rank {x.ndim}",
                    self.axis,
                    "contract each axis once",
                )
            )
        found = tuple(x.shape[a] for a in axis)
        if found != self.in_features:
            raise ValueError(
                message(
                    where,
                    "x",
                    f"hold in_features {self.in_features} at axis {self.axis}",
                    f"{found} in shape {x.shape}",
                    "change in_features or the input",
                )
            )
        rest = tuple(a for a in range(x.ndim) if a not in axis)
        return self._placed(x, (*rest, *axis))

    def _placed(
        self, x: Array, order: tuple[int, ...]
    ) -> tuple[Array, tuple[Axes | None, Axes | None]]:
        """Places x, orders its dims, and returns its logical axes with it.

        They are those that it has and those that it has where the product reads it.
        """
        given = self._axes("input_axes", x.ndim)
        x = sharding.constrain(x, given)
        if order != tuple(range(x.ndim)):
            x = jnp.transpose(x, order)
        read = self._axes("dot_input_axes", x.ndim) or given
        given, read = (a and tuple(a[i] for i in order) for a in (given, read))
        return x, (given, read)

    def _axes(self, name: str, ndim: int) -> Axes | None:
        """The logical axes of x in its own order."""
        where, flipped = type(self).__name__, self.transpose_batch_sequence
        return _arguments.input_axes(where, getattr(self, name), ndim, flipped, name)

    def _init_lora(
        self, enable: bool, rank: int, alpha: float | None, init: Initializer, make: Any
    ) -> None:
        """Low-rank factors: a like the kernel, b zeros, so that they add nothing."""
        self.lora_a = self.lora_b = nnx.data(None)
        where = type(self).__name__
        (rank,) = _arguments.sizes(where, low_rank_adaptation_dim=rank)
        self.lora_scale = 1.0
        if alpha is not None:
            remedy = "use None for a factor of 1"
            name = "low_rank_adaptation_alpha"
            alpha = _arguments.number(where, name, alpha, 0, math.inf, remedy)
            self.lora_scale = alpha / rank
        if not enable:
            return
        n_in, n_out = math.prod(self.in_features), math.prod(self.out_features)
        a, b = (*self.in_features, rank), (rank, *self.out_features)
        self.lora_a = make(init, a, (n_in, rank), lora_axes=None, metadata={})
        self.lora_b = make(ZEROS, b, (rank, n_out), lora_axes=None, metadata={})
