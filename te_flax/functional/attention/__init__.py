"""Scaled dot-product attention: one function, several implementations."""
