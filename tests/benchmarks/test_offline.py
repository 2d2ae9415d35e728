"""Tests the offline benchmarks with tiny shapes: reproducible workloads, token times, and the baselines' table."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from meshserve.benchmarks.baselines import compare
from meshserve.benchmarks.engine import decode, speculation
from meshserve.benchmarks.lib.expert_balance import balance_text, expert_tokens, with_skewed_router
from meshserve.benchmarks.lib.offline_engine import parse_settings
from meshserve.benchmarks.lib.oracle import chance_of
from meshserve.benchmarks.lib.token_times import TokenClock, percentile
from meshserve.benchmarks.lib.workloads import fixed, nano_vllm
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.batch import Bucket
from meshserve.runtime.program.expert_balance import imbalance
from meshserve.runtime.program.step_runner import StepRunner
from meshserve.runtime.resolve.resolved_server import resolve_here
from meshserve.runtime.scheduler.drafts.draft_counts import StepCosts
from meshserve.runtime.scheduler.drafts.payoff import Payoff
from meshserve.runtime.weights.random_weights import random_model
from meshserve.runtime.weights.registry import model_config, named_model, published_config
from meshserve.sharding.mesh import make_mesh
from tests.checkpoints import TINY
from tests.waiting import wait_for

RAW = {
    **{key: value for key, value in TINY.items() if key != "eos_token_id"},
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    return tmp_path


def test_nano_vllms_workload_has_the_published_totals():
    batch = nano_vllm(0, 256, 100, 1024, 10_000)
    assert sum(len(work.prompt_token_ids) for work in batch) == 142_827
    assert sum(work.max_tokens for work in batch) == 133_966
    assert batch == nano_vllm(0, 256, 100, 1024, 10_000) != nano_vllm(1, 256, 100, 1024, 10_000)


def test_fixed_lengths_with_fresh_prompts():
    first, second = fixed(0, 3, 5, 7, 99), fixed(1, 3, 5, 7, 99)
    assert [(len(work.prompt_token_ids), work.max_tokens) for work in first] == [(5, 7)] * 3
    assert first != second and all(0 <= token <= 99 for work in first for token in work.prompt_token_ids)


def test_token_times():
    clock = TokenClock()
    for request, now, num_tokens in ((0, 1.0, 1), (1, 2.0, 1), (0, 1.5, 2), (1, 5.0, 1), (1, 5.0, 0)):
        clock.add(request, 0.5, now, num_tokens)
    times = clock.times(10.0)
    assert (times.num_tokens, times.tokens_per_second) == (5, 0.5)
    assert times.first_seconds == [0.5, 1.5]
    assert sorted(times.gap_seconds) == [0.0, 0.5, 3.0]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([0.0, 1.0], 90) == 0.9


def test_settings_are_options_of_the_server():
    assert parse_settings(["tp=2", "memory_fraction=0.5", "prefix_cache=false", "attention=cuda"]) == {
        "tp": 2, "memory_fraction": 0.5, "prefix_cache": False, "attention": "cuda",
    }  # fmt: skip
    assert parse_settings(["adapter=a=/x", "adapter=b=/y"]) == {"adapter": ("a=/x", "b=/y")}
    wrong = {
        "tpp=2": "there is no option 'tpp'",
        "tp=two": "'two' is not of type int",
        "model=demo": "use --model instead",
        "random_weights=true": "use --random-weights instead",
    }
    for pair, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            parse_settings([pair])


def test_published_sizes_are_what_config_json_says():
    assert named_model("qwen3-8b") == model_config(published_config("qwen3-8b"))


def test_a_long_request_decodes_among_short_ones(tiny: Path, capsys: pytest.CaptureFixture):
    arguments = [
        f"--model={tiny}", "--random-weights", "--batch=3", "--context=10", "--first-context=30", "--max-context=60",
        "--runs=2", "--steps=2", "--page-size=16", "--max-step-tokens=8", "--dtype=float32", "--cpu-devices=8",
        f"--json={tiny / 'rows.json'}",
    ]  # fmt: skip
    assert decode.main(arguments) == 0
    (row,) = json.loads((tiny / "rows.json").read_text())
    assert (row["batch"], row["context"], row["first_context"], row["power"]) == (3, 10, 30, None)
    assert row["tokens_per_second"] == pytest.approx(3 / row["step_ms"] * 1000)
    assert "batch    3 context     10 (one 30):" in capsys.readouterr().out


def test_decodes_with_adapters_are_timed(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    run, used = StepRunner.run, []

    def noted(runner: StepRunner, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        used.append((bucket.num_requests, bucket.num_adapters))
        return run(runner, bucket, packed)

    monkeypatch.setattr(StepRunner, "run", noted)
    arguments = [
        f"--model={tiny}", "--random-weights", "--batch", "1", "4", "--context=10", "--runs=1", "--steps=2",
        "--page-size=16", "--max-step-tokens=8", "--dtype=float32", "--cpu-devices=8", "--adapters=2",
        "--set=max_adapter_rank=4", f"--json={tiny / 'rows.json'}",
    ]  # fmt: skip
    assert decode.main(arguments) == 0
    assert [row["batch"] for row in json.loads((tiny / "rows.json").read_text())] == [1, 4]
    assert (1, 1) in used and (4, 2) in used, "one request reads one adapter, and four read both"
    assert all(num_adapters for _, num_adapters in used)


def test_the_balance_of_experts_and_a_skewed_router():
    """Split by expert over 4 devices, with a router that prefers the first of 16 experts."""
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    model, config = model_config({**RAW, **experts, **names}), ServeConfig(model="", tp=4, expert_parallel=True)
    server = resolve_here(dataclasses.replace(config, page_size=16, dtype="float32"), model, make_mesh(4))
    structure, params = random_model(model, server.layout, server.mesh, server.dtype)
    found = [
        expert_tokens(server, structure, with_skewed_router(params, skew), num_requests=16) for skew in (0.0, 0.0, 2.0)
    ]
    assert [counts.shape for counts in found] == [(model.num_layers, 16)] * 3
    assert all((counts.sum(axis=1) == 16 * 2).all() for counts in found)
    np.testing.assert_array_equal(found[0], found[1])
    assert imbalance(found[2]) > imbalance(found[0]) and found[2][:, :4].sum() > found[0][:, :4].sum()
    assert balance_text(np.array([[3, 1, 0, 0], [1, 1, 1, 1]]), 2) == (
        "balance: a layer reads 3.0 of 4 experts on average, the busiest has 2.00 times the mean; tokens of each "
        "device: 3, 1, the busiest 1.50 times the mean"
    )
    with pytest.raises(SystemExit, match="has no experts"):
        decode.main(["--model=qwen3-8b", "--random-weights", "--skew=1"])


def test_baselines_make_one_table(tiny: Path, capsys: pytest.CaptureFixture):
    """Compares Hugging Face, in a process that sees only our benchmarks, and ours, without server-only packages."""
    blocked = tiny / "blocked"
    blocked.mkdir()
    for name in ("grpc_health", "grpc_reflection", "llguidance"):
        (blocked / f"{name}.py").write_text("raise ImportError('not here')")
    wrapper = tiny / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{blocked}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    (tiny / "without-vllm").write_text("#!/bin/sh\nexit 1\n")
    (tiny / "without-vllm").chmod(0o755)
    arguments = [
        f"--model={tiny}", "--dtype=float32", "--runs=2", "--warmups=1", "--requests=3", "--input-tokens=5",
        "--output-tokens=4", "--engines", "hf-batched", "vllm", "ours", f"--python-ours={wrapper}",
        f"--python-vllm={tiny / 'without-vllm'}", "--set=cpu_devices=1", "--set=num_pages=16", "--set=cache_dir=",
        "--set=max_step_tokens=8", "--set=logits_processors=false", f"--json={tiny / 'rows.json'}",
    ]  # fmt: skip
    status = compare.main(arguments)
    said = capsys.readouterr()
    assert status == 0, said.err
    rows = json.loads((tiny / "rows.json").read_text())
    assert list(rows) == ["hf-batched", "ours"]
    assert rows["ours"]["version"].startswith("jax") and "torch" in rows["hf-batched"]["version"]
    for row in rows.values():
        assert row["tokens_per_second_p10"] <= row["tokens_per_second"] <= row["tokens_per_second_p90"]
        assert row["first_token_ms"] > 0 and row["gap_ms_p50"] >= 0 and row["peak_bytes"] > 2**26
    lines = said.out.splitlines()
    assert "3 requests, 15 tokens in, 12 out" in lines[0]
    assert [line.startswith("| Hugging Face, batched") for line in lines[3:]] == [True, False]
    assert lines[3].rstrip(" |").endswith("1.00")
    assert "vLLM: not installed" in said.err


def test_a_baseline_that_fails_is_named_with_its_error(tiny: Path, capsys: pytest.CaptureFixture):
    (tiny / "broken").write_text("#!/bin/sh\necho no torch here; exit 3\n")
    (tiny / "broken").chmod(0o755)
    assert compare.main([f"--model={tiny}", "--engines", "hf-single", f"--python-hf={tiny / 'broken'}"]) == 1
    assert "exit status 3:\nno torch here" in capsys.readouterr().err


def test_a_failed_baseline_is_shown_with_its_traceback_however_much_is_logged_after_it(
    tiny: Path, capsys: pytest.CaptureFixture
):
    log = "printf 'Traceback (most recent call last)\\n  the cause\\n\\226'; seq 10000"  # \\226 is no UTF-8
    (tiny / "talkative").write_text(f"#!/bin/sh\n{log}; exit 1\n")
    (tiny / "talkative").chmod(0o755)
    assert compare.main([f"--model={tiny}", "--engines", "hf-single", f"--python-hf={tiny / 'talkative'}"]) == 1
    said = capsys.readouterr().err
    assert "exit status 1:\nTraceback (most recent call last)\n  the cause" in said
    assert "10000" in said and len(said) < 10_000


def test_a_baseline_that_does_not_end_in_time_leaves_no_server_behind(tiny: Path, capsys: pytest.CaptureFixture):
    (tiny / "endless").write_text(f"#!/bin/sh\nsleep 600 & echo $! > {tiny / 'server'}; wait\n")
    (tiny / "endless").chmod(0o755)
    arguments = [f"--model={tiny}", "--engines", "hf-single", f"--python-hf={tiny / 'endless'}", "--timeout=1"]
    assert compare.main(arguments) == 1
    assert "exit status -9" in capsys.readouterr().err
    server = int((tiny / "server").read_text())
    wait_for(lambda: not _is_running(server))


def _is_running(pid: int) -> bool:
    """Returns whether a process has not ended; the machine's init may leave it as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("is_single", [False, True])
