"""Tests how serving options are given, checked and explained."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.commands import generate
from meshserve.runtime.commands.cli import main
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.options.flags import Parser, add_options, serve_config
from meshserve.runtime.options.serve_config import SECTIONS, ServeConfig
from meshserve.runtime.options.toml_file import read_toml
from meshserve.runtime.resolve.model_defaults import context_tokens, serving_dtype
from meshserve.runtime.weights.registry import named_model, published_config


def test_every_option_has_help_and_a_type_that_a_flag_can_take():
    for field in dataclasses.fields(ServeConfig):
        about = field.metadata["option"]
        assert about.help and about.section in SECTIONS, field.name
        if about.is_list:
            assert field.type == tuple[str, ...] and field.default == (), field.name
        else:
            assert field.type in (int, float, str, bool) and type(field.default) is field.type, field.name
        assert not about.choices or field.default in about.choices, field.name


def test_ports_that_the_system_chooses_and_those_of_other_addresses_do_not_clash():
    ServeConfig(port=0, http_port=0, openai_port=0, gateway_port=-1)
    ServeConfig(host="127.0.0.1", port=50061, coordinator="10.0.0.1:1234", num_processes=2)
    ServeConfig(coordinator="127.0.0.1:50051", num_processes=2, process_id=1)  # binds none of them


def test_the_flags_of_serve_are_the_options(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = set(re.findall(r"^  (?:-h, )?--([a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    assert flags - {"help", "config"} == {field.name.replace("_", "-") for field in dataclasses.fields(ServeConfig)}


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"tp": -1}, "tp is -1; it must be 1 or more"),
        ({"page_size": -1}, "page_size is -1; it must be 1 or more"),
        ({"num_pages": -1}, "num_pages is -1; it must be 0 or more"),
        ({"max_context": -1}, "max_context is -1; it must be 0 or more"),
        ({"max_context": 1}, "max_context is 1; it must be 2 or more .a prompt and one token., or 0"),
        ({"compile_threads": -1}, "compile_threads is -1; it must be 0 or more"),
        ({"stored_programs": "gpu"}, "stored_programs is 'gpu'; allowed are auto, on, off"),
        ({"stored_programs": "on", "cache_dir": ""}, "stored_programs is on, which needs cache_dir"),
        ({"stored_programs": "on", "coordinator": "auto"}, "needs cache_dir and a server of one process"),
        ({"draft_tokens": -1}, "draft_tokens is -1; it must be 0 or more"),
        ({"draft_min_match": 0}, "draft_min_match is 0; it must be 1 or more"),
        ({"page_size": 8, "draft_tokens": 8}, r"draft_tokens is 8; allowed is 0 to page_size - 1 \(7\)"),
        ({"port": -1}, "port is -1; it must be 0 to 65535"),
        ({"step_port": 99999}, "step_port is 99999; it must be 0 to 65535"),
        ({"http_port": 70000}, "http_port is 70000; it must be -1 to 65535"),
        ({"gateway_port": -7}, "gateway_port is -7; it must be -1 to 65535"),
        ({"openai_port": 50051}, "port and openai_port are both port 50051; each must be a port of its own. Change op"),
        ({"http_port": 9, "gateway_port": 9}, "http_port and gateway_port are both port 9"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:50051"}, "port and kv_events_endpoint are both port 50051"),
        ({"host": "0.0.0.0", "coordinator": "h:50051"}, "port and coordinator are both port 50051"),
        ({"coordinator": "h:7", "step_port": 7}, "coordinator and step_port are both port 7"),
        ({"reserve_mib": -5}, "reserve_mib is -5; it must be 0 or more"),
        ({"priority_seconds": math.inf}, "priority_seconds is inf; it must be finite"),
        ({"drain_seconds": math.nan}, "drain_seconds is nan; it must be finite"),
        ({"fail_seconds": math.nan}, "fail_seconds is nan; it must be finite"),
        ({"memory_fraction": -0.5}, "memory_fraction is -0.5; it must be 0.01 to 1"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"max_running": 8, "max_step_tokens": 7}, "max_step_tokens is 7 and max_running 8: .* Raise it or lower"),
        ({"tp": 4, "cpu_devices": 2}, "tp is 4 but cpu_devices only 2. Raise cpu_devices or set it to 0"),
        ({"adapter": ("a",)}, "adapter is 'a'; it must be NAME=PATH, such as"),
        ({"adapter": ("=/a",)}, "adapter is '=/a'; it must be NAME=PATH"),
        ({"adapter": ("a=/a", "a=/b")}, "adapter gives two paths for the same name"),
        ({"max_adapters": 257}, "max_adapters is 257; it must be 1 to 256"),
        ({"dtype": "float16"}, "dtype is 'float16'; allowed are auto, bfloat16, float32"),
    ],
)
def test_what_cannot_be_served_is_refused(options: dict[str, Any], fault: str):
    with pytest.raises(ConfigError, match=fault):
        ServeConfig(**options)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn_allows_its_factor_times_the_original_context():
    """Uses the numbers of Qwen3's model card: made for 40,960 positions, 131,072 tokens with YaRN."""
    published = published_config("qwen3-0.6b")
    plain, scaled = ModelConfig.from_dict(published), ModelConfig.from_dict({**published, "rope_scaling": YARN})
    assert (plain.longest_context, scaled.longest_context) == (40960, 131072)
    assert context_tokens(ServeConfig(max_context=131072), scaled) == 131072
    assert context_tokens(ServeConfig(), scaled) == context_tokens(ServeConfig(), plain) == 32768
    with pytest.raises(ConfigError, match=r"max_context is 131073; .* 131072 tokens .* times a rope factor of 4\)"):
        context_tokens(ServeConfig(max_context=131073), scaled)
    with pytest.raises(ConfigError, match="max_context is 40961; the model supports 40960 tokens"):
        context_tokens(ServeConfig(max_context=40961), plain)


