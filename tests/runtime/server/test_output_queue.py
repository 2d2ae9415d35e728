import asyncio
import threading

import pytest

from meshserve.runtime.api.errors import EngineStoppedError
from meshserve.runtime.api.request import FinishReason, Output, TokenLogprobs
from meshserve.runtime.scheduler.limits import SchedulerLimits
from meshserve.runtime.server.output_queue import (
    OutputQueues,
    RequestIdInUseError,
    SlowReaderError,
    max_dispatch_tokens,
)


class Cancels(list):
    def __call__(self, request_id, reason):
        self.append((request_id, reason))


def bound_room(**options) -> tuple[OutputQueues, Cancels]:
    room, cancels = OutputQueues(**options), Cancels()
    room.bind(cancels)
    return room, cancels


def in_thread(function, *args) -> None:
    """Runs it elsewhere while this thread, and with it the loop, waits."""
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def token(request_id: str, token_id: int, **fields) -> Output:
    return Output(request_id=request_id, token_ids=(token_id,), text=f"{token_id} ", **fields)


def last(request_id: str, reason: FinishReason = FinishReason.LENGTH, **fields) -> Output:
    return Output(request_id=request_id, finish_reason=reason, **fields)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_steps_that_come_before_the_handler_wakes_are_one_output():
    async def main():
        room, _ = bound_room()
        queue = room.open("a")
        taking = asyncio.create_task(queue.take())
        await settle()

        def engine():
            for step in range(5):
                room.deliver([token("a", step), token("nobody", 7)])
            room.deliver([last("a", num_prompt_tokens=3, num_output_tokens=5)])

        in_thread(engine)
        assert await taking == Output(
            request_id="a",
            token_ids=(0, 1, 2, 3, 4),
            text="0 1 2 3 4 ",
            finish_reason=FinishReason.LENGTH,
            num_prompt_tokens=3,
            num_output_tokens=5,
        )

    asyncio.run(main())


def test_what_was_generated_is_taken_before_the_error_of_a_stop():
    async def main():
        room, _ = bound_room()
        queue = room.open("a")
        room.deliver([token("a", 1), token("a", 2)])
        await settle()
        room.fail_all(EngineStoppedError("the server was stopped"))
        room.deliver([token("a", 3)])
        await settle()
        assert (await queue.take()).token_ids == (1, 2)
        with pytest.raises(EngineStoppedError, match="was stopped"):
            await queue.take()

    asyncio.run(main())


def test_a_step_wakes_the_loop_once(monkeypatch):
    async def main():
        room, _ = bound_room()
        queues = [room.open(str(i)) for i in range(64)]
        loop, wake_ups = asyncio.get_running_loop(), []
        call_soon_threadsafe = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda *args: wake_ups.append(args) or call_soon_threadsafe(*args)
        )
        in_thread(room.deliver, [token(str(i), i) for i in range(64)])
        assert [(await queue.take()).token_ids for queue in queues] == [(i,) for i in range(64)]
        assert len(wake_ups) == 1

    asyncio.run(main())


def test_an_id_is_free_only_after_the_last_output():
    async def main():
        room, cancels = bound_room()
        queue = room.open("a")
        with pytest.raises(RequestIdInUseError, match="'a'"):
            room.open("a")
        room.close(queue, FinishReason.CANCELLED)
        assert cancels == [("a", FinishReason.CANCELLED)] and room.num_open == 0
        with pytest.raises(RequestIdInUseError):  # what the engine still sends would reach the wrong request
            room.open("a")
        room.deliver([token("a", 1)])
        room.deliver([last("a", FinishReason.CANCELLED)])
        await settle()
        again = room.open("a")
        room.deliver([token("a", 2)])
        assert (await again.take()).token_ids == (2,)

    asyncio.run(main())


def test_a_request_that_ended_is_not_cancelled():
    async def main():
        room, cancels = bound_room()
        queue = room.open("a")
        room.deliver([last("a")])
        assert (await queue.take()).finish_reason is FinishReason.LENGTH
        room.close(queue, FinishReason.CANCELLED)
        assert cancels == []
        room.discard(room.open("a"))  # free, and free again if submitting fails
        room.open("a")

    asyncio.run(main())


def test_too_many_unread_tokens_cancel_the_request_at_once():
    async def main():
        room, cancels = bound_room(max_undelivered_tokens=3)
        slow, quick = room.open("slow"), room.open("quick")
        for step in range(6):
            room.deliver([token("slow", step), token("quick", step)])
            await settle()
            assert (await quick.take()).token_ids == (step,)
            assert cancels == ([] if step < 3 else [("slow", FinishReason.CANCELLED)])
        with pytest.raises(SlowReaderError, match="4 tokens are unread; this server keeps at most 3"):
            await slow.take()

    asyncio.run(main())


def prompt_positions(request_id: str, num: int) -> Output:
    return Output(request_id=request_id, prompt_logprobs=(TokenLogprobs(1, -0.5, ()),) * num)


def test_log_probabilities_of_prompts_count_an_eighth():
    async def main():
        room, cancels = bound_room(max_undelivered_tokens=30)
        room.open("slow")
        for _ in range(4):
            assert cancels == []
            room.deliver([prompt_positions("slow", 80)])
            await settle()
        assert cancels == [("slow", FinishReason.CANCELLED)]

    asyncio.run(main())


