"""Tests what is read of PEFT checkpoints, and which are refused before anything changes."""

import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshserve.runtime.adapters.catalog import HostCatalog
from meshserve.runtime.adapters.peft_config import parsed_config
from meshserve.runtime.adapters.peft_files import HostAdapter, read_adapter
from meshserve.runtime.api.adapters import NoAdapters
from meshserve.runtime.api.errors import (
    AdapterExistsError,
    AdapterRoomError,
    AdaptersOffError,
    InvalidAdapterError,
    UnknownAdapterError,
)
from meshserve.runtime.weights.registry import read_model
from tests import adapters, checkpoints

RANK = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("dense") / "base")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("experts") / "base", **checkpoints.TINY_EXPERTS)


def read(path: Path, base: Path, rank: int = RANK) -> HostAdapter:
    return read_adapter("a", str(path), read_model(base / "config.json"), rank=rank, dtype=jnp.dtype("float32"))


def change_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Changes, adds or, with None, removes tensors of an adapter, whose names end as the keys with dots for __."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    for key, value in changes.items():
        end = key.replace("__", ".")
        name = next((each for each in tensors if each.endswith(end)), f"base_model.model.{end}")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_matrices_are_padded_and_scaled(base: Path, tmp_path: Path):
    path = adapters.save_adapter(
        tmp_path / "a", base, seed=1, targets=("q_proj", "down_proj"), r=4, lora_alpha=6, use_rslora=True,
        rank_pattern={"model.layers.2.mlp.down_proj": 9}, alpha_pattern={"down_proj": 3.5},
    )  # fmt: skip
    found = read(path, base)
    assert (found.rank, found.targets, found.is_on_device) == (9, ("down_proj", "q_proj"), False)
    assert found.num_bytes == sum(matrix.nbytes for matrix in found.matrices.values())
    stored = load_file(path / "adapter_model.safetensors")
    for target, layer, rank, alpha in (("q_proj", 0, 4, 6), ("down_proj", 1, 4, 3.5), ("down_proj", 2, 9, 3.5)):
        name = f"base_model.model.{adapters.module(layer, target)}.lora_"
        down, up = found.matrices[target, "A"][layer], found.matrices[target, "B"][layer]
        np.testing.assert_array_equal(down[:rank], stored[f"{name}A.weight"].numpy())
        scaled = stored[f"{name}B.weight"].numpy() * np.float32(alpha / rank**0.5)
        np.testing.assert_allclose(up[:, :rank], scaled, rtol=1e-6)
        assert down.shape[0] == up.shape[1] == RANK and not down[rank:].any() and not up[:, rank:].any()


def test_the_digest_is_that_of_config_and_tensors(base: Path, tmp_path: Path):
    paths = [adapters.save_adapter(tmp_path / name, base, seed=1) for name in ("one", "same", "scaled", "changed")]
    change_config(paths[2], lora_alpha=17)
    key = "layers__0__self_attn__q_proj__lora_A__weight"
    change_tensors(paths[3], **{key: torch.ones(8, 48)})
    digests = [read(path, base).digest for path in paths]
    assert digests[0] == digests[1] and len(set(digests)) == 3 and len(digests[0]) == 64


def test_all_linear_regular_expressions_and_other_prefixes_are_read_by_the_tensors(base: Path, tmp_path: Path):
    expected = read(adapters.save_adapter(tmp_path / "a", base, seed=1), base)
    for index, targets in enumerate(("all-linear", r".*\.(self_attn|mlp)\..*_proj", "(a+)+$")):
        found = read(adapters.save_adapter(tmp_path / f"b{index}", base, seed=1, target_modules=targets), base)
        assert found.matrices.keys() == expected.matrices.keys()
    file = tmp_path / "a" / "adapter_model.safetensors"  # of a model without an output head, such as an embedding model
    save_file({name.replace("model.model.", "model."): each for name, each in load_file(file).items()}, file)
    assert read(tmp_path / "a", base).matrices.keys() == expected.matrices.keys()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; allowed is LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora is True; DoRA is not implemented"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]; it replaces whole modules"),
        ({"bias": "all"}, "bias is 'all'; allowed is none"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "adapters of experts are not implemented"),
        ({"fan_in_fan_out": True}, "for another model"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the base model. Convert"),
        ({"init_lora_weights": ["x"]}, "changes the weights"),
        ({"of_the_future": 1}, "of_the_future is not known"),
        ({"r": 0}, "r is 0; allowed is a whole number, 1 to 256"),
        ({"r": 257}, "r is 257"),
        ({"r": "8"}, "r is '8'"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 1e300}, r"lora_alpha is 1e\+300"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; allowed is true or false"),
        ({"rank_pattern": {"(a+)+$": 4}}, r"rank_pattern has '\(a\+\)\+\$'; allowed are names of modules"),
        ({"rank_pattern": {"q_proj": 10**9}}, "rank_pattern of q_proj is 1000000000"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern of q_proj is -1"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": None}, "target_modules"),
        ({"layers_to_transform": [10**6]}, "layers_to_transform"),
    ],
)
def test_options_that_are_not_implemented_are_refused_by_name(options: dict[str, Any], reason: str):
    with pytest.raises(InvalidAdapterError, match=reason):
        parsed_config({**adapters.CONFIG, **options})


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"layers__0__self_attn__q_proj__lora_A__weight": torch.ones(8, 47)}, r"is \(8, 47\).*ask for \(8, 48\)"),
        ({"layers__0__self_attn__q_proj__lora_B__weight": torch.ones(127, 8)}, "another base model, or damaged"),
        ({"layers__0__mlp__down_proj__lora_B__weight": None}, "lora_B of model.layers.0.mlp.down_proj is missing"),
        ({"model__layers__9__self_attn__q_proj__lora_A__weight": torch.ones(8, 48)}, "layer 9 of the served model, wh"),
        ({"model__layers__0__mlp__q_proj__lora_A__weight": torch.ones(8, 48)}, "allowed for this model are self_attn"),
        ({"model__layers__0__mlp__experts__1__up_proj__lora_A__weight": torch.ones(8, 48)}, "adapters of experts"),
        ({"model__embed_tokens__lora_embedding_A": torch.ones(8, 48)}, "train without embed_tokens"),
        ({"lm_head__lora_A__weight": torch.ones(8, 48)}, "train without lm_head"),
        ({"layers__0__self_attn__q_proj__lora_magnitude_vector": torch.ones(8)}, "DoRA is not implemented"),
        ({"visual__blocks__0__attn__lora_A__weight": torch.ones(8, 48)}, "it is no part of an adapter"),
        ({"layers__1__self_attn__k_proj__lora_A__weight": torch.full((8, 48), torch.nan)}, "NaN or infinite"),
        ({"layers__1__self_attn__k_proj__lora_A__weight": torch.ones((8, 48), dtype=torch.int32)}, "is I32; allowed"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: dict[str, Any], reason: str, base: Path, tmp_path: Path):
    path = adapters.save_adapter(tmp_path / "a", base, seed=1)
    change_tensors(path, **tensors)
    with pytest.raises(InvalidAdapterError, match=rf"(?s)adapter 'a' at .*{reason}"):
        read(path, base)


