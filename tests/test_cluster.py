"""Runs clusters of real processes on virtual CPU devices through gRPC: equal tokens, failures, and shutdown."""

import contextlib
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.client.client import CallError, Client
from meshserve.runtime.commands.local_cluster import LocalCluster, local_cluster

from . import adapters, checkpoints
from .listening import listening_addresses
from .waiting import WAIT_SECONDS, wait_for

# Half of this time without a sign of life counts as a failure, also on a busy machine. The exact timeouts are tested
# with fake clocks in tests/runtime/cluster/test_step_stream.py.
FAIL_SECONDS = 60.0
FLAGS = [
    "--tp=4", "--dtype=float32", "--page-size=16", "--max-running=2", "--max-step-tokens=2",
    "--num-pages=128", "--host-cache-gib=0.05", "--no-logits-processors", f"--fail-seconds={FAIL_SECONDS:g}",
    f"--drain-seconds={WAIT_SECONDS:g}", "--cache-dir=",
]  # fmt: skip
NUM_STREAMS = 8


@contextlib.contextmanager
def ready(num_processes: int, folder: Path, *flags: str) -> Iterator[LocalCluster]:
    """Yields a cluster that is ready, by default of the demo model's first two layers, with its files in `folder`."""
    model = checkpoints.truncated_demo(folder / "demo", 2)
    flags = (*FLAGS, f"--model={model}", f"--cpu-devices={4 // num_processes}", *flags)
    with local_cluster(num_processes, flags, folder) as cluster, Client(cluster.target) as client:
        cluster.wait_until_ready(client, WAIT_SECONDS)
        yield cluster


class Stream(threading.Thread):
    """One request; some of the streams are cancelled midway."""

    def __init__(self, target: str, index: int, max_tokens: int = 20):
        super().__init__(daemon=True)
        self.token_ids: tuple[int, ...] = ()
        self.error: CallError | None = None
        self.has_begun = threading.Event()
        self.is_cancelled = index % 4 == 3
        self._target, self._index, self._max_tokens = target, index, max_tokens
        self.start()

    def run(self) -> None:
        prompt = [300 + (7 * self._index + position) % 500 for position in range(1 + 4 * self._index)]
        sampling = {"temperature": 0.9 * (self._index % 2), "seed": self._index, "ignore_eos": True}
        try:
            with Client(self._target) as client:
                for chunk in client.generate(prompt, max_tokens=self._max_tokens, **sampling):
                    self.token_ids += chunk.token_ids
                    self.has_begun.set()
                    if self.is_cancelled and len(self.token_ids) > 5:
                        break
        except CallError as error:
            self.error = error

    def finish(self) -> None:
        self.join(WAIT_SECONDS)
        assert not self.is_alive()


def mixed_load(target: str) -> list[tuple[int, ...]]:
    streams = [Stream(target, index) for index in range(NUM_STREAMS)]
    for stream in streams:
        stream.finish()
        assert stream.error is None
    return [stream.token_ids[: 5 if stream.is_cancelled else None] for stream in streams]


def evict_all_pages(target: str) -> None:
    """Serves another prompt, which takes all 16 pages of 16 tokens, so that earlier prompts are in host memory only."""
    with Client(target) as client:
        list(client.generate([300 + position * position % 700 for position in range(255)], max_tokens=1))


def health(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS).status


def scraped(cluster: LocalCluster, index: int) -> str:
    """Returns a process's metrics, after checking that it is live and ready."""
    found = re.search(r"answers probes on (\S+)", cluster.log(index).read_text())
    assert found is not None
    answers = []
    for path in ("livez", "readyz", "metrics"):
        with urllib.request.urlopen(f"{found[1]}/{path}", timeout=WAIT_SECONDS) as answer:
            answers.append(answer.read().decode())
    return answers[-1]


