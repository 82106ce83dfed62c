"""te_flax: Flax NNX layers for low-precision training."""
