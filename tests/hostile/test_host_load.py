"""As many streams as a GPU decodes, beside a simulated device: the host keeps up with its steps."""

import os
import random
from dataclasses import dataclass

import pytest

from meshserve.benchmarks.load.edge_streams import measure_server
from meshserve.protos import inference_pb2 as pb
from tests.hostile.simulated_server import MAX_CONTEXT, command

_NUM_INPUT_TOKENS = 64


@dataclass(frozen=True)
class Load:
    """Streams beside a device, and how long a step may take, as a multiple of the device's time."""

    num_streams: int
    step_ms: float
    decode_steps: int
    most: float
    seconds: float = 10.0


SMALL = Load(8, 20.0, 2, most=4.0, seconds=2.0)  # a busy machine may be slower than the device
# An idle machine took 1.00, 1.02, 1.01 and 1.11 times the device's steps (docs/log/edge.md).
LOADS = (Load(256, 7.5, 4, 1.1), Load(256, 7.5, 1, 1.15), Load(512, 13.3, 4, 1.1), Load(512, 6.0, 4, 1.3))


def requests(num_streams: int, max_tokens: int) -> list[pb.GenerateRequest]:
    draw = random.Random(0)
    return [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(token_ids=[draw.randrange(300) for _ in range(_NUM_INPUT_TOKENS)]),
            sampling=pb.SamplingParams(max_tokens=max_tokens),
        )
        for _ in range(num_streams)
    ]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.num_streams} streams, {load.step_ms} ms")
def test_every_stream_gets_a_token_for_each_step_of_the_device(load: Load, num_requests: int):
    """With `make fuzz` at full size, on a machine that has nothing else to do; otherwise one small load."""
    if num_requests < 10_000:
        if load is not LOADS[0]:
            pytest.skip("compares times; see make fuzz")
        load = SMALL
    measured = measure_server(
        command(load.num_streams, load.step_ms, load.decode_steps),
        requests(load.num_streams, MAX_CONTEXT - _NUM_INPUT_TOKENS),
        load.seconds,
    )
    step_ms = 1e3 * load.num_streams / measured.tokens_per_second
    print(f"{measured}\n  a step {step_ms:.2f} ms, {step_ms / load.step_ms:.2f} of the device's {load.step_ms} ms")
    assert 0.9 * load.step_ms <= step_ms <= load.most * load.step_ms


def test_streams_that_end_too_soon_give_no_figures():
    before = os.sched_getaffinity(0)
    with pytest.raises(RuntimeError, match="2 of 2 streams ended too soon"):
        measure_server(command(2, 5.0, 2), requests(2, 8), 1.0, warm_up_seconds=0.2)
    assert os.sched_getaffinity(0) == before
