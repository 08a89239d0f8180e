"""Settings of `idioms.py` in a module of their own, as larger projects have them."""

gain = 1.0


class Options:
    """Settings in attributes of a class, or of an object."""

    gain = 1.0

    def __init__(self):
        self.scale = 1.0


OPTIONS = Options()


def scaled(x):
    """A tensor times a setting."""
    return x * gain