def test_damaged_missing_and_foreign_files_are_refused(base: Path, experts: Path, tmp_path: Path):
    path = adapters.save_adapter(tmp_path / "a", base, seed=1)
    with pytest.raises(InvalidAdapterError, match="has rank 8; this server accepts 4.*--max-adapter-rank 8"):
        read(path, base, rank=4)
    with pytest.raises(InvalidAdapterError, match="is not among target_modules"):
        change_config(path, target_modules=["v_proj"])
        read(path, base)
    with pytest.raises(InvalidAdapterError, match="allowed for this model are self_attn.q_proj"):
        change_config(path, target_modules="all-linear")
        read(path, experts)
    file = path / "adapter_model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-1], content[:40], b"", content + b"x"):
        file.write_bytes(damaged)
        with pytest.raises(InvalidAdapterError, match="cannot be read"):
            read(path, base)
    file.unlink()
    with pytest.raises(InvalidAdapterError, match="does not exist. The directory must hold adapter_model.safetensors"):
        read(path, base)
    os.mkfifo(file)
    with pytest.raises(InvalidAdapterError, match="a FIFO"):
        read(path, base)
    file.unlink()
    outside = tmp_path / "outside"
    outside.write_bytes(content)
    file.symlink_to(outside)
    with pytest.raises(InvalidAdapterError, match="leads out of the model's directory"):
        read(path, base)
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(InvalidAdapterError, match="is not valid JSON"):
        read(path, base)
    with pytest.raises(InvalidAdapterError, match=r"has no adapter_config.json; an adapter is a directory"):
        read(tmp_path, base)
    with pytest.raises(InvalidAdapterError, match="is not local"):
        read_adapter("a", "gs://b/c", read_model(base / "config.json"), rank=8, dtype=jnp.dtype("float32"))


def test_attention_adapters_of_experts_are_read(experts: Path, tmp_path: Path):
    path = adapters.save_adapter(tmp_path / "a", experts, seed=1, targets=adapters.ATTENTION)
    assert read(path, experts).targets == ("k_proj", "o_proj", "q_proj", "v_proj")


# --- the catalog


def test_a_catalog_loads_replaces_and_unloads(base: Path, tmp_path: Path):
    one, other = (str(adapters.save_adapter(tmp_path / f"a{seed}", base, seed=seed)) for seed in (1, 2))
    num_bytes = read(Path(one), base).num_bytes
    resident: set[str] = set()
    catalog = HostCatalog(
        read_model(base / "config.json"),
        rank=RANK,
        dtype=jnp.dtype("float32"),
        max_bytes=2 * num_bytes,
        is_on_device=resident.__contains__,
    )
    with pytest.raises(UnknownAdapterError, match="loaded are none"):
        catalog.find("a")
    first = catalog.load("a", one)
    assert catalog.is_enabled and catalog.load("a", one) == first == catalog.find("a")
    with pytest.raises(AdapterExistsError, match="loaded from .*a1, with another content"):
        catalog.load("a", other)
    second = catalog.load("a", other, replaces=True)
    assert second.digest != first.digest and [each.path for each in catalog.list()] == [other]
    resident.add(second.digest)
    assert catalog.find("a").is_on_device and catalog.list()[0].is_on_device
    catalog.load("b", one)
    catalog.load("c", one)  # of the same content, which is kept once
    with pytest.raises(AdapterRoomError, match="Unload others first"):
        catalog.load("d", str(adapters.save_adapter(tmp_path / "a3", base, seed=3)))
    assert [each.name for each in catalog.list()] == ["a", "b", "c"]
    catalog.unload("a")
    with pytest.raises(UnknownAdapterError, match="there is no adapter 'a'; loaded are 'b', 'c'"):
        catalog.unload("a")
    for name in ("", " a", "a\n", "a" * 257):
        with pytest.raises(InvalidAdapterError, match="is not allowed"):
            catalog.load(name, one)


def test_a_server_without_adapters_says_so():
    catalog = NoAdapters()
    assert not catalog.is_enabled and not catalog.list()
    for call in (catalog.find, catalog.unload, lambda name: catalog.load(name, "/x")):
        with pytest.raises(AdaptersOffError, match="adapter 'a': this server serves no adapters"):
            call("a")