def test_hugging_face_ends_each_row_at_its_length(tiny: Path, is_single: bool):
    pytest.importorskip("torch")
    from meshserve.benchmarks.baselines.hugging_face import start
    from meshserve.benchmarks.baselines.job import Batch, Job
    from meshserve.benchmarks.lib.workloads import Work

    batch = Batch([Work([1, 2, 3], 5), Work([4], 2)], temperature=0.0)
    job = Job(
        model="tiny", model_dir=str(tiny), dtype="float32", is_single=is_single, batches=[batch], settings={}
    )  # fmt: skip
    times = start(job).run(batch)
    assert (times.num_tokens, len(times.first_seconds), len(times.gap_seconds)) == (7, 2, 5)


VLLM = """
class SamplingParams:
    def __init__(self, **fields): self.__dict__ |= fields

class Output:
    def __init__(self, request_id, token_ids):
        self.request_id, self.token_ids, self.outputs = request_id, token_ids, [self]

class Engine:
    class vllm_config:
        class cache_config: num_gpu_blocks, block_size = 7, 16
    open = {}
    def add_request(self, request_id, prompt, params): self.open[request_id] = [params.max_tokens, []]
    def has_unfinished_requests(self): return bool(self.open)
    def step(self):
        for left in self.open.values(): left[0] -= 1; left[1] = [*left[1], 7]
        told = [Output(name, left[1]) for name, left in self.open.items()]
        self.open = {name: left for name, left in self.open.items() if left[0]}
        return told

class LLM:
    def __init__(self, **options): self.options, self.llm_engine = options, Engine(); LLM.last = self
    def generate(self, prompts, params, use_tqdm):
        assert len(prompts) == len(params) and all(each.ignore_eos for each in params)

__version__ = "0"
"""


