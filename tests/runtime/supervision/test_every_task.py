"""Checks that a server starts no thread and no task besides its supervisor, in its source and while it runs."""

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.server.edge import Backend, Edge
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.server.method_permissions import new_access
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.startup.launch import launch
from meshserve.runtime.supervision.supervisor import Supervisor
from tests import checkpoints
from tests.certificates import certificate
from tests.runtime.loopback import serving
from tests.runtime.server.test_auth import TOKENS
from tests.test_layout import PACKAGES, ROOT, files, parsed

# What starts a thread or a task that nobody waits for. The calls of pools and task groups are waited for.
STARTERS = {
    "Thread", "Timer", "start_new_thread", "create_task", "ensure_future", "run_coroutine_threadsafe", "Process",
    "QueueListener", "add_periodic_callback",
}  # fmt: skip
# Files that start some, and why that is right.
EXEMPT = {
    "runtime/supervision/supervisor.py": "the supervisor itself",
    "runtime/openai/generation.py": "a task group within a call, which waits for its tasks",
    "runtime/openai/batches/batch_run.py": "a task group within a call, which waits for its tasks",
    "runtime/openai/batches/batch_jobs.py": "batches, whose failures are recorded: a supervised task begins them",
    "runtime/openai/web_page/server_status.py": "one reading of the metrics for all callers that wait for it",
    "runtime/server/retrieval_methods.py": "a task group within a call, which waits for its tasks",
}
MAKERS_OF_POOLS = {"ThreadPoolExecutor", "ThreadPool", "ProcessPoolExecutor", "Pool"}
# Pools of threads. The errors of their calls go to whoever waits for the results.
POOLS = {
    "runtime/text/work_pool.py", "runtime/telemetry/probe_server.py", "runtime/startup/persistent_host_cache.py",
    "runtime/cluster/stream_server.py", "runtime/host_cache/pinning.py", "runtime/weights/convert.py",
    "runtime/openai/batches/batch_run.py", "runtime/openai/batches/records.py",
    "runtime/program/compile_cache.py", "runtime/program/program_store.py", "kernels/cuda/build.py",
    "sharding/checkpoints/tensor_files.py",
    "sharding/checkpoints/writer.py",
    "sharding/checkpoints/loading.py",
}  # fmt: skip
LIBRARIES = {"concurrent", "grpc", "tqdm", "threading"}  # that start threads; threading for those of other languages
NOT_SERVING = {"client", "offline", "commands"}


def calls(path: Path) -> Iterator[str]:
    """Yields the names of all functions that a file calls, without what they belong to."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def files_of_the_server() -> list[Path]:
    packages = [f"runtime/{package}" for package in PACKAGES if package not in NOT_SERVING]
    return files(*packages, "sharding", "kernels")


def test_only_the_supervisor_starts_threads_and_tasks() -> None:
    found = {str(path.relative_to(ROOT)) for path in files_of_the_server() if STARTERS & set(calls(path))}
    assert found == set(EXEMPT), "start it with a Supervisor"


def test_tasks_within_calls_belong_to_groups_that_wait_for_them() -> None:
    for name in (name for name, reason in EXEMPT.items() if reason.startswith("a task group")):
        text = (ROOT / name).read_text()
        assert "async with asyncio.TaskGroup() as tasks:" in text
        assert text.count("create_task(") == text.count("tasks.create_task(")


def test_every_pool_of_threads_is_known() -> None:
    found = {str(path.relative_to(ROOT)) for path in files_of_the_server() if MAKERS_OF_POOLS & set(calls(path))}
    assert found == POOLS, "see that somebody waits for the results of its calls"


def test_an_unsupervised_thread_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import threading\nthreading.Thread(target=print).start()\nloop.create_task(f())\n")
    assert {"Thread", "create_task"} <= set(calls(path))


def maker(thread: threading.Thread) -> str:
    """Returns the module whose function a thread runs, or that defines its class."""
    target = getattr(thread, "_target", None)
    return type(thread).__module__ if target is None else target.__module__


def test_every_thread_of_a_running_server_is_supervised(tmp_path: Path) -> None:
    """A server with everything that runs in the background: tokens, certificates, probes, files of a host tier..."""
    before = set(threading.enumerate())
    (tmp_path / "tokens.toml").write_text(TOKENS)
    model = checkpoints.truncated_demo(tmp_path / "model", 1)
    supervisor, queues = Supervisor(), OutputQueues()
    config = ServeConfig(
        model=str(model), tp=1, dtype="float32", page_size=16, max_running=2, max_step_tokens=16, num_pages=48,
        max_context=128, host_cache_gib=0.01, host_cache_dir=str(tmp_path / "tier"), cache_dir="", kv_events=True,
    )  # fmt: skip
    launched = launch(config, queues.deliver, supervisor=supervisor)
    assert launched.grammars is not None
    try:
        launched.engine.start(supervisor)
        edge = Edge(queues, access=new_access(tmp_path / "tokens.toml"), supervisor=supervisor)
        edge.attach(Backend(launched.engine, launched.tokenizer, launched.info, launched.grammars, launched.kv_events))
        with serving(edge, queues, Listen(tls=certificate(tmp_path, "server"), http_port=0)):
            tasks = {task.name for task in supervisor.tasks}
            assert tasks >= {"engine", "kv-events", "tokens", "certificates", "constraints"}
            started = [thread for thread in threading.enumerate() if thread not in before]
            ours = {thread for thread in started if maker(thread).startswith("meshserve.")}
            assert {maker(thread) for thread in ours} == {Supervisor.__module__}
            assert {thread.name for thread in ours} <= tasks
            assert {maker(thread).partition(".")[0] for thread in started} <= {"meshserve", *LIBRARIES, "tests"}
            assert not supervisor.problem and not any(supervisor.num_failures().values())
    finally:
        launched.close()
        supervisor.stop()


@pytest.mark.parametrize("name", sorted(EXEMPT))
def test_exemptions_are_of_files_that_exist(name: str) -> None:
    assert (ROOT / name).exists()
