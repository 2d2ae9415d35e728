"""Times updates of a running engine's weights, and sleep and wake, and prints one JSON object.

    meshserve bench weight_updates --model qwen3-8b --random-weights
    meshserve bench weight_updates --model qwen3-8b --random-weights --forms tunix maxtext --trainer-dtype float32
    meshserve bench weight_updates --model demo --cpu-devices 4 --tp 4 --requests 4

Accepts all options of `serve` that change the engine. Unless told else (--reserve-mib), the engine leaves so much
memory free that the trainer's arrays, jax's copies of them and a second copy of the weights fit. The trainer's arrays
are random, and sharded over the engine's devices as with FSDP. The updates alternate between two trees that give
different tokens; each is timed once with the programs that it compiles (`first_seconds`), then `--repeats` times:

* from arrays on the same devices in each form of names, and from host memory that is not pinned,
* beside requests that decode,
* on accelerators, also while the devices have no room for two copies of the weights, through the memory of the cache.

`sleep` and `wake` follow, with a copy of the weights in host memory and with weights dropped. `copies` are what jax
itself takes to copy the first form's arrays, to compare with: within the devices, from and to host memory that is not
pinned, and to and from pinned memory. All times are in seconds. `is_replaced` says whether each update gave its tree's
tokens; the exit status is 1 if one did not, or if a request ended in an unexpected way.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshserve.benchmarks.lib.trainer_trees import (
    FORMS,
    Tree,
    filled_devices,
    on_host,
    trainer_tree,
    with_other_tables,
)
from meshserve.runtime.host_cache.pinning import PINNED
from meshserve.runtime.offline.llm import LLM
from meshserve.runtime.offline.user_params import LLMSamplingParams
from meshserve.runtime.options.flags import Parser, add_options, serve_config
from meshserve.runtime.options.serve_config import ServeConfig, server_only_options
from meshserve.runtime.startup.launch import read_model_of
from meshserve.runtime.weights.locate import find_model
from meshserve.sharding.memory import shard_bytes

_RESERVED_SHARE = 1.3  # of the trees: tables are there twice; and of weights: what the allocator loses
_PROMPTS = 4  # whose tokens tell the trees apart
_PROMPT_TOKENS, _CHECKED_TOKENS = 16, 8
_CHECKED = LLMSamplingParams(max_tokens=_CHECKED_TOKENS, temperature=0, ignore_eos=True)

Pair = tuple[Tree, Tree]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    config = serve_config(options)
    given: dict[str, Any] = {"reserve_mib": _reserved_mib(config, options.trainer_dtype)}
    given |= {field.name: getattr(config, field.name) for field in _changed(config)}
    with LLM(**given) as llm:
        report = _Benchmark(llm, options).run()
    print(json.dumps(report, indent=1))
    return 0 if report["is_clean"] else 1


def _parser() -> Parser:
    parser = Parser(prog="meshserve bench weight_updates", description=__doc__.splitlines()[0])
    add_options(parser, left_out=server_only_options())
    known = ", ".join(FORMS)
    parser.add_argument("--forms", nargs="+", default=["hugging_face", "tunix"], metavar="FORM", choices=FORMS,
                        help=f"names of the trainer's arrays: {known} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--trainer-dtype", default="bfloat16", choices=["bfloat16", "float32"],
                        help="data type of its arrays (default: %(default)s)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="timed updates of each kind (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=32,
                        help="requests that decode beside updates (default: %(default)s; 0: none)")  # fmt: skip
    parser.add_argument("--output-tokens", type=int, default=256, help="tokens of each (default: %(default)s)")
    return parser


def _changed(config: ServeConfig) -> Iterator[dataclasses.Field[Any]]:
    for field in dataclasses.fields(config):
        if getattr(config, field.name) != field.default:
            yield field


def _reserved_mib(config: ServeConfig, trainer_dtype: str) -> int:
    """Returns the memory that must be free on each device beside the engine's weights and cache."""
    files = find_model(config.model, revision=config.revision, random_weights=config.random_weights)
    num_params = read_model_of(config, files).num_params
    tree_bytes, engine_bytes = (num_params * jnp.dtype(name).itemsize for name in (trainer_dtype, "bfloat16"))
    return int((_RESERVED_SHARE + 1) * tree_bytes + _RESERVED_SHARE * engine_bytes) // max(config.tp, 1) >> 20


