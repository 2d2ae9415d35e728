"""What comparisons with vLLM share: their engines and these engines' options, a run of one of them, and the heading."""

import argparse
import dataclasses
import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshserve.benchmarks.baselines.engine_process import model_config_json, run_engine
from meshserve.benchmarks.baselines.job import Batch, Job, Report
from meshserve.benchmarks.lib.open_loop import OpenLoop
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.model_files.quantization import NOT_QUANTIZED, SCHEMES

_VLLM_SETTINGS = {"max_model_len": 4096}
_VLLM_QUANTIZATION = {"fp8-block": "fp8", "fp8-channel": "fp8"}  # by what meshserve calls it


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine of the comparison: a module of `benchmarks.baselines`, and its settings."""

    title: str
    module: str
    settings: Mapping[str, Any]

    @property
    def is_vllm(self) -> bool:
        return self.module.startswith("vllm")


def add_engine_options(parser: argparse.ArgumentParser, *other_engines: str) -> None:
    parser.add_argument(
        "--engines", nargs="+", choices=("vllm", "ours", "tuned", *other_engines),
        help="default: vllm, ours, and tuned with --set",
    )  # fmt: skip
    parser.add_argument("--tp", type=int, default=0, help="TP size of every engine (default: each engine's own)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the tuned server")
    parser.add_argument("--set-vllm", default="{}", metavar="JSON", help="additional engine arguments of vLLM")
    parser.add_argument(
        "--set-all", action="append", default=[], metavar="KEY=VALUE",
        help="an option of every meshserve server, such as cache_dir",
    )  # fmt: skip
    parser.add_argument("--python-vllm", default=sys.executable, help="interpreter for vLLM (default: the current one)")
    parser.add_argument("--python-ours", default=sys.executable, help="interpreter for meshserve (likewise)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--quantize",
        choices=(NOT_QUANTIZED, *SCHEMES),
        default=NOT_QUANTIZED,
        help="quantize the weights of every engine; vLLM can do so with FP8 only",
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="time limit per model and engine, in seconds")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")


def engines_from(options: argparse.Namespace, vllm_module: str) -> dict[str, Engine]:
    """Returns all engines by the name that `--engines` has for them, and sets its default.

    Raises:
      ConfigError: The options contradict each other.
    """
    from meshserve.benchmarks.lib.offline_engine import parse_settings

    shared = parse_settings(options.set_all)
    vllm = {**_VLLM_SETTINGS, **json.loads(options.set_vllm)}
    if options.tp:
        shared, vllm = {**shared, "tp": options.tp}, {**vllm, "tensor_parallel_size": options.tp}
    if options.engines is None:
        options.engines = ["vllm", "ours", *(["tuned"] if options.set else [])]
    if "tuned" in options.engines and not options.set:
        raise ConfigError("--engines tuned needs --set: without it, it would equal `ours`.")
    if options.quantize != NOT_QUANTIZED:
        shared["quantize"] = options.quantize
        if options.quantize in _VLLM_QUANTIZATION:
            vllm["quantization"] = _VLLM_QUANTIZATION[options.quantize]
        elif "vllm" in options.engines:
            raise ConfigError(
                f"--quantize {options.quantize}: vLLM does not quantize to it while it loads a model. Omit vllm from "
                "--engines."
            )
    return {
        "vllm": Engine("vLLM", vllm_module, vllm),
        "ours": Engine("meshserve, defaults", "ours_served", shared),
        "tuned": Engine(
            f"meshserve, {' '.join(options.set)}", "ours_served", {**shared, **parse_settings(options.set)}
        ),
        "http": Engine("meshserve, OpenAI's API", "ours_http", shared),
        "offline": Engine("meshserve, without a server", "ours", shared),
    }


def run(
    options: argparse.Namespace,
    engine: Engine,
    model: str,
    folder: Path,
    batches: Sequence[Batch] = (),
    open_loop: OpenLoop | None = None,
) -> Report | str:
    """Runs one engine on one model. Returns its report, or the reason why there is none."""
    if engine.is_vllm:
        (folder / "config.json").write_text(json.dumps(model_config_json(model)))
    job = Job(
        model=model,
        model_dir=str(folder),
        dtype=options.dtype,
        is_single=False,
        batches=list(batches),
        settings=dict(engine.settings),
        open_loop=open_loop,
    )
    interpreter = options.python_vllm if engine.is_vllm else options.python_ours
    result = run_engine(engine.module, interpreter, job, folder, options.timeout)
    return result if isinstance(result, str) else result[0]


def heading(name: str, arguments: Sequence[str], versions: Collection[str]) -> str:
    """Says on which GPU, when, with which versions and by which command the figures were measured."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = shlex.join(["meshserve", "bench", name, *arguments])
    return f"{_gpu()}, {day}; {', '.join(sorted(versions))}. Command: `{command}`"


def _gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "No GPU"
    return "; ".join(done.stdout.strip().splitlines())
