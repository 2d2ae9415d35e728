"""The bounds of every number that is read from a model's small files, and the parsing of these files.

A model comes from others: a number in its files is checked here before anything is allocated or computed by it. The
bounds are several times the largest published values. Numbers of which only a few values are implemented are compared
with these (`weights.formats.config_options`); lengths in weight files are checked by `sharding.checkpoints`.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..api.errors import UnsupportedModelError

_MAX_SHOWN_CHARS = 120
_MAX_DIGITS = 300  # of a whole number; more than a float can hold


class Bound(NamedTuple):
    """The values that a number may have: `low` to `high`."""

    low: float
    high: float
    is_whole: bool = True
    is_above: bool = False  # whether `low` itself is not allowed
    may_be_float: bool = False  # whether a whole number may be written as 4096.0

    def accepts(self, value: object) -> bool:
        """Returns whether a value is such a number."""
        kinds: tuple[type, ...] = (int, float) if self.may_be_float or not self.is_whole else (int,)
        if type(value) not in kinds or not isinstance(value, int | float):
            return False
        if not (self.low < value if self.is_above else self.low <= value) or not value <= self.high:
            return False
        return not self.is_whole or value % 1 == 0

    def __str__(self) -> str:
        if self.is_above:
            return f"a number above {self.low:g} and at most {self.high:g}"
        return f"a {'whole ' if self.is_whole else ''}number, {self.low:.0f} to {self.high:.0f}"


_LAYERS, _HEADS, _WIDTH, _POSITIONS = 512, 1024, 2**19, 2**27
TOKEN_ID = Bound(0, 2**31 - 1)
LAYER = Bound(0, _LAYERS - 1)
BOUNDS: Mapping[str, Bound] = {
    # config.json
    "vocab_size": Bound(1, 2**22),
    "hidden_size": Bound(1, 2**16),
    "intermediate_size": Bound(1, _WIDTH),
    "num_hidden_layers": Bound(1, _LAYERS),
    "num_attention_heads": Bound(1, _HEADS),
    "num_key_value_heads": Bound(1, _HEADS),
    "head_dim": Bound(1, 1024),
    "max_position_embeddings": Bound(1, _POSITIONS),
    "rms_norm_eps": Bound(0, 1, is_whole=False, is_above=True),
    # of its experts
    "num_experts": Bound(1, 4096),
    "num_experts_per_tok": Bound(1, 4096),
    "moe_intermediate_size": Bound(1, _WIDTH),
    "decoder_sparse_step": Bound(1, _LAYERS),
    # of its rope_parameters
    "rope_theta": Bound(1, 1e15, is_whole=False, is_above=True),
    "factor": Bound(1, 10_000, is_whole=False),
    "original_max_position_embeddings": Bound(1, _POSITIONS, may_be_float=True),
    "attention_factor": Bound(0, 10_000, is_whole=False, is_above=True),
    "beta_fast": Bound(0, 1e6, is_whole=False, is_above=True),
    "beta_slow": Bound(0, 1e6, is_whole=False, is_above=True),
    "mscale": Bound(0, 10_000, is_whole=False, is_above=True),
    "mscale_all_dim": Bound(0, 10_000, is_whole=False, is_above=True),
    # generation_config.json; the others are bounded as those of requests
    "top_k": Bound(-1, 2**31 - 1),
    "max_new_tokens": Bound(1, 2**31 - 1),
    # config_sentence_transformers.json
    "truncate_dim": Bound(1, 2**20),
}
# Of a model with experts: each has matrices of its own in each layer.
MAX_EXPERTS_OF_ALL_LAYERS = 2**17
MAX_END_TOKENS = 1024


def check_number(options: Mapping[str, Any], key: str, file: str = "config.json") -> None:
    """Checks that an option is within its bound.

    Raises:
      UnsupportedModelError: It is not.
    """
    if not BOUNDS[key].accepts(options[key]):
        raise UnsupportedModelError(f"{file}: {key} is {shown(options[key])}; allowed is {BOUNDS[key]}.")


def number(options: Mapping[str, Any], key: str, default: float = math.nan) -> float:
    """Returns an option that is a number, or `default` if it is missing. Raises as `check_number`."""
    if options.get(key) is None:
        return default
    check_number(options, key)
    return float(options[key])


def shown(value: object) -> str:
    """Returns a value as an error message shows it: cut if it is long, and not followed deep."""
    try:
        text = repr(value[:_MAX_SHOWN_CHARS] if isinstance(value, str | list | tuple) else value)
    except (ValueError, RecursionError):  # of more digits than Python writes, or nested too deep
        return f"something of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def parse_json(text: str) -> Any:
    """Parses JSON. A number of more digits than a float holds becomes an infinite one, which no bound allows.

    Raises:
      ValueError, RecursionError: It is no JSON, or nested too deep.
    """
    return json.loads(text, parse_int=_parsed_int)


def _parsed_int(text: str) -> int | float:
    return int(text) if len(text) <= _MAX_DIGITS else float(text)
