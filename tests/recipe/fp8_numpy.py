"""The FP8 state in plain numpy: what the trajectory tests compare against.

Written from the documented rules alone; shares no code with te_flax. Sums run in
float64, so a result differs from the library's by float32 rounding only.
"""

import math

import ml_dtypes
import numpy as np

FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}


def amax(array):
    """(largest finite magnitude, whether anything is not finite)."""
    array = np.asarray(array, np.float32)
    finite = np.isfinite(array)
    return float(np.max(np.abs(array[finite]), initial=0.0)), not finite.all()


def scale_of(value, format, margin=0):
    if value == 0:
        return np.float32(1)
    scale = np.float32(FORMATS[format][1]) / np.float32(value)
    scale = np.float64(scale) * 2.0**-margin
    return np.float32(np.clip(scale, 2.0**-126, 2.0**126))


def quantize(array, scale, format):
    """The values, in float64, that the codes of an array stand for."""
    dtype, limit = FORMATS[format]
    scaled = np.clip(np.asarray(array, np.float32) * scale, -limit, limit)
    return scaled.astype(dtype).astype(np.float64) * np.float64(np.float32(1) / scale)


def bound(value):
    """The power of two at or above a positive value."""
    mantissa, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


class DenseState:
    """Histories of one dense layer, its product and its gradients."""

    def __init__(self, length, window=None, margin=0, most_recent=False):
        self.history = {name: [0.0] * length for name in ("x", "kernel", "dy")}
        self.window = window or length
        self.margin, self.most_recent = margin, most_recent
        self.nonfinite = 0
        self.contributions = []
        self.frozen = False
        self.dy_current = False

    def reference(self, name):
        entries = self.history[name][: self.window]
        return entries[0] if self.most_recent else max(entries)

    def push(self, name, value):
        if value > 0 and not self.frozen:
            self.history[name] = [value, *self.history[name][:-1]]

    def scale(self, name, format):
        return scale_of(self.reference(name), format, self.margin)

    def forward(self, x, kernel):
        """Returns y and what the backward pass needs."""
        qx = quantize(x, self.scale("x", "e4m3"), "e4m3")
        qk = quantize(kernel, self.scale("kernel", "e4m3"), "e4m3")
        for name, array in (("x", x), ("kernel", kernel)):
            value, bad = amax(array)
            self.push(name, value)
            self.nonfinite += bad and not self.frozen
        return qx @ qk, (qx, qk)

    def backward(self, dy, saved):
        """Returns dx and dkernel; amax(dy) waits until `deliver`."""
        qx, qk = saved
        value, bad = amax(dy)
        self.contributions.append((value, bad))
        current = self.dy_current or self.frozen
        scale = scale_of(value, "e5m2", self.margin)
        qdy = quantize(dy, scale if current else self.scale("dy", "e5m2"), "e5m2")
        return qdy @ qk.T, qx.reshape(-1, qx.shape[-1]).T @ qdy.reshape(
            -1, qdy.shape[-1]
        )

    def deliver(self, copies=1):
        """The end of a te.value_and_grad call: one push of what came back."""
        values = [v for v, _ in self.contributions if v > 0]
        exact = len(values) * copies == 1
        if values:
            self.push("dy", values[0] if exact else bound(max(values)))
        bad = any(bad for _, bad in self.contributions)
        self.nonfinite += bad and not self.frozen
        self.contributions = []
