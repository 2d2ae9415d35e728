"""Tests that equal keys of pages mean equal contents: tokens, salt, and adapter."""

from meshserve.runtime.api.request import Request
from meshserve.runtime.api.sampling_params import SamplingParams
from meshserve.runtime.scheduler.page_keys import extend_page_keys

TOKENS = tuple(range(8))


def keys(token_ids: tuple[int, ...] = TOKENS, **fields: str) -> list[bytes]:
    request = Request(request_id="r", prompt_token_ids=token_ids, params=SamplingParams(), seed=0, **fields)
    extend_page_keys(request, 4, 2)
    return request.page_keys


def test_pages_are_shared_by_the_content_of_an_adapter_not_by_its_name():
    one, other = "01" * 32, "02" * 32
    assert keys(adapter="a", adapter_digest=one) == keys(adapter="b", adapter_digest=one)
    groups = [keys(), keys(adapter_digest=one), keys(adapter_digest=other), keys(cache_salt="s")]
    groups += [keys(cache_salt="s", adapter_digest=one), keys(cache_salt=one)]
    assert len(set().union(*groups)) == 2 * len(groups)


def test_a_key_depends_on_all_tokens_before_the_end_of_its_page():
    assert keys()[0] == keys((*TOKENS[:4], 9, 9, 9, 9))[0]
    assert keys()[1] != keys((9, *TOKENS[1:]))[1]
