"""`meshserve convert`: writes a model as an Orbax checkpoint, holding at most two parts in memory.

An interrupted conversion continues where it stopped: parts already written from the same source are reused.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from tqdm import tqdm

from meshserve.sharding.checkpoints.checkpoint import MANIFEST_FILE, OrbaxCheckpoint
from meshserve.sharding.checkpoints.loading import load_parameters, progress_bar
from meshserve.sharding.checkpoints.parameters import Parameter
from meshserve.sharding.checkpoints.storage import as_path, file_bytes, is_remote
from meshserve.sharding.checkpoints.tensor_files import INDEX_FILE, weight_files
from meshserve.sharding.checkpoints.writer import CheckpointWriter, storage_sharding
from meshserve.sharding.mesh import use_cpu_devices

from ..api.errors import ConfigError
from ..api.versions import installed_version
from ..model_files.config_file import read_config_file
from ..model_files.model_config import ModelConfig
from ..model_files.quantization import NOT_QUANTIZED, Quantization
from .formats.published import with_skipped
from .formats.quantize import published_form
from .load import OpenedWeights, is_orbax, open_weights, read_model_with_weights
from .locate import model_directory, pooling_folders
from .model_task import with_task
from .orbax_layout import StoredArray, model_layout, stored_parts, stored_shapes
from .registry import read_model

_log = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".tmp")
_NUM_DEVICES = 16  # each writes its shard; up to this TP size, a shard consists of whole chunks
_HASH_BLOCK_BYTES = 8 * 2**20


def run_convert(
    model: str,
    target: str,
    *,
    revision: str = "",
    dtype: str = "auto",
    quantize: str = NOT_QUANTIZED,
    is_verified: bool = False,
) -> int:
    """Runs the command and returns its exit status.

    It also raises the errors of `model_directory`, `convert` and `verify`.

    Raises:
      ConfigError: Neither `target` nor `is_verified` is given, or the target cannot be written.
    """
    if not target and not is_verified:
        raise ConfigError("nothing to do: pass --output with a directory to write, or --verify to check --model.")
    source = model_directory(model, revision=revision)
    if target:
        with contextlib.suppress(RuntimeError):  # JAX is already initialized with other devices
            use_cpu_devices(_NUM_DEVICES)
        try:
            convert(source, target, dtype=dtype, quantize=quantize, devices=jax.devices("cpu"))
        except OSError as error:
            raise ConfigError(
                f"{error}. {target} keeps the parts written so far; the same command continues from there."
            ) from None
    if is_verified:
        print(f"{verify(target or source)} arrays verified: all checksums match.")
    return 0


def convert(
    source: epath.PathLike,
    target: epath.PathLike,
    *,
    dtype: str = "auto",
    quantize: str = NOT_QUANTIZED,
    devices: list[jax.Device],
) -> None:
    """Writes the model in directory `source` to directory `target` as an Orbax checkpoint.

    Args:
      source: Model directory.
      target: Directory to write.
      dtype: "bfloat16", "float32", or "auto": the model's own, or bfloat16 for a float16 model.
      quantize: Scheme to quantize an unquantized model in; see `ServeConfig.quantize`.
      devices: CPU devices. Their number bounds how finely an Orbax array is split along its sharded axis.

    Raises:
      CheckpointError: The weight files of the source are invalid.
      UnsupportedModelError: meshserve does not support the model.
      ConfigError: Source and target are the same, the target's disk is too small, or the model cannot be quantized.
      OSError: The target cannot be written.
    """
    directory, output = as_path(source), as_path(target)
    if os.path.realpath(directory) == os.path.realpath(output):
        raise ConfigError(f"--output {output} is the model itself. Choose another directory.")
    config = read_model_with_weights(directory / "config.json", directory, quantize)
    config = with_task(config, "auto", directory)  # an embedding model is stored without an output head
    kind = _stored_dtype(config, dtype)
    config = _with_scales(config, kind)
    weights = open_weights(directory, config)
    hashes = _source_hashes(directory)
    made = [quantize] if quantize != NOT_QUANTIZED else []
    source_id = hashlib.sha256(json.dumps([hashes, "orbax", kind.name, *made], sort_keys=True).encode()).hexdigest()
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    job = _Job(weights, config, kind, output, source_id, devices)
    num_bytes = job.run(hashes)
    stored: dict[str, Any] = {"dtype": kind.name, "tie_word_embeddings": config.is_tied}
    if config.quantization is not None:
        stored["quantization_config"] = _stored_quantization(config.quantization, directory)
    _copy_other_files(directory, output, stored)
    seconds = time.monotonic() - started
    _log.info("%.2f GB written to %s in %.1f s, %.2f GB/s", num_bytes / 1e9, output, seconds, num_bytes / 1e9 / seconds)


def verify(directory: epath.PathLike) -> int:
    """Reads a whole Orbax checkpoint, compares every checksum and returns the number of arrays.

    Raises:
      ConfigError: The directory is not an Orbax checkpoint.
      CheckpointError: An array is damaged. The message names the first one.
    """
    path = as_path(directory)
    if not is_orbax(path):
        raise ConfigError(
            f"{path} has no Orbax checkpoint of meshserve; safetensors files have no checksums to compare."
        )
    checkpoint = OrbaxCheckpoint(path)
    checkpoint.check(stored_shapes(read_model(path / "config.json")))
    names = checkpoint.names()
    bar = progress_bar(checkpoint.manifest.num_bytes, "verify")
    with bar as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        for num_bytes in pool.map(checkpoint.verify, names):
            progress.update(num_bytes)
    return len(names)


class _Job:
    """Writes one model as an Orbax checkpoint."""

    def __init__(
        self,
        opened: OpenedWeights,
        config: ModelConfig,
        dtype: jnp.dtype,
        output: epath.Path,
        source_id: str,
        devices: list[jax.Device],
    ):
        self._opened, self._config, self._dtype = opened, config, dtype
        self._output, self._source_id, self._devices = output, source_id, devices

    def run(self, hashes: Mapping[str, str]) -> int:
        """Writes all missing parts and returns their total bytes. The next part is read while one is written."""
        parts = stored_parts(self._config, self._dtype)
        writer = CheckpointWriter(self._output, self._source_id)
        sizes = {part: _num_bytes(arrays.values()) for part, arrays in parts.items()}
        missing: dict[str, Any] = {}
        with progress_bar(sum(sizes.values()), "check") as progress:
            for part, arrays in parts.items():
                if not writer.has(part):
                    missing[part] = arrays
                progress.update(sizes[part])
        self._check_disk(sum(sizes[part] for part in missing))
        if len(missing) < len(parts):
            _log.info("%d of %d parts were already written by an earlier run", len(parts) - len(missing), len(parts))
        writing: Future[None] | None = None
        with progress_bar(sum(sizes[part] for part in missing), "convert") as progress, ThreadPoolExecutor(1) as thread:
            for part, arrays in missing.items():
                loaded = load_parameters(self._opened.source, self._stored_parameters(arrays))
                if writing is not None:
                    writing.result()
                writing = thread.submit(writer.write, part, loaded)
                progress.update(sizes[part])
            if writing is not None:
                writing.result()
        version = installed_version()
        return writer.finish(list(parts), dtype=self._dtype.name, source=hashes, version=version)

    def _stored_parameters(self, arrays: Mapping[str, StoredArray]) -> dict[str, Parameter]:
        pieces = self._opened.pieces(self._config, model_layout(self._config, 1))
        parameters = {}
        for key, array in arrays.items():
            parameters[key] = Parameter(
                shape=array.shape,
                dtype=array.dtype,
                sharding=storage_sharding(array.shape, array.sharded_axis, self._devices),
                pieces=lambda _, array=array: pieces[array.parameter](array.stack_index),  # type: ignore[misc]
            )
        return parameters

    def _check_disk(self, num_bytes: int) -> None:
        if is_remote(self._output):
            return
        free = shutil.disk_usage(self._output).free
        if free < num_bytes:
            raise ConfigError(
                f"--output {self._output}: {num_bytes / 1e9:.2f} GB are to be written but its disk has "
                f"{free / 1e9:.2f} GB free, {(num_bytes - free) / 1e9:.2f} GB too few. Free some or use another disk."
            )


def _stored_quantization(quantization: Quantization, source: epath.Path) -> dict[str, Any]:
    """Returns the `quantization_config` of a model, with the modules that its files do not quantize."""
    if quantization.is_made:
        return published_form(quantization)
    path = source / "config.json"
    given = read_model(path).quantization
    assert given is not None
    found = [module for module in quantization.skipped if module not in given.skipped]
    raw = read_config_file(path)["quantization_config"]
    if given.has_kv_scales and not quantization.has_kv_scales:  # the files hold none
        raw = {key: value for key, value in raw.items() if key != "kv_cache_scheme"}
    return with_skipped(raw, found) if found else raw


def _num_bytes(arrays: Iterable[StoredArray]) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def _stored_dtype(config: ModelConfig, dtype: str) -> jnp.dtype:
    if dtype != "auto":
        return jnp.dtype(dtype)
    return jnp.dtype("float32" if config.dtype == "float32" else "bfloat16")


def _with_scales(config: ModelConfig, dtype: jnp.dtype) -> ModelConfig:
    """Returns the config with scales in the stored dtype, where they have the model's dtype in files."""
    quantization = config.quantization
    if quantization is None:
        return config
    grids = tuple(grid._replace(dtype=dtype.name) if grid.has_model_dtype else grid for grid in quantization.grids)
    return dataclasses.replace(config, quantization=dataclasses.replace(quantization, grids=grids))


