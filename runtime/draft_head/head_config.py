"""Checks that a trained head or block drafter was trained for the served model."""

from collections.abc import Mapping
from typing import Any

from ..api.errors import UnsupportedModelError
from ..api.model_config import ModelConfig


def check_served(kind: str, options: Mapping[str, Any], served: ModelConfig) -> None:
    """Compares what a config.json says of the model it was trained for; of this, only hidden_size must be there.

    Args:
      kind: What it describes, for the message.
      options: Of the config.json.
      served: The served model.

    Raises:
      UnsupportedModelError: It was trained for another model.
    """
    expected = {
        "hidden_size": served.embed_dim,
        "target_hidden_size": served.embed_dim,
        "vocab_size": served.vocab_size,
        "num_target_layers": served.num_layers,
    }
    for key, allowed in expected.items():
        found = options.get(key)
        if found != allowed and (found is not None or key == "hidden_size"):
            raise UnsupportedModelError(
                f"config.json of the {kind}: {key} is {found!r} and the served model has {allowed}. Use a {kind} that "
                "was trained for this model."
            )
