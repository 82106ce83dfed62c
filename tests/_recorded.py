"""A dense layer that hands its operands to te.record."""

import te_flax as te
from te_flax.recipe.context import resolve
from te_flax.recipe.record import record_operands


class Dense(te.DenseGeneral):
    def __call__(self, x, out_sharding=None):
        recipe = resolve(self.recipe)
        if recipe is not None:
            amaxes = None
            if isinstance(recipe, te.DelayedScaling):
                amaxes = te.Amaxes(
                    self.fp8.amax("x", recipe),
                    self.fp8.amax("kernel", recipe),
                    self.fp8.amax("dy", recipe) if self.fp8.tracked else None,
                )
            record_operands(
                self.fp8, recipe, x=x, kernel=self.kernel[...], amaxes=amaxes
            )
        return super().__call__(x, out_sharding=out_sharding)