def test_a_draft_model_over_two_processes_changes_no_token(tmp_path, every_case):
    if not every_case:
        pytest.skip("starts two more clusters")
    tokens, drafted = [], []
    for num_processes, flags in ((1, ()), (2, ("--draft-model=demo", "--draft-tokens=3"))):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        flags = (
            "--model=demo",
            "--max-running=4",
            "--max-step-tokens=4",
            "--fail-seconds=600",
            "--http-port=0",
            "--host-cache-gib=0",
            *flags,
        )
        with ready(num_processes, folder, *flags) as cluster:
            tokens.append(mixed_load(cluster.target))
            found = re.search(r"^meshserve_accepted_draft_tokens_total (\S+)", scraped(cluster, 0), re.MULTILINE)
            drafted.append(found is not None and float(found[1]) > 0)
    assert tokens[0] == tokens[1] and drafted == [False, True]


def test_adapters_reach_all_processes(tmp_path):
    """Those of the options, and one that is loaded while the server runs, from files that only process 0 reads."""
    base = checkpoints.save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    root = tmp_path / "root"
    for seed, name in enumerate(("one", "two", "late")):
        adapters.save_adapter(root / name, base, seed=seed, strength=1.0)
    prompts, tokens = checkpoints.random_prompts((5, 9, 20, 3), 320), {}
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        flags = [f"--adapter={name}={root / name}" for name in ("one", "two")]
        flags += [f"--model={base}", f"--adapter-root={root}", "--max-adapters=2", "--host-cache-gib=0"]
        with ready(num_processes, folder, *flags) as cluster, Client(cluster.target) as client:
            with grpc.insecure_channel(cluster.target) as channel:
                request = pb.LoadAdapterRequest(name="late", path="late")
                pb_grpc.AdminServiceStub(channel).LoadAdapter(request, timeout=WAIT_SECONDS)
            tokens[num_processes] = [
                client.complete(prompt, max_tokens=6, temperature=0.0, ignore_eos=True, adapter=adapter).token_ids
                for prompt, adapter in zip(prompts, ("", "one", "two", "late"), strict=True)
            ]
    assert tokens[1] == tokens[2]
    merged = adapters.merge(tmp_path / "merged", base, root / "late")
    assert tokens[2][3] == tuple(checkpoints.greedy(merged, prompts[3:], 6)[0])


def test_the_same_tokens_as_one_process_and_an_end_in_order(tmp_path, every_case):
    tokens = {}
    for num_processes in (1, 2, 4) if every_case else (1, 2):
        folder = tmp_path / str(num_processes)
        folder.mkdir()
        with ready(num_processes, folder, "--fail-seconds=600", "--http-port=0", "--num-pages=16") as cluster:
            tokens[num_processes] = mixed_load(cluster.target)
            for target in cluster.targets:
                assert health(target) == health_pb2.HealthCheckResponse.SERVING
            opened = listening_addresses(cluster.processes[0].pid)
            for option in ("--coordinator", "--step-port"):
                [port] = [int(re.split("[=:]", flag)[-1]) for flag in cluster.commands[0] if flag.startswith(option)]
                assert opened.get(port, "127.0.0.1") == "127.0.0.1", option
                assert (port in opened) == (num_processes > 1)
            if num_processes == 2:  # on SIGTERM they drain in turn, and the open stream finishes normally
                evict_all_pages(cluster.target)
                assert mixed_load(cluster.target) == tokens[2]
                assert re.search(r"_host_cache_restored_pages_total [1-9]", scraped(cluster, 0))
                for method in ("run", "copy_pages"):
                    assert re.search(rf'_followed_calls_total{{method="{method}"}} [1-9]', scraped(cluster, 1))
                assert "\nmeshserve_ready 1.0\n" in scraped(cluster, 0) and "\nmeshserve_ready" not in scraped(
                    cluster, 1
                )
                stream = Stream(cluster.target, 1, max_tokens=100)
                stream.has_begun.wait(WAIT_SECONDS)
                cluster.processes[1].send_signal(signal.SIGHUP)  # has no effect
                wait_for(lambda: "SIGHUP changes nothing here" in cluster.log(1).read_text())
                cluster.processes[1].send_signal(signal.SIGTERM)
                wait_for(lambda: health(cluster.target) == health_pb2.HealthCheckResponse.NOT_SERVING)
                cluster.processes[0].send_signal(signal.SIGTERM)
                stream.finish()
                assert stream.error is None and len(stream.token_ids) == 100
                assert cluster.wait(WAIT_SECONDS) == [0, 0]
            else:
                assert cluster.stop(WAIT_SECONDS) == [0] * num_processes, cluster.log(0).read_text()
    assert all(made == tokens[1] for made in tokens.values())
    assert len(tokens[1][0]) == 20


