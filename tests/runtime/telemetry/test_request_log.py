import json
import logging
import sys
import time

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from meshserve.runtime.api.request import Output
from meshserve.runtime.telemetry.logs import JsonFormatter, configure_logs, is_worth_a_line
from meshserve.runtime.telemetry.request_log import Observer


def finish_one(request_id: str = "r1") -> None:
    request_log = Observer().begin(
        method="Chat", request_id=request_id, tenant="t", num_prompt_tokens=3, metadata={}, began=0.0
    )
    request_log.sent(Output(request_id=request_id, token_ids=(1, 2)))
    request_log.sent(Output(request_id=request_id, text="held"))
    request_log.end("stop")


def test_the_log_has_a_line_of_json_for_each_request(caplog):
    caplog.set_level(logging.INFO, "meshserve.request")
    finish_one("r\n1")
    text = JsonFormatter().format(caplog.records[-1])
    assert "\n" not in text
    line = json.loads(text)
    expected = {
        "level": "INFO", "logger": "meshserve.request", "request_id": "r\n1", "tenant": "t", "method": "Chat",
        "outcome": "stop", "num_prompt_tokens": 3, "num_output_tokens": 2,
    }  # fmt: skip
    assert expected.items() <= line.items()
    assert 0 <= line["first_token_seconds"] <= line["total_seconds"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_both_formats_have_one_line_for_a_finished_request(log_format, capsys):
    configure_logs(log_format)
    finish_one()
    [line] = capsys.readouterr().err.splitlines()
    assert ("INFO meshserve.request: Chat" in line) == (log_format == "text")
    assert "of t stop: 3 prompt tokens, 2 output tokens, first token after" in line


def test_bytes_that_are_not_http_are_not_an_error_of_the_server():
    def record(error: Exception) -> logging.LogRecord:
        try:
            raise error
        except Exception:
            return logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Error handling", (), sys.exc_info())

    assert not is_worth_a_line(record(BadHttpMessage("bytes")))
    assert is_worth_a_line(record(RuntimeError("a handler that fails")))


def test_the_last_requests_are_kept_without_their_text():
    observer = Observer()
    for number in range(120):
        request_log = observer.begin(
            method="Chat", request_id=f"r{number}", tenant="t", num_prompt_tokens=3, metadata={}, began=time.monotonic()
        )
        request_log.sent(Output(request_id=f"r{number}", token_ids=(1, 2), text="secret"))
        request_log.end("stop")
    assert [each.request_id for each in observer.recent] == [f"r{number}" for number in range(20, 120)]
    last = observer.recent[-1]
    assert (last.tenant, last.outcome, last.num_prompt_tokens, last.num_output_tokens) == ("t", "stop", 3, 2)
    assert last.first_token_seconds is not None and 0 <= last.first_token_seconds <= last.total_seconds
    assert "secret" not in str(last)
