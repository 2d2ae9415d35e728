"""An accelerator that jax is installed for and that cannot be used: one line says why, and nothing serves on CPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.startup import accelerators
from tests.waiting import WAIT_SECONDS

# What jax's plugin for CUDA does where a library is missing: jax prints the traceback, and computes on the CPU.
PLUGIN = """
def initialize():
    try:
        raise RuntimeError("cuDNN not found.")
    except RuntimeError as error:
        raise RuntimeError("Unable to load cuDNN. Is it installed?") from error
"""
SERVE = "from meshserve.runtime.commands.cli import main; import sys; sys.exit(main(['serve', 'demo', '--port=0']))"
IN_PYTHON = """
from meshserve import LLM
from meshserve.runtime.api.errors import ConfigError
try:
    LLM("demo", show_progress=False)
except ConfigError as error:
    raise SystemExit(f"ConfigError: {error}")
"""
SEES_A_GPU = """
import ctypes, pathlib
from meshserve.runtime.startup import accelerators
accelerators._DEVICES = pathlib.Path({folder!r})
ctypes.CDLL = lambda name: None
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with jax's plugin for CUDA 13, and a device file of a GPU."""
    for name, text in (("jax_cuda13_plugin", ""), ("jax_plugins/xla_cuda13", PLUGIN)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "nvidia0").touch()
    return tmp_path


def said(plugin: Path, code: str, **environment: str) -> str:
    """Runs code where jax has the plugin, and returns what it says when it ends with an error."""
    path = os.pathsep.join([str(plugin), *sys.path])
    names = {"JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"}
    env = {name: value for name, value in os.environ.items() if name not in names} | {"PYTHONPATH": path} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS, env=env)
    assert done.returncode and done.stdout == "", "nothing listens"
    return done.stderr


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "there is no device file such as /dev/nvidia0. Start a container with its GPUs (docker run --gpus all"),
        ({"JAX_PLATFORMS": "cuda"}, "there is no device file such as /dev/nvidia0. Start a container"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is '' in the environment. Unset it."),
    ],
)
@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="the machine has a GPU")
def test_a_server_does_not_start_where_there_is_no_gpu(environment: dict[str, str], why: str, plugin: Path):
    error = said(plugin, SERVE, **environment)
    assert error.startswith(f"meshserve: jax is installed for a GPU, but none can be used: {why}")
    assert error.endswith("To serve on the CPU instead, set --cpu-devices 1 (cpu_devices=1 in Python).\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize("platforms", ["", "cuda"])
@pytest.mark.parametrize("code", [SERVE, IN_PYTHON], ids=["serve", "LLM"])
def test_a_gpu_that_jax_cannot_start_is_one_line_without_a_traceback(platforms: str, code: str, plugin: Path):
    environment = {"JAX_PLATFORMS": platforms} if platforms else {}
    error = said(plugin, SEES_A_GPU.format(folder=str(plugin)) + code, **environment)
    lines = [line for line in error.splitlines() if "jax is installed" in line]
    assert len(lines) == 1 and "Traceback" not in error and "AssertionError" not in error
    assert "none can be used: Unable to load cuDNN. Is it installed? (cuDNN not found)." in lines[0]
    assert ("ConfigError: " in lines[0]) == (code == IN_PYTHON)


@pytest.mark.parametrize(
    ("kind", "failures", "message"),
    [
        ("GPU", ["operation cudaGetDeviceCount() failed: CUDA driver version is insufficient for CUDA runtime version"],
         "the driver 535.104.05 is too old for CUDA 13. Install driver 580 or later"),
        ("GPU", [], "jax found none. nvidia-smi must list it."),
        ("TPU", ["TPU initialization failed: No jellyfish device found"], "none can be used: TPU initialization"),
        ("TPU", [f"ABORTED: The TPU is already in use by process with pid {os.getpid()}. Not attempting to load it"],
         f"The TPU is in use by process {os.getpid()} ("),
        ("TPU", ["The TPU is already in use by process with pid 4194305."],
         "The TPU is in use by process 4194305. Stop it, or wait until it has ended."),
    ],
    ids=["old driver", "no GPU", "no TPU", "a TPU in use", "a TPU that was in use"],
)  # fmt: skip
def test_the_reason_is_what_jax_says(
    kind: str, failures: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    monkeypatch.setattr(accelerators, "_DRIVER_VERSION", driver)
    monkeypatch.setattr(accelerators, "_cuda_version", lambda: 13)
    found = accelerators._reason(kind, failures)
    assert message in found and found.endswith("(cpu_devices=1 in Python).") and "\n" not in found


LOCK = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"


def test_the_process_that_has_locked_the_tpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lock = tmp_path / "libtpu_lockfile"
    monkeypatch.setattr(accelerators, "_TPU_LOCK", lock)
    failure = (
        'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile"'
    )
    command = [sys.executable, "-c", LOCK, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        found = accelerators._reason("TPU", [failure])
        holder.stdin.close()
    assert f"The TPU is in use by process {holder.pid} ({sys.executable} -c import fcntl" in found
    assert "by a process that this one cannot see" in accelerators._reason("TPU", [failure])


def test_the_cpu_is_used_where_it_is_meant():
    assert jax.config.values["jax_platforms"] == "cpu"
    assert [device.platform for device in accelerators.started_devices()] == ["cpu"] * 8


def test_what_jax_warns_of_besides_is_still_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def devices() -> list[jax.Device]:
        accelerators.logging.getLogger("jax._src.xla_bridge").warning("mind the gap")
        accelerators.logging.getLogger("jax._src.xla_bridge").info("Unable to initialize backend 'cuda': no")
        return jax.local_devices()

    monkeypatch.setattr(accelerators, "_installed_kinds", lambda: {"GPU": ""})
    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(ConfigError, match=re.escape("none can be used: Unable to initialize backend 'cuda': no.")):
        accelerators.started_devices()
    assert caplog.messages == ["mind the gap"]
