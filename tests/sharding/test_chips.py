"""Machines by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from meshserve.sharding.chips import (
    CHIPS,
    GIB,
    GPUS,
    GPUAttributes,
    chip_of,
    compiler_options,
    detection,
    gpu_of,
    target,
    topology,
)
from meshserve.sharding.mesh import make_mesh
from tests.sharding.gpu_cards import CARDS, attributes, device


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
        ("a100-pcie-40gb:2", 2),
        ("rtxpro6000:4", 4),
        ("cpu:3", 3),
    ],
)
def test_a_slice_counts_its_devices(name, num_devices):
    goal = target(name)
    assert goal.num_devices == num_devices
    assert goal.chip is CHIPS[name.partition(":")[0]]


@pytest.mark.parametrize(
    "name", ["v6e-8", "v7x:2x2x1", "v6e:2", "v6e:2x4 ", "h100:2x4", "h100", "cpu:2x2", "h100:0", "v6e:0x4", "h100-:1"]
)
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(
        ValueError, match="it takes CHIP:SHAPE with a chip of v5e, v6e, .*, a100, a100-pcie, .*, gb10, cpu, "
    ):
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


# --- GPUs are recognized by what they are


def test_every_gpu_of_the_table_is_tried() -> None:
    assert list(CARDS) == [chip.name for chip in GPUS]


@pytest.mark.parametrize("card", CARDS)
def test_a_gpu_is_found_by_its_attributes(card: str) -> None:
    assert gpu_of(attributes(card)) is CHIPS[card]
    assert chip_of(device(card)) is CHIPS[card], "jax does not tell its memory"


@pytest.mark.parametrize("card", CARDS)
def test_a_gpu_of_another_name_is_one_with_the_same_attributes(card: str) -> None:
    found, chip = gpu_of(attributes(card, name="NVIDIA Graphics Device")), CHIPS[card]
    assert not found.is_estimated
    known = (found.compute_capability, found.num_multiprocessors)
    assert known == (chip.compute_capability, chip.num_multiprocessors)
    assert found.hbm_bytes == pytest.approx(chip.hbm_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("card", "changes", "found"),
    [
        ("a100", {"name": "NVIDIA A800-SXM4-80GB"}, "a100"),
        ("h100", {"name": "NVIDIA H800"}, "h100"),
        ("rtxa6000", {"memory_bytes": int(44.5 * GIB)}, "rtxa6000"),  # with error correction
        ("b300", {"num_multiprocessors": 158}, "b300"),
        ("rtxpro6000", {"name": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"}, "rtxpro6000"),
    ],
)
def test_variants_of_a_card_are_found(card: str, changes: dict[str, Any], found: str) -> None:
    assert gpu_of(attributes(card, **changes)) is CHIPS[found]


@pytest.mark.parametrize(
    ("card", "changes"),
    [
        ("a100", {"name": "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "memory_bytes": 39 * GIB, "num_multiprocessors": 42}),
        ("rtx3090", {"name": "NVIDIA A10G", "memory_bytes": 22 * GIB, "num_multiprocessors": 80}),
        ("rtx3090", {"name": "NVIDIA GeForce RTX 3090 Ti", "num_multiprocessors": 84}),
        ("rtx4090", {"name": "NVIDIA GeForce RTX 4090 D", "num_multiprocessors": 114}),
        ("h200", {"compute_capability": (9, 9)}),
    ],
)
def test_other_cards_are_described_by_their_attributes(card: str, changes: dict[str, Any]) -> None:
    known = attributes(card, clock_hz=1.7e9, bytes_per_second=6e11, **changes)
    found = gpu_of(known)
    assert found.is_estimated and found.name == found.kind == known.name and found.is_unrolled
    assert (found.hbm_bytes, found.hbm_bytes_per_second) == (known.memory_bytes, 6e11)
    assert (found.compute_capability, found.num_multiprocessors) == known[1:2] + known[3:4]


@pytest.mark.parametrize(
    ("card", "clock_hz"),
    [("a100", 1.41e9), ("rtxa6000", 1.8e9), ("rtx3090", 1.695e9), ("l40s", 2.52e9), ("rtx4090", 2.52e9)]
    + [("h100", 1.83e9), ("b200", 1.85e9), ("rtx5090", 2.41e9), ("rtxpro6000", 2.6e9)],
)
def test_estimated_speeds_are_near_those_of_data_sheets(card: str, clock_hz: float) -> None:
    name = "NVIDIA GeForce unknown" if "GeForce" in CARDS[card][0] else "unknown"
    half = CARDS[card][3] // 2
    found, chip = gpu_of(attributes(card, name=name, clock_hz=clock_hz, num_multiprocessors=half)), CHIPS[card]
    share = half / chip.num_multiprocessors
    for field in ("flops_per_second", "fp8_flops_per_second", "vector_flops_per_second"):
        assert getattr(found, field) == pytest.approx(share * getattr(chip, field), rel=0.15), field


def test_a_gpu_that_says_nothing_is_taken_for_a_small_one() -> None:
    found = gpu_of(GPUAttributes("gfx942", None))
    assert found.is_estimated and not found.is_hopper and found.compute_capability is None
    assert (found.hbm_bytes, found.hbm_bytes_per_second) == (24 * GIB, 1e12) and found.flops_per_second > 1e12


def test_what_the_driver_says_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    one = device("gh200")
    monkeypatch.setattr(detection, "_local_device", lambda device: device)
    monkeypatch.setattr(detection, "_driver_attributes", lambda ordinal: attributes("gh200-144gb", bytes_per_second=1))
    assert chip_of(one) is CHIPS["gh200-144gb"]


def test_a_copy_is_timed_where_the_bandwidth_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = attributes("l4", name="unknown", num_multiprocessors=40)
    monkeypatch.setattr(detection, "_local_device", lambda device: device)
    monkeypatch.setattr(detection, "_driver_attributes", lambda ordinal: unknown)
    monkeypatch.setattr(detection, "_timed_copy", lambda device: 2.5e11)
    found = chip_of(device("l4"))
    assert found is not None and found.hbm_bytes_per_second == 2.5e11
    monkeypatch.setattr(detection.jax, "process_count", lambda: 2)
    assert chip_of(device("l4")).hbm_bytes_per_second == 1e12, "processes must not measure different speeds"


def test_a_copy_is_timed_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_COPIED_BYTES", 1 << 20)
    assert detection._timed_copy(jax.local_devices()[0]) > 0
    detection._timed_copy.cache_clear()


def test_the_compiler_gets_the_multiprocessors_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []
    monkeypatch.setattr(
        topology.topologies, "get_topology_desc", lambda *_, target_config, **__: described.append(target_config)
    )
    for name in ("h200", "h100-pcie"):
        topology.gpu_topology(CHIPS[name], 1)
    assert "core_count: 132 " in described[0] and "core_count: 114 " in described[1]