def _source_hashes(directory: epath.Path) -> dict[str, str]:
    """Returns the SHA-256 of each weight file, which model hubs publish for safetensors files.

    For an Orbax checkpoint, only the manifest is hashed, because it contains the checksums of everything else.
    """
    files = [directory / MANIFEST_FILE] if is_orbax(directory) else weight_files(directory)
    bar = progress_bar(sum(file_bytes(path) for path in files), "hash")
    with bar as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(lambda path: _sha256(path, progress), files)
        return {path.name: digest for path, digest in zip(files, digests, strict=True)}


def _sha256(path: epath.Path, progress: tqdm) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
            progress.update(len(block))
    return digest.hexdigest()


def _copy_other_files(directory: epath.Path, output: epath.Path, stored: Mapping[str, Any]) -> None:
    """Copies all files other than the weights: tokenizer, generation config, license.

    config.json is written last, with the options that describe what is stored.
    """
    for path in directory.iterdir():
        is_weights = path.name.endswith(_WEIGHT_SUFFIXES) or path.name in (INDEX_FILE, MANIFEST_FILE, "config.json")
        if not (is_weights or path.name.startswith(".") or path.is_dir()):
            (output / path.name).write_bytes(path.read_bytes())
    for folder in pooling_folders(directory):
        (output / folder.name).mkdir(exist_ok=True)
        (output / folder.name / "config.json").write_bytes((folder / "config.json").read_bytes())
    raw = json.loads((directory / "config.json").read_text()) | stored
    if "torch_dtype" in raw:
        raw["torch_dtype"] = raw["dtype"]
    (output / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