class _Benchmark:
    def __init__(self, llm: LLM, options: argparse.Namespace):
        self._llm, self._options = llm, options
        server = llm._launched.resharder.server
        self._model, self._mesh = server.model, server.mesh
        self._is_accelerated = self._mesh.devices.flat[0].platform != "cpu"
        draw = random.Random(0)
        num_prompts = max(_PROMPTS, options.requests)
        self._prompts = [[draw.randrange(self._model.vocab_size) for _ in range(_PROMPT_TOKENS)]
                         for _ in range(num_prompts)]  # fmt: skip
        self._faults: list[str] = []

    def run(self) -> dict[str, Any]:
        launched, device = self._llm._launched, self._mesh.devices.flat[0]
        info = launched.info
        report: dict[str, Any] = {
            "model": info.name, "device": device.device_kind, "tp": info.tp_size, "dtype": info.dtype,
            "quantization": info.quantization, "trainer_dtype": self._options.trainer_dtype, "jax": jax.__version__,
            "weight_bytes": shard_bytes(launched.engine.runner.params),  # type: ignore[attr-defined]
            "cache_pages": launched.engine.load().num_pages, "page_size": info.page_size_tokens,
        }  # fmt: skip
        updates: list[dict[str, Any]] = []
        for number, form in enumerate(self._options.forms):
            tree = trainer_tree(form, self._model, self._mesh, self._options.trainer_dtype)
            pair = (tree, with_other_tables(tree, self._model.vocab_size))
            updates.append(self._timed_updates(pair, form=form))
            if number == 0:
                report["copies"] = _copies(tree, self._options.repeats)
                updates += self._other_updates(form, pair, report["weight_bytes"])
                report["sleep"] = [self._timed_sleep(None), self._timed_sleep(tree)]
            for array in (*pair[0].values(), *pair[1].values()):
                array.delete()
        report["updates"] = updates
        report["faults"] = self._faults
        report["is_clean"] = not self._faults and all(each["is_replaced"] for each in updates)
        return report

    def _other_updates(self, form: str, pair: Pair, weight_bytes: int) -> Iterator[dict[str, Any]]:
        if self._options.requests:
            with self._decoding():
                yield self._timed_updates(pair, form=form, requests=self._options.requests)
        if self._is_accelerated:
            with filled_devices(self._mesh, weight_bytes):
                yield self._timed_updates(pair, form=form, way="through the cache")
        hosted = on_host(pair[0]), on_host(pair[1])  # type: ignore[arg-type]
        yield self._timed_updates(hosted, form=form, place="host")

    def _timed_updates(
        self, pair: Pair, *, form: str, place: str = "device", way: str = "beside", requests: int = 0
    ) -> dict[str, Any]:
        """Updates from both trees by turns, and returns the times."""
        row: dict[str, Any] = {"form": form, "place": place, "way": way, "requests": requests}
        seconds, paused, tokens = [], [], []
        for number in range(2 + self._options.repeats):
            started = time.perf_counter()
            update = self._llm.update_weights(pair[number % 2])
            seconds.append(time.perf_counter() - started)
            paused.append(update.paused_seconds)
            tokens.append(self._tokens())
        is_replaced = tokens[0] != tokens[1] and all(each == tokens[at % 2] for at, each in enumerate(tokens))
        row |= {"bytes": sum(each.nbytes for each in pair[0].values()), "first_seconds": seconds[0],
                **_figures("seconds", seconds[2:]), **_figures("paused_seconds", paused[2:]),
                "is_replaced": is_replaced}  # fmt: skip
        _tell(row)
        return row

    def _tokens(self) -> list[tuple[int, ...]]:
        outputs = self._llm.generate(self._prompts[:_PROMPTS], _CHECKED, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def _timed_sleep(self, tree: Tree | None) -> dict[str, Any]:
        """Sleeps and wakes, and returns the times; with a tree, drops the weights and takes these instead."""
        names = ("sleep", "wake") if tree is None else ("sleep", "wake", "update")
        times: dict[str, list[float]] = {name: [] for name in names}
        expected = self._tokens() if tree is None else None
        for _ in range(1 + self._options.repeats):
            times["sleep"].append(_seconds(lambda: self._llm.sleep(drop_weights=tree is not None)))
            times["wake"].append(_seconds(self._llm.wake))
            if tree is not None:
                times["update"].append(_seconds(lambda: self._llm.update_weights(tree)))
            elif self._tokens() != expected:
                self._faults.append("other tokens after sleep and wake")
        row: dict[str, Any] = {"weights": "dropped" if tree is not None else "copied to host memory"}
        for name, seconds in times.items():
            row |= {f"first_{name}_seconds": seconds[0], **_figures(f"{name}_seconds", seconds[1:])}
        _tell(row)
        return row

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Has requests decode during the block, again and again."""
        count, stop = self._options.requests, threading.Event()
        params = LLMSamplingParams(max_tokens=self._options.output_tokens, temperature=1.0, ignore_eos=True)

        def decode() -> None:
            try:
                while not stop.is_set():
                    for output in self._llm.generate(self._prompts[:count], params, use_tqdm=False):
                        sample = output.outputs[0]
                        if (sample.finish_reason, len(sample.token_ids)) != ("length", self._options.output_tokens):
                            self._faults.append(f"a request ended after {len(sample.token_ids)} tokens: "
                                                f"{sample.finish_reason} {sample.error}")  # fmt: skip
            except Exception as error:
                self._faults.append(f"decoding beside updates failed: {error}")

        thread = threading.Thread(target=decode, name="decode beside updates")
        thread.start()
        try:
            while thread.is_alive() and not self._llm._launched.engine.load().num_running:
                time.sleep(0.01)
            yield
        finally:
            stop.set()
            thread.join()


def _copies(tree: Mapping[str, jax.Array], repeats: int) -> dict[str, Any]:
    """Times jax's own copies of a tree's arrays."""
    arrays = list(tree.values())
    shardings = [array.sharding for array in arrays]
    copy = jax.jit(lambda given: [jnp.copy(array) for array in given])
    found = _timed_copy("on_device", lambda: copy(arrays), repeats)
    hosted = on_host(tree)
    found |= _timed_copy("from_host", lambda: jax.device_put(list(hosted.values()), shardings), repeats)
    started = time.perf_counter()
    on_host(dict(enumerate(jax.block_until_ready(copy(arrays)))))  # type: ignore[arg-type]
    found["to_host_seconds"] = time.perf_counter() - started
    try:
        pinned = [sharding.with_memory_kind(PINNED) for sharding in shardings]
        found |= _timed_copy("to_pinned", lambda: jax.device_put(arrays, pinned), repeats)
        held = jax.block_until_ready(jax.device_put(arrays, pinned))
        found |= _timed_copy("from_pinned", lambda: jax.device_put(held, shardings), repeats)
    except (ValueError, jax.errors.JaxRuntimeError) as error:  # such memory does not exist, or not so much of it
        found["pinned"] = str(error).partition("\n")[0]
    _tell(found)
    return found


def _timed_copy(name: str, copy: Callable[[], list[jax.Array]], repeats: int) -> dict[str, Any]:
    seconds = []
    for _ in range(1 + repeats):
        copies: list[jax.Array] = []
        seconds.append(_seconds(lambda: copies.extend(jax.block_until_ready(copy()))))  # noqa: B023
        for array in copies:
            array.delete()
    return {f"first_{name}_seconds": seconds[0], **_figures(f"{name}_seconds", seconds[1:])}


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _figures(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    return {name: statistics.median(seconds), f"most_{name}": max(seconds)} if seconds else {}


def _tell(row: Mapping[str, Any]) -> None:
    print(json.dumps(row), file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
