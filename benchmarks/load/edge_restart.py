"""Restarts two replicas of the demo model in turn while 2,000 requests run, and checks every answer.

    python benchmarks/load/edge_restart.py --requests 2000

First, undisturbed replicas answer every request. Then they answer the same requests again while each replica in turn
gets SIGTERM with a grace period too short for its running requests, and is started again. Reports the number of failed
requests, of different texts, and of restarts.
"""

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from meshserve.runtime.client.client import AsyncClient, SamplingFields

_GRACE_SECONDS = 0.2


class Replica:
    """A server process on a fixed port."""

    def __init__(self, cache: str) -> None:
        self._cache = cache
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.start()

    def start(self) -> None:
        flags = [
            "--model=demo",
            f"--port={self.port}",
            "--tp=1",
            "--cpu-devices=1",
            "--dtype=float32",
            "--page-size=16",
        ]
        flags += ["--max-running=8", "--max-step-tokens=8", "--num-pages=512", f"--drain-seconds={_GRACE_SECONDS}"]
        command = [sys.executable, "-m", "meshserve", "serve", *flags]
        # Restarts must not wait for the compiler, so the programs come from JAX's own cache on disk.
        cache = {"JAX_COMPILATION_CACHE_DIR": self._cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | cache
        )
        assert self.process.stdout is not None
        assert re.search("listens on", self.process.stdout.readline())

    async def wait_until_ready(self) -> None:
        async with AsyncClient(f"127.0.0.1:{self.port}") as client:
            await client.wait_until_ready(240)

    async def restart(self) -> None:
        self.process.terminate()
        status = await asyncio.to_thread(self.process.wait, 30)
        assert status == 0, f"the replica ended with status {status}"
        await asyncio.to_thread(self.start)
        await self.wait_until_ready()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


async def texts(target: str, num_requests: int, concurrency: int) -> list[str]:
    """Returns the answer to every request, or the exception's text for a failed one."""
    gate = asyncio.Semaphore(concurrency)

    async def one(client: AsyncClient, index: int) -> str:
        sampling: SamplingFields = {
            "max_tokens": 24,
            "temperature": 0.9,
            "top_p": 0.95,
            "seed": index,
            "stop": ["\n\n"],
        }
        async with gate:
            try:
                return (await client.complete(f"HAMLET:\nWhat {index}", **sampling)).text
            except Exception as error:
                return f"FAILED {error!r}"

    async with AsyncClient(target, resumes=30) as client:
        return await asyncio.gather(*(one(client, index) for index in range(num_requests)))


async def run(num_requests: int, concurrency: int) -> int:
    folder = tempfile.TemporaryDirectory()
    replicas = [Replica(folder.name), Replica(folder.name)]
    try:
        await asyncio.gather(*(replica.wait_until_ready() for replica in replicas))
        target = "ipv4:" + ",".join(f"127.0.0.1:{replica.port}" for replica in replicas)
        began = time.monotonic()
        expected = await texts(target, num_requests, concurrency)
        quiet_seconds = time.monotonic() - began
        num_restarts = 0

        async def roll() -> None:
            nonlocal num_restarts
            while True:
                for replica in replicas:
                    await asyncio.sleep(1.0)
                    await replica.restart()
                    num_restarts += 1

        rolling = asyncio.create_task(roll())
        began = time.monotonic()
        got = await texts(target, num_requests, concurrency)
        seconds = time.monotonic() - began
        if rolling.done():
            rolling.result()  # raises if a restart failed
        rolling.cancel()
    finally:
        for replica in replicas:
            replica.stop()
        folder.cleanup()
    num_failed = sum(text.startswith("FAILED") for text in got + expected)
    num_different = sum(one != other for one, other in zip(expected, got, strict=True))
    print(f"undisturbed: {num_requests} requests in {quiet_seconds:.0f} s")
    print(f"with rolling restarts: {num_requests} requests in {seconds:.0f} s, {num_restarts} restarts")
    print(f"failed: {num_failed}, different texts: {num_different}")
    for text in [text for text in got if text.startswith("FAILED")][:3]:
        print(text)
    return 1 if num_failed or num_different or not num_restarts else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args(arguments)
    return asyncio.run(run(options.requests, options.concurrency))


if __name__ == "__main__":
    sys.exit(main())
