"""Quantizers, scaled tensors and the products over them."""