@pytest.mark.parametrize("split", ["--expert-parallel", "--no-expert-parallel"])
def test_experts_over_two_processes_are_hugging_faces(split, tmp_path):
    """By expert, each process holds experts that the other lacks; by tensor, slices of every one."""
    model = checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=2, **checkpoints.TINY_EXPERTS)
    prompt = checkpoints.random_prompts((9,), vocab_size=320)[0]
    [expected] = checkpoints.greedy(model, [prompt], 16)
    flags = (f"--model={model}", split, "--fail-seconds=600")
    with ready(2, tmp_path, *flags) as cluster, Client(cluster.target) as client:
        chunks = client.generate(prompt, max_tokens=16, temperature=0.0, ignore_eos=True)
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected


def test_pages_divided_among_two_processes_are_hugging_faces(tmp_path):
    """Each of four devices holds every fourth token of the only KV head."""
    model = checkpoints.save_checkpoint(tmp_path / "model", num_hidden_layers=2, num_key_value_heads=1)
    prompts = checkpoints.random_prompts((40, 9), vocab_size=320)
    expected = checkpoints.greedy(model, prompts, 16)
    flags = (f"--model={model}", "--cp=4", "--fail-seconds=600", "--max-step-tokens=4")
    with ready(2, tmp_path, *flags) as cluster, Client(cluster.target) as client:
        for prompt, tokens in zip(prompts * 2, expected * 2, strict=True):
            chunks = client.generate(prompt, max_tokens=16, temperature=0.0, ignore_eos=True)
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == tokens


def test_embeddings_over_two_processes_are_hugging_faces(tmp_path):
    model = checkpoints.save_embedding_checkpoint(tmp_path / "model", num_hidden_layers=2)
    prompts = checkpoints.random_prompts((9, 30, 1), vocab_size=320)
    expected = checkpoints.pooled_last_tokens(model, prompts).numpy()
    flags = (f"--model={model}", "--fail-seconds=600", "--max-step-tokens=16")
    with ready(2, tmp_path, *flags) as cluster, Client(cluster.target) as client:
        found = client.embed(prompts, normalize=False)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("victim", "number", "statuses", "is_always"),
    [
        (1, signal.SIGKILL, {0: 1}, True),
        (0, signal.SIGKILL, {}, False),  # jax may abort the follower before we end it: any status but 0
        (1, signal.SIGSTOP, {0: 1, 1: -signal.SIGKILL}, False),  # the watchdog process kills a stopped process
        (0, signal.SIGSTOP, {0: -signal.SIGKILL}, True),
    ],
)
def test_a_lost_process_ends_everybody(tmp_path, every_case, victim, number, statuses, is_always):
    if not (is_always or every_case):
        pytest.skip("only run with --every-case")
    with ready(2, tmp_path) as cluster:
        streams = [Stream(cluster.target, 4 * index, max_tokens=900) for index in range(6)]
        wait_for(lambda: sum(stream.has_begun.is_set() for stream in streams) >= 2)
        cluster.processes[victim].send_signal(number)
        for stream in streams:
            stream.finish()
        errors = [stream.error for stream in streams if stream.error is not None or len(stream.token_ids) < 900]
        assert len(errors) >= 2 and None not in errors  # two run at a time, so the last ones were certainly open
        assert {error.code for error in errors} == {grpc.StatusCode.UNAVAILABLE}
        if victim == 1:
            assert "the engine failed: " in str(errors[0])
        ended = cluster.wait(WAIT_SECONDS)
        assert 0 not in ended and ended == [statuses.get(index, status) for index, status in enumerate(ended)]


def test_a_cluster_told_to_stop_while_it_starts_ends_in_order(tmp_path):
    with local_cluster(2, (*FLAGS, "--model=demo", "--cpu-devices=2"), tmp_path) as cluster:
        wait_for(lambda: "joined" in cluster.log(0).read_text())
        cluster.processes[0].send_signal(signal.SIGTERM)
        assert cluster.wait(WAIT_SECONDS) == [0, 0]
        assert "process 0 has ended the lockstep" in cluster.log(1).read_text()