def test_what_has_gathered_is_no_larger_than_a_message_may_be():
    """The log-probabilities of a long prompt come step by step, and are sent so to a caller that does not read."""

    async def main():
        room, _ = bound_room()
        queue = room.open("a", num_samples=2)
        room.deliver([prompt_positions("a", 4096)] * 3 + [token("a", 1, index=1), token("a", 2), token("a", 3)])
        await settle()
        outputs = [await queue.take() for _ in range(4)]
        assert [len(output.prompt_logprobs) for output in outputs] == [4096, 0, 4096, 4096]
        assert [output.token_ids for output in outputs] == [(), (1,), (), ()]
        assert (await queue.take()).token_ids == (2, 3) and queue.num_undelivered_tokens == [0, 0]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "num_samples", "num_tokens", "num_positions"),
    [
        ({"max_decode_steps": 128, "page_size": 128}, 33, 128, 0),
        ({"max_decode_steps": 8192, "page_size": 8192}, 1, 8192, 0),
        ({"draft_tokens": 6000, "page_size": 8192}, 1, 6001, 0),
        ({"max_step_tokens": 65_536}, 1, 0, 65_536),
    ],
)
def test_a_reader_who_takes_each_dispatch_before_the_next_keeps_up(options, num_samples, num_tokens, num_positions):
    """Two dispatches wait at most: the one that is being written and the next one."""

    def dispatch(step: int) -> list[Output]:
        return [
            Output(
                request_id="a",
                index=index,
                token_ids=(step,) * num_tokens,
                prompt_logprobs=(TokenLogprobs(1, -0.5, ()),) * num_positions,
            )
            for index in range(num_samples)
        ]

    async def main():
        fields = {"page_size": 32, "max_running": 1, "max_step_tokens": 512, "max_waiting": 1, "max_context": 64}
        limits = SchedulerLimits(**(fields | options))
        room, cancels = bound_room(max_dispatch_tokens=max_dispatch_tokens(limits))
        queue = room.open("a", num_samples)
        for step in range(0, 6, 2):
            room.deliver(dispatch(step))
            room.deliver(dispatch(step + 1))
            await settle()
            assert cancels == [], f"given up as slow in dispatch {step}"
            while any(queue.num_undelivered_tokens):
                await queue.take()

    asyncio.run(main())


def test_the_bound_of_many_samples_is_their_part_of_the_requests():
    async def main():
        room, cancels = bound_room()
        for name, num_samples, most in (("one", 1, 4096), ("eight", 8, 512), ("many", 64, 256)):
            room.open(name, num_samples)
            for index in range(num_samples):  # each sample may have `most`
                room.deliver([Output(request_id=name, index=index, token_ids=(1,) * most)])
            await settle()
            assert cancels == []
            room.deliver([token(name, 1, index=num_samples - 1)])
            await settle()
            assert cancels.pop() == (name, FinishReason.CANCELLED)

    asyncio.run(main())


def test_failing_reaches_who_waits_and_spares_who_has_ended():
    async def main():
        room, _ = bound_room()
        waits, ended = room.open("waits"), room.open("ended")
        taking = asyncio.create_task(waits.take())
        room.deliver([last("ended")])
        await settle()
        room.fail_all(EngineStoppedError("boom"))
        with pytest.raises(EngineStoppedError, match="boom"):
            await taking
        assert (await ended.take()).finish_reason is FinishReason.LENGTH

    asyncio.run(main())


def test_delivering_to_nobody_is_safe():
    room = OutputQueues()
    room.deliver([token("a", 1)])  # not bound yet

    async def main():
        room.bind(Cancels())

    asyncio.run(main())
    room.deliver([token("a", 1)])  # the loop is closed


def test_samples_are_taken_one_at_a_time_and_end_one_by_one():
    async def main() -> None:
        room, _ = bound_room()
        queue = room.open("a", 2)
        room.deliver([token("a", 1), token("a", 2, index=1), token("a", 3), last("a", index=1)])
        await settle()
        first = await queue.take()
        assert (first.index, first.token_ids, first.finish_reason) == (0, (1, 3), None)
        second = await queue.take()
        assert (second.index, second.token_ids, second.finish_reason) == (1, (2,), FinishReason.LENGTH)
        assert not queue.has_ended
        room.deliver([last("a")])
        await settle()
        assert (await queue.take()).index == 0 and queue.has_ended
        room.close(queue, FinishReason.CANCELLED)
        room.open("a")

    asyncio.run(main())


def test_a_write_that_hangs_ends_when_its_request_is_given_up():
    async def main():
        room, cancels = bound_room(max_undelivered_tokens=2)
        queue = room.open("a")
        handing = asyncio.create_task(queue.handing_over(asyncio.Event().wait()))
        await settle()
        in_thread(room.deliver, [token("a", step) for step in range(3)])
        with pytest.raises(SlowReaderError):
            await handing
        assert handing.cancelling() == 0 and cancels == [("a", FinishReason.CANCELLED)]

    asyncio.run(main())


def test_a_caller_who_leaves_cancels_a_write():
    async def main():
        room, _ = bound_room()
        handing = asyncio.create_task(room.open("a").handing_over(asyncio.Event().wait()))
        await settle()
        handing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handing

    asyncio.run(main())
