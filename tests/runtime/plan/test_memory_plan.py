"""`meshserve plan`: its arithmetic, its roofline, its choice of a TP size, and a real start beside it."""

import json
import re

import jax.numpy as jnp
import pytest

from meshserve.benchmarks.checks import plan_check
from meshserve.kernels.paged_attention import implementation
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.commands.cli import main
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.plan.memory_plan import Planner, output_bytes
from meshserve.runtime.program.output_buffers import output_buffer_shapes
from meshserve.runtime.resolve.buckets import declare_buckets
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import abstract_model, named_model, weight_bytes
from meshserve.sharding import chips
from meshserve.sharding.layout import shard_layout
from meshserve.sharding.memory import shard_bytes
from meshserve.sharding.mesh import make_mesh
from tests.runtime.draft.published import PUBLISHED_HEAD


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert main(["plan", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_a_device_holds_adds_up(capsys):
    found = plan(capsys, "--model=qwen3-8b", "--target=v6e:2x4", "--page-size=128")
    assert found["tp"] == 8
    assert found["page_bytes"] == 36 * 1 * 2 * 128 * 128 * 2
    names = ("weight_bytes", "scratch_bytes", "processor_bytes")
    used = sum(found[name] for name in names) + found["max_pages"] * found["page_bytes"]
    assert 0 <= found["limit_bytes"] - used < found["page_bytes"]
    assert found["served_pages"] < found["max_pages"]


def test_a_host_cache_holds_tokens_and_takes_staging_memory(capsys):
    flags = ("--model=qwen3-8b", "--target=h200:2", "--attention=reference")
    without, found = plan(capsys, *flags), plan(capsys, *flags, "--host-cache-gib=64")
    assert 62 << 30 < found["host_pages"] * found["page_bytes"] * 2 <= 64 << 30  # two devices share it
    staging = (without["served_pages"] - found["served_pages"]) * found["page_bytes"]
    assert 512 << 20 < staging <= 2 << 30 and without["host_pages"] == 0


def test_adapters_take_memory_of_each_device(capsys):
    """Qwen3-8B: A of q, k, v, gate and up and B of o and down are whole on each of two devices; the rest is divided."""
    flags = ("--model=qwen3-8b", "--target=h200:2", "--attention=reference", "--decode-layers=off")
    without, found = plan(capsys, *flags), plan(capsys, *flags, "--max-adapters=8", "--max-adapter-rank=32")
    whole, divided = 7 * 4096, (4096 + 2 * 1024 + 4096 + 3 * 12288) // 2
    of_one = 36 * 32 * (whole + divided) * 2
    assert found["weight_bytes"] - without["weight_bytes"] == 8 * of_one + 4 * found["max_running"]
    missing = (without["served_pages"] - found["served_pages"]) * found["page_bytes"]
    scratch = found["scratch_bytes"] - without["scratch_bytes"]
    assert 0 < scratch < 2 << 30, "what a step with adapters needs beside one without"
    assert abs(missing - 10 * of_one - scratch) < 2 * found["page_bytes"], "two more for loads"
    assert found["kernels"]["decode_layers"] == "off"


def test_devices_that_divide_pages_hold_more_tokens(capsys):
    """Qwen3-30B-A3B has 4 KV heads, which 8 devices repeat or divide."""
    flags = ("--model=qwen3-30b-a3b", "--target=h200:8", "--attention=reference", "--page-size=64")
    whole, halves, automatic = (plan(capsys, *flags, *more) for more in ((), ("--cp=2",), ("--cp=auto",)))
    assert whole["tp"] == halves["tp"] == 8
    assert halves["page_bytes"] * 2 == whole["page_bytes"] == 48 * 2 * 64 * 128 * 2
    assert halves["max_pages"] >= 2 * whole["max_pages"] - 1
    assert automatic["page_bytes"] == halves["page_bytes"] and automatic["cp"] == halves["cp"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp=4", "--cp=2"), "cp is 2, but at tp 4 a KV head of the model is on 1 device"),
        (("--tp=8", "--cp=4"), "on 2 device(s), which can divide its pages among them. Use cp 1, 2, or another tp"),
        (("--tp=8", "--cp=2", "--page-size=33"), "Set page_size to a multiple of cp"),
    ],
)
def test_a_context_parallel_size_that_does_not_fit_is_refused(flags, message, capsys):
    assert main(["plan", "--model=qwen3-30b-a3b", "--target=h200:8", "--attention=reference", *flags]) != 0
    assert message in capsys.readouterr().err


def test_a_draft_model_or_head_takes_weights_and_its_part_of_each_page(capsys, tmp_path):
    """A head reads three hidden states of 4,096 and has 32,000 tokens; its one layer has inputs twice as wide."""
    flags = ("--model=qwen3-8b", "--target=h100:2", "--draft-tokens=4", "--attention=reference")
    without = plan(capsys, *flags)
    found = plan(capsys, *flags, "--draft-model=qwen3-0.6b")
    small = plan(capsys, "--model=qwen3-0.6b", "--target=h100:2", "--attention=reference")
    for name in ("weight_bytes", "page_bytes"):
        assert found[name] == without[name] + small[name]
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_HEAD))
    found = plan(capsys, *flags, f"--draft-model={tmp_path}")
    page_size, width = found["page_size"], 4096
    assert found["page_bytes"] == without["page_bytes"] + page_size * 2 * (2 * 4 * 128 + width // 2)
    matrices = 3 * width * width + 2 * width * (32 + 2 * 8) * 128 + width * 4096 + 3 * width * 12288 + 32000 * width
    added = found["weight_bytes"] - without["weight_bytes"] - matrices  # two bytes, over two devices
    assert 0 < added < 200_000  # norms, and the ids of the head's vocabulary


def test_on_one_device_the_weights_are_the_whole_model():
    model = named_model("qwen3-0.6b")
    layout = shard_layout(
        num_shards=1,
        num_query_heads=model.num_query_heads,
        num_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        mlp_dim=model.mlp_dim,
    )
    assert abstract_model(model, layout, jnp.dtype("bfloat16"))
    assert weight_bytes(model, layout, jnp.dtype("bfloat16")) == 2 * model.num_params


def test_what_steps_keep_is_planned_as_it_is_allocated():
    model, dtype = named_model("qwen3-8b"), jnp.dtype("bfloat16")
    layout = model_layout(model, 4)
    buckets = declare_buckets(max_running=256, max_step_tokens=4096, page_size=32, max_fused_tokens=64)
    _, params = abstract_model(model, layout, dtype)
    kernels = Kernels(attend=implementation("reference"), has_output_buffers=True)
    allocated = shard_bytes(output_buffer_shapes(kernels, params, buckets, make_mesh(4)))
    assert output_bytes(model, layout, buckets, dtype) == allocated > 100 << 20


def test_a_tp_size_of_its_own_and_a_directory(capsys):
    found = plan(capsys, "--model=demo", "--target=v5e:2x4", "--tp=4", "--num-pages=77")
    assert (found["tp"], found["served_pages"]) == (4, 77)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=qwen3-32b", "--target=v5e:2x2"], "15.3 GiB for weights on each of 4 devices of v5e:2x2"),
        (["--model=qwen3-8b", "--target=v6e-8"], "target is 'v6e-8'; it takes CHIP:SHAPE"),
        (
            ["--model=qwen3-8b", "--target=v6e:4x4", "--tp=3"],
            "tp is 3, but the model's 32 query heads cannot be divided by it. Possible: 1, 2, 4, 8, 16.",
        ),
        (["--model=qwen3-8b", "--target=h100:2x4"], "it takes CHIP:SHAPE"),
        (
            ["--model=qwen3-8b", "--target=h100:4", "--tp=8"],
            "tp is 8, but there are 4 devices in h100:4. Possible: 1, 2, 4.",
        ),
        (
            ["--model=qwen3-8b", "--target=cpu:1", "--compile"],
            "--compile needs a target with TPUs or GPUs, but the target is cpu:1",
        ),
        (
            ["--model=qwen3-8b", "--target=h100:1", "--length=0"],
            "length is 0 and batch 1, 32, 256; they must be",
        ),
        (
            ["--model=qwen3-32b", "--target=h100:4", "--tp=1", "--memory-fraction=0.75"],
            "61.0 GiB for weights on each of 1 devices of h100:4, which have 59.4 GiB; 4.3 GiB are missing for a "
            "single KV cache page. Use a larger machine or TP size. On h100:4 it fits with --tp 4",
        ),
    ],
)
def test_what_cannot_be_is_explained(flags, message, capsys):
    assert main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err


