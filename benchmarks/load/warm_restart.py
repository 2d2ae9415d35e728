"""Stops a server and starts it again, and measures how much of its prefix cache the next one has.

    meshserve bench warm_restart
    meshserve bench warm_restart --model qwen3-8b --random-weights --prompts 8 --tokens 30000 --host-cache-gib 40

Prompts are sent twice: the second time, the part of their tokens that was cached is the hit rate before. Then the
server gets SIGTERM and is started again with the same `host_cache_dir`, and the prompts are sent once more: the hit
rate after. With `--damage N`, a byte in each of N files is changed meanwhile; those files must not be used.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.benchmarks.lib.server_process import ServerProcess
from meshserve.runtime.client.client import AsyncClient

_MAX_TOKENS = 4


class Pass(NamedTuple):
    """The answers to all prompts, one after another."""

    hit_rate: float  # part of the prompts' tokens that were cached
    texts: tuple[tuple[int, ...], ...]  # the tokens generated for each
    request_seconds: float  # median


class Result(NamedTuple):
    """What a restart kept."""

    before: Pass
    after: Pass
    stop_seconds: float  # from SIGTERM to the end of the process
    num_files: int


def restart(settings: Mapping[str, Any], num_prompts: int, num_tokens: int, num_damaged: int = 0) -> Result:
    """Runs a server twice with these options."""
    prompts = random_prompts(num_prompts, num_tokens)
    before, stop_seconds = serve(settings, prompts, num_passes=2)
    num_files = damage(Path(settings["host_cache_dir"]), num_damaged)
    after, _ = serve(settings, prompts)
    return Result(before, after, stop_seconds, num_files)


def random_prompts(num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Returns the prompts, which are always the same."""
    return [np.random.default_rng(seed).integers(300, 1800, num_tokens).tolist() for seed in range(num_prompts)]


def serve(settings: Mapping[str, Any], prompts: Sequence[Sequence[int]], num_passes: int = 1) -> tuple[Pass, float]:
    """Starts a server, sends it the prompts `num_passes` times, and stops it by SIGTERM.

    Returns:
      The last pass, and the seconds from SIGTERM to the end of the process.
    """

    async def send(server: ServerProcess) -> Pass:
        async with await server.connect() as client:
            for _ in range(num_passes):
                done = await _send(client, prompts)
        return done

    with ServerProcess(settings) as server:
        last = asyncio.run(send(server))
        began = time.monotonic()
        server.process.terminate()
        server.process.wait()
        return last, time.monotonic() - began


def damage(directory: Path, num_files: int) -> int:
    """Changes a byte in each of `num_files` files of a stored host cache, and returns how many files it has."""
    files = sorted(directory.glob("*.kv"))
    for path in files[:num_files]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return len(files)


async def _send(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> Pass:
    num_cached, seconds, texts = 0, [], []
    for prompt in prompts:
        began = time.perf_counter()
        done = await client.complete(prompt, max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
        seconds.append(time.perf_counter() - began)
        num_cached += done.usage.num_cached_tokens
        texts.append(tuple(done.token_ids))
    return Pass(num_cached / sum(map(len, prompts)), tuple(texts), float(np.median(seconds)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="warm_restart", description="Measure how much of its prefix cache a restarted server has."
    )
    parser.add_argument("--model", default="demo", help="a model as for `serve`")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each prompt")
    parser.add_argument("--host-cache-gib", type=float, default=0.1)
    parser.add_argument("--directory", help="where the files go (default: a temporary directory)")
    parser.add_argument("--damage", type=int, default=0, help="files to change while the server is down")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of the server")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "model": options.model,
            "random_weights": options.random_weights,
            "host_cache_gib": options.host_cache_gib,
            "host_cache_dir": options.directory or str(Path(folder) / "tier"),
        }
        result = restart(settings | parse_settings(options.set), options.prompts, options.tokens, options.damage)
    before, after, is_same = result.before, result.after, result.before.texts == result.after.texts
    print(f"{options.prompts} prompts of {options.tokens} tokens: hit rate {100 * before.hit_rate:.1f} % before, "
          f"{100 * after.hit_rate:.1f} % after the restart; median of a request {1e3 * before.request_seconds:.0f} "
          f"and {1e3 * after.request_seconds:.0f} ms; stopped in {result.stop_seconds:.1f} s, "
          f"{result.num_files} files; tokens {'the same' if is_same else 'DIFFERENT'}")  # fmt: skip
    return 0 if is_same and after.hit_rate >= 0.8 * before.hit_rate else 1


if __name__ == "__main__":
    sys.exit(main())
