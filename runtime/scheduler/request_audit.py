"""Checks the scheduling state of one request, for `Scheduler.audit`. Serves step 4 of 10."""

from ..api.request import Request


def audit_request(request: Request, *, is_running: bool, is_leaving: bool) -> None:
    """Raises AssertionError with the violation, if an unfinished request has a state that it cannot have."""
    name = f"request {request.request_id}"
    assert not request.is_finished, f"{name} is finished but still held"
    num_known, num_tokens, limit = request.num_known_tokens, request.num_tokens, request.max_total_tokens
    counted = len(request.prompt_token_ids) + len(request.output_token_ids)
    assert num_known == counted, f"{name} counts {num_known} known tokens of {counted}"
    assert num_known <= num_tokens <= limit, f"{name} has {num_known}, {num_tokens} tokens of at most {limit}"
    is_bare = request.slot is None and not request.pages and request.num_computed_tokens == 0
    is_placed = request.slot is not None and request.pages
    assert is_placed if is_running else is_bare, f"{name} has the wrong state"
    assert not is_leaving or num_tokens == limit, f"{name} left too early"