# Milliseconds of a decode step with 1,024 tokens of context each, calculated by hand: the published sizes' weights and
# cache over the bandwidth of the data sheet.
ROOFLINES = [
    ("qwen3-0.6b", "h100:1", (0.391, 1.478, 9.33)),
    ("qwen3-0.6b", "h200:1", (0.273, 1.031, 6.51)),
    ("qwen3-0.6b", "h200:4", (0.068, 0.258, 1.63)),
    ("qwen3-8b", "h100:1", (4.56, 5.96, 16.06)),
    ("qwen3-8b", "h200:1", (3.19, 4.16, 11.21)),
    ("qwen3-8b", "h200:2", (1.59, 2.08, 5.60)),
    ("qwen3-8b", "h200:4", (0.796, 1.04, 2.80)),
    ("qwen3-32b", "h200:1", (13.4, 15.1, 27.6)),
    ("qwen3-32b", "h200:2", (6.69, 7.56, 13.8)),
    ("qwen3-32b", "h200:4", (3.35, 3.78, 6.91)),
]


@pytest.mark.parametrize(("model", "machine", "milliseconds"), ROOFLINES)
def test_the_roofline_is_that_of_the_data_sheet(model, machine, milliseconds, capsys):
    found = plan(capsys, f"--model={model}", f"--target={machine}", "--jax-fraction=0.95")
    assert [roof["num_tokens"] for roof in found["decode"]] == [1, 32, 256]
    assert [1e3 * roof["seconds"] for roof in found["decode"]] == pytest.approx(milliseconds, rel=0.006)
    assert all(roof["bound"] == "memory" for roof in found["decode"])


