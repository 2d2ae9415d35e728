"""Times the loading of a model, in GB/s and peak host memory, and compares it with `cat` of the same files.

    meshserve bench loading --model qwen3-4b --tp 8

Writes a checkpoint of random weights of a published size (once; --directory keeps it), converts it to Orbax, and loads
both forms onto virtual CPU devices, each time in a new process, cold (the files dropped from the page cache) and warm.
On CPU devices the shards are host memory, so the relevant figure is the peak beyond them. Each load is printed with its
two bounds: `cat` of the same files, which is how fast the disk or the page cache delivers the bytes, and `fill`, which
is how fast new memory of the shards' size can be obtained. On virtual machines, `fill` is often the slower of the two.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath
from safetensors.numpy import save_file

from meshserve.runtime.weights.hf_layout import checkpoint_tensors
from meshserve.runtime.weights.registry import named_model, read_model
from meshserve.sharding.checkpoints.tensor_files import INDEX_FILE

_SEED_VALUES = 1 << 24  # number of random values; tensors are windows of them, so that writing stays fast
_FILE_BYTES = 2 * 2**30  # a file is held in memory while it is written
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark and returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.load is not None:
        print(json.dumps(load_once(Path(options.load), options.tp, options.dtype)))
        return 0
    with tempfile.TemporaryDirectory(prefix="meshserve-loading-") as temporary:
        root = Path(options.directory or temporary)
        files = root / options.model
        if not (files / "config.json").exists():
            write_random(files, options.model)
        orbax = root / f"{options.model}.orbax"
        started = time.monotonic()
        command = [sys.executable, "-m", "meshserve", "convert"]
        subprocess.run([*command, f"--model={files}", f"--output={orbax}"], check=True)
        print(f"convert to Orbax: {time.monotonic() - started:.1f} s")
        columns = ("cat GB/s", "fill GB/s", "load GB/s", "load s", "CPU s", "shards GB", "beyond GB")
        print(f"{'form':<12} {'cache':<5}" + "".join(f"{column:>10}" for column in columns))
        for form, directory in (("safetensors", files), ("orbax", orbax)):
            for cache in ("cold", "warm"):
                _row(form, cache, directory, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshserve bench loading", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-4b", help="a published size (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=8, help="number of virtual CPU devices (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="data type to load as (default: %(default)s)")
    parser.add_argument("--directory", default="", help="folder to keep the checkpoints in (default: a temporary one)")
    parser.add_argument("--load", help=argparse.SUPPRESS)  # how the new processes are started
    return parser


def _row(form: str, cache: str, directory: Path, options: argparse.Namespace) -> None:
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in paths)
    seconds = []
    command = [sys.executable, "-m", "meshserve", "bench", "loading"]
    command += [f"--load={directory}", f"--tp={options.tp}", f"--dtype={options.dtype}"]
    loaded: dict[str, Any] = {}
    for what in ("cat", "load"):
        if cache == "cold":
            drop_pages(paths)
        started = time.monotonic()
        if what == "cat":
            with open(os.devnull, "wb") as nowhere:
                subprocess.run(["cat", *map(str, paths)], stdout=nowhere, check=True)
            seconds.append(time.monotonic() - started)
        else:
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            loaded = json.loads(output.splitlines()[-1])
    figures = (
        num_bytes / 1e9 / seconds[0],
        loaded["shard_bytes"] / 1e9 / fill_seconds(loaded["shard_bytes"]),
        num_bytes / 1e9 / loaded["seconds"],
        loaded["seconds"],
        loaded["cpu_seconds"],
        loaded["shard_bytes"] / 1e9,
        loaded["beyond_bytes"] / 1e9,
    )
    print(f"{form:<12} {cache:<5}" + "".join(f"{figure:>10.2f}" for figure in figures), flush=True)


def load_once(directory: Path, tp: int, dtype: str) -> dict[str, float]:
    """Loads a model in this process; returns wall and CPU seconds, bytes of all shards, and peak memory beyond them."""
    from meshserve.sharding.mesh import make_mesh, use_cpu_devices

    use_cpu_devices(tp)
    import jax
    import jax.numpy as jnp

    from meshserve.runtime.weights.load import load_model
    from meshserve.runtime.weights.orbax_layout import model_layout

    config, mesh = read_model(directory / "config.json"), make_mesh(tp)
    before = _peak_bytes()
    started, started_cpu = time.monotonic(), time.process_time()
    _, params = load_model(epath.Path(directory), config, model_layout(config, tp), mesh, jnp.dtype(dtype))
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - started_cpu
    leaves = jax.tree.leaves(params)
    pointers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards
    }
    shard_bytes = sum(pointers.values())  # an array replicated over CPU devices is stored once
    beyond_bytes = _peak_bytes() - before - shard_bytes
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "shard_bytes": shard_bytes, "beyond_bytes": beyond_bytes}


def _peak_bytes() -> int:
    """Returns the peak memory of this process so far; getrusage would include its parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def fill_seconds(num_bytes: float) -> float:
    """Returns the seconds to write one byte per page of new memory, a lower bound for a load into host memory."""
    code = "import sys, time, numpy; t = time.monotonic(); numpy.empty(int(sys.argv[1]), numpy.uint8)[::4096] = 1; "
    command = [sys.executable, "-c", code + "print(time.monotonic() - t)", str(int(num_bytes))]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def drop_pages(paths: Sequence[Path]) -> None:
    """Drops files from the page cache, so that the next read comes from the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not yet on the disk cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def write_random(directory: Path, size: str) -> None:
    """Writes a checkpoint of random bfloat16 weights, without a tokenizer."""
    config = named_model(size)
    directory.mkdir(parents=True, exist_ok=True)
    shapes = checkpoint_tensors(config)
    values = (0.02 * np.random.default_rng(0).standard_normal(_SEED_VALUES, np.float32)).astype(_BFLOAT16)
    weight_map: dict[str, str] = {}
    names = list(shapes)
    while names:
        of_file, num_bytes = [], 0
        while names and num_bytes < _FILE_BYTES:
            of_file.append(names.pop(0))
            num_bytes += _BFLOAT16.itemsize * math.prod(shapes[of_file[-1]])
        file = f"model-from-{of_file[0]}.safetensors"
        arrays = _windows(values, [shapes[name] for name in of_file])
        save_file(dict(zip(of_file, arrays, strict=True)), directory / file)
        weight_map |= dict.fromkeys(of_file, file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.is_tied,
        "rope_theta": config.rope.theta,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(raw))


def _windows(values: np.ndarray, shapes: Any) -> Iterator[np.ndarray]:
    start = 0
    for shape in shapes:
        count = int(np.prod(shape))
        start = (start + 7919) % values.size
        yield np.resize(np.roll(values, -start) if count > values.size else values[start:], count).reshape(shape)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
