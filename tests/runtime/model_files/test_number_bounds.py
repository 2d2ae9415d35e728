"""Tests that whatever stands in the place of a number in a model's files is refused by name, at once, or harmless.

Every value of a valid file is replaced by each of `HOSTILE` in turn. The file is then refused by an error of ours that
is short and names the file or the key, or what was read of it stays within bounds.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from meshserve.runtime.api.errors import MeshserveError, UnsupportedModelError
from meshserve.runtime.draft.heads.head_weights import kind_of
from meshserve.runtime.model_files.generation_config import read_eos_token_ids, read_sampling_defaults
from meshserve.runtime.model_files.model_config import read_json
from meshserve.runtime.model_files.number_bounds import BOUNDS, Bound, shown
from meshserve.runtime.retrieval.embedding_defaults import read_embedding_defaults
from meshserve.runtime.weights.model_task import published_task
from meshserve.runtime.weights.registry import named_model, published_config, read_model
from meshserve.sharding.checkpoints.checkpoint import MANIFEST_FILE, OrbaxCheckpoint, PartDigest, sha256
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.checkpoints.tensor_files import INDEX_FILE, SINGLE_FILE, TensorFiles
from tests.runtime.draft.published import PUBLISHED_BLOCK, PUBLISHED_HEAD

DEEP = "[" * 600 + "1" + "]" * 600
HOSTILE = [
    "1000000000", "1" + "0" * 18, "1" + "0" * 400, "1" + "0" * 5000, "-1", "0", "1", "0.5", "1e300", "1e400", "NaN",
    "-Infinity", "true", "null", '"7"', '""', '"' + "a" * 10_000 + '"', "[]", "[[]]", '{"a": 1}', DEEP,
    "[" * 100_000, "[" + "1," * 5_000 + "1]",
]  # fmt: skip
PLACE = "@place@"
SECONDS = 5.0  # for one file; it takes milliseconds, and minutes or all memory if a size is believed
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6,
        "attention_factor": 1.1, "beta_fast": 32, "beta_slow": 1, "truncate": True}  # fmt: skip
MSCALE = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "quant_method": "gptq", "sym": True,
        "dynamic": {"-:.*mlp.*": {}}, "checkpoint_format": "gptq"}  # fmt: skip
AUTO_ROUND = {"bits": 4, "group_size": 128, "sym": True, "data_type": "int", "quant_method": "auto-round",
              "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}}}  # fmt: skip
AWQ = {"quant_method": "awq", "zero_point": True, "group_size": 128, "bits": 4, "version": "GEMM"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["lm_head"]}
WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}  # fmt: skip
DENSE, EXPERTS = published_config("qwen3-0.6b"), published_config("qwen3-30b-a3b")


def of_config(path: Path) -> object:
    return read_model(path / "config.json")


def of_head(path: Path) -> object:
    raw = read_json(path / "config.json")
    kind = kind_of(raw)
    return kind.config(raw, named_model("qwen3-8b")) if kind is not None else None


def of_generation(path: Path) -> object:
    return read_eos_token_ids(path), read_sampling_defaults(path)


# What is read of which file: name -> the file, its valid contents, and what reads it.
FILES: dict[str, tuple[str, Any, Callable[[Path], object]]] = {
    "dense": ("config.json", {**DENSE, "layer_types": ["full_attention"] * 28, "sliding_window": None}, of_config),
    "experts": ("config.json", {**EXPERTS, "mlp_only_layers": [0, 3]}, of_config),
    "yarn": ("config.json", {**DENSE, "rope_scaling": YARN}, of_config),
    "mscale": ("config.json", {**DENSE, "rope_parameters": MSCALE}, of_config),
    "linear": ("config.json", {**DENSE, "rope_scaling": {"type": "linear", "factor": 2}}, of_config),
    "no class": ("config.json", {**DENSE, "architectures": None}, of_config),
    "gptq": ("config.json", {**DENSE, "quantization_config": GPTQ}, of_config),
    "awq": ("config.json", {**DENSE, "quantization_config": AWQ}, of_config),
    "autoround": ("config.json", {**DENSE, "quantization_config": AUTO_ROUND}, of_config),
    "fp8": ("config.json", {**DENSE, "quantization_config": FP8}, of_config),
    "compressed": ("config.json", {**DENSE, "quantization_config": COMPRESSED}, of_config),
    "head": ("config.json", PUBLISHED_HEAD, of_head),
    "block drafter": ("config.json", PUBLISHED_BLOCK, of_head),
    "generation": ("generation_config.json", {
        "eos_token_id": [151645, 151643], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0,
        "repetition_penalty": 1.05, "max_new_tokens": 2048,
    }, of_generation),
    "embedding": ("config_sentence_transformers.json", {
        "truncate_dim": 256, "default_prompt_name": "query", "prompts": {"query": "a", "document": ""},
    }, read_embedding_defaults),
    "lengths of texts": ("sentence_bert_config.json", {"max_seq_length": 512}, read_embedding_defaults),
    "modules": ("modules.json", [{"idx": 0, "type": "a.Transformer", "path": ""}], published_task),
}  # fmt: skip

LIKE_DENSE = ("yarn", "mscale", "linear", "gptq", "awq", "autoround", "fp8", "compressed")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the place of each value in parsed JSON, also of lists and objects."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from places(value[index], (*path, index))


def replaced(value: Any, path: tuple[Any, ...], new: str) -> str:
    """Returns the JSON of a value in which something else stands at a place."""
    copy = json.loads(json.dumps(value))
    part = copy
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = PLACE
    return json.dumps(copy).replace(f'"{PLACE}"', new)


def numbers(value: object) -> Iterator[float]:
    """Yields all numbers of what was read."""
    if isinstance(value, int | float):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from numbers(getattr(value, field.name))
    elif isinstance(value, tuple | list | frozenset):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, dict):
        yield from numbers(list(value.values()))


def assert_bounded(read: Callable[[Path], object], directory: Path, text: str) -> None:
    began = time.thread_time()
    try:
        for each in numbers(read(directory)):
            assert math.isfinite(each) and abs(each) <= 1e15, text[:200]
    except (MeshserveError, CheckpointError) as error:
        is_short = len(str(error)) < 2500
        assert is_short, f"{text[:100]}: {str(error)[:200]}"
    except Exception as error:
        raise AssertionError(f"{text[:100]}: {type(error).__name__} {str(error)[:200]}") from error
    assert time.thread_time() - began < SECONDS, text[:200]


def write_config(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(DENSE))
    (directory / "modules.json").write_text("[]")


@pytest.mark.parametrize("name", FILES)
def test_every_value_is_bounded(name: str, tmp_path: Path) -> None:
    file, valid, read = FILES[name]
    write_config(tmp_path)
    (tmp_path / file).write_text(json.dumps(valid))
    read(tmp_path)
    seen = set(places(FILES["dense"][1])) if name in LIKE_DENSE else set()
    for place in sorted(set(places(valid)) - seen, key=str):
        for new in HOSTILE:
            text = replaced(valid, place, new)
            (tmp_path / file).write_text(text)
            assert_bounded(read, tmp_path, f"{place}: {new}")


@pytest.mark.parametrize("key", BOUNDS)
@pytest.mark.parametrize("value", ["1000000000", "1" + "0" * 400, "-5", "1e400", "NaN", "true", '"7"', DEEP])
def test_each_number_is_refused_by_its_name(key: str, value: str, tmp_path: Path) -> None:
    names = [name for name, (_, valid, _) in FILES.items() if key in json.dumps(valid)]
    file, valid, read = FILES[names[0]]
    write_config(tmp_path)
    place = next(place for place in places(valid) if place[-1] == key)
    (tmp_path / file).write_text(replaced(valid, place, value))
    if json.loads("1000000000") <= BOUNDS[key].high and value == "1000000000":
        read(tmp_path)
        return
    with pytest.raises(UnsupportedModelError) as caught:
        read(tmp_path)
    assert key in str(caught.value) and len(str(caught.value)) < 400


def test_what_bounds_allow() -> None:
    whole, above = Bound(1, 512), Bound(0, 1, is_whole=False, is_above=True)
    assert [whole.accepts(each) for each in (1, 512, 0, 513, 2.0, True, "1", None)] == [True] * 2 + [False] * 6
    assert [above.accepts(each) for each in (1e-6, 1, 0, 0.0, 1.1, math.nan, True)] == [True] * 2 + [False] * 5
    assert Bound(1, 9, may_be_float=True).accepts(2.0) and not Bound(1, 9, may_be_float=True).accepts(2.5)
    assert str(whole) == "a whole number, 1 to 512" and str(above) == "a number above 0 and at most 1"


def test_what_is_shown_is_short() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("a" * 10**6, [1] * 10**6, {str(each): each for each in range(10**5)}, deep, 10**5000):
        assert len(shown(value)) < 150


# --- headers of weight files


def header_of(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    num_bytes = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + num_bytes]), data[8 + num_bytes :]


def test_every_number_of_a_header_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones((4,), np.float32)}, path)
    header, rest = header_of(path)
    for place in places(header):
        for new in [*HOSTILE, "[2,3,1000000000000]", "[" + "9" * 17 + ",3]"]:
            text = replaced(header, place, new).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + rest)
            assert_bounded(lambda directory: TensorFiles(directory) and None, tmp_path, f"{place}: {new}")
    for length in (0, 1, 2**31, 2**63 - 1, 2**64 - 1):
        path.write_bytes(length.to_bytes(8, "little") + rest)
        with pytest.raises(CheckpointError, match="is cut short or damaged"):
            TensorFiles(tmp_path)


@pytest.mark.parametrize("new", HOSTILE, ids=range(len(HOSTILE)))
def test_every_value_of_an_index_is_bounded(new: str, tmp_path: Path) -> None:
    save_file({"a": np.ones((2, 3), np.float32)}, tmp_path / "part.safetensors")
    index = {"metadata": {"total_size": 24}, "weight_map": {"a": "part.safetensors"}}
    for place in places(index):
        (tmp_path / INDEX_FILE).write_text(replaced(index, place, new))
        assert_bounded(lambda directory: TensorFiles(directory) and None, tmp_path, f"{place}: {new}")


def test_every_number_of_a_digest_and_manifest_is_bounded(tmp_path: Path) -> None:
    digest = {"source_id": "a", "arrays": {
        "a": {"shape": [4, 6], "dtype": "float32", "block": [2, 6], "crc32": [1, 2]}}}  # fmt: skip
    PartDigest.from_json(json.dumps(digest))
    (tmp_path / "digests").mkdir()
    manifest = {"format": "meshserve orbax", "format_version": 1, "meshserve_version": "0", "dtype": "bfloat16",
                "num_bytes": 96, "source": {}, "parts": {"part": "0"}}  # fmt: skip

    def write(digest: str, manifest: dict[str, Any] | str) -> None:
        (tmp_path / "digests" / "part.json").write_text(digest)
        if isinstance(manifest, dict):
            manifest = json.dumps({**manifest, "parts": {"part": sha256(digest)}})
        (tmp_path / MANIFEST_FILE).write_text(manifest)

    def read(directory: Path) -> list[Any]:
        return [array.blocks() for _, _, array in OrbaxCheckpoint(directory)._arrays.values()]

    for new in [*HOSTILE, "[1000000000, 1000000000]", "[4, 6, 1]", "[1000000000000000000, 6]"]:
        for place in places(digest):
            write(replaced(digest, place, new), manifest)
            assert_bounded(read, tmp_path, f"{place}: {new}")
        for place in places(manifest):
            write(json.dumps(digest), replaced(manifest, place, new))
            assert_bounded(read, tmp_path, f"{place}: {new}")
