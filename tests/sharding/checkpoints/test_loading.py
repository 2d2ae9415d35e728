"""Checkpoints: what is wrong with them is named, and each device reads its own shard and no more."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from meshserve.runtime.model_files.model_config import ModelConfig, RopeConfig
from meshserve.runtime.weights.hf_layout import checkpoint_tensors
from meshserve.runtime.weights.load import load_model
from meshserve.sharding.checkpoints.parameters import CheckpointError, Copy, Region
from meshserve.sharding.checkpoints.tensor_files import TensorFiles
from meshserve.sharding.layout import ShardLayout, shard_layout
from meshserve.sharding.mesh import make_mesh

# 8 query heads over 4 KV heads; vocabulary and MLP width are multiples of no TP size.
CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=37,
    embed_dim=6,
    mlp_dim=10,
    num_layers=2,
    num_query_heads=8,
    num_kv_heads=4,
    head_dim=4,
    rms_norm_eps=1e-6,
    max_positions=64,
    is_tied=False,
    dtype="float32",
    experts=None,
    rope=RopeConfig(
        theta=1e4, kind="default", factor=1.0, original_max_positions=64, attention_factor=1.0,
        beta_fast=32.0, beta_slow=1.0, truncate=True,
    ),
    quantization=None,
    pooling=None,
    head_quantization=None,
)  # fmt: skip
FLOAT32 = jnp.dtype("float32")
Q_PROJ, K_PROJ = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


def random_tensors(dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in checkpoint_tensors(CONFIG).items()}


def save_single(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    save_file(tensors, directory / "model.safetensors")
    return directory


def save_indexed(directory: Path, tensors: dict[str, np.ndarray], num_files: int = 3) -> Path:
    weight_map = {name: f"model-{index % num_files}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def layout_of(tp: int) -> ShardLayout:
    sizes = {name: getattr(CONFIG, name) for name in ("num_query_heads", "num_kv_heads", "vocab_size", "mlp_dim")}
    return shard_layout(num_shards=tp, **sizes)


def load(directory: Path, tp: int, dtype: jnp.dtype = FLOAT32) -> dict[str, jax.Array]:
    """The parameters by their paths in the model."""
    _, params = load_model(directory, CONFIG, layout_of(tp), make_mesh(tp), dtype)
    return {".".join(map(str, path)): weight[...] for path, weight in nnx.to_flat_state(params)}


def check(directory: Path, ignored: frozenset[str] = frozenset()) -> None:
    TensorFiles(directory).check(checkpoint_tensors(CONFIG), ignored)


def padded(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    return np.pad(array, [(0, size - length if axis == index else 0) for index, length in enumerate(array.shape)])


def expected_parameters(tensors: dict[str, np.ndarray], layout: ShardLayout) -> dict[str, np.ndarray]:
    """What the model's parameters must hold, padding included, put together head by head."""
    mlp_dim, vocab_size, head_dim = layout.mlp_dim, layout.vocab_size, CONFIG.head_dim
    layers: dict[str, list[np.ndarray]] = {}
    for index in range(CONFIG.num_layers):
        layer = {name.split(f"layers.{index}.")[1]: t for name, t in tensors.items() if f"layers.{index}." in name}
        layer = {name.removesuffix(".weight"): tensor for name, tensor in layer.items()}
        q, k, v = (layer[f"self_attn.{n}_proj"].reshape(-1, head_dim, CONFIG.embed_dim) for n in "qkv")
        queries_of_kv_head = len(q) // len(k)
        groups = []
        for first in range(0, len(q), layout.group_size):
            kv_head = first // queries_of_kv_head
            groups.append(np.concatenate([*q[first : first + layout.group_size], k[kv_head], v[kv_head]]))
        gate, up = (padded(layer[f"mlp.{name}_proj"], 0, mlp_dim) for name in ("gate", "up"))
        values = {
            "attention_norm": layer["input_layernorm"],
            "attention.qkv": np.stack(groups),
            "attention.q_norm": layer["self_attn.q_norm"],
            "attention.k_norm": layer["self_attn.k_norm"],
            "attention.out": layer["self_attn.o_proj"],
            "mlp_norm": layer["post_attention_layernorm"],
            "mlp.gate_up": np.stack([gate, up]),
            "mlp.down": padded(layer["mlp.down_proj"], 1, mlp_dim),
        }
        for name, value in values.items():
            layers.setdefault(f"layers.{name}", []).append(value)
    return {
        "embedding": padded(tensors["model.embed_tokens.weight"], 0, vocab_size),
        "head": padded(tensors["lm_head.weight"], 0, vocab_size),
        "norm": tensors["model.norm.weight"],
        **{name: np.stack(values) for name, values in layers.items()},
    }


# --- what is loaded