def test_vllms_outputs_are_counted_once(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    """Tests with a stand-in that, like vLLM, reports all tokens so far at each step."""
    (tiny / "vllm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(tiny)
    from meshserve.benchmarks.baselines import vllm_engine
    from meshserve.benchmarks.baselines.job import Batch, Job

    batch = Batch(fixed(0, 2, 3, 4, 99), temperature=0.6)
    job = Job(
        model="tiny", model_dir=str(tiny), dtype="bfloat16", is_single=False, batches=[batch],
        settings={"enforce_eager": True},
    )  # fmt: skip
    started = vllm_engine.start(job)
    for _ in range(2):  # request ids continue
        times = started.run(batch)
        assert (times.num_tokens, len(times.first_seconds), len(times.gap_seconds)) == (8, 2, 6)
    whole = started.run(batch._replace(has_token_times=False))
    assert (whole.num_tokens, whole.first_seconds) == (8, [])
    options = vllm_engine.vllm.LLM.last.options
    assert (started.version, started.kv_tokens) == ("vllm 0", 112) and options["enforce_eager"]
    assert options["load_format"] == "dummy" and not options["enable_prefix_caching"]


def test_the_light_modules_need_nothing_but_python():
    code = "import sys, meshserve.benchmarks.baselines.job; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "jax", "grpc", "torch"} & set(done.stdout.split())


def test_an_oracle_reaches_the_acceptance_that_is_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Payoff, "wants_drafts", True)
    monkeypatch.setattr(StepCosts, "seconds", lambda self, size: 1.0)  # each request gets all draft tokens
    arguments = [
        f"--model={tiny}", "--random-weights", "--requests", "2", "--temperature", "1", "--runs=1", "--acceptance",
        "1.5", "2.5", "--cpu-devices=8", "--input-tokens=9", "--output-tokens=150", "--draft-tokens=3",
        "--set=num_pages=64", "--set=page_size=16", "--set=max_running=8", "--set=max_step_tokens=8",
        "--set=cache_dir=", "--set=logits_processors=false", f"--json={tiny / 'cases.json'}",
    ]  # fmt: skip
    assert speculation.main(arguments) == 0
    for case in json.loads((tiny / "cases.json").read_text()):
        assert 1.0 + case["num_accepted"] / case["num_verified"] == pytest.approx(case["acceptance"], abs=0.35)
        assert case["plain_full_tokens_per_second"] > 0 < case["full_tokens_per_second"]


def test_an_oracle_decides_for_a_draft_model_in_one_engine(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StepCosts, "seconds", lambda self, size: 1.0)
    arguments = [
        f"--model={tiny}", "--random-weights", "--requests", "2", "--temperature", "1", "--runs=1", "--one-engine",
        "--acceptance", "1.8", "--cpu-devices=8", "--input-tokens=9", "--output-tokens=150", "--draft-tokens", "1", "3",
        "--set=num_pages=64", "--set=page_size=16", "--set=max_running=8", "--set=max_step_tokens=8", "--always",
        "--set=cache_dir=", "--set=logits_processors=false", f"--set=draft_model={tiny}",
        f"--json={tiny / 'cases.json'}",
    ]  # fmt: skip
    assert speculation.main(arguments) == 0
    cases = json.loads((tiny / "cases.json").read_text())
    assert [case["draft_tokens"] for case in cases] == [1, 3]
    for case in cases:
        assert 1.0 + case["num_accepted"] / case["num_verified"] == pytest.approx(1.8, abs=0.2)


@pytest.mark.parametrize(("acceptance", "chance"), [(1.0, 0.0), (1.75, 0.5), (3.0, 1.0)])
def test_chances_add_up_to_the_acceptance(acceptance: float, chance: float):
    assert chance_of(acceptance, 2) == pytest.approx(chance)
    with pytest.raises(ValueError, match="allowed is 1 to 1 \\+ draft tokens, 3"):
        chance_of(3.5, 2)


def test_speculation_compares_the_same_tokens(tiny: Path, capsys: pytest.CaptureFixture):
    arguments = [
        f"--model={tiny}", "--random-weights", "--requests", "1", "2", "--temperature", "0", "--runs=1",
        "--cpu-devices=8", "--input-tokens=9", "--output-tokens=60", "--draft-tokens=3",
        "--set=num_pages=32", "--set=page_size=16", "--set=max_running=4",
        "--set=max_step_tokens=8", "--set=cache_dir=", "--set=logits_processors=false", f"--json={tiny / 'cases.json'}",
    ]  # fmt: skip
    assert speculation.main(arguments) == 0
    cases = json.loads((tiny / "cases.json").read_text())
    assert [case["num_requests"] for case in cases] == [1, 2]
    assert all(case["num_changed"] == 0 and case["num_drafts"] >= case["num_accepted"] for case in cases)
    assert "up to 3 draft tokens" in capsys.readouterr().out
    assert all(case["acceptance"] == 0.0 for case in cases)
