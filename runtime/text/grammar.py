"""Compiles constraints on a request's output, in processes of their own.

Accompanies step 2 of 10. In: a `Constraint`. Out: a `Grammar`, from which `mask_exchange` takes the token masks of a
request. Parsing is done by llguidance, which walks a trie of the vocabulary with an Earley parser, so that no grammar
states are computed ahead of time. It is native code and its input comes from callers: some crash it, some keep it busy
for minutes. So each constraint is first compiled in a worker process that serves nothing else; a crash, a time limit or
a memory limit ends that process and refuses one request. Constraints that compile fast are then followed in workers
that are shared, and all others stay in the worker that compiled them.
"""

import contextlib
import signal
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from weakref import WeakSet

import numpy as np

from ..api.constraint import Constraint
from ..api.errors import DeadlineError, EngineStoppedError, InvalidRequestError, QuotaExceededError
from .constraint_limits import LIMITS, ConstraintLimits, LimitError, SlowCompiles, check_size
from .worker_processes import WorkerLostError, WorkerProcess, WorkerTemplate
from .worker_protocol import HAS_FAILED, IS_COMPLETE, IS_REFUSED, MUST_END

_MAX_CACHED_GRAMMARS = 256
_MAX_OWN_WORKERS = 32  # constraints with a worker of their own; half of them may be one tenant's
_MAX_LEXER_STATES = 20_000  # about 2 kB each, kept as long as the grammar
_MAX_ROW_ITEMS = 500  # parser items; ambiguous grammars cost their square: 40 ms per mask, 2 s at llguidance's 2,000
_MAX_LEXER_FUEL = 100_000  # per mask, half of the default: hostile expressions delay all requests
_FAST_SECONDS = 0.05  # constraints that compile within this share a worker,
_FAST_MASK_SECONDS = 0.005  # if their first mask takes no longer than this
_PROMPT_SECONDS = 0.1  # compiling for longer takes one of few places
_STACK_BYTES = 16 << 20  # per worker; constraints are parsed recursively
_MAX_SPARE_WORKERS = 4
_MAX_USES = 500  # uses of a compiling worker before a new one replaces it
_RETRY_SECONDS = 1.0
_MAX_MESSAGE_CHARS = 500

FIRST_NUMBER = 0  # number of the constraint that a worker has compiled alone


class Compiled:
    """A constraint that compiles. Shared by all requests with the same constraint.

    Attributes:
      seconds: How long compiling took, with the first mask.
      is_fast: Whether it may be followed in a shared worker. Following it may show that it is slow.
      worker: The worker of its own, if it has one.
    """

    def __init__(self, constraint: Constraint, seconds: float, mask_seconds: float = 0.0):
        self.constraint = constraint
        self.seconds = seconds
        self.is_fast = seconds <= _FAST_SECONDS and mask_seconds <= _FAST_MASK_SECONDS
        self.num_slow_masks = 0
        self.worker: WorkerProcess | None = None
        self.is_in_worker = False  # which has compiled it already, under `FIRST_NUMBER`


class Grammar:
    """A compiled constraint, after the tokens of the output that a request resumes. Made by `Grammars.compile`.

    Attributes:
      tenant: On whose behalf it was compiled.
      mask: [W] uint32, the allowed next tokens; bit i % 32 of word i // 32 is for token i.
      state: Flags of `worker_protocol`.
    """

    def __init__(
        self,
        owner: tuple["Grammars", str],
        compiled: Compiled,
        resumed: Sequence[int],
        mask: np.ndarray,
        state: int,
    ):
        self.grammars, self.tenant = owner
        self.compiled = compiled
        self.resumed = tuple(resumed)
        self.mask = mask
        self.state = state


class Compiling:
    """Lets another thread give up a compilation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Ends the compilation, and the process that does it."""
        with self._lock:
            self.is_cancelled = True
            if self._worker is not None:
                self._worker.kill()

    @contextlib.contextmanager
    def using(self, worker: WorkerProcess) -> Iterator[None]:
        """Makes `cancel` kill the worker while the block runs."""
        with self._lock:
            self._worker = worker
            if self.is_cancelled:
                worker.kill()
        try:
            yield
        finally:
            with self._lock:
                self._worker = None


