"""Orbax checkpoints: the same bits as the safetensors at every TP size, and any damage is refused by name."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.weights.convert import convert, run_convert, verify
from meshserve.runtime.weights.load import load_model
from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.checkpoints import writer
from meshserve.sharding.checkpoints.parameters import CheckpointError
from meshserve.sharding.mesh import make_mesh
from tests import checkpoints

DEMO = DEMO_DIRECTORY
SMALL = {"vocab_size": 333, "intermediate_size": 90, "num_hidden_layers": 2, "tie_word_embeddings": False}


def parameters(directory: Path, tp: int, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    config = read_model(directory / "config.json")
    _, params = load_model(directory, config, model_layout(config, tp), make_mesh(tp), jnp.dtype(dtype))
    return {".".join(map(str, path)): np.asarray(weight[...]) for path, weight in nnx.to_flat_state(params)}


def assert_same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and array.tobytes() == theirs[name].tobytes(), name


def converted(source: Path, target: Path, **options: str) -> Path:
    convert(source, target, **options, devices=jax.devices("cpu"))
    return target


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(DEMO, tmp_path_factory.mktemp("orbax") / "demo")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_checkpoint(tmp_path_factory.mktemp("small"), **SMALL)


# --- what is restored


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_demo_model_restores_bit_by_bit_at_every_tp_size(tp: int, demo: Path) -> None:
    assert_same_bits(parameters(demo, tp), parameters(DEMO, tp))


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_widths_that_do_not_divide_are_padded_on_restore(tp: int, dtype: str, small: Path, tmp_path: Path) -> None:
    stored = converted(small, tmp_path / "orbax")
    assert_same_bits(parameters(stored, tp, dtype), parameters(small, tp, dtype))


def test_heads_that_straddle_shards(tmp_path: Path) -> None:
    """6 query heads over 2 KV heads on 3 shards: the middle one reads both KV heads."""
    source = checkpoints.save_checkpoint(tmp_path / "hf", num_attention_heads=6, num_key_value_heads=2)
    stored = converted(source, tmp_path / "orbax")
    for tp in (1, 2, 3, 6):
        assert_same_bits(parameters(stored, tp), parameters(source, tp))


def test_any_orbax_reads_a_part(demo: Path) -> None:
    layer = ocp.StandardCheckpointer().restore(demo / "weights" / "layers.0003")
    loaded = parameters(DEMO, 1)
    np.testing.assert_array_equal(layer["attention"]["qkv"], loaded["layers.attention.qkv"][3])
    np.testing.assert_array_equal(layer["mlp"]["down"], loaded["layers.mlp.down"][3])


def test_what_lies_beside_the_weights_is_copied(demo: Path) -> None:
    assert (demo / "config.json").exists()
    assert (demo / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    assert not list(demo.glob("*.safetensors"))


def test_another_dtype_is_stored_and_said(small: Path, tmp_path: Path) -> None:
    stored = converted(small, tmp_path / "orbax", dtype="bfloat16")
    assert json.loads((stored / "config.json").read_text())["dtype"] == "bfloat16"
    assert read_model(stored / "config.json").dtype == "bfloat16"
    assert_same_bits(parameters(stored, 2), parameters(small, 2))  # float32 was rounded once, either way


# --- what is refused


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_a_flipped_byte_anywhere_is_refused_or_harmless(demo: Path, tmp_path: Path) -> None:
    """A bit of every file of weights and digests: what can still be loaded is what was written."""
    expected, draw = parameters(demo, 2), np.random.default_rng(0)
    num_refused = 0
    paths = [*files_of(demo / "weights" / "layers.0002"), *files_of(demo / "digests"), demo / "checkpoint.json"]
    for path in paths:
        contents = path.read_bytes()
        damaged = bytearray(contents)
        damaged[draw.integers(len(damaged))] ^= 1 << int(draw.integers(8))
        path.write_bytes(damaged)
        try:
            assert_same_bits(parameters(demo, 2), expected)
        except CheckpointError as error:
            assert str(demo) in str(error)
            num_refused += 1
        finally:
            path.write_bytes(contents)
    assert num_refused >= 10, f"of {len(paths)}"
    assert verify(demo) == 6 * 8 + 2


def test_a_flipped_byte_of_the_weights_names_the_array(demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    data = max(files_of(copy / "weights" / "layers.0004"), key=lambda path: path.stat().st_size)
    contents = bytearray(data.read_bytes())
    contents[len(contents) // 2] ^= 1
    data.write_bytes(contents)
    for check in (lambda: parameters(copy, 4), lambda: verify(copy)):
        with pytest.raises(CheckpointError, match=r"layers.0004, array layers.0004\.\S+: .*CRC-32 differs"):
            check()


def test_a_file_cut_short_names_the_part(demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    data = max(files_of(copy / "weights" / "embedding"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="weights/embedding, array embedding: cut short or damaged"):
        parameters(copy, 1)
    shutil.rmtree(copy / "weights" / "embedding")
    with pytest.raises(CheckpointError, match="array embedding: cut short or damaged"):
        parameters(copy, 1)


def test_a_part_of_another_model_is_refused(demo: Path, small: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    other = converted(small, tmp_path / "other")
    for path in ("weights/layers.0001", "digests/layers.0001.json"):
        target = copy / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        shutil.copytree(other / path, target) if (other / path).is_dir() else shutil.copy(other / path, target)
    with pytest.raises(CheckpointError, match="part layers.0001 comes from another model"):
        parameters(copy, 1)


def test_the_config_of_another_model_is_refused(demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    checkpoints.edit_config(copy, num_hidden_layers=7, layer_types=None, intermediate_size=256)
    with pytest.raises(CheckpointError, match="layers.0006") as caught:
        parameters(copy, 1)
    assert "layers.0000.mlp.down is (192, 512), config.json asks for (192, 256)" in str(caught.value)


# --- how it is written


def test_an_interrupted_conversion_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = writer.CheckpointWriter.write

    def failing(self: writer.CheckpointWriter, part: str, arrays: dict) -> None:
        if len(written) == 3:
            raise OSError("the power went out")
        written.append(part)
        write(self, part, arrays)

    monkeypatch.setattr(writer.CheckpointWriter, "write", failing)
    with pytest.raises(OSError, match="power"):
        converted(DEMO, tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint.json does not exist: the conversion did not end"):
        load_model(
            tmp_path, config := read_model(DEMO / "config.json"), model_layout(config, 1), make_mesh(1),
            jnp.dtype("bfloat16"),
        )  # fmt: skip
    monkeypatch.setattr(writer.CheckpointWriter, "write", lambda *args: (written.append(args[1]), write(*args)))
    converted(DEMO, tmp_path)
    assert len(written) == len(set(written)) == 8
    assert_same_bits(parameters(tmp_path, 1), parameters(DEMO, 1))


def test_parts_of_another_source_are_not_kept(demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    (copy / "checkpoint.json").unlink()
    converted(DEMO, copy, dtype="float32")
    assert verify(copy) == 50
    assert_same_bits(parameters(copy, 1, "float32"), parameters(DEMO, 1, "float32"))


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_same_conversion_mends_what_is_damaged(demo: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(demo, tmp_path / "copy")
    flip_a_byte(max((copy / "weights").rglob("d/*"), key=lambda path: path.stat().st_size))
    with pytest.raises(CheckpointError, match=r"CRC-32 differs|cut short or damaged"):
        verify(copy)
    converted(DEMO, copy)
    assert verify(copy) == 50


def test_an_output_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.* the same command continues from there"):
        run_convert(str(DEMO), str(tmp_path / "file"))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="0.01 GB are to be written .* too few"):
        converted(DEMO, tmp_path / "out")
    assert not list((tmp_path / "out" / "weights").glob("*"))


def test_nothing_to_do_and_the_model_itself(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to do"):
        run_convert(str(demo), "")
    with pytest.raises(ConfigError, match="is the model itself"):
        run_convert(str(demo), str(demo))
    link = tmp_path / "link"
    link.symlink_to(demo)
    with pytest.raises(ConfigError, match="is the model itself"):
        run_convert(str(demo), str(link))
    with pytest.raises(ConfigError, match="no Orbax checkpoint"):
        run_convert(str(DEMO), "", is_verified=True)
