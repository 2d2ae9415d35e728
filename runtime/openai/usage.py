"""The usage of a request in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

from .generation import Choice


def usage_of(choices: Sequence[Choice], num_samples: int, num_reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Returns what the choices of a request took. A prompt with several samples counts once.

    Args:
      choices: All choices, prompt by prompt.
      num_samples: Of each prompt.
      num_reasoning_tokens: How many of the output's tokens are reasoning; None leaves it out.
    """
    prompts = choices[::num_samples]
    num_prompt_tokens = sum(choice.num_prompt_tokens for choice in prompts)
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in prompts)},
    }
    if num_reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return usage