def write_toml(directory: Path, text: str) -> Path:
    path = directory / "serve.toml"
    path.write_text(text)
    return path


def test_a_toml_file_sets_every_option(tmp_path: Path):
    config = ServeConfig(
        model="m", tp=2, page_size=16, memory_fraction=0.5, allow_insecure=True, drain_seconds=2.0, host="::1"
    )
    values = dataclasses.asdict(config)
    path = write_toml(tmp_path, "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    assert ServeConfig(**read_toml(path)) == config


def test_a_whole_number_may_stand_for_a_float(tmp_path: Path):
    assert read_toml(write_toml(tmp_path, "drain_seconds = 5")) == {"drain_seconds": 5.0}


@pytest.mark.parametrize("text", ["[adapter]\na = '/x=y'\nb = '/z'", "adapter = ['a=/x=y', 'b=/z']"])
def test_a_toml_file_names_adapters_in_a_table_or_a_list(text: str, tmp_path: Path):
    config = ServeConfig(**read_toml(write_toml(tmp_path, text)))
    assert config.adapter_paths == {"a": "/x=y", "b": "/z"} and config.num_adapter_slots == 8
    assert ServeConfig().num_adapter_slots == 0 and ServeConfig(max_adapters=3).num_adapter_slots == 3


def test_the_flag_of_an_adapter_may_be_repeated():
    parser = Parser()
    add_options(parser)
    assert serve_config(parser.parse_args(["--adapter", "a=/x", "--adapter", "b=/y"])).adapter == ("a=/x", "b=/y")
    assert serve_config(parser.parse_args([])).adapter == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("adapter = 'a=/x'", "adapter is 'a=/x'; it must be a list or a table of texts"),
        ("adapter = {a = 1}", "it must be a list or a table of texts"),
        ("max_runing = 3", "unknown key 'max_runing'. Did you mean max_running?"),
        ("tp = 2\ntensor_parallel_size = 2", "tp and tensor_parallel_size = 2 are the same option. Omit one."),
        ("zzz = 3", "unknown key 'zzz'."),
        ("tp = '2'", "tp is '2'; it must be of type int"),
        ("tp = true", "tp is True; it must be of type int"),
        ("tp = 2.0", "tp is 2.0; it must be of type int"),
        ("allow_insecure = 1", "allow_insecure is 1; it must be of type bool"),
        ("model = 7", "model is 7; it must be of type str"),
        ("[tp]", "tp is {}; it must be of type int"),
        ("tp = ", "serve.toml: Invalid value"),
        ("drain_seconds = 1" + 400 * "0", "it must be of type float"),
        ("tp = 1" + 5_000 * "0", "serve.toml: Exceeds the limit"),
        ("tp = " + 3_000 * "[", "serve.toml: maximum recursion depth"),
    ],
)
def test_a_faulty_toml_file_is_explained(text: str, fault: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape(fault)):
        read_toml(write_toml(tmp_path, text))


def test_a_missing_toml_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="none.toml: no such file"):
        read_toml(tmp_path / "none.toml")


def test_a_flag_beats_the_file_and_the_file_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[ServeConfig] = []

    def generate_file(config: ServeConfig, source: Path, target: Path) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(generate, "generate_file", generate_file)
    path = write_toml(tmp_path, "tp = 2\npage_size = 8\nmodel = 'from-file'\n")
    arguments = ["generate", f"--config={path}", "--tp=4", "--model=from-flag", "--input=i", "--output=o"]
    assert main(arguments) == 0
    assert seen == [ServeConfig(model="from-flag", tp=4, page_size=8)]


def test_a_bad_config_is_one_line_on_stderr_and_exit_status_2(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "--tp=-1", "--input=i", "--output=o"]) == 2
    assert capsys.readouterr().err == "meshserve: tp is -1; it must be 1 or more.\n"


@pytest.mark.parametrize(
    ("asked", "of_model", "platform", "served"),
    [
        ("auto", "bfloat16", "gpu", "bfloat16"),
        ("auto", "float16", "tpu", "bfloat16"),
        ("auto", "float32", "gpu", "float32"),
        ("auto", "bfloat16", "cpu", "float32"),
        ("bfloat16", "bfloat16", "cpu", "bfloat16"),
    ],
)
def test_the_dtype_that_serves(asked: str, of_model: str, platform: str, served: str):
    model = dataclasses.replace(named_model("qwen3-0.6b"), dtype=of_model)
    assert serving_dtype(ServeConfig(dtype=asked), model, platform) == served