@pytest.mark.parametrize("save", [save_single, save_indexed])
@pytest.mark.parametrize("tp", [1, 4, 8])
def test_parameters_hold_the_checkpoint_and_zeros_as_padding(save, tp: int, tmp_path: Path):
    tensors = random_tensors()
    loaded = load(save(tmp_path, tensors), tp)
    expected = expected_parameters(tensors, layout_of(tp))
    assert loaded.keys() == expected.keys()
    for name, array in loaded.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_other_dtypes_are_converted(tmp_path: Path):
    tensors = random_tensors("bfloat16")
    loaded = load(save_single(tmp_path, tensors), 2)
    assert loaded["norm"].dtype == FLOAT32
    np.testing.assert_array_equal(loaded["norm"], tensors["model.norm.weight"].astype(np.float32))
    loaded = load(save_single(tmp_path, random_tensors()), 2, jnp.dtype("bfloat16"))
    assert loaded["norm"].dtype == ml_dtypes.bfloat16
    expected = random_tensors()["model.norm.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(loaded["norm"]), expected)


# --- what is read


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    """Every part of a tensor that a shard gets: its name, and (start, stop) of each dimension."""
    seen = []
    fill = TensorFiles.fill

    def recording(files: TensorFiles, name: str, block: Region, copies: list[Copy]) -> None:
        seen.extend((name, copy.region) for copy in copies)
        fill(files, name, block, copies)

    monkeypatch.setattr(TensorFiles, "fill", recording)
    return seen


def test_each_shard_reads_its_own_rows_and_no_more(reads, tmp_path: Path):
    load(save_single(tmp_path, random_tensors()), 8)
    all_columns = (0, CONFIG.embed_dim)
    # A query head a shard; two shards read the same KV head.
    assert sorted(region for name, region in reads if name == Q_PROJ) == [
        ((4 * head, 4 * head + 4), all_columns) for head in range(8)
    ]
    assert sorted(region for name, region in reads if name == K_PROJ) == [
        ((4 * head, 4 * head + 4), all_columns) for head in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    # The output projection is cut along its columns; of 37 rows of the vocabulary a shard has 5, the last one 2.
    o_proj = Q_PROJ.replace("q_proj", "o_proj")
    assert sorted(region for name, region in reads if name == o_proj) == [
        (all_columns, (4 * head, 4 * head + 4)) for head in range(8)
    ]
    assert sorted(region for name, region in reads if name == "lm_head.weight") == [
        ((5 * shard, min(5 * shard + 5, 37)), all_columns) for shard in range(8)
    ]
    # 10 columns of the MLP padded to 16: the shards from the sixth on hold padding alone and read nothing.
    down = "model.layers.0.mlp.down_proj.weight"
    assert sorted(region for name, region in reads if name == down) == [
        (all_columns, (2 * shard, 2 * shard + 2)) for shard in range(5)
    ]


def test_no_read_is_larger_than_a_shard_of_a_layer(reads, tmp_path: Path):
    """So the host never holds more. Together the reads cover each tensor once; only norms are read by every shard."""
    tp, tensors = 4, random_tensors()
    load(save_single(tmp_path, tensors), tp)
    num_read: Counter[str] = Counter()
    for name, region in reads:
        shape = [stop - start for start, stop in region]
        num_read[name] += math.prod(shape)
        is_cut = [length < whole for length, whole in zip(shape, tensors[name].shape, strict=True)]
        cut_length = [-(-whole // tp) for whole in tensors[name].shape]
        if "norm" not in name:
            assert sum(is_cut) == 1 and shape[is_cut.index(True)] <= cut_length[is_cut.index(True)], (name, region)
    for name, tensor in tensors.items():
        assert num_read[name] / tensor.size in ((1, tp) if "norm" in name else (1,)), name


def test_each_device_holds_what_was_read_for_it(tmp_path: Path):
    tensors = random_tensors()
    embedding = load(save_single(tmp_path, tensors), 8)["embedding"]
    rows = padded(tensors["model.embed_tokens.weight"], 0, 40)
    for index, device in enumerate(jax.devices()):
        (shard,) = [shard for shard in embedding.addressable_shards if shard.device == device]
        np.testing.assert_array_equal(shard.data, rows[5 * index : 5 * index + 5])


# --- what is wrong with a checkpoint


def test_missing_surplus_and_misshapen_tensors_are_all_named(tmp_path: Path):
    tensors = random_tensors()
    del tensors[Q_PROJ]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    tensors["model.norm.weight"] = np.zeros(7, np.float32)
    with pytest.raises(CheckpointError) as caught:
        check(save_single(tmp_path, tensors))
    message = str(caught.value)
    assert f"1 missing: {Q_PROJ}" in message
    assert "1 not part of this model: model.layers.2.mlp.up_proj.weight" in message
    assert "1 of another shape: model.norm.weight is (7,), config.json asks for (6,)" in message


def test_a_long_list_is_cut_but_counted(tmp_path: Path):
    tensors = {name: tensor for name, tensor in random_tensors().items() if "layers.1." not in name}
    with pytest.raises(CheckpointError, match="11 missing: .* and 6 more"):
        check(save_single(tmp_path, tensors))


def test_an_unserved_dtype_is_named(tmp_path: Path):
    tensors = random_tensors()
    tensors[K_PROJ] = np.zeros(tensors[K_PROJ].shape, np.int8)
    with pytest.raises(CheckpointError, match=f"of a dtype other than BF16, F16, F32: {K_PROJ} is I8"):
        check(save_single(tmp_path, tensors))


def test_a_repeated_head_may_be_ignored(tmp_path: Path):
    save_single(tmp_path, random_tensors() | {"extra": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match="extra"):
        check(tmp_path)
    check(tmp_path, ignored=frozenset({"extra"}))


def test_a_directory_without_weights(tmp_path: Path):
    with pytest.raises(CheckpointError, match="model.safetensors does not exist"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("num_bytes_left", [0, 4, 100, -10])
def test_a_file_cut_short(num_bytes_left: int, tmp_path: Path):
    path = save_single(tmp_path, random_tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes_left])
    with pytest.raises(CheckpointError, match="model.safetensors is cut short or damaged .* Download it again"):
        TensorFiles(tmp_path)


def test_an_index_that_names_a_missing_file(tmp_path: Path):
    save_indexed(tmp_path, random_tensors())
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-1.safetensors does not exist"):
        TensorFiles(tmp_path)


def edit_header(path: Path, edit: Callable[[dict], None]) -> None:
    data = path.read_bytes()
    num_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + num_bytes])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + num_bytes :])


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("data_offsets", lambda offsets: [float(offset) for offset in offsets]),
        ("data_offsets", lambda offsets: [offset + 4 for offset in offsets]),  # over the next one, a hole before it
        ("data_offsets", lambda offsets: None),
        ("shape", lambda shape: [-length for length in shape]),
        ("shape", lambda shape: [float(length) for length in shape]),
        ("dtype", lambda dtype: ["F32"]),
    ],
)
def test_a_header_that_contradicts_itself(key: str, change: Callable[[Any], object], tmp_path: Path):
    path = save_single(tmp_path, random_tensors()) / "model.safetensors"

    def edit(header: dict) -> None:
        entry = next(entry for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) == 2)
        entry[key] = change(entry[key])

    edit_header(path, edit)
    with pytest.raises(CheckpointError, match="model.safetensors is cut short or damaged .* Download it again"):
        TensorFiles(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path):
    tensors = random_tensors()
    save_indexed(tmp_path, tensors)
    files = sorted(tmp_path.glob("*.safetensors"))
    (name, *_), others = load_file(files[0]), load_file(files[1])
    save_file({**others, name: tensors[name]}, files[1])
    with pytest.raises(CheckpointError, match=f"{name} is in two files, {files[0].name} and {files[1].name} of"):
        TensorFiles(tmp_path)


