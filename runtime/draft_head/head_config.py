"""Reads what the config.json files of trained heads and of block drafters have in common.

The decoder layer's options stand at the top level or, where this has none, in `transformer_layer_config` (vLLM's
speculators).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..api.errors import UnsupportedModelError
from ..api.model_config import ModelConfig

# Keys that do not affect the result.
_IGNORED = frozenset(
    "architectures speculators_config speculators_model_type speculators_version auto_map pretraining_tp".split()
)


class HeadOptions:
    """The options of a parsed config.json; those that have not been taken yet are in `left`.

    Every method raises UnsupportedModelError, with the name of the option, if meshserve does not implement a value.

    Args:
      kind: What the file describes, for messages.
      raw: The parsed file.
      served: The served model.
      ignored: Keys that do not affect the result, besides those of every kind.
    """

    def __init__(self, kind: str, raw: Mapping[str, Any], served: ModelConfig, ignored: Collection[str] = ()):
        merged = dict(raw.get("transformer_layer_config") or {}) | dict(raw)
        skipped = {"transformer_layer_config", *_IGNORED, *ignored}
        self.kind, self.served = kind, served
        self.left = {key: value for key, value in merged.items() if key not in skipped}

    def take(self, key: str) -> Any:
        """Returns the value of a key; None if it is missing."""
        return self.left.pop(key, None)

    def refuse(self, reason: str) -> UnsupportedModelError:
        """Returns the error for an option."""
        return UnsupportedModelError(f"config.json of the {self.kind}: {reason}")

    def take_group(self, name: str, known: Collection[str]) -> dict[str, Any]:
        """Returns the options of a group, of which all must be known."""
        group = dict(self.take(name) or {})
        for key in sorted(group.keys() - set(known)):
            raise self.refuse(f"{name} has {key} = {group[key]!r}, which is not implemented.")
        return group

    def check_fixed(self, implemented: Mapping[str, Any]) -> None:
        """Takes options of which only one value is implemented."""
        for key, value in implemented.items():
            found = self.take(key)
            if found is not None and found != value:
                raise self.refuse(f"{key} is {found!r}; meshserve implements only {value!r}.")

    def take_number(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Returns a whole number from `low` to `high`; `default` if it is missing or 0."""
        value = self.take(key)
        value = value or default if default is not None else value
        if not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(f"{key} is {value!r}; allowed is {low} to {high}.")
        return value

    def take_layer(self, fixed: Mapping[str, Any]) -> ModelConfig:
        """Returns the decoder layers, whose vocabulary is the head's, from all options that are left.

        What the file says of the model that it was trained for must hold for the served one. Of this, only hidden_size
        must be there.
        """
        served = self.served
        expected = {
            "hidden_size": served.embed_dim,
            "target_hidden_size": served.embed_dim,
            "vocab_size": served.vocab_size,
            "num_target_layers": served.num_layers,
        }
        for key, allowed in expected.items():
            found = self.left.get(key)
            if found != allowed and (found is not None or key == "hidden_size"):
                raise self.refuse(
                    f"{key} is {found!r} and the served model has {allowed}. Use a {self.kind} that was trained for "
                    "this model."
                )
        vocab_size = self.take_number("draft_vocab_size", 1, served.vocab_size, served.vocab_size)
        for key in ("target_hidden_size", "num_target_layers"):
            self.take(key)
        try:
            return ModelConfig.from_dict(
                self.left | {"tie_word_embeddings": False, "vocab_size": vocab_size} | dict(fixed)
            )
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"the {self.kind}: {error}") from None

    def check_layers_read(self, layers: Sequence[Any], count: int | None = None) -> tuple[int, ...]:
        """Checks that these are `count` layers of the served model in ascending order; None: any number of them."""
        last = self.served.num_layers - 1
        is_valid = len(layers) == (count or len(layers)) > 0 and all(isinstance(layer, int) for layer in layers)
        # Heads of a fixed number of layers read some of a shallow model twice.
        is_valid = is_valid and list(layers) == sorted(layers if count else set(layers))
        if not is_valid or not 0 <= layers[0] <= layers[-1] <= last:
            raise UnsupportedModelError(
                f"the {self.kind} reads the inputs of the layers {tuple(layers)}; {count or 'some'} of 0 to {last} in "
                "ascending order are needed."
            )
        return tuple(layers)


def inputs_after(outputs_of: Sequence[Any]) -> list[Any]:
    """Returns the layers whose inputs are the outputs of the given ones."""
    return [layer + 1 if isinstance(layer, int) else layer for layer in outputs_of]
