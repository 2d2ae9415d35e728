"""Prompts of which many begin with the same text."""

import random

_WORDS = "king crown night blood sword love ghost father sleep heart storm grave mother fool truth honour queen".split()


def shared_prefixes(
    num_groups: int, num_requests: int, *, prefix_words: int, suffix_words: int, seed: int
) -> list[str]:
    """Returns prompts in random order, the same number of each group; those of a group share their first words."""
    draw = random.Random(seed)

    def words(number: int) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(number))

    prefixes = [f"Scene {group}. {words(prefix_words)}" for group in range(num_groups)]
    prompts = [f"{prefixes[number % num_groups]} {words(suffix_words)}\n" for number in range(num_requests)]
    draw.shuffle(prompts)
    return prompts
