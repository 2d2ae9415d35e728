"""The rows of the table, in order of importance: what each runs, for how long at most, and the lines it gives.

A row is chosen by the number of devices and their memory. In a dry run the same commands get small models and virtual
CPU devices, by arguments that take precedence over those before them.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshserve.runtime.api.errors import MeshserveError
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.resolve.auto_limits import GPU_RUNNING
from meshserve.runtime.weights.registry import named_model

from . import readers
from .machine import Machine
from .readers import AIMS_TP, Results, Served
from .table import Case, Line
from .tasks import Task

_ROOT = Path(__file__).resolve().parents[2]  # the repository, which has the tests
_BENCHMARKS = "meshserve.benchmarks"
_BF16_BYTES, _FP8_BYTES = 2.0, 1.03  # per weight, with its share of a scale
_VLLM_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_SUM_KILOBYTES = ("4", "8", "64", "256", "512", "2048", "8192")
_VLLM_SECONDS = 300.0  # that a row with vLLM beside may take longer
_STEP_CONTEXT = 1024
_TINY = ("--model=demo", "--batch", "1", "2")  # for a dry run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row, or several, measured by one start of one or more processes."""

    name: str
    tasks: tuple[Task, ...]
    limit_seconds: float
    read: Callable[[Results], list[Line]]
    tp: int = 0
    is_sums: bool = False  # the result is the time of the all-reduces, which other rows refer to


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What the rows are made from.

    Attributes:
      check_seconds: How long all-reduces are checked, alone, within steps, and under mixed load: a third each.
      vllm: The interpreter that has vLLM; empty measures meshserve alone.
      cache_dir: Where servers keep compiled programs.
    """

    machine: Machine
    check_seconds: float
    vllm: str = ""
    cache_dir: str = "~/.cache/meshserve"

    @property
    def tp(self) -> int:
        return self.machine.num_devices

    def rows(self) -> tuple[list[Row], dict[str, str]]:
        """Returns the rows for this machine, and by name why others are left out."""
        left_out: dict[str, str] = {}
        has_tests = (_ROOT / "tests").is_dir()
        if not has_tests:
            left_out = dict.fromkeys(("mesh-tests", "gpu-tests"), "the tests are in the repository only")
        rows = [*([self._mesh_tests()] if has_tests else ()), self._sums(), *self._checks()]
        for each in self._all_served():
            try:
                model = named_model(each.model, each.quantize or "none")
            except MeshserveError as error:
                left_out[each.name] = f"not supported: {error}"
                continue
            if not self.machine.holds(model, each.tp, _FP8_BYTES if each.quantize else _BF16_BYTES):
                left_out[each.name] = "does not fit in the memory of this machine"
                continue
            rows.append(self._served_row(each, model))
            if each.tp == self.tp and not each.quantize:
                rows.append(self._steps_row(each, model, "auto"))
            if each.name == "30b-a3b":  # to decide whether `auto` should be P2P without fused layers
                rows.append(self._steps_row(each, model, "p2p"))
            if each.name == "30b-a3b-ep":  # before the models that take longest
                rows += self._live_tp()
        return [*rows, *([self._gpu_tests()] if has_tests else ())], left_out

    def _all_served(self) -> list[Served]:
        tp = self.tp
        served = [
            Served("8b", "qwen3-8b", tp, ("one", "32", "512"), 240.0),
            Served("30b-a3b", "qwen3-30b-a3b", tp, ("one", "32", "256"), 420.0),
            Served("30b-a3b-ep", "qwen3-30b-a3b", tp, ("one", "32", "256"), 420.0, expert_parallel=True),
            Served("32b", "qwen3-32b", tp, ("one", "32"), 240.0),
            Served("8b-one-gpu", "qwen3-8b", 1, ("512",), 240.0),
            Served("32b-fp8", "qwen3-32b", tp, ("one", "128"), 240.0, quantize="fp8-block"),
            Served("30b-a3b-fp8", "qwen3-30b-a3b", tp, ("one", "32", "256"), 420.0, quantize="fp8-block"),
            Served(
                "30b-a3b-fp8-ep", "qwen3-30b-a3b", tp, ("one", "32", "256"), 420.0,
                quantize="fp8-block", expert_parallel=True,
            ),
            Served("235b-a22b-fp8", "qwen3-235b-a22b", tp, ("8", "64"), 420.0, quantize="fp8-block"),
        ]  # fmt: skip
        if tp > AIMS_TP:
            served += [
                Served(f"{name}-tp{AIMS_TP}", f"qwen3-{name}", AIMS_TP, ("one", "32"), 240.0) for name in ("8b", "32b")
            ]
        return served

    def _dry(self, *arguments: str) -> tuple[str, ...]:
        """Returns arguments of a dry run, to stand last."""
        return (*arguments, f"--cpu-devices={self.tp}") if self.machine.is_virtual else ()

    def _mesh_tests(self) -> Row:
        return self._tests("mesh-tests", [["tests/kernels/test_p2p_gpu.py"]], 240.0)

    def _gpu_tests(self) -> Row:
        """The tests of one GPU's kernels, spread over all GPUs."""
        files = sorted(str(path.relative_to(_ROOT)) for path in (_ROOT / "tests/kernels").glob("test_*_gpu.py"))
        files = [file for file in files if not file.endswith("test_p2p_gpu.py")]
        shares = [files[device :: self.tp] for device in range(min(self.tp, len(files)))]
        return self._tests("gpu-tests", shares, 400.0)

    def _tests(self, name: str, shares: Sequence[Sequence[str]], limit_seconds: float) -> Row:
        dry = ("--collect-only",) if self.machine.is_virtual else ()
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self.machine.is_virtual:
            environment["JAX_PLATFORMS"] = "cpu"

        def own_gpu(index: int) -> dict[str, str]:
            return {"CUDA_VISIBLE_DEVICES": str(index)} if len(shares) > 1 else {}

        tasks = tuple(
            Task(
                module="pytest",
                arguments=("--noconftest", "-q", f"--rootdir={_ROOT}", *dry, *(str(_ROOT / file) for file in share)),
                result_flag="--junitxml=",
                environment={**environment, **own_gpu(index)},
            )
            for index, share in enumerate(shares)
        )
        return Row(name=name, tasks=tasks, limit_seconds=limit_seconds, read=partial(readers.read_tests, name))

    def _sums(self) -> Row:
        dry = self._dry("--rounds=1", "--seconds=0.01", "--kilobytes", "4", "8")
        tps = sorted({self.tp, min(self.tp, AIMS_TP)})
        arguments = ("--op=p2p", "--rounds=5", "--tp", *map(str, tps), "--kilobytes", *_SUM_KILOBYTES, *dry)
        tasks = (Task(module=f"{_BENCHMARKS}.kernels.kernels", arguments=arguments),)
        return Row(name="all-reduces", tasks=tasks, limit_seconds=120.0, read=readers.read_sums, is_sums=True)

    def _checks(self) -> list[Row]:
        seconds, tp = self.check_seconds / 3, str(self.tp)
        soak_dry = self._dry(
            "--model=demo", "--num-pages=64", "--page-size=16", "--max-context=256", "--max-running=8",
            "--max-step-tokens=32", "--set=dtype=float32", "--set=cache_dir=",
        )  # fmt: skip
        tasks = {
            "check-all-reduces": Task(
                module=f"{_BENCHMARKS}.kernels.kernels",
                arguments=("--op=p2p", "--tp", tp, f"--check-seconds={seconds}", *self._dry("--kilobytes", "4")),
            ),
            "check-steps": Task(
                module=f"{_BENCHMARKS}.checks.repeated_steps",
                arguments=(
                    "--model=qwen3-8b", "--tp", tp, f"--seconds={seconds}",
                    *self._dry(*_TINY, "--context=16", "--set=page_size=16"),
                ),
            ),
            "check-load": Task(
                module=f"{_BENCHMARKS}.checks.soak",
                arguments=(
                    "--model=qwen3-8b", "--random-weights", f"--tp={tp}", f"--seconds={seconds}",
                    f"--set=cache_dir={self.cache_dir}", *soak_dry,
                ),
            ),
        }  # fmt: skip
        read = {
            "check-all-reduces": readers.read_check_sums,
            "check-steps": readers.read_check_steps,
            "check-load": readers.read_soak,
        }
        return [
            Row(name=name, tasks=(task,), limit_seconds=seconds + 150.0, read=read[name])
            for name, task in tasks.items()
        ]

    def _served_row(self, served: Served, model: ModelConfig) -> Row:
        engines = ("ours", "vllm") if self.vllm else ("ours",)
        arguments = [
            "--models", served.model, "--workloads", *served.workloads, f"--tp={served.tp}",
            "--engines", *engines, f"--set-all=cache_dir={self.cache_dir}",
        ]  # fmt: skip
        vllm_settings: dict[str, Any] = {}
        most = max((int(name) for name in served.workloads if name.isdecimal()), default=0)
        if most > GPU_RUNNING:  # or they would take turns, and the time of a token would not be that of a step
            arguments.append(f"--set-all=max_running={most}")
        if served.expert_parallel:
            arguments.append("--set-all=expert_parallel=true")
            vllm_settings["enable_expert_parallel"] = True
        if served.quantize:
            arguments.append(f"--set-all=quantize={served.quantize}")
            vllm_settings["hf_overrides"] = {"quantization_config": _VLLM_FP8}
        if self.vllm:
            arguments += [f"--python-vllm={self.vllm}", f"--set-vllm={json.dumps(vllm_settings)}"]
        if self.machine.is_virtual:
            small = {
                "cpu_devices": self.tp, "num_pages": 64, "max_running": 4, "max_step_tokens": 16, "max_context": 64,
                "expert_parallel": "false", "quantize": "none", "logits_processors": "false",
            }  # fmt: skip
            arguments += ["--models", "demo", "--workloads", "few", "--dtype=float32", "--engines", "ours"]
            arguments += [f"--set-all={name}={value}" for name, value in small.items()]
        case = Case(machine=self.machine, model=model, tp=served.tp, expert_parallel=served.expert_parallel)
        return Row(
            name=served.name,
            tasks=(Task(module=f"{_BENCHMARKS}.load.full_load", arguments=tuple(arguments)),),
            limit_seconds=served.limit_seconds + (_VLLM_SECONDS if self.vllm else 0.0),
            read=partial(readers.read_served, served, case),
            tp=served.tp,
        )

    def _steps_row(self, served: Served, model: ModelConfig, all_reduce: str) -> Row:
        """Steps alone, through the engine but without gRPC: what the edge adds is the difference."""
        arguments = (
            "--model", served.model, "--random-weights", "--tp", str(served.tp), "--batch", "1", "32",
            f"--context={_STEP_CONTEXT}", f"--set=all_reduce={all_reduce}", f"--set=cache_dir={self.cache_dir}",
            *(("--set=expert_parallel=true",) if served.expert_parallel else ()),
            *self._dry(
                *_TINY, "--context=32", "--page-size=16", "--runs=1", "--steps=2", "--dtype=float32",
                "--max-step-tokens=16", "--set=all_reduce=auto", "--set=expert_parallel=false", "--set=cache_dir=",
            ),
        )  # fmt: skip
        case = Case(machine=self.machine, model=model, tp=served.tp, expert_parallel=served.expert_parallel)
        name = f"{served.name}-steps" if all_reduce == "auto" else f"{served.name}-{all_reduce}-steps"
        return Row(
            name=name,
            tasks=(Task(module=f"{_BENCHMARKS}.engine.decode", arguments=arguments),),
            limit_seconds=240.0,
            read=partial(readers.read_steps, name, served, case, all_reduce),
            tp=served.tp,
        )

    def _live_tp(self) -> list[Row]:
        sizes = ["1", str(self.tp), str(max(1, self.tp // 2))]
        kinds = {"live-tp": ("qwen3-8b", "bfloat16"), "live-tp-float32": ("qwen3-0.6b", "float32")}
        dry = self._dry(
            "--model=demo", "--dtype=float32", "--streams=3", "--prompt-tokens=8", "--output-tokens=24",
            "--set=num_pages=64", "--set=max_step_tokens=16", "--set=max_context=64", "--set=cache_dir=",
        )  # fmt: skip
        rows = []
        for name, (model, dtype) in kinds.items():
            arguments = (
                f"--model={model}", f"--dtype={dtype}", "--tp", *sizes, f"--set=cache_dir={self.cache_dir}", *dry,
            )  # fmt: skip
            task = Task(module=f"{_BENCHMARKS}.checks.live_tp", arguments=arguments)
            rows.append(Row(name=name, tasks=(task,), limit_seconds=300.0, read=partial(readers.read_live_tp, name)))
        return rows
