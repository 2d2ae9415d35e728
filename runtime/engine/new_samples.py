"""Turns an accepted call into the requests that the scheduler knows: one for each sample."""

import math
from collections.abc import Sequence

from ..api.adapters import AdapterInfo
from ..api.request import Request, RequestOptions
from ..api.sampling_params import MAX_SEED, SamplingParams


def new_samples(
    request_id: str,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    options: RequestOptions,
    *,
    seed: int,
    now: float,
    adapter: AdapterInfo | None,
) -> list[Request]:
    """Returns the samples of a request, one for each of `prompts`.

    Args:
      request_id, prompts, params, options: See `EngineApi.submit_prompts`.
      seed: Of the first sample.
      now: The time of arrival, by the clock whose time the scheduler is given.
      adapter: What `options.adapter` names now.
    """
    timeout_seconds = math.inf if options.timeout_seconds is None else options.timeout_seconds
    return [
        Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=(seed + index) % (MAX_SEED + 1),
            index=index,
            priority=options.priority,
            cache_salt=options.cache_salt,
            tenant=options.tenant,
            weight=options.weight,
            adapter=options.adapter,
            adapter_digest=adapter.digest if adapter is not None else "",
            adapter_info=adapter,
            arrival_seconds=now,
            deadline_seconds=now + timeout_seconds,
        )
        for index, prompt_token_ids in enumerate(prompts)
    ]
