"""Tests what a server checks before it opens a port, and what it tells when it starts."""

import dataclasses
import logging
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshserve.runtime.api.engine_api import ModelInfo
from meshserve.runtime.api.errors import ConfigError, MeshserveError
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.resolve.resolved_server import PlacedServer, resolve_here
from meshserve.runtime.startup import serve, summary
from meshserve.runtime.startup.checks import check_before_listening
from meshserve.runtime.weights.load import read_model_with_weights
from meshserve.runtime.weights.locate import find_model
from meshserve.runtime.weights.registry import read_model
from meshserve.sharding import chips
from meshserve.sharding.mesh import make_mesh
from tests.checkpoints import edit_config, truncated_demo
from tests.runtime.loopback import INFO
from tests.waiting import WAIT_SECONDS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no model given"),
        ({"model": "/no/such"}, "/no/such: no such directory"),
        ({"model": "/"}, "/ has no config.json, so it is not a model directory"),
        ({"model": "demo", "tp": 3}, "tp is 3, but the model's 8 query heads .* Possible: 1, 2, 4, 8."),
        ({"model": "demo", "tp": 16}, r"tp is 16, but there are 8 cpu device\(s\). Possible: 1, 2, 4, 8. To try it"),
        ({"model": "demo", "tp": 3, "coordinator": "h:1"}, "tp is 3, but the model's 8 query heads .* Possible: 1, 2"),
        ({"model": "demo", "max_context": 99_999}, "max_context is 99999; the model supports 1024"),
        ({"model": "demo", "host_cache_gib": 1e6}, "host_cache_gib is 1e\\+06, but this process can still allocate"),
        ({"model": "qwen3-9b", "random_weights": True}, "qwen3-9b: no such directory"),
    ],
)
def test_a_mistake_is_found_before_a_port_opens(options: dict[str, Any], message: str):
    with pytest.raises(MeshserveError, match=message):
        check_before_listening(ServeConfig(port=0, cache_dir="", **options))


def test_what_can_be_served_passes():
    check_before_listening(ServeConfig(model="demo", port=0, cache_dir=""))
    check_before_listening(ServeConfig(model="qwen3-32b", random_weights=True, port=0, tp=8, cache_dir=""))


def test_keys_of_config_json_that_are_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A start names them once; with --strict-config it ends before a port opens."""
    directory = truncated_demo(tmp_path, 1)
    edit_config(directory, zigzag_rate=2, tie_word_embeddings=None)
    config = ServeConfig(model=str(directory), port=0, cache_dir="")
    with caplog.at_level(logging.INFO, logger="meshserve"):
        check_before_listening(config)
        files = find_model(str(directory))
        read_model_with_weights(files.small / "config.json", files.weights)
    told = [record.getMessage() for record in caplog.records if "config.json" in record.getMessage()]
    assert told == [
        "config.json: keys that meshserve does not know are ignored: zigzag_rate",
        "config.json lacks keys; transformers' defaults are used: tie_word_embeddings = false",
    ]
    strict = dataclasses.replace(config, strict_config=True)
    with pytest.raises(MeshserveError, match="does not know: zigzag_rate.*omit --strict-config"):
        check_before_listening(strict)
    edit_config(directory, zigzag_rate=None)
    with pytest.raises(MeshserveError, match="lacks options: tie_word_embeddings = false would be assumed"):
        check_before_listening(strict)


@pytest.mark.parametrize("option", ["port", "http_port", "gateway_port", "openai_port", "kv_events_endpoint"])
def test_a_port_in_use_is_found_before_the_devices_start(option: str):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = f"tcp://127.0.0.1:{port}" if option == "kv_events_endpoint" else port
        options: dict[str, Any] = {"port": 0, option: value}
        flag = option.replace("_", "-")
        with pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{port}: it is in use.* another --{flag}"):
            check_before_listening(ServeConfig(model="/no/such", **options))


def test_the_command_says_it_in_one_line_and_does_not_listen():
    command = [sys.executable, "-m", "meshserve", "serve", "demo", "--tp=3", "--cpu-devices=4", "--port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 2 and done.stdout == "", "nothing listens"
    assert done.stderr.startswith("meshserve: tp is 3, but the model's 8 query heads") and done.stderr.count("\n") == 1


def resolved(**options: Any) -> PlacedServer:
    config = ServeConfig(model="demo", tp=2, max_running=4, max_step_tokens=64, **options)
    model = read_model(find_model("demo").small / "config.json")
    return resolve_here(config, model, make_mesh(2))


def told(server: PlacedServer, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO, logger="meshserve"):
        summary.log_summary(server, is_tp_chosen=True)
    return "\n".join(f"{record.levelname} {record.getMessage()}" for record in caplog.records)


def test_the_log_tells_what_to_expect(caplog: pytest.LogCaptureFixture):
    text = told(resolved(num_pages=100), caplog)
    assert "INFO model: demo, Qwen3ForCausalLM, 3.05 M parameters, float32" in text
    assert "INFO devices: 2 of 8 x cpu; tp 2, chosen automatically" in text
    assert "INFO KV cache: about 3,200 tokens, enough for 3 requests of 1,024 tokens at the same time" in text
    assert "INFO expected speed: unknown, because the speed of CPUs is not known" in text
    assert "WARNING" not in text


def test_the_log_tells_the_speed_of_known_devices(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Takes CPU devices, with XLA's attention, for H100s; the figures are those of `meshserve plan`."""
    monkeypatch.setattr(summary, "chip_of", lambda device: chips.CHIPS["h100"])
    text = told(resolved(), caplog)
    assert "expected speed, at most, by the roofline (the kernels were never measured on this chip): " in text
    assert " tokens/s for 4 requests of 1,024 tokens" in text


