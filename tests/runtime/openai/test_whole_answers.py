"""Answers that are sent at once: long ones are made beside the event loop."""

import asyncio
import json
import threading
from typing import Any

import pytest

from meshserve.runtime.openai.bodies import Apart
from meshserve.runtime.openai.http_call import HttpCall
from meshserve.runtime.openai.whole_answers import answered
from meshserve.runtime.text.work_pool import Paced, WorkPool


@pytest.mark.parametrize("is_long", [False, True])
def test_long_answers_are_made_in_the_thread_of_large_bodies(is_long: bool) -> None:
    call, threads = HttpCall({}), list[threading.Thread]()
    value: dict[str, Any] = {"a": [{"b": 1}], "c": "ü"}
    call.apart = Apart(WorkPool("bodies", num_threads=1, max_calls=4, max_size=4), Paced(0.5), "tenant")

    def whole() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return value

    response = asyncio.run(answered(call, whole, is_long=is_long))
    assert (response.status, response.content_type) == (200, "application/json")
    assert json.loads(response.text or "") == value
    assert [thread is threading.main_thread() for thread in threads] == [not is_long]
