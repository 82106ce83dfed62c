"""CPU handlers of te_flax and what they were built with."""



def registrations() -> dict[str, object]:
    """Returns the XLA FFI handler of each name, as a capsule."""

def build_info() -> dict[str, object]:
    """
    Returns the te_flax version, the XLA FFI API and the compiler of this build.
    """

def simd_level() -> str:
    """
    Returns the instruction set in use; a TE_FLAX_SIMD that this CPU lacks raises ValueError.
    """

def testing(simd: str = 'auto', threads: int = 0, ieee: bool = False) -> None:
    """
    For tests: the instruction set, the number of threads (0: the pool's) and the float mode
    (ieee: subnormals are not flushed by the hardware) of all later handler calls in this
    process. testing() restores the defaults. No handler may be running.
    """
