"""One server with the demo model for all tests that want one, as users start it."""

import atexit
import functools
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class ServerProcess:
    """A running `mlx-paged serve`.

    Attributes:
        url: without "/v1".
    """

    url: str
    process: subprocess.Popen

    def metrics(self):
        """Values of /metrics by name, with the state or reason after a slash."""
        values = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                name = "/".join([sample.name.removeprefix("mlx_paged_"), *sample.labels.values()])
                values[name] = sample.value
        return values

    def until(self, condition, seconds=20):
        """Wait until the metrics fulfil a condition. The engine tells its own once a second."""
        end = time.monotonic() + seconds
        while not condition(values := self.metrics()):
            assert time.monotonic() < end, values
            time.sleep(0.05)
        return values


@functools.cache
def start(model: Path, *options: str) -> ServerProcess:
    """A server on a free port, ended with this process."""
    command = [sys.executable, "-m", "mlx_paged", "serve", "--model", str(model), "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    atexit.register(stop, process)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"serving:\s+(http://\S+)/v1", line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return ServerProcess(found[1], process)
    raise RuntimeError("the server did not start:\n" + "".join(lines))


def stop(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.fixture(scope="session")
def demo_server(smollm2_path):
    """The demo model with a pool of 4,096 tokens, called "smollm2"."""
    return start(
        smollm2_path,
        *("--num-blocks", "256", "--served-model-name", "smollm2", "--no-access-log"),
        *("--log-level", "warning"),
    )
