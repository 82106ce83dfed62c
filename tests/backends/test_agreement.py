"""Processes compare what they would generate, and settle whether all have a kernel."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import te_flax as te
from te_flax.backends import agreement

CODE = """
import logging, sys, jax
process = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, process)
logging.basicConfig()
import jax.numpy as jnp, numpy as np, te_flax as te
from _fake import Fake, text
from te_flax.ops.amax import AMAX
mesh = jax.make_mesh((16,), ("d",), (jax.sharding.AxisType.Explicit,))
cut = jax.NamedSharding(mesh, jax.P("d"))
def asked(dtype):
    x = jax.make_array_from_callback((64,), cut, lambda i: np.ones(64, dtype)[i])
    return "te_flax.jit." in text(AMAX, x)
fake = Fake(fails="disk full" if process == 1 else None)
te.backends.register_backend(fake, ("amax",))
print("agree:", te.backends.agree())
if process == 0:
    print("alone:", "te_flax.jit." in text(AMAX, jnp.ones(8, jnp.float16)))
print("before:", asked(jnp.float32))
try:
    with te.kernels("amax=jit"):
        asked(jnp.float32)
except NotImplementedError as error:
    print("by name:", error)
fake.fails = None
print("another:", asked(jnp.bfloat16))
te.backends.reset()
print("after:", asked(jnp.float32))
"""


def run(*settings):
    """What each of two processes prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = []
    here = os.path.dirname(__file__)
    for i, jit in enumerate(settings):
        path = os.pathsep.join((here, *filter(None, sys.path)))
        environment = os.environ | {"TE_FLAX_JIT": jit, "PYTHONPATH": path}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        command = [sys.executable, "-c", CODE, str(i), address]
        pipe = subprocess.PIPE
        running.append(
            subprocess.Popen(
                command, env=environment, stdout=pipe, stderr=pipe, text=True
            )
        )
    return [process.communicate(timeout=120) for process in running]


@pytest.mark.slow
def test_processes_with_other_settings_do_not_agree():
    for text, errors in run("0", "1"):
        assert "agree: False" in text, errors
        assert "before: False" in text
        assert "by name:" in text
        assert "the processes differ in what they would generate" in text


@pytest.mark.slow
def test_a_kernel_that_one_process_lacks_is_used_in_none():
    """A program of one process alone waits for nobody."""
    for process, (text, errors) in enumerate(run("1", "1")):
        assert "agree: True" in text, errors
        why = "process 1: failed: RuntimeError: disk full"
        assert errors.count(f"amax: no kernel of fake: {why}") == 1
        assert ("alone: True" in text) == (process == 0)
        said = ["before: False", "by name:", why, "another: True", "after: True"]
        places = [text.index(each) for each in said]
        assert places == sorted(places)


class Store:
    """Of the service of jax.distributed what is needed."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        there = lambda: key in self.values
        with self.changed:
            if not self.changed.wait_for(there, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


@pytest.fixture
def settled(monkeypatch):
    """Calls settle in threads that stand for processes: (process, error) of each."""
    store, here = Store(), threading.local()
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: here.process)
    monkeypatch.setattr(agreement, "_store", lambda: store)
    monkeypatch.setattr(agreement, "PATIENCE", 0.2)

    def one(process, error=""):
        here.process = process
        return agreement.settle("k", error)

    def several(*calls):
        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(lambda call: one(*call), calls))

    return several


@pytest.mark.parametrize("bad", [None, 0, 1, 2])
def test_all_read_one_verdict(settled, bad):
    calls = [(i, "no space" if i == bad else "") for i in (2, 0, 1)]
    want = "" if bad is None else f"process {bad}: no space"
    assert settled(*calls) == [want] * 3


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_who_comes_too_late_reads_what_the_others_decided(settled, absent):
    there = [(i,) for i in range(3) if i != absent]
    why = f"process {absent} did not come to this kernel in time"
    assert settled(*there) == [why] * 2
    assert settled((absent,)) == [why]


def test_another_try_is_another_question(monkeypatch):
    store = Store()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(agreement, "_store", lambda: store)
    now = agreement._try
    store.key_value_set(f"k/{now}/1", "failed")
    store.key_value_set(f"k/{now + 1}/1", "ready")
    assert agreement.settle("k", "") == "process 1: failed"
    assert agreement.settle("k", "") == "process 1: failed"  # who comes late reads it
    te.backends.reset()
    assert agreement.settle("k", "") == ""
    monkeypatch.setattr(agreement, "_store", lambda: None)
    assert "jax.distributed.initialize() was not called" in agreement.settle("k", "")