def test_prefill_is_bound_by_the_chunk_or_by_the_multiplications(capsys):
    flags = ("--model=qwen3-8b", "--target=h100:1")
    small, large = (plan(capsys, *flags, f"--max-step-tokens={size}")["prefill"] for size in (64, 2048))
    assert (small[0]["bound"], large[0]["bound"]) == ("memory", "compute")
    # 2 operations a weight and token, but for the tables and the last MLP; 4 a query dimension and pair of tokens, half
    # of them masked.
    layers = named_model("qwen3-8b").num_params - 2 * 151_936 * 4096 - 3 * 4096 * 12_288
    operations = 1024 * 2 * layers + 36 * 4096 * 4 * 1024**2 / 2
    assert large[0]["seconds"] == pytest.approx(operations / 989e12, rel=1e-3)
    assert small[0]["seconds"] == pytest.approx(16 * 15.14e9 / 3.35e12, rel=0.01)


def test_the_best_tp_size_is_the_one_with_the_most_tokens(capsys):
    small = plan(capsys, "--model=qwen3-0.6b", "--target=h200:4")
    assert small["best_tp"] == 1 and "does not fit" not in small["reason"]
    large = plan(capsys, "--model=qwen3-32b", "--target=h100:4", "--memory-fraction=0.75", "--max-running=64")
    by_tp_size = {item["tp"]: item for item in large["tp_sizes"]}
    assert by_tp_size[1]["num_requests"] == 0 and "missing for a single KV cache page" in by_tp_size[1]["reason"]
    assert large["best_tp"] == max(by_tp_size, key=lambda tp: by_tp_size[tp]["tokens_per_second"]) != 1
    assert "The model does not fit at tp 1" in large["reason"]
    for item in (by_tp_size[2], by_tp_size[4]):
        assert item["num_replicas"] * item["tp"] == 4
    assert by_tp_size[4]["step_seconds"] < by_tp_size[2]["step_seconds"]


def test_all_reduces_are_estimated_for_the_kernels_that_the_devices_use(capsys):
    """Peers are two or four GPUs; a TP size of eight is not the fastest by what four would take."""
    ours, xla = (plan(capsys, "--model=qwen3-8b", "--target=h200:8", *flag) for flag in ((), ("--all-reduce=xla",)))
    ours, xla = ({item["tp"]: item["step_seconds"] for item in found["tp_sizes"]} for found in (ours, xla))
    assert xla[4] - ours[4] == pytest.approx(73 * 14e-6)
    assert xla[8] == ours[8] > ours[4]


def test_requests_of_a_length_are_those_that_the_pages_hold(capsys):
    flags = ("--model=qwen3-8b", "--target=h100:1", "--max-running=512", "--max-step-tokens=512")
    short, long = (plan(capsys, *flags, f"--length={length}") for length in (1000, 30_001))
    assert short["num_requests"] == short["served_pages"] // 32
    assert long["num_requests"] == long["served_pages"] // 938
    assert plan(capsys, *flags, "--length=64")["num_requests"] == 512, "max_running"


def test_the_table_says_it_in_words(capsys):
    assert main(["plan", "--model=qwen3-8b", "--target=h200:4", "--batch", "1", "2000"]) == 0
    text = capsys.readouterr().out
    assert "qwen3-8b on h200:4, tp 4, bfloat16, per device:" in text
    assert re.search(r"decode 1 x 1024 +0.796 +memory +0.294 +917", text), "1 / (0.796 + 0.294) ms"
    assert "exceeds the cache or max_running" in text
    assert "requests of 1024 tokens, limited by max_running; tp 2" in text
    assert "best: tp 1: 4 x tp 1 decode" in text and "For a single request, tp 4 is fastest" in text