class Grammars:
    """Compiles constraints for one vocabulary. Thread-safe.

    Args:
      tokenizer_file: The model's tokenizer.json.
      vocab_size: Vocabulary size of the model, including padding. A mask has one bit per token.
      eos_token_ids: End tokens, allowed wherever the output may end. Known to the tokenizer.
      limits: What one constraint may take.
      num_ahead: Maximum number of draft tokens of a sample.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        limits: ConstraintLimits = ConstraintLimits(),  # noqa: B008
        *,
        max_lexer_states: int = _MAX_LEXER_STATES,
        num_ahead: int = 0,
    ):
        self.limits = limits
        self.num_lost_workers = 0  # crashed, or killed for exceeding a limit
        # Constraints, by the name of the limit.
        self.num_refused = Counter({name: 0 for name in LIMITS})
        num_words = -(-vocab_size // 32)
        settings = {
            "tokenizer_file": str(tokenizer_file),
            "vocab_size": vocab_size,
            "eos_token_ids": sorted(eos_token_ids),
            "mask_bytes": num_words * 4,
            "num_ahead": num_ahead,
            "stack_bytes": _STACK_BYTES,
            "limits": {
                "max_items_in_row": _MAX_ROW_ITEMS,
                "max_lexer_states": max_lexer_states,
                "step_lexer_fuel": _MAX_LEXER_FUEL,
            },
        }
        self.eos_mask = _mask_of(sorted(eos_token_ids), num_words)  # [W] uint32, like `Grammar.mask`
        self._template = WorkerTemplate(settings, limits.memory_bytes)
        self._spares: deque[tuple[WorkerProcess, int]] = deque()  # and how often each has been used
        self._own_workers: WeakSet[WorkerProcess] = WeakSet()
        self._slow = SlowCompiles()
        self._cached: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._known_slow: OrderedDict[Constraint, None] = OrderedDict()  # turned out slow, and no longer cached
        self._lock = threading.Lock()  # guards the cache, the spares and the counters
        self._is_closed = False

    def wait_until_ready(self) -> None:
        """Waits until constraints can be compiled.

        Raises:
          WorkerLostError: The tokenizer cannot be loaded.
        """
        self._template.wait_until_ready()
        with self._lock:
            self._spares.append((self._new_spare(), 0))

    def check(self) -> None:
        """Replaces processes that do not answer. Called every second or so."""
        self._template.check()

    def close(self) -> None:
        """Ends all processes. Compilations in other threads end with an error."""
        self._is_closed = True
        self._template.close()

    def cached(self, constraint: Constraint, tenant: str) -> Grammar | None:
        """Returns the grammar of a constraint if it is compiled already."""
        with self._lock:
            if (found := self._cached.get(constraint)) is None:
                return None
            self._cached.move_to_end(constraint)
            return Grammar((self, tenant), found.compiled, (), found.mask, found.state)

    def compile(
        self,
        constraint: Constraint,
        resumed: Sequence[int] = (),
        *,
        tenant: str = "",
        seconds: float | None = None,
        compiling: Compiling | None = None,
    ) -> Grammar:
        """Returns the grammar of a constraint, compiled or cached, after the tokens `resumed`.

        Compiling takes about 1 ms for most constraints.

        Args:
          tenant: On whose behalf; each has a share of the room for constraints that take long.
          seconds: How long the caller waits, if not as long as the limit allows.

        Raises:
          InvalidRequestError: The constraint is malformed, cannot be satisfied, uses unsupported features or exceeds a
            limit, or it does not allow the tokens. The message names them.
          QuotaExceededError: There is no room for a constraint that takes long.
          DeadlineError: The caller does not wait any longer.
          EngineStoppedError: The server is stopping.
        """
        if not resumed and (found := self.cached(constraint, tenant)) is not None:
            return found
        try:
            check_size(constraint)
            grammar = self._compile(constraint, resumed, tenant, seconds, compiling or Compiling())
        except (LimitError, QuotaExceededError) as error:
            with self._lock:
                self.num_refused[getattr(error, "limit", "slow_constraints")] += 1
            raise
        if not resumed:
            with self._lock:
                self._cached[constraint] = grammar
                if len(self._cached) > _MAX_CACHED_GRAMMARS:
                    self._cached.popitem(last=False)
        return grammar

    def counts(self) -> tuple[int, dict[str, int]]:
        """Returns the number of lost workers, and the numbers of refused constraints by limit, for metrics."""
        with self._lock:
            return self.num_lost_workers, dict(self.num_refused)

    def forget(self, compiled: Compiled) -> None:
        """Removes a constraint from the cache, so that the next request compiles it again."""
        with self._lock:
            found = self._cached.get(compiled.constraint)
            if found is not None and found.compiled is compiled:
                del self._cached[compiled.constraint]
            if not compiled.is_fast:
                self._known_slow[compiled.constraint] = None
                if len(self._known_slow) > _MAX_CACHED_GRAMMARS:
                    self._known_slow.popitem(last=False)

    def shared_worker(self, tenant: str) -> WorkerProcess:
        """Returns a new worker for a tenant's constraints that are fast.

        Raises:
          WorkerLostError: It cannot be started.
        """
        worker = self._template.fork()
        worker.tenant = tenant
        return worker

    def own_worker(self, compiled: Compiled, tenant: str) -> WorkerProcess:
        """Returns the worker of a constraint's own, a new one if it has none.

        Raises:
          QuotaExceededError: Too many constraints have one.
          WorkerLostError: It cannot be started.
        """
        if compiled.worker is None or compiled.worker.is_lost:
            compiled.is_in_worker = False
            self._keep(compiled, self._template.fork(), tenant)
        assert compiled.worker is not None
        return compiled.worker

    def lost(self, worker: WorkerProcess) -> None:
        """Counts a worker that has crashed or was killed."""
        worker.kill()
        with self._lock:
            self.num_lost_workers += 1

    def _compile(
        self, constraint: Constraint, resumed: Sequence[int], tenant: str, seconds: float | None, compiling: Compiling
    ) -> Grammar:
        worker, num_uses = self._spare()
        source = [constraint.kind, constraint.text, constraint.choices]
        with compiling.using(worker):
            worker.send({"sources": {FIRST_NUMBER: source}, "rows": [[0, FIRST_NUMBER, True, list(resumed)]]})
            try:
                self._await(worker, constraint, tenant, seconds)
                answer = worker.receive()
            except WorkerLostError:
                raise self._loss(worker, constraint, compiling) from None
            except BaseException:
                self.lost(worker)
                raise
        [(state, error)] = answer["rows"]
        mask = worker.masks[0, 0].copy()
        mask.flags.writeable = False
        compiled = Compiled(constraint, answer["seconds"], answer["mask_seconds"])
        if constraint in self._known_slow:
            compiled.is_fast, compiled.num_slow_masks = False, 1
        if state & HAS_FAILED or compiled.is_fast:
            self._give_back(worker, num_uses + 1)
        else:
            self._keep(compiled, worker, tenant)
            compiled.is_in_worker = True
        if state & IS_REFUSED:
            raise InvalidRequestError(
                "sampling.num_resumed_tokens",
                "the tokens at the end of the prompt break the constraint; send output generated under it.",
            )
        if state & HAS_FAILED:
            raise _refusal(constraint, error)
        if not resumed and state & (MUST_END | IS_COMPLETE):
            raise _refusal(constraint, "only the empty text satisfies it")
        return Grammar((self, tenant), compiled, resumed, mask, state)

    def _await(self, worker: WorkerProcess, constraint: Constraint, tenant: str, seconds: float | None) -> None:
        """Waits for a worker's answer.

        Raises:
          As `compile`.
        """
        limit = self.limits.seconds
        end = time.monotonic() + (limit if seconds is None else min(seconds, limit))
        while not worker.has_used(_PROMPT_SECONDS) and (left := end - time.monotonic()) > 0:
            if worker.wait(min(left, _PROMPT_SECONDS)):
                return
        if worker.wait(0.0):
            return
        worker.pause()
        worker.renice()
        with self._slow.turn(tenant) as turn:
            if turn.wait(end - time.monotonic()):
                worker.resume()
                if worker.wait(end - time.monotonic()):
                    return
        if seconds is not None and seconds < limit:
            raise DeadlineError("the deadline passed while the constraint was compiled")
        raise LimitError(
            constraint, "seconds", f"takes longer to compile than {limit:g} s (constraint_seconds). Simplify it."
        )

    def _loss(self, worker: WorkerProcess, constraint: Constraint, compiling: Compiling) -> Exception:
        """Returns the error for a constraint whose worker has ended while compiling it."""
        self.lost(worker)
        if compiling.is_cancelled:
            return DeadlineError("the caller has gone")
        if self._is_closed:
            return EngineStoppedError("the server is stopping; send the request to another server.")
        status = worker.exit_status
        if status is None:  # the template has ended with all its workers
            return EngineStoppedError("the process that compiles constraints has ended; retry.")
        if status in (-signal.SIGSEGV, -signal.SIGBUS):
            return LimitError(
                constraint, "stack", "is nested or chained more deeply than the parser's stack allows. Simplify it."
            )
        memory_mib = self.limits.memory_bytes >> 20
        if status in (-signal.SIGABRT, -signal.SIGKILL):
            return LimitError(
                constraint, "memory", f"takes more memory than {memory_mib} MiB (constraint_memory_mib). Simplify it."
            )
        return LimitError(constraint, "crash", f"its parser has failed (exit status {status}). Change or omit it.")

    def _spare(self) -> tuple[WorkerProcess, int]:
        """Returns an idle worker for compiling and how often it has been used, and starts the next one."""
        with self._lock:
            if len(self._spares) < 2:
                try:
                    self._spares.append((self._new_spare(), 0))
                except WorkerLostError as error:
                    raise EngineStoppedError(f"constraints cannot be compiled: {error}") from None
            return self._spares.popleft()

    def _new_spare(self) -> WorkerProcess:
        """Returns a worker for compiling, which lets the engine and the workers that follow samples go first."""
        worker = self._template.fork()
        worker.renice()
        return worker

    def _give_back(self, worker: WorkerProcess, num_uses: int) -> None:
        with self._lock:
            if num_uses < _MAX_USES and len(self._spares) < _MAX_SPARE_WORKERS and not worker.is_lost:
                self._spares.append((worker, num_uses))
                return
        worker.kill()

    def _keep(self, compiled: Compiled, worker: WorkerProcess, tenant: str) -> None:
        """Makes a worker that of one constraint.

        Raises:
          QuotaExceededError: Too many constraints have one.
        """
        with self._lock:
            for constraint, cached in tuple(self._cached.items()):  # unused ones end with their entries
                if self._has_room_for_own(tenant):
                    break
                if cached.compiled.worker is not None:
                    del self._cached[constraint]
                del cached
            if not self._has_room_for_own(tenant):
                worker.kill()
                raise QuotaExceededError(
                    f"{len(self._own_workers)} constraints that take long are in use (limit slow_constraints); allowed "
                    f"are {_MAX_OWN_WORKERS}, and {_MAX_OWN_WORKERS // 2} for one caller. Retry later, or simplify it.",
                    f"tenant:{tenant}",
                    _RETRY_SECONDS,
                )
            worker.tenant = tenant
            self._own_workers.add(worker)
        compiled.worker = worker
        worker.renice()

    def _has_room_for_own(self, tenant: str) -> bool:
        workers = [worker for worker in self._own_workers if not worker.is_lost]
        num_of_tenant = sum(worker.tenant == tenant for worker in workers)
        return len(workers) < _MAX_OWN_WORKERS and num_of_tenant < _MAX_OWN_WORKERS // 2


def compiled(constraint: Constraint | None, grammars: Grammars | None, resumed: Sequence[int] = ()) -> Grammar | None:
    """Returns the grammar of a constraint, or None without a constraint.

    Args:
      constraint: Constraint of a request, if any.
      grammars: None if the server does not support constraints.
      resumed: See `Grammars.compile`.

    Raises:
      InvalidRequestError: See `Grammars.compile`; or the server does not support constraints.
    """
    return None if constraint is None else supporting(constraint, grammars).compile(constraint, resumed)


def supporting(constraint: Constraint, grammars: Grammars | None) -> Grammars:
    """Returns `grammars` if the server supports constraints.

    Raises:
      InvalidRequestError: It does not.
    """
    if grammars is None:
        message = "this server runs without --logits-processors, or its model has no tokenizer.json; omit it."
        raise InvalidRequestError(constraint.field, message)
    return grammars


def one_line(message: str) -> str:
    """Returns a message of llguidance without its backtrace."""
    message = message.partition("<backtrace>")[0]  # appended when llguidance panics
    line = " ".join(message.split()).removesuffix(" <non-verbose/>").rstrip(".")
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[:_MAX_MESSAGE_CHARS] + "..."


def _mask_of(token_ids: Sequence[int], num_words: int) -> np.ndarray:
    """Returns the bitmask in which exactly these tokens are set."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _refusal(constraint: Constraint, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        constraint.field, f"this server cannot enforce it: {one_line(reason)}. Change or omit it."
    )
