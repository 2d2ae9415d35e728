"""Options of vLLM and SGLang: as flags, in TOML files and in Python, and as docs/coming_from.md shows them."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.commands.cli import main
from meshserve.runtime.offline.llm import offline_config
from meshserve.runtime.offline.llm_options import EngineOptions, VllmOptions
from meshserve.runtime.options.flags import Parser, add_options, serve_config
from meshserve.runtime.options.foreign.meaning import VLLM, flag
from meshserve.runtime.options.foreign.table import OWN_VALUES, TABLE
from meshserve.runtime.options.foreign.translation import foreign_options
from meshserve.runtime.options.nearest import nearest
from meshserve.runtime.options.serve_config import ServeConfig, options, server_only_options

GUIDE = Path(__file__).parents[3] / "docs" / "coming_from.md"


def parsed(*flags: str) -> tuple[ServeConfig, list[str]]:
    parser, notes = Parser(prog="meshserve serve"), list[str]()
    add_options(parser)
    return serve_config(parser.parse_args(flags), notes.append), notes


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns what a command prints that refuses its arguments."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    assert ended.value.code == 2 and not captured.out
    return captured.err


# --- flags


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--served-model-name a", {"served_name": "a"}),
        ("--tensor-parallel-size 2", {"tp": 2}), ("-tp 2", {"tp": 2}), ("--tp-size=2", {"tp": 2}),
        ("--max-model-len 100", {"max_context": 100}), ("--max-model-len auto", {}),
        ("--context-length=100", {"max_context": 100}), ("--max-num-seqs 9", {"max_running": 9}),
        ("--max-running-requests 9", {"max_running": 9}), ("--max-queued-requests 9", {"max_waiting": 9}),
        ("--max-num-batched-tokens 512", {"max_step_tokens": 512}),
        ("--chunked-prefill-size 512", {"max_step_tokens": 512}),
        ("--gpu-memory-utilization 0.5", {"memory_fraction": 0.5}),
        ("--mem-fraction-static 0.5", {"memory_fraction": 0.5}),
        ("--block-size 16", {"page_size": 16}), ("--num-gpu-blocks-override 7", {"num_pages": 7}),
        ("--kv-cache-dtype fp8", {"kv_dtype": "fp8"}), ("--kv-cache-dtype fp8_e4m3", {"kv_dtype": "fp8"}),
        ("--kv-cache-dtype auto", {}), ("--quantization fp8", {"quantize": "fp8-block"}),
        ("-q fp8", {"quantize": "fp8-block"}),
        ("--load-format dummy", {"random_weights": True}), ("--load-format safetensors", {}),
        ("--enable-prefix-caching", {}), ("--no-enable-prefix-caching", {"prefix_cache": False}),
        ("--disable-radix-cache", {"prefix_cache": False}), ("--enable-expert-parallel", {"expert_parallel": True}),
        ("--dtype float", {"dtype": "float32"}), ("--generation-config vllm", {"generation_config": "off"}),
        ("--sampling-defaults openai", {"generation_config": "off"}), ("--is-embedding", {"task": "embed"}),
        ("--seed 7", {"seed": 7}), ("--random-seed 7", {"seed": 7}), ("--model-path x", {"model": "x"}),
        ("x --tokenizer x", {"model": "x"}), ("--pipeline-parallel-size 1", {}), ("-dp 1", {}),
        ("--disable-custom-all-reduce", {"all_reduce": "xla"}), ("--device cpu", {"cpu_devices": 1}),
        ("--nnodes 2 --node-rank 1 --dist-init-addr h:1", {"num_processes": 2, "process_id": 1, "coordinator": "h:1"}),
        ("--ssl-certfile c --ssl-keyfile k", {"tls_cert": "c", "tls_key": "k"}),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_min":2}',
         {"draft_tokens": 5, "draft_min_match": 2}),
        ('--speculative-config {"method":"eagle3","model":"h","num_speculative_tokens":3}',
         {"draft_tokens": 3, "draft_model": "h"}),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path h --speculative-num-draft-tokens 4",
         {"draft_tokens": 4, "draft_model": "h"}),
        ("--lora-modules a=/x b=/y --lora-modules c=/z --max-loras 4 --max-lora-rank 64",
         {"adapter": ("a=/x", "b=/y", "c=/z"), "max_adapters": 4, "max_adapter_rank": 64}),
        ('--lora-modules {"name":"a","path":"/x","base_model_name":"m"}', {"adapter": ("a=/x",)}),
        ('--lora-paths a=/x {"lora_name":"b","lora_path":"/y","pinned":true} --max-loras-per-batch 2',
         {"adapter": ("a=/x", "b=/y"), "max_adapters": 2}),
    ],
)  # fmt: skip
def test_what_has_an_equivalent_is_that(flags: str, expected: dict[str, Any]):
    assert parsed(*flags.split())[0] == ServeConfig(**expected)


@pytest.mark.parametrize(
    "flags",
    [
        "--trust-remote-code", "--enable-auto-tool-choice", "--enforce-eager", "--enable-chunked-prefill",
        "--swap-space 4", "--disable-log-requests", "--attention-backend FLASH_ATTN", "--quantization awq",
        "--structured-outputs-config {}", "--async-scheduling", "--no-async-scheduling", "--disable-cuda-graph",
        "--enable-lora", "--max-cpu-loras 9",
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted_with_a_line(flags: str):
    config, [note] = parsed(*flags.split())
    assert config == ServeConfig() and note.startswith(flags) and " changes nothing: " in note and note.endswith(".")


def test_what_is_taken_as_another_value_is_told():
    assert parsed("--quantization", "fp8")[1] == ["--quantization fp8 (vLLM, SGLang) is taken as --quantize fp8-block."]
    assert parsed("--max-model-len", "9", "--enable-prefix-caching")[1] == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--api-key secret", "--api-key (vLLM, SGLang) is refused: callers have tokens; make one with"),
        ("--data-parallel-size 2", "--data-parallel-size 2 (vLLM, SGLang) is refused: start one server for each"),
        ("--tokenizer other", "--tokenizer (vLLM, SGLang) is refused: the tokenizer is read from the model's"),
        ("--tool-call-parser llama3_json", "the models are Qwen3, whose tool calls hermes and qwen3_coder parse"),
        ("--reasoning-parser granite", "allowed is qwen3"),
        ("--dtype half", "--dtype: half is refused: bfloat16 has the size of float16"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill (vLLM) is refused: prompts longer than a step"),
        ("--quantization bitsandbytes", "--quantization bitsandbytes (vLLM, SGLang) is refused"),
        ("--lora-modules law", "--lora-modules law (vLLM) is refused: got 'law'; allowed are NAME=PATH and objects"),
        ("--lora-dtype float16", "adapters are computed in --dtype"),
        ("--rope-scaling {}", "change config.json"),
        ('--speculative-config {"method":"mtp"}', "the method is 'mtp'; allowed are ngram, eagle3"),
        ('--speculative-config {"num_speculative_tokens":3,"quantization":"fp8"}', "it has quantization; allowed are"),
        ("--speculative-config x", "allowed is a JSON object"),
        ("--max-logprobs 50", "up to 20 log-probabilities"),
        ("--tensor-parallel-size two", "--tensor-parallel-size two: got 'two'; allowed is a whole number or auto."),
        ("--tp 2 --tensor-parallel-size 4", "--tp and --tensor-parallel-size 4 are the same option. Omit one."),
        ("--tp-size 2 --tensor-parallel-size 4", "--tp-size 2 and --tensor-parallel-size 4 are the same option."),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_with_the_reason(flags: str, reason: str, capsys: pytest.CaptureFixture[str]):
    error = said(capsys, "serve", "demo", *flags.split())
    assert reason in error and error.count("\n") == 1 and "secret" not in error


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]):
    flags = [
        "--enable-prefix-cachin",
        "--api-key",
        "k",
        "--zzz=3",
        "--dtype",
        "float23",
        "--max-num-seqs=x",
        "--foo",
        "9",
    ]
    assert said(capsys, "serve", "demo", *flags).splitlines() == [
        "meshserve serve: unknown flag --enable-prefix-cachin. Did you mean --enable-prefix-caching?",
        "meshserve serve: unknown flag --zzz.",
        "meshserve serve: unknown flag --foo.",
        "meshserve serve: --api-key (vLLM, SGLang) is refused: callers have tokens; make one with `meshserve token "
        "NAME`, and name their file by --tokens.",
        "meshserve serve: --dtype: got 'float23'; allowed are auto, bfloat16, float32. Did you mean float32?",
        "meshserve serve: --max-num-seqs x: got 'x'; allowed is a whole number or auto.",
        "`meshserve serve --help` explains all arguments.",
    ]


def is_negative(name: str) -> bool:
    return re.match(r"-*(no|disable|skip|without)-", name.replace("_", "-")) is not None


def test_no_hint_means_the_opposite():
    own = [each for name, option in options().items() for each in (flag(name), *([f"--no-{flag(name)[2:]}"]))]
    unknown = [each for option in TABLE for each in option.flags]
    unknown += [f"--{word}-{each[2:]}" for each in own for word in ("enable", "disable", "no", "use", "skip")]
    for each in unknown:
        near = nearest(each, own)
        assert near is None or is_negative(near) == is_negative(each), each
    assert nearest("--disable-prefix-cache", own) == "--no-prefix-cache"
    assert nearest("--enable-prefix-cache", own) == "--prefix-cache"
    assert nearest("--api-key", own) is None


# --- files and Python


def test_a_file_has_the_same_names(tmp_path: Path):
    file = tmp_path / "serve.toml"
    file.write_text("tensor_parallel_size = 2\nenforce_eager = true\nquantization = 'fp8'\n")
    config, notes = parsed(f"--config={file}")
    assert config == ServeConfig(tp=2, quantize="fp8-block")
    assert [note.partition(": ")[2] for note in notes] == [
        "enforce_eager = True (vLLM) changes nothing: every step is a program of a fixed size, compiled before the "
        "server is ready.",
        "quantization = 'fp8' (vLLM, SGLang) is taken as --quantize fp8-block.",
    ]
    file.write_text("api_key = 'secret'\ncalculate_kv_scales = true\nmax_runing = 3\n")
    with pytest.raises(ConfigError) as caught:
        parsed(f"--config={file}")
    lines = [line.partition("serve.toml: ")[2] for line in str(caught.value).splitlines()]
    assert [line.partition(" is refused")[0] for line in lines] == [
        "unknown key 'max_runing'. Did you mean max_running?",
        "api_key (vLLM, SGLang)",
        "calculate_kv_scales = True (vLLM)",
    ]


def test_python_has_the_same_names():
    notes: list[str] = []
    given = {"model": "m", "tensor_parallel_size": 2, "trust_remote_code": True, "seed": 3, "quantization": None,
             "enable_lora": False, "tokenizer": "m", "max_model_len": None}  # fmt: skip
    config = offline_config(given, notes.append)
    assert (config.tp, config.seed, config.quantize) == (2, 3, "none")
    assert notes == [
        "LLM: trust_remote_code = True (vLLM, SGLang) changes nothing: no code of a checkpoint is ever run."
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_paralel_size": 2, "zzz": 1},
         "LLM: unknown key 'tensor_paralel_size'. Did you mean tensor_parallel_size?\nLLM: unknown key 'zzz'."),
        ({"tensor_parallel_size": "two"}, "LLM: tensor_parallel_size = 'two' is 'two'; it must be of type int."),
        ({"tp": 1, "tensor_parallel_size": 2}, "LLM: tp and tensor_parallel_size = 2 are the same option. Omit one."),
        ({"data_parallel_size": 2}, "LLM: data_parallel_size = 2 (vLLM, SGLang) is refused: start one server for each"),
        ({"dtype": "half"}, "LLM: dtype half is refused: bfloat16 has the size"),
        ({"served_model_name": "x"}, "LLM: served_name has no effect without a server"),
    ],
)  # fmt: skip
def test_python_gets_the_same_hints_and_reasons(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        offline_config({"model": "m"} | given, print)


def typed_like(name: str) -> Any:
    """Returns the type of an option's values in Python."""
    option, kind = options()[name], {field.name: field.type for field in dataclasses.fields(ServeConfig)}[name]
    if option.is_list:
        return dict[str, str] | list[str]
    if option.choices:
        return Literal[option.choices]
    return kind | Literal["auto"] if option.is_auto else kind


