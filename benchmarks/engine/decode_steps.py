"""Measures multi-step decode, several decode steps in one dispatch, with the demo model on one CPU device.

    python benchmarks/engine/decode_steps.py [--requests 4] [--tokens 200] [--steps 1 4 8]

Prints wall time and CPU time of this process per token; on a busy machine the CPU time is the more reliable figure.
"""

import argparse
import threading
import time
from collections.abc import Sequence

from meshserve.runtime.api.request import Output
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.engine.step_record import StepRecord
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.startup.launch import launch

_NUM_ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="decode-steps", description="Measure several decode steps in one dispatch.")
    parser.add_argument("--requests", type=int, default=4, help="number of requests that decode at the same time")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each request")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 8], help="decode steps per dispatch")
    options = parser.parse_args(arguments)
    for num_steps in options.steps:
        wall, cpu, num_dispatches = _measure(options.requests, options.tokens, num_steps)
        print(f"{num_steps} steps: {wall * 1000:.2f} ms a step, {cpu * 1000:.2f} ms of CPU time, "
              f"{num_dispatches} dispatches", flush=True)  # fmt: skip
    return 0


def _measure(num_requests: int, num_tokens: int, num_steps: int) -> tuple[float, float, int]:
    """Returns wall and CPU seconds per decode step, and the number of dispatches, of the best of a few rounds."""
    records: list[StepRecord] = []
    ended = threading.Semaphore(0)

    def deliver(outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                ended.release()

    config = ServeConfig(
        model="demo", cpu_devices=1, dtype="float32", page_size=16, num_pages=num_requests * (num_tokens // 16 + 2),
        max_running=num_requests, max_step_tokens=max(num_requests, 16), max_context=num_tokens + 16,
        max_decode_steps=num_steps,
    )  # fmt: skip
    engine = launch(config, deliver, records.append).engine
    engine.start()
    rounds = []
    for number in range(_NUM_ROUNDS):
        records.clear()
        started, started_cpu = time.monotonic(), time.process_time()
        for index in range(num_requests):
            params = SamplingParams(max_tokens=num_tokens, seed=index, ignore_eos=True)
            engine.submit(f"{number} {index}", (300 + index, 400, 500), params)
        for _ in range(num_requests):
            ended.acquire()
        wall, cpu = time.monotonic() - started, time.process_time() - started_cpu
        rounds.append((wall / num_tokens, cpu / num_tokens, len(records)))
    engine.stop()
    return min(rounds, key=lambda round: round[1])


if __name__ == "__main__":
    raise SystemExit(main())
