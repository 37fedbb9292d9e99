"""The demo as `make demo` runs it: a gateway of its own, real answers, a clean end."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples/demo.py"


@pytest.mark.timeout(900)
def test_the_demo_shows_each_call_and_a_high_hit_rate():
    done = subprocess.run([sys.executable, DEMO], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"│ (researcher|fact-checker|writer) ", done.stdout)
    assert rows == ["researcher", "fact-checker", "writer"] * 3
    (rate,) = re.findall(r"Hit rate ([\d.]+)%", done.stdout)
    assert float(rate) > 60


def test_a_gateway_that_is_not_there_is_a_failure():
    command = [sys.executable, DEMO, "--url", "http://127.0.0.1:9/v1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "http://127.0.0.1:9/v1" in done.stdout
