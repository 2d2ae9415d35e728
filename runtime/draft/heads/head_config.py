"""Reads what the config.json files of trained heads and of block drafters have in common.

The decoder layer's options stand at the top level or, where this has none, in `transformer_layer_config` (vLLM's
speculators).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...api.errors import UnsupportedModelError
from ...model_files.model_config import ModelConfig
from ...model_files.number_bounds import shown

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
        self.kind, self.served = kind, served
        merged = self._object("transformer_layer_config", raw.get("transformer_layer_config")) | dict(raw)
        skipped = {"transformer_layer_config", *_IGNORED, *ignored}
        self.left = {key: value for key, value in merged.items() if key not in skipped}

    def take(self, key: str) -> Any:
        """Returns the value of a key; None if it is missing."""
        return self.left.pop(key, None)

    def refuse(self, reason: str) -> UnsupportedModelError:
        """Returns the error for an option."""
        return UnsupportedModelError(f"config.json of the {self.kind}: {reason}")

    def take_group(self, name: str, known: Collection[str]) -> dict[str, Any]:
        """Returns the options of a group, of which all must be known."""
        group = self._object(name, self.take(name))
        for key in sorted(group.keys() - set(known)):
            raise self.refuse(f"{name} has {key} = {shown(group[key])}, which is not implemented.")
        return group

    def _object(self, key: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict | None):
            raise self.refuse(f"{key} is {shown(value)}; it must be an object.")
        return dict(value or {})

    def check_fixed(self, implemented: Mapping[str, Any]) -> None:
        """Takes options of which only one value is implemented."""
        for key, value in implemented.items():
            found = self.take(key)
            if found is not None and found != value:
                raise self.refuse(f"{key} is {shown(found)}; meshserve implements only {value!r}.")

    def take_number(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Returns a whole number from `low` to `high`; `default` if it is missing or 0."""
        value = self.take(key)
        value = value or default if default is not None else value
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(f"{key} is {shown(value)}; allowed is {low} to {high}.")
        return value

    def take_layer(self, fixed: Mapping[str, Any]) -> ModelConfig:
        """Returns the decoder layers, whose vocabulary is the head's, from all options that are left.

        What the file says about the model that it was trained for must be true for the served one. Only hidden_size is
        required.
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
                    f"{key} is {shown(found)} and the served model has {allowed}. Use a {self.kind} that was trained "
                    "for this model."
                )
        vocab_size = self.take_number("draft_vocab_size", 1, served.vocab_size, served.vocab_size)
        for key in ("target_hidden_size", "num_target_layers"):
            self.take(key)
        try:
            config = ModelConfig.from_dict(
                self.left | {"tie_word_embeddings": False, "vocab_size": vocab_size} | dict(fixed)
            )
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"the {self.kind}: {error}") from None
        if config.notes.unknown:
            raise self.refuse(f"it has options that meshserve does not know: {', '.join(config.notes.unknown)}.")
        if config.notes.assumed:
            missing = ", ".join(note.partition(" = ")[0] for note in config.notes.assumed)
            raise self.refuse(f"it lacks {missing}. Add the values that it was trained with.")
        return config

    def check_layers_read(self, layers: Any, count: int | None = None) -> tuple[int, ...]:
        """Checks that these are `count` layers of the served model in ascending order; None: any number of them."""
        last = self.served.num_layers - 1
        is_valid = isinstance(layers, Sequence) and len(layers) == (count or len(layers)) > 0
        is_valid = is_valid and all(type(layer) is int for layer in layers)
        # Heads of a fixed number of layers read some of a shallow model twice.
        is_valid = is_valid and list(layers) == sorted(layers if count else set(layers))
        if not is_valid or not 0 <= layers[0] <= layers[-1] <= last:
            found = shown(tuple(layers) if isinstance(layers, list) else layers)
            raise UnsupportedModelError(
                f"the {self.kind} reads the inputs of the layers {found}; {count or 'some'} of 0 to {last} in "
                "ascending order are needed."
            )
        return tuple(layers)


def has_class(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    """Returns whether a config.json names one of some classes."""
    found = raw.get("architectures")
    return isinstance(found, list) and any(name in names for name in found)


def inputs_after(outputs_of: Any) -> Any:
    """Returns the layers whose inputs are the outputs of the given ones; what is no list of layers as it is."""
    if not isinstance(outputs_of, list):
        return outputs_of
    return [layer + 1 if type(layer) is int else layer for layer in outputs_of]
