"""Reads a PEFT checkpoint of LoRA into host memory, in the form in which its matrices are copied to the devices.

Nothing is read before names, shapes and types agree with the model that is served.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.checkpoints.storage import is_remote
from meshserve.sharding.checkpoints.tensor_files import FLOATS, TensorFiles

from ..api.adapters import AdapterInfo
from ..api.errors import InvalidAdapterError
from ..model_files.model_config import ModelConfig
from .adapter_targets import AdapterTarget, targets_of
from .peft_config import MAX_RANK, PeftConfig, read_peft_config

TENSOR_FILE = "adapter_model.safetensors"
DOWN, UP = "A", "B"  # the two matrices of a module, as PEFT calls them
_TENSOR = re.compile(r"base_model\.model\.(?:model\.)?layers\.(\d{1,3})\.([a-z_.]{1,64})\.lora_([AB])\.weight")
_MAX_SHOWN = 200
# What else may be trained, and how an error calls it.
_OTHERS = {
    ".experts.": "adapters of experts are not implemented; train only the attention projections of this model",
    "embed": "adapters of the embedding are not implemented; train without embed_tokens",
    "lm_head": "adapters of the output head are not implemented; train without lm_head",
    "magnitude": "DoRA is not implemented; train without it",
    "bias": "biases are not implemented; train with bias none",
}


@dataclass(frozen=True, kw_only=True)
class HostAdapter(AdapterInfo):
    """An adapter in host memory.

    `matrices` has, for each target and "A" or "B", the matrices of all layers: [L, R, K] and [L, N, R], in the type in
    which the model computes. Ranks are padded with zeros to the server's, as are layers that it does not change. The
    scale is part of B.
    """

    matrices: Mapping[tuple[str, str], np.ndarray] = field(repr=False, compare=False)


def read_adapter(name: str, path: str, model: ModelConfig, *, rank: int, dtype: jnp.dtype) -> HostAdapter:
    """Reads an adapter from a local directory.

    Args:
      name: By which requests will name it.
      path: The directory.
      model: The model that is served.
      rank: The largest rank that the server has room for.
      dtype: The type of the result.

    Raises:
      InvalidAdapterError: It is damaged, for another model, or needs something that is not implemented.
    """
    if is_remote(path) or "://" in path:
        raise InvalidAdapterError(f"adapter {name!r}: {path} is not local. Copy it to a local directory.")
    directory = Path(path).expanduser().absolute()
    try:
        config, raw = read_peft_config(directory)
        files = TensorFiles(directory, single_file=TENSOR_FILE)
        found = _checked_tensors(files, config, model, rank)
        return _read(
            files, config, found, model, AdapterSource(name, path, json.dumps(raw, sort_keys=True), rank, dtype)
        )
    except InvalidAdapterError as error:
        raise InvalidAdapterError(f"adapter {name!r} at {path} cannot be served: {error}") from None
    except (CheckpointError, OSError) as error:
        raise InvalidAdapterError(f"adapter {name!r} at {path} cannot be read: {error}") from None


@dataclass(frozen=True)
class AdapterSource:
    """What is read, and the form of the result."""

    name: str
    path: str
    config_text: str
    rank: int
    dtype: jnp.dtype


Tensors = dict[tuple[str, int], dict[str, str]]  # by target and layer: the names of the tensors A and B


def _checked_tensors(files: TensorFiles, config: PeftConfig, model: ModelConfig, rank: int) -> Tensors:
    """Returns the tensors of each module, all of which fit the model."""
    targets, found = targets_of(model), Tensors()
    for name, shape in sorted(files.shapes.items()):
        target_name, layer, kind = _place_of(name, targets, model)
        target, module = targets[target_name], _module(targets[target_name], layer)
        if not config.names(module):
            raise InvalidAdapterError(f"{_cut(name)} is not among target_modules; the files do not belong together.")
        its_rank = config.rank_of(module)
        if its_rank > rank:
            raise InvalidAdapterError(
                f"{module} has rank {its_rank}; this server accepts {rank}. Restart it with --max-adapter-rank "
                f"{its_rank}."
            )
        expected = (its_rank, target.columns) if kind == DOWN else (target.rows, its_rank)
        if shape != expected:
            raise InvalidAdapterError(
                f"{_cut(name)} is {shape}; the served model and the adapter's config ask for {expected}. The adapter "
                "is for another base model, or damaged."
            )
        if files.dtype_name(name) not in FLOATS:
            raise InvalidAdapterError(f"{_cut(name)} is {files.dtype_name(name)}; allowed are {', '.join(FLOATS)}.")
        found.setdefault((target_name, layer), {})[kind] = name
    _check_complete(found, config, targets)
    return found


def _place_of(name: str, targets: Mapping[str, AdapterTarget], model: ModelConfig) -> tuple[str, int, str]:
    """Returns the target, the layer and the kind of a tensor."""
    match = _TENSOR.fullmatch(name)
    if match is None or "experts" in name:
        why = next((text for part, text in _OTHERS.items() if part in name), "it is no part of an adapter (LoRA)")
        raise InvalidAdapterError(f"it has a tensor {_cut(name)}: {why}.")
    layer, module, kind = int(match[1]), match[2], match[3]
    target_name = module.rpartition(".")[2]
    target = targets.get(target_name)
    if target is None or target.module != module:
        raise InvalidAdapterError(
            f"it has a tensor {_cut(name)}; allowed for this model are "
            f"{', '.join(each.module for each in targets.values())}."
        )
    if layer not in target.layers:
        raise InvalidAdapterError(
            f"it has a tensor {_cut(name)}, and layer {layer} of the served model, which has {model.num_layers}, has "
            f"no {module}. The adapter is for another base model."
        )
    return target_name, layer, kind


def _check_complete(found: Tensors, config: PeftConfig, targets: Mapping[str, AdapterTarget]) -> None:
    """Checks that no matrix is missing of those that the files themselves name."""
    if not found:
        raise InvalidAdapterError("it has no tensors.")
    expected = set(found)
    if config.targets:
        for name, target in targets.items():
            layers = target.layers if config.layers is None else config.layers.intersection(target.layers)
            expected |= {(name, layer) for layer in layers if config.names(_module(target, layer))}
    for name, layer in sorted(expected):
        for kind in (DOWN, UP):
            if kind not in found.get((name, layer), {}):
                raise InvalidAdapterError(
                    f"lora_{kind} of {_module(targets[name], layer)} is missing; copy the files again."
                )


def _module(target: AdapterTarget, layer: int) -> str:
    return f"model.layers.{layer}.{target.module}"


def _read(
    files: TensorFiles, config: PeftConfig, found: Tensors, model: ModelConfig, source: AdapterSource
) -> HostAdapter:
    targets, num_layers = targets_of(model), model.num_layers
    digest = hashlib.sha256(source.config_text.encode())
    matrices: dict[tuple[str, str], np.ndarray] = {}
    for name in sorted({name for name, _ in found}):
        rows, columns = targets[name].rows, targets[name].columns
        matrices[name, DOWN] = np.zeros((num_layers, source.rank, columns), source.dtype)
        matrices[name, UP] = np.zeros((num_layers, rows, source.rank), source.dtype)
    for (name, layer), tensors in sorted(found.items()):
        module = _module(targets[name], layer)
        rank, scale = config.rank_of(module), config.scale_of(module)
        for kind in (DOWN, UP):
            values = files.read(tensors[kind])
            digest.update(f"{tensors[kind]} {values.dtype} {values.shape}\n".encode())
            digest.update(values.tobytes())
            values = values.astype(np.float32) * (np.float32(scale) if kind == UP else np.float32(1))
            place = matrices[name, kind][layer]
            place = place[:rank] if kind == DOWN else place[:, :rank]
            with np.errstate(over="ignore"):  # checked below
                place[...] = values
            # A NaN would also reach requests of other adapters, whose tokens are multiplied with zeros in its place.
            if not math.isfinite(float(np.abs(place.astype(np.float32)).max(initial=0.0))):
                raise InvalidAdapterError(f"{_cut(tensors[kind])} has values that are NaN or infinite.")
    return HostAdapter(
        name=source.name,
        path=source.path,
        digest=digest.hexdigest(),
        rank=max(config.rank_of(_module(targets[name], layer)) for name, layer in found),
        targets=tuple(sorted({name for name, _ in found})),
        num_bytes=sum(matrix.nbytes for matrix in matrices.values()),
        is_on_device=False,
        matrices=matrices,
    )


def largest_rank(paths: Mapping[str, str]) -> int:
    """Returns the largest rank of some adapters, by their configs; 0 without any. Raises as `read_adapter`."""
    ranks = [0]
    for name, path in paths.items():
        try:
            config, _ = read_peft_config(Path(path).expanduser().absolute())
        except InvalidAdapterError as error:
            raise InvalidAdapterError(f"adapter {name!r} at {path} cannot be served: {error}") from None
        ranks += [config.rank, *map(int, config.ranks.values())]
    return min(max(ranks), MAX_RANK)


def _cut(text: str) -> str:
    shown = ascii(text)[1:-1]
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