@pytest.mark.parametrize("target", ["a100:2", "l40s:2", "rtx4090:4", "rtx5090:2"])
def test_gpus_before_and_after_hopper_are_planned_with_the_portable_attention(target: str, capsys):
    found = plan(capsys, "--model=qwen3-8b", f"--target={target}")
    assert found["num_requests"] > 0
    assert (found["kernels"]["attention"], found["kernels"]["decode_layers"]) == ("portable", "off")
    assert {refusal["option"] for refusal in found["kernel_refusals"]} >= {"attention", "decode_layers"}
    least = 15e9 / chips.target(target).chip.hbm_bytes_per_second / found["tp"]
    assert least < found["decode"][0]["seconds"] < 1.1 * least and found["decode"][0]["bound"] == "memory"
    assert not found["is_measured"]
    config = ServeConfig(model="qwen3-8b")
    server = Planner.on(chips.target(target), config, named_model("qwen3-8b"), num_devices=2).server
    assert (server.kernel_names.attention, server.kernel_names.decode_layers) == ("portable", "off")
    assert server.kernel_names.all_reduce == "xla"
    assert main(["plan", "qwen3-8b", f"--target={target}", "--compile"]) == 2
    assert "can be compiled on such GPUs only. Omit --compile" in capsys.readouterr().err


def test_the_plan_says_which_kernels_run_and_whether_they_were_measured(capsys):
    texts = {}
    for target in ("h200:1", "h20:1", "a100:1", "v6e:2x4"):
        assert main(["plan", "qwen3-8b", f"--target={target}"]) == 0
        texts[target] = capsys.readouterr().out
    assert "kernels: attention: cuda; decode layers: cuda; all-reduce: xla" in texts["h200:1"]
    reasons = (
        "attention: portable instead of cuda; decode layers: off instead of cuda, which is slower: the CUDA kernels"
    )
    assert reasons in texts["a100:1"] and "which is slower" not in texts["h200:1"] + texts["v6e:2x4"]
    marked = {target for target, text in texts.items() if "never measured on this chip" in text}
    assert marked == {"h20:1", "a100:1", "v6e:2x4"}


def test_a_named_kernel_that_cannot_run_on_the_target_is_refused(capsys):
    assert main(["plan", "qwen3-8b", "--target=a100:1", "--attention=cuda"]) == 2
    assert "--attention cuda cannot serve this model here: the CUDA kernels need" in capsys.readouterr().err


def test_the_throughput_is_computed_with_the_all_reduces(capsys):
    found = plan(capsys, "--model=qwen3-8b", "--target=h100:8")
    for roof in found["decode"]:
        seconds = roof["seconds"] + roof["all_reduce_seconds"]
        assert roof["all_reduce_seconds"] > 0
        assert roof["tokens_per_second"] == pytest.approx(roof["num_tokens"] / seconds)


@pytest.mark.parametrize(
    ("max_running", "length", "limit"), [("8", "1024", "max_running"), ("512", "32000", "KV cache")]
)
def test_the_plan_tells_what_limits_the_requests(max_running: str, length: str, limit: str, capsys):
    flags = [f"--max-running={max_running}", "--max-step-tokens=512", f"--length={length}"]
    found = plan(capsys, "--model=qwen3-8b", "--target=h100:2", *flags)
    assert {size["limited_by"] for size in found["tp_sizes"]} == {limit}
    assert f"limited by {limit}" in found["reason"]


def test_the_help_of_plan_names_the_sizes_and_its_own_default_of_tp(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "qwen3-235b-a22b" in text and "tensor-parallel size (default: all devices of the target)" in text


@pytest.mark.parametrize(("tp", "dtype"), [(4, "bfloat16"), (2, "float32")])
def test_a_real_start_holds_what_was_planned(tp, dtype, capsys):
    """Within 2 %: bytes of weights, of scratch, of the cache and of control; the number of programs exactly."""
    flags = [f"--tp={tp}", "--cpu-devices=8", f"--dtype={dtype}", "--max-running=8", "--max-step-tokens=8"]
    assert plan_check.main(["--model=demo", "--target=cpu:8", "--cache-dir=", *flags]) == 0, capsys.readouterr().out


def test_a_plan_that_is_wrong_is_noticed(tmp_path, capsys):
    log = tmp_path / "log"
    log.write_text(
        'x INFO each device holds: {"limit_bytes": 0, "weight_bytes": 4000000, "scratch_bytes": 0, '
        '"processor_bytes": 0, "page_bytes": 24576, "num_pages": 10000, "num_programs": 10}\n'
    )
    assert plan_check.main(["--model=demo", "--target=cpu:8", "--tp=4", f"--log={log}"]) == 1
    assert "weight_bytes" in capsys.readouterr().out
