"""What a functional must know besides its arrays: static configurations, scales."""

import dataclasses
from typing import NamedTuple

from jax.sharding import PartitionSpec

from te_flax.quantize.quantizer import Identity, Quantizer
from te_flax.quantize.quantizer import Quantized as Quantized
from te_flax.quantize.quantizer import Scale as Scale
from te_flax.sharding import Placement
from te_flax.typing import Array

IDENTITY = Identity()
NOWHERE = Placement()
QUANTIZED_NAME = "te_quantized"


class Scales(NamedTuple):
    """The scales of the three operands where earlier steps fix them.

    None in place of one: it comes from the array itself.

    Attributes:
        x: of the input.
        kernel: of the kernel.
        dy: of the cotangent.

    Example:
        >>> Scales().dy is None
        True
    """

    x: Scale | None = None
    kernel: Scale | None = None
    dy: Scale | None = None


class GemmState(NamedTuple):
    """The arrays beside the operands of one GEMM that its recipe asks for.

    Attributes:
        scales: from the amaxes of earlier steps under delayed scaling.
        mailbox: float32 ``[279]``; its cotangent carries amax(dy) out of the backward
            pass when ``DenseConfig.report_dy``.
        key: random key of stochastic rounding.
        kernel: the kernel's copies where they were made before.
        record: float32 ``[563]`` while ``te.record`` is entered; its cotangent carries
            the statistics of dy out of the backward pass.

    Example:
        >>> GemmState().mailbox is None
        True
    """

    scales: Scales = Scales()
    mailbox: Array | None = None
    key: Array | None = None
    kernel: Quantized | None = None
    record: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """All that both passes of one GEMM must know before tracing.

    Attributes:
        x: quantizer of the input.
        kernel: quantizer of the kernel.
        dy: quantizer of the cotangent.
        split_accumulator: of the forward, input-gradient and kernel-gradient GEMM.
        out_dtype: name of y's dtype; None takes x's.
        precision: of the products of unquantized operands.
        out_sharding: wanted of y.
        input: placement that x was given.
        operand: placement of the quantized input, after a norm or an activation, in
            both passes. Where it leaves fewer mesh axes on the tokens than ``input``
            or ``out_sharding``, codes of x and of dy are gathered.
        amax_axes: manual mesh axes over which an amax is the maximum.
        report_dy: whether amax(dy) leaves through the mailbox's cotangent.
        checkpoint_name: under which ``jax.checkpoint`` policies find the copies.
        impl: kernel rules of every op of both passes.

    Example:
        >>> import jax.numpy as jnp, te_flax as te
        >>> e4m3 = te.TensorQuantizer()
        >>> e5m2 = te.TensorQuantizer(format="e5m2")
        >>> config = DenseConfig(x=e4m3, kernel=e4m3, dy=e5m2)
        >>> te.dense(jnp.ones((2, 3)), jnp.ones((3, 4)), config=config)[0].shape
        (2, 4)
    """

    x: Quantizer = IDENTITY
    kernel: Quantizer = IDENTITY
    dy: Quantizer = IDENTITY
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)
    out_dtype: str | None = None
    precision: str = "default"
    out_sharding: PartitionSpec | None = None
    input: Placement = NOWHERE
    operand: Placement = NOWHERE
    amax_axes: tuple[str, ...] = ()
    report_dy: bool = False
    checkpoint_name: str = QUANTIZED_NAME
    impl: tuple | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The norm in front of a GEMM, or alone.

    Attributes:
        kind: "layernorm" or "rmsnorm".
        epsilon: added to the variance, >= 0.
        zero_centered_gamma: whether the factor is ``1 + gamma``.
        out_dtype: name of the result's dtype; None takes x's.
        impl: kernel rules of the norm alone; in front of a GEMM its rules count.

    Example:
        >>> NormConfig(kind="rmsnorm").epsilon
        1e-06
    """

    kind: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    out_dtype: str | None = None
    impl: tuple | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """An activation, alone or gated.

    Attributes:
        name: such as "gelu" or "silu,linear"; see ``te_flax.ops.activation``.
        limit: bound of the clamped activations.
        alpha: factor inside the sigmoid of "clamped_silu".
        offset: added by "clamped_linear".
        out_dtype: name of the result's dtype; None takes x's.
        impl: kernel rules of the activation alone.

    Example:
        >>> ActivationConfig(name="silu,linear").slices
        2
    """

    name: str = "gelu"
    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0
    out_dtype: str | None = None
    impl: tuple | None = None

    @property
    def slices(self) -> int:
        """The number of slices that the activation reads."""
        return self.name.count(",") + 1

    @property
    def attrs(self) -> dict[str, str | float]:
        """The attributes of the ops."""
        return {
            "activation": self.name,
            "limit": self.limit,
            "alpha": self.alpha,
            "offset": self.offset,
        }
