"""What quantization costs the demo model on verse from two plays that it was not trained on."""

import functools
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from meshserve.runtime.weights.locate import DEMO_DIRECTORY
from tests.runtime.weights.formats.exact_model import our_logits

DEMO = DEMO_DIRECTORY
TEXT = Path(__file__).with_name("held_out.txt").read_text()


@functools.cache
def perplexity(tp: int = 1, **options: str) -> float:
    """Returns exp of the mean loss of the text's first 400 tokens."""
    token_ids = [0, *Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(TEXT).ids][:400]
    logits = our_logits(DEMO, token_ids, tp, **options)[:-1].astype(np.float64)
    highest = logits.max(axis=1)
    log_sums = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    return float(np.exp(np.mean(log_sums - logits[np.arange(len(logits)), token_ids[1:]])))


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"quantize": "fp8-block"}, 1.01),
        ({"quantize": "fp8-channel"}, 1.01),
        ({"quantize": "fp8-channel", "linear": "xla_fp8"}, 1.01),
        ({"kv_dtype": "float8_e4m3fn"}, 1.01),
        ({"quantize": "int4"}, 1.03),
    ],
    ids=str,
)
def test_perplexity_rises_by_little(options: dict[str, str], most: float) -> None:
    before = perplexity()
    assert 5 < before < 300, "well below the 2048 of a uniform guess"
    assert perplexity(**options) < most * before


def test_perplexity_is_the_same_at_any_tp_size() -> None:
    assert perplexity(8, quantize="fp8-block") == pytest.approx(perplexity(quantize="fp8-block"), rel=1e-4)
