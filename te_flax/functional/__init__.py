"""Pure functions with custom_vjp: the only place where two passes meet."""
