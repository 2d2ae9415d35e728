"""`meshserve generate` with a file in OpenAI's batch format: answers it without a server."""

import asyncio
import dataclasses
import logging
from pathlib import Path

from tqdm import tqdm

from ..api.errors import MeshserveError
from ..openai.batches.answer_file import AnswerFile
from ..openai.batches.batch_run import BatchCounts, BatchRun
from ..openai.http_call import HttpCall
from ..openai.routes import line_routes
from ..options.serve_config import ServeConfig
from ..server.edge import Backend, Edge, failure_error
from ..server.lifecycle import run_until_done
from ..server.output_queue import OutputQueues, max_dispatch_tokens
from ..startup.interpreter import take_turns_often
from ..startup.launch import Launched, launch
from ..telemetry.request_log import Observer

_QUEUE_LENGTH = 2**31 - 1  # the number of open lines bounds the queue
_OPEN_PER_SLOT = 2  # lines ahead of the device: those that run, and as many that wait
_POLL_SECONDS = 0.05


def answer_batch(config: ServeConfig, source: Path, target: Path, errors: Path) -> BatchCounts:
    """Answers every line of `source`, and writes the answers as they come: to `target`, and what failed to `errors`.

    Lines about which an earlier run has written something, known by their `custom_id`, are left out.

    Raises:
      MeshserveError: A file cannot be read or written, or the engine failed.
    """
    _check_different(source, target, errors)
    take_turns_often()
    with AnswerFile(target) as answers, AnswerFile(errors) as failures:
        queues = OutputQueues()
        launched = launch(dataclasses.replace(config, max_waiting=_QUEUE_LENGTH), queues.deliver)
        launched.engine.start()
        try:
            edge = _edge_of(launched, queues)
            with tqdm(desc="answered", unit=" lines", dynamic_ncols=True, disable=None) as bar:

                def show(counts: BatchCounts) -> None:
                    bar.total = counts.total
                    bar.update(counts.completed + counts.failed - bar.n)

                run = BatchRun(
                    line_routes(edge), lambda num_bytes: HttpCall({}), answers, failures,
                    max_open=_OPEN_PER_SLOT * launched.limits.max_running, on_answer=show,
                )  # fmt: skip
                run_until_done(_answer(run, edge, source))
        finally:  # also after Ctrl-C: JAX aborts a process that exits while one of its threads computes
            launched.close()
    if not errors.stat().st_size:
        errors.unlink()
    return run.counts


def _check_different(source: Path, target: Path, errors: Path) -> None:
    """
    Raises:
      MeshserveError: Two of the files are one.
    """
    paths = [path.resolve() for path in (source, target, errors)]
    if len(set(paths)) < len(paths):
        raise MeshserveError(f"--input {source}, --output {target} and --errors {errors} must be three files.")


def _edge_of(launched: Launched, queues: OutputQueues) -> Edge:
    """Returns an edge, as a server has one."""
    edge = Edge(queues, observer=Observer(level=logging.DEBUG))
    queues.max_dispatch_tokens = max_dispatch_tokens(launched.limits)
    edge.max_samples = launched.limits.max_waiting
    if launched.grammars is not None:
        launched.grammars.wait_until_ready()
    engine, info = launched.engine, launched.info
    edge.attach(Backend(engine, launched.tokenizer, info, launched.grammars, embedding=launched.embedding))
    return edge


async def _answer(run: BatchRun, edge: Edge, source: Path) -> None:
    edge.queues.bind(edge.cancel)
    edge.accept()
    watch = asyncio.create_task(_watch(edge))
    try:
        await run.run(source)
    except OSError as error:
        raise MeshserveError(f"--input {source} cannot be read: {error}.") from None
    finally:
        watch.cancel()


async def _watch(edge: Edge) -> None:
    """Fails the open requests when the engine has failed."""
    while edge.failure is None:
        await asyncio.sleep(_POLL_SECONDS)
    edge.queues.fail_all(failure_error(edge.failure))
