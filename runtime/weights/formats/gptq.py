"""Checkpoints of GPTQ: words of eight 4-bit numbers in the transposed matrix, with a zero point for each scale."""

from collections.abc import Mapping

import numpy as np

from meshserve.kernels.linear.formats import INT4, SCALE, SYMMETRIC_ZERO, ZERO
from meshserve.sharding.checkpoints.parameters import CheckpointError, Region
from meshserve.sharding.checkpoints.tensor_files import TensorFiles

from ...model_files.quantization import Grid, Quantization, grouped
from .awq import TransposedMatrix
from .config_options import INT4_GROUPS, Options
from .stored_matrix import bytes_of, numbers_of


class GPTQv2(TransposedMatrix):
    """Words pack columns. Zero points are stored as they are."""

    zero_point_offset = 0

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """See `StoredMatrix`."""
        groups = self.grid_shape(self.quantization.scale)[1]
        return {
            f"{self.module}.qweight": (self.columns // 8, self.rows),
            f"{self.module}.qzeros": (groups, self.rows // 8),
            f"{self.module}.scales": (groups, self.rows),
        }

    def data(self, files: TensorFiles, region: Region) -> np.ndarray:
        """See `StoredMatrix`."""
        first, last = (2 * byte for byte in region[1])
        words = files.read(f"{self.module}.qweight", (first // 8, last // 8))
        return bytes_of(np.ascontiguousarray(words.T))

    def grid(self, files: TensorFiles, grid: Grid) -> np.ndarray:
        """See `StoredMatrix`."""
        if grid.part == ZERO:
            return self._zero(files)
        assert grid.part == SCALE
        if not self.quantization.has_zero_points and (self._zero(files) != SYMMETRIC_ZERO).any():
            raise CheckpointError(
                f"{self.module}.qzeros has zero points other than {SYMMETRIC_ZERO}, but quantization_config.sym of "
                "config.json is true. Set it to false."
            )
        return files.read(f"{self.module}.scales").T

    def _zero(self, files: TensorFiles) -> np.ndarray:
        numbers = numbers_of(files.read(f"{self.module}.qzeros"))
        return (numbers.T + np.uint8(self.zero_point_offset)) & np.uint8(15)

    def open(self, files: TensorFiles) -> None:
        """See `StoredMatrix`. `g_idx` may only say what is so without it."""
        name = f"{self.module}.g_idx"
        if name not in files:
            return
        group = self.quantization.scale.block[1]
        if not np.array_equal(files.read(name), np.arange(self.columns) // group):
            raise CheckpointError(
                f"{name} orders columns by activation (quantization_config.desc_act); allowed is the natural order "
                "only. Use a checkpoint that was quantized with desc_act false."
            )


class GPTQ(GPTQv2):
    """The first version, in which zero points are stored less 1."""

    zero_point_offset = 1


_VERSIONS = {"gptq": GPTQ, "gptq_v2": GPTQv2}
_LEFT_OUT = "-:"


def read(options: Options, dtype: str) -> Quantization:
    """Reads a `quantization_config`."""
    options.one_of("bits", (4,))
    options.one_of("lm_head", (False,), False)
    options.one_of("desc_act", (False, True), False)  # true only with the trivial order, which the files tell
    name = "checkpoint_format" if options.any("checkpoint_format") is not None else "format"
    version = options.one_of(name, tuple(_VERSIONS), "gptq")
    options.one_of("format", (version,), version)
    is_symmetric = options.one_of("sym", (False, True), True)
    scale = Grid(SCALE, "float16", (1, options.one_of("group_size", INT4_GROUPS)))
    return Quantization(
        layout=_VERSIONS[version],
        format=INT4,
        grids=grouped(scale, has_zero_points=not is_symmetric),
        skipped=("lm_head", *options.modules("modules_to_not_convert"), *_left_out(options)),
    )


def _left_out(options: Options) -> list[str]:
    """Returns the modules that GPTQModel's `dynamic` leaves out: "-:" and a regular expression. Others are refused."""
    rules = options.any("dynamic", {})
    if not isinstance(rules, Mapping):
        options.refuse("dynamic", "an object")
    for expression, changes in rules.items():
        if not expression.startswith(_LEFT_OUT) and changes:
            options.refuse("dynamic", f"entries that begin with {_LEFT_OUT!r}, which leave modules out")
        options.check_expression("dynamic", expression.removeprefix(_LEFT_OUT))
    return [f"re:{expression.removeprefix(_LEFT_OUT)}" for expression in rules if expression.startswith(_LEFT_OUT)]