def test_the_log_tells_what_is_assumed_of_unknown_devices(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    found = chips.GPUAttributes("NVIDIA A10G", (8, 6), 22 << 30, 80, clock_hz=1.71e9, bytes_per_second=6e11)
    monkeypatch.setattr(summary, "chip_of", lambda device: chips.gpu_of(found))
    text = told(resolved(), caplog)
    assert "NVIDIA A10G is not in sharding/chips; its attributes say 22.0 GiB, 600 GB/s and 140 TFLOPS" in text


def test_a_page_size_that_kernels_do_not_support_is_warned_of(caplog: pytest.LogCaptureFixture):
    text = told(resolved(page_size=33), caplog)
    assert "WARNING page_size is 33, which is not a multiple of 16" in text and "Use 16 or 32." in text


@pytest.mark.parametrize(
    ("mode", "said"), [(0o755, ""), (0o2775, ""), (0o777, "it has mode 777, so that other users may write to it")]
)
def test_a_directory_of_programs_that_others_may_write_to_is_warned_of(mode: int, said: str, tmp_path: Path):
    """A group that shares it, as on a volume of Kubernetes, is trusted."""
    tmp_path.chmod(mode)
    warnings = summary.cache_dir_warnings(str(tmp_path))
    assert len(warnings) == bool(said) and all(said in warning for warning in warnings)
    assert not summary.cache_dir_warnings("") and not summary.cache_dir_warnings(str(tmp_path / "none"))


@pytest.mark.parametrize(("num_pages", "is_warned"), [(1, True), (31, True), (32, False)])
def test_a_cache_smaller_than_the_context_is_warned_of(
    num_pages: int, is_warned: bool, caplog: pytest.LogCaptureFixture
):
    server: Any = SimpleNamespace(limits=SimpleNamespace(page_size=32, max_context=1024))
    with caplog.at_level(logging.WARNING):
        summary.warn_of_cache(server, num_pages)
    expected = f"the KV cache has room for {32 * num_pages} tokens ({num_pages} pages of 32), less than max_context"
    assert (expected in caplog.text) == is_warned


def test_the_example_fits_the_server(tmp_path: Path):
    def example(info: ModelInfo = INFO, **options: Any) -> str:
        return serve._example(ServeConfig(**options), info, "h:1")

    assert example() == "meshserve chat --target h:1"
    assert example(tls_cert="c", tls_key="k", tokens="t") == (
        "meshserve chat --target h:1 --tls-ca AUTHORITY.pem --token-file FILE"
    )
    without_template = ModelInfo(**{**vars(INFO), "supports_chat": False})
    assert example(without_template) == "meshserve bench serve --target h:1"
