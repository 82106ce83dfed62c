"""The statistics that delayed scaling keeps for one attention."""

import jax
import jax.numpy as jnp

from te_flax.quantize.mailbox import MAILBOX_SIZE, push, scales
from te_flax.quantize.quantizer import Scale
from te_flax.recipe.base import Quantizers, Recipe
from te_flax.recipe.delayed import DelayedScaling
from te_flax.recipe.state import Fp8Mailbox, Fp8Stat, Fp8Statistics, history_length
from te_flax.typing import Array

OPERANDS = 5  # in each pass


def attention_quantizers(recipe: DelayedScaling) -> Quantizers:
    """Those of attention: e4m3 backwards too, as XLA's call has one FP8 format."""
    quantizers = recipe.quantizers()
    return quantizers._replace(dy=quantizers.x)


class Fp8AttentionState(Fp8Statistics):
    """Amax histories of the ten arrays that FP8 attention rounds.

    As :class:`te_flax.Fp8State`, one history a row.

    Args:
        amax_history_len: length H of the histories; None takes that of the delayed
            recipe which the layer follows, its own or the one in context, else 1024.
        recipe: the layer's own recipe; None follows the context.

    Attributes:
        forward: float32 [5, H], amaxes of q, k, v, of the probabilities and of o.
        dy: float32 [5, H], amaxes of do, dp, dq, dk and dv.
        nonfinite: int32 [5], how many pushes saw a NaN or an infinity; each row counts
            those of both histories.
        mailbox: float32 [5, 279], zero.
        use_running_average: True freezes all statistics (``model.eval()``).
        track_gradients: set by ``te.track_gradients`` while it is entered.
        record: an ``Fp8Record``, float32 [5, 2, 5], while ``te.record`` is entered.
        record_mailbox: an ``Fp8RecordMailbox``, float32 [5, 563], zero, likewise.

    Raises:
        ValueError: `amax_history_len` is not a positive integer.
        TypeError: `recipe` is not a recipe.

    Example:
        >>> state = Fp8AttentionState(amax_history_len=2)
        >>> state.push(jnp.ones((5, 2)) * jnp.array([448.0, 0.0]))
        >>> forward, _ = state.scales(DelayedScaling(amax_history_len=2))
        >>> float(forward.scale[0])
        1.0
    """

    histories = ("forward", "dy")
    roles = (("q", "do"), ("k", "dp"), ("v", "dq"), ("s", "dk"), ("o", "dv"))

    def __init__(
        self, amax_history_len: int | None = None, recipe: Recipe | None = None
    ):
        length = history_length("Fp8AttentionState", amax_history_len, recipe)
        self.forward = Fp8Stat(jnp.zeros((OPERANDS, length), jnp.float32))
        self.dy = Fp8Stat(jnp.zeros((OPERANDS, length), jnp.float32))
        self.nonfinite = Fp8Stat(jnp.zeros(OPERANDS, jnp.int32))
        self.mailbox = Fp8Mailbox(jnp.zeros((OPERANDS, MAILBOX_SIZE), jnp.float32))
        self.use_running_average = False
        self.track_gradients = False

    def scaled_by(self, recipe: Recipe | None) -> bool:
        """Whether a recipe quantizes attention."""
        return isinstance(recipe, DelayedScaling) and recipe.fp8_attention

    def scales(self, recipe: DelayedScaling) -> tuple[Scale, Scale]:
        """Reads the scales that the histories ask for.

        Args:
            recipe: gives the number of newest entries and how they are combined.

        Returns:
            Those of the forward and of the backward pass, float32 [5]; 1 while nothing
            has been pushed.

        Raises:
            ValueError: the recipe looks at more entries than the histories hold.
        """
        forward, dy = jax.lax.stop_gradient((self.forward[...], self.dy[...]))
        window = self._window(recipe)
        quantizers = attention_quantizers(recipe)
        found = scales(forward, forward, dy, window=window, quantizers=quantizers)
        return found[0], found[2]

    def push(self, amaxes: Array) -> None:
        """Records a forward call, unless the statistics are frozen.

        Args:
            amaxes: float32 [5, 2] of q, k, v, the probabilities and o: the largest
                finite magnitude and a flag that is 1.0 if an element was NaN or
                infinite. An amax of 0 pushes nothing.
        """
        if self.use_running_average:
            return
        held, amaxes = jax.lax.stop_gradient((self.forward[...], amaxes))
        nonfinite = jax.lax.stop_gradient(self.nonfinite[...])
        none = jnp.zeros_like(amaxes)
        pushed = push(held, jnp.zeros_like(held), nonfinite, amaxes, none)
        self.forward[...], _, self.nonfinite[...] = pushed
