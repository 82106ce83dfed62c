"""Two real processes compare what they would generate."""

import os
import socket
import subprocess
import sys

import pytest

CODE = """
import sys, jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[1]))
import te_flax as te
print("agree:", te.backends.agree())
"""


@pytest.mark.slow
@pytest.mark.parametrize("equal", [True, False])
def test_processes_with_other_settings_do_not_agree(equal):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = []
    for i in range(2):
        environment = os.environ | {"TE_FLAX_JIT": "1" if equal else str(i)}
        command = [sys.executable, "-c", CODE, str(i), address]
        running.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, text=True
            )
        )
    for process in running:
        text, _ = process.communicate(timeout=120)
        assert f"agree: {equal}" in text
