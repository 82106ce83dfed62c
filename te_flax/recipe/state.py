"""The statistics that delayed scaling keeps for one GEMM."""

import zlib
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from te_flax.errors import message
from te_flax.quantize.mailbox import MAILBOX_SIZE, push, scales
from te_flax.quantize.quantizer import Scale
from te_flax.recipe.base import Recipe
from te_flax.recipe.context import check_recipe, local_amax_axes, resolve
from te_flax.recipe.delayed import DelayedScaling
from te_flax.typing import Array

DEFAULT_HISTORY_LEN = 1024


class Fp8Stat(nnx.Variable):
    """A statistic of the FP8 state: checkpointed, never trained."""


class Fp8Mailbox(nnx.Variable):
    """Always zero; its cotangent carries amax(dy) out of the backward pass."""


class Fp8Record(Fp8Stat):
    """Statistics of a layer's operands while ``te.record`` is entered.

    float32 [..., 5]: amax, scale, saturated, flushed, nonfinite of each of the state's
    roles; NaN where a number is not known. It is no part of a checkpoint.
    """


class Fp8RecordMailbox(Fp8Mailbox):
    """Always zero; its cotangent carries the record's last column, that of dy."""


class Fp8Rounding(nnx.Variable):
    """Seed and count of the draws for stochastic rounding; checkpointed."""


class Fp8KernelCache(nnx.Variable):
    """A kernel's quantized copies while ``te.cache_quantized`` is entered."""


