"""A format that meshserve does not have, added as CONTRIBUTING.md says: loaded, stored and multiplied with no edit.

Its numbers are 4 bits, which choose one of 16 values (NF4's), with an 8-bit scale for each 16 columns and a float32
scale of the whole matrix. What stands here would be five files: the format, its entry in `kernels.linear.formats`, the
publisher's layout, its entry in `published.METHODS`, and its checkpoints in `formats.py`.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from meshserve.kernels.linear import Format, QuantizedMatrix, dequantized
from meshserve.kernels.linear.formats import SCALE
from meshserve.runtime.model_files.quantization import Grid, Quantization
from meshserve.runtime.weights.convert import convert
from meshserve.runtime.weights.formats import published
from meshserve.runtime.weights.formats.config_options import Options
from meshserve.runtime.weights.formats.stored_matrix import StoredMatrix
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.random_weights import random_model
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding.checkpoints.tensor_files import TensorFiles
from meshserve.sharding.mesh import make_mesh
from tests.runtime.weights.formats import formats
from tests.runtime.weights.formats.exact_model import exact_logits, our_logits, relative_error
from tests.runtime.weights.formats.test_formats import loaded

_VALUES = np.array(
    [-1, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0, 0.07958030, 0.16093020,
     0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1], np.float32
)  # fmt: skip
_TENSOR_SCALE = "tensor_scale"


class NF4(Format):
    name, dtype, storage, packed = "nf4", jnp.dtype("int4"), jnp.dtype("uint8"), 2
    typical = {SCALE: 2.5, _TENSOR_SCALE: 0.7}

    def unpack(self, data):
        library = data.__array_namespace__()
        codes = library.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        return library.asarray(_VALUES)[codes]

    def elements(self, numbers, grids):
        return numbers * grids[SCALE] * grids[_TENSOR_SCALE]


class Published(StoredMatrix):
    @property
    def whole(self) -> str:
        return f"{self.module}.weight"

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {
            self.whole: (self.rows, self.data_columns),
            f"{self.module}.weight_scale": self.grid_shape(self.quantization.scale),
            f"{self.module}.weight_scale_2": (),
        }

    def dtypes(self) -> Mapping[str, tuple[str, ...]]:
        return dict(zip(self.tensors(), (("U8",), ("F8_E4M3",), ("F32",)), strict=True))

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        name = f"{self.module}.weight_scale"
        return files.read(name) if grid.part == SCALE else files.read(f"{name}_2").reshape(1, 1)


def read(options: Options, dtype: str) -> Quantization:
    options.one_of("quant_type", ("nf4",))
    grids = Grid(SCALE, "float8_e4m3fn", (1, 16)), Grid(_TENSOR_SCALE, "float32", (0, 0))
    return Quantization(layout=Published, format=NF4(), grids=grids, skipped=("lm_head",))


def stored(rng: np.random.Generator, rows: int, columns: int) -> formats.Stored:
    data = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    scale = torch.tensor(rng.uniform(0.5, 4, (rows, columns // 16)), dtype=torch.float32).to(torch.float8_e4m3fn)
    tensor_scale = torch.tensor(rng.uniform(0.5, 1) * 0.05, dtype=torch.float32)
    codes = np.stack([data % 16, data // 16], axis=-1).reshape(rows, columns)
    exact = _VALUES[codes] * np.repeat(scale.to(torch.float32).numpy(), 16, axis=1) * tensor_scale.numpy()
    tensors = {"weight": torch.tensor(data), "weight_scale": scale, "weight_scale_2": tensor_scale}
    return formats.Stored(tensors, exact.astype(np.float64))


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> formats.Checkpoint:
    monkeypatch.setitem(published.METHODS, "normal-float", published.Method(read))
    config = {"quant_method": "normal-float", "quant_type": "nf4"}
    monkeypatch.setitem(formats.FORMATS, "nf4", (stored, config, "bfloat16"))
    return formats.save(tmp_path / "model", "nf4")


def test_it_is_loaded_at_every_tp_size_and_stored_as_an_orbax_checkpoint(
    checkpoint: formats.Checkpoint, tmp_path: Path
) -> None:
    plain = formats.save_plain(tmp_path / "plain", checkpoint)
    config = read_model(checkpoint.directory / "config.json")
    assert config.quantization_name == "nf4-group-16" and config.quantization.format.bytes_per_weight == 0.5
    convert(checkpoint.directory, tmp_path / "orbax", dtype="float32", devices=jax.devices("cpu"))
    for tp in (1, 8):
        expected = loaded(plain, tp)
        for directory in (checkpoint.directory, tmp_path / "orbax"):
            for parameter, values in loaded(directory, tp).items():
                np.testing.assert_array_equal(values, expected[parameter], err_msg=f"{parameter} at tp {tp}")
    for parameter, values in loaded(checkpoint.directory, 2, is_plain=True).items():
        np.testing.assert_array_equal(values, loaded(plain, 2)[parameter], err_msg=parameter)


def test_it_is_multiplied(checkpoint: formats.Checkpoint) -> None:
    token_ids = [5, 3, 90, 11]
    expected = exact_logits(checkpoint.weights, checkpoint.raw, token_ids)
    assert relative_error(our_logits(checkpoint.directory, token_ids, 2), expected) < 1e-5


def test_random_weights_have_the_usual_deviation(checkpoint: formats.Checkpoint) -> None:
    config = read_model(checkpoint.directory / "config.json")
    _, params = random_model(config, model_layout(config, 2), make_mesh(2), jnp.dtype("bfloat16"))
    down = params["layers"]["mlp"]["down"]
    grids = {name: down[name].get_value() for name in (SCALE, _TENSOR_SCALE)}
    matrix = QuantizedMatrix(NF4(), down["data"].get_value(), grids)
    assert 0.015 < float(dequantized(matrix).std()) < 0.025