def test_the_types_for_editors_are_those_of_the_options():
    taken = [name for name in options() if name not in server_only_options() | {"model", "tp"}]
    assert get_type_hints(EngineOptions) == {name: typed_like(name) for name in taken}


def test_the_types_for_editors_have_the_equivalents_of_vllm():
    hints, found = get_type_hints(VllmOptions), foreign_options()
    assert not hints.keys() & options().keys()
    for name, hint in hints.items():
        option = found[name]
        assert VLLM in option.servers and name == option.names[0]
        assert not option.meaning.refusal or option.values or option.may_be_model, f"{name} is always refused"
        if option.meaning.alias and option.read is None:
            kind = {field.name: field.type for field in dataclasses.fields(ServeConfig)}[option.meaning.alias]
            assert hint == kind | None
        elif option.is_switch:
            assert get_origin(hint) is not None and bool in get_args(hint)
    aliases = {each.names[0] for each in TABLE if VLLM in each.servers and each.meaning.alias}
    server_only = {each for each in aliases if found[each].meaning.alias in server_only_options()}
    assert hints.keys() >= aliases - server_only


# --- the table


def test_the_table_is_sound():
    names = [name for option in TABLE for name in option.names]
    assert len(names) == len(set(names)) and not set(names) & options().keys()
    for meanings in [[option.meaning, *option.values.values()] for option in TABLE] + [
        list(values.values()) for values in OWN_VALUES.values()
    ]:
        for meaning in meanings:
            assert not (meaning.note + meaning.refusal).endswith(".")
            assert sum(map(bool, (meaning.alias, meaning.options, meaning.note, meaning.refusal))) <= 1
            assert not meaning.alias or meaning.alias in options()
            ServeConfig(**meaning.options)
            for named in re.findall(r"--([a-z-]+)", meaning.refusal + meaning.note):
                assert named.replace("-", "_") in options(), f"{named} is no option"
    for name, values in OWN_VALUES.items():
        assert not values.keys() & set(options()[name].choices)


def rows() -> list[str]:
    """Returns the table of docs/coming_from.md, with a row for each meaning."""
    found: dict[str, list[str]] = {}
    for option in TABLE:
        found.setdefault(option.shown(), []).extend((*option.flags, *option.short))
    for name, values in OWN_VALUES.items():
        for value, meaning in values.items():
            found.setdefault(meaning.shown(), []).append(flag(name, value))
    lines = [f"| {', '.join(f'`{each}`' for each in flags)} | {shown} |" for shown, flags in found.items()]
    return ["| vLLM, SGLang | meshserve |", "|---|---|", *lines]


def test_the_guide_shows_the_table():
    section = GUIDE.read_text(encoding="utf-8").partition("\n## Flags\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")] == rows()
