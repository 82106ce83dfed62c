"""The one error that the examples report as a line instead of a traceback."""

from te_flax.errors import message


class InputError(Exception):
    """Something the user gave, or the machine lacks, that ends the run."""

    def __init__(self, text: object):
        super().__init__(" ".join(str(text).split()))  # one line, whatever comes in


def invalid(argument: str, rule: str, got: object, remedy: str) -> InputError:
    """Returns the error in te_flax's form: the rule, what was found, a way out."""
    return InputError(message("example", argument, rule, got, remedy))