def test_a_file_that_cannot_be_opened(tmp_path: Path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read: Too many levels of symbolic links"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(text: str, tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        TensorFiles(tmp_path)


# --- comparing two tensors


@pytest.mark.parametrize(
    ("change", "differ"),
    [
        (lambda embedding: embedding, False),
        (lambda embedding: embedding.astype(ml_dtypes.bfloat16), True),  # rounded
        (lambda embedding: np.concatenate([embedding[:-1], embedding[-1:] + 1]), True),
        (lambda embedding: embedding[:-1], True),
        (lambda embedding: embedding.astype(np.float64), True),  # not served, so `check` names it
    ],
    ids=["equal", "rounded", "last_row", "shape", "dtype"],
)
def test_whether_two_tensors_differ(change: Callable[[np.ndarray], np.ndarray], differ: bool, tmp_path: Path) -> None:
    tensors = random_tensors()
    embedding = tensors["model.embed_tokens.weight"]
    files = TensorFiles(save_indexed(tmp_path, {**tensors, "lm_head.weight": change(embedding)}))
    assert files.differ("lm_head.weight", "model.embed_tokens.weight") == differ
    assert not files.differ("lm_head.weight", "no.such.tensor")


def test_equal_values_of_two_dtypes_do_not_differ(tmp_path: Path) -> None:
    head = random_tensors("bfloat16")["lm_head.weight"]
    tensors = {**random_tensors(), "lm_head.weight": head, "model.embed_tokens.weight": head.astype(np.float32)}
    assert not TensorFiles(save_single(tmp_path, tensors)).differ("lm_head.weight", "model.embed_tokens.weight")
