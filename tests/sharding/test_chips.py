"""Machines by name."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from meshserve.sharding.chips import CHIPS, chip_of, compiler_options, target
from meshserve.sharding.mesh import make_mesh


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("v5e:2x4", 8),
        ("v6e:4x4", 16),
        ("v5p:2x2x2", 8),
        ("tpu7x:2x2x1", 8),
        ("h100:8", 8),
        ("h200:4", 4),
        ("a100:8", 8),
        ("l40s:2", 2),
        ("rtx4090:1", 1),
        ("rtx5090:2", 2),
        ("cpu:3", 3),
    ],
)
def test_a_slice_counts_its_devices(name, num_devices):
    goal = target(name)
    assert goal.num_devices == num_devices
    assert goal.chip is CHIPS[name.partition(":")[0]]


@pytest.mark.parametrize(
    "name", ["v6e-8", "v7x:2x2x1", "v6e:2", "v6e:2x4 ", "h100:2x4", "h100", "cpu:2x2", "h100:0", "v6e:0x4"]
)
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ValueError, match="it takes CHIP:SHAPE with a chip of v5e, v6e, .*, h100, h200, a100, l40s, "):
        target(name)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_no_gpu_computes_twice_to_save_memory(num_devices):
    devices = np.array([SimpleNamespace(platform="gpu", device_kind="NVIDIA A100")] * num_devices)
    mesh = SimpleNamespace(devices=devices, size=num_devices)
    assert compiler_options(mesh)["xla_disable_hlo_passes"] == "rematerialization"
    with_library = compiler_options(mesh, has_library_gemms=True)
    assert with_library == {**compiler_options(mesh), "xla_gpu_enable_triton_gemm": False}


@pytest.mark.parametrize("num_devices", [1, 4])
def test_long_programs_for_which_a_gpu_waits_have_no_graph_of_all_kernels(num_devices):
    devices = np.array([SimpleNamespace(platform="gpu", device_kind="NVIDIA A100")] * num_devices)
    mesh = SimpleNamespace(devices=devices, size=num_devices)
    weights = [
        jax.ShapeDtypeStruct((num_devices << 31,), np.int8),
        jax.ShapeDtypeStruct((num_devices << 30,), np.int16),
    ]
    early = compiler_options(mesh, awaited_weights=weights)
    assert early == {**compiler_options(mesh), "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN"}
    assert compiler_options(mesh, awaited_weights=weights[:1]) == compiler_options(mesh, awaited_weights=None)


def gpu_options():
    devices = np.array([SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")])
    weights = jax.ShapeDtypeStruct((1 << 40,), np.int8)
    return compiler_options(SimpleNamespace(devices=devices, size=1), has_library_gemms=True, awaited_weights=weights)


def test_every_option_for_gpus_is_known_to_this_xla():
    assert jax.jit(lambda x: x + 1, compiler_options=gpu_options())(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_unknown": False})(1)


def test_nothing_that_xla_tries_has_its_operands_come_by_the_copy_engine():
    options = gpu_options()
    assert options["xla_gpu_experimental_enable_fusion_autotuner"] is False, "fusions have no list of what to try"
    lines = Path(options["xla_gpu_gemm_autotuner_override_file"]).read_text().splitlines()
    tried = [line for line in lines if not line.startswith("#")]
    assert len(tried) > 8 and len(set(tried)) == len(tried)
    assert all(line.startswith("config {") and "tma" not in line for line in tried)


def test_other_devices_are_no_chip_and_have_no_options():
    mesh = make_mesh(2)
    assert chip_of(mesh.devices.flat[0]) is None
    assert compiler_options(mesh) == {}