class Fp8Statistics(nnx.Module):
    """What the statistics of a GEMM and those of an attention have in common.

    Attributes:
        histories: names of the histories, of which the backward pass fills the last.
        roles: names of the arrays that are quantized, ``[*rows, histories]``; the
            statistics of an array lie where its name does.
        dy: histories that ``te.value_and_grad`` fills, newest entry at index 0.
        nonfinite: int32, how many pushes saw a NaN or an infinity.
        mailbox: zero; its cotangent carries what `dy` is filled with.
        use_running_average: True freezes all statistics (``model.eval()``).
        track_gradients: set by ``te.track_gradients`` while it is entered.
        record: an ``Fp8Record`` while ``te.record`` is entered.
        record_mailbox: an ``Fp8RecordMailbox``, float32 [*rows, 563], zero, likewise.
    """

    histories: ClassVar[tuple[str, ...]]
    roles: ClassVar[tuple]
    dy: Fp8Stat
    nonfinite: Fp8Stat
    mailbox: Fp8Mailbox
    use_running_average: bool = False
    track_gradients: bool = False
    record: Fp8Record | None = None
    record_mailbox: Fp8RecordMailbox | None = None

    def scaled_by(self, recipe: Recipe | None) -> bool:
        """Whether scales come from the histories under a recipe."""
        return isinstance(recipe, DelayedScaling)

    def set_view(self, use_running_average: bool | None = None, **kwargs) -> Mapping:
        """Takes part in ``nnx.view``.

        Args:
            use_running_average: if True, the statistics are frozen.
            **kwargs: not ours.

        Returns:
            The unused keywords.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average
        return kwargs

    @property
    def tracked(self) -> bool:
        """Whether dy uses its history here: somebody fills it and it is not frozen."""
        return self.track_gradients and not self.use_running_average

    def _window(self, recipe: DelayedScaling) -> int:
        window, length = recipe.amax_history_len, self.dy.shape[-1]
        if window > length:
            raise ValueError(
                message(
                    type(recipe).__name__,
                    "amax_history_len",
                    f"be <= {length}, the length of the layer's history",
                    window,
                    f"build the layer with amax_history_len={window}",
                )
            )
        return 1 if recipe.amax_compute_algo == "most_recent" else window


class Fp8State(Fp8Statistics):
    """Amax histories of the three operands of one GEMM.

    Histories hold the newest entry at index 0 and are read through
    ``stop_gradient``. x and the kernel are pushed by the layer's forward pass, dy by
    ``te.value_and_grad`` from the cotangent of the mailbox.

    Args:
        amax_history_len: length H of the histories; None takes that of the delayed
            recipe which the layer follows, its own or the one in context, else 1024.
        recipe: the layer's own recipe; None follows the context.
        rngs: seeds stochastic rounding from its stream "sr"; without one, from the
            parameters' stream, which does not advance. None is a fixed seed.

    Attributes:
        x: float32 [H], amax of the layer's input, one entry a forward call.
        kernel: float32 [H], amax of the kernel, one entry a forward call.
        dy: float32 [H], amax of the output's cotangent.
        nonfinite: int32 [], how many pushes saw a NaN or an infinity.
        mailbox: float32 [279], zero.
        rounding: uint32 [3], the seed of stochastic rounding and the number of draws.
            Plain words: a typed key in every layer would keep numpy from the model.
        use_running_average: True freezes all statistics (``model.eval()``).
        track_gradients: set by ``te.track_gradients`` while it is entered.
        record: an ``Fp8Record`` while ``te.record`` is entered.
        record_mailbox: an ``Fp8RecordMailbox``, float32 [563], zero, likewise.
        kernel_cache: an ``Fp8KernelCache`` while ``te.cache_quantized`` is entered.

    Raises:
        ValueError: `amax_history_len` is not a positive integer.
        TypeError: `recipe` is not a recipe.

    Example:
        >>> state = Fp8State(amax_history_len=2)
        >>> state.push(jnp.array([3.0, 0.0]), jnp.array([1.0, 0.0]))
        >>> float(state.amax("x", DelayedScaling(amax_history_len=2)))
        3.0
    """

    histories = roles = ("x", "kernel", "dy")
    kernel_cache: Fp8KernelCache | None = None

    def __init__(
        self,
        amax_history_len: int | None = None,
        recipe: Recipe | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        length = history_length("Fp8State", amax_history_len, recipe)
        self.x = Fp8Stat(jnp.zeros(length, jnp.float32))
        self.kernel = Fp8Stat(jnp.zeros(length, jnp.float32))
        self.dy = Fp8Stat(jnp.zeros(length, jnp.float32))
        self.nonfinite = Fp8Stat(jnp.zeros((), jnp.int32))
        self.rounding = Fp8Rounding(_seed(rngs))
        self.mailbox = Fp8Mailbox(jnp.zeros(MAILBOX_SIZE, jnp.float32))
        self.use_running_average = False
        self.track_gradients = False

    def amax(self, name: str, recipe: DelayedScaling) -> Array:
        """Reads the amax that an operand's scale is made from.

        Args:
            name: "x", "kernel" or "dy".
            recipe: gives the number of newest entries and how they are combined.

        Returns:
            float32 []; 0.0 while nothing has been pushed.

        Raises:
            ValueError: the recipe looks at more entries than the history holds.
        """
        history = jax.lax.stop_gradient(getattr(self, name)[...])
        return jnp.max(history[..., : self._window(recipe)], axis=-1)

    def scales(self, recipe: DelayedScaling) -> tuple[Scale, Scale, Scale]:
        """Reads the scales of x, kernel and dy that the histories ask for.

        Args:
            recipe: gives the number of newest entries and how they are combined.

        Returns:
            Scales of float32 []; 1 while nothing has been pushed.

        Raises:
            ValueError: the recipe looks at more entries than the histories hold.
        """
        held = (self.x[...], self.kernel[...], self.dy[...])
        x, kernel, dy = jax.lax.stop_gradient(held)
        window = self._window(recipe)
        return scales(x, kernel, dy, window=window, quantizers=recipe.quantizers())

    def push(self, x_amax: Array | None, kernel_amax: Array | None) -> None:
        """Records a forward call, unless the statistics are frozen.

        Args:
            x_amax: float32 [2], the largest finite magnitude of x and a flag that is
                1.0 if an element was NaN or infinite. An amax of 0 pushes nothing,
                nor does None.
            kernel_amax: float32 [2], the kernel's.
        """
        if self.use_running_average:
            return
        none = jnp.zeros((*self.nonfinite.shape, 2), jnp.float32)
        amaxes = (none if a is None else a for a in (x_amax, kernel_amax))
        held = (self.x[...], self.kernel[...], self.nonfinite[...])
        pushed = push(*jax.lax.stop_gradient((*held, *amaxes)))
        self.x[...], self.kernel[...], self.nonfinite[...] = pushed

    def rounding_key(self) -> Array | None:
        """Draws a key for stochastic rounding; None while the statistics are frozen.

        Returns:
            A key, another one at each call.
        """
        if self.use_running_average:
            return None
        words = jax.lax.stop_gradient(self.rounding[...])
        self.rounding[...] = words.at[2].add(jnp.uint32(1))
        key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
        return jax.random.fold_in(key, words[2])


def history_length(
    where: str, amax_history_len: int | None, recipe: Recipe | None
) -> int:
    """The length of the histories of a layer that follows a recipe.

    Args:
        where: the state that is built.
        amax_history_len: asked for; None takes that of the delayed recipe which the
            layer follows, its own or the one in context, else 1024.
        recipe: the layer's own recipe; None follows the context.

    Returns:
        The length.

    Raises:
        ValueError: it is not a positive integer.
        TypeError: `recipe` is not a recipe.
    """
    check_recipe(where, recipe)
    length = amax_history_len
    if length is None:
        # A layer built where recipes are disabled may be called elsewhere.
        own = isinstance(recipe, DelayedScaling)
        followed = recipe if own else resolve(recipe)
        delayed = isinstance(followed, DelayedScaling)
        length = followed.amax_history_len if delayed else DEFAULT_HISTORY_LEN
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        rule, remedy = "be an integer >= 1", "use None for the recipe's"
        raise ValueError(message(where, "amax_history_len", rule, repr(length), remedy))
    return length


def _seed(rngs: nnx.Rngs | None) -> Array:
    """Two random words and a count of 0."""
    if rngs is None:
        key = jax.random.key(0)
    elif "sr" in rngs:
        key = rngs.sr()
    else:
        stream = rngs.params
        key = jax.random.fold_in(stream.key[...], stream.count[...])
        key = jax.random.fold_in(key, zlib.crc32(b"sr"))
    words = jax.random.bits(key, (2,), jnp.uint32)
    return jnp.concatenate([words, jnp.zeros(1, jnp.uint32)])


def amax_axes(state: Fp8Statistics) -> tuple[str, ...]:
    """The manual mesh axes over which a layer's amax is maximised here.

    On Auto and Explicit meshes the amax ops reduce by themselves. Inside
    ``jax.shard_map`` each device sees its shard only, so the maximum is taken over
    the manual axes, except those that hold different layers: axes over which the
    statistics themselves vary, and ``te.autocast(..., local_amax_axes=)``.

    Args:
        state: the layer's statistics.

    Returns:
        Axis names, empty outside ``jax.shard_map``.

    Example:
        >>> amax_axes(Fp8State(amax_history_len=2))
        ()
    """
    mesh = jax.sharding.get_abstract_mesh()
    apart = _varying(state.nonfinite[...]) | set(local_amax_axes())
    return tuple(
        axis
        for axis in mesh.axis_names
        if axis in mesh.manual_axes and axis not in apart
    )


def _varying(array: Array) -> frozenset[str]:
    """The manual axes over which an array's type says it differs."""
    aval = jax.typeof(array)
    mat = getattr(aval, "mat", None)
    return frozenset(mat.varying if mat is not None else getattr(aval, "vma", ()))
