"""The sampling parameters of `LLM.generate`: the same fields as over gRPC, and `n`."""

from typing import Unpack

from ..api import proto_codec
from ..api.sampling_params import params_table, without_unset
from ..client import messages
from ..client.messages import RequestFields
from ..options.nearest import nearest
from .prompt_batch import Prompt

_FIELDS = tuple(name for name in (*params_table(), "n", "priority", "cache_salt") if name != "num_resumed_tokens")


class LLMSamplingParams:
    """How to choose the tokens of a request: the fields of SamplingParams in inference.proto, which explains them.

    `n` is the number of samples of a prompt, `priority` and `cache_salt` are those of GenerateRequest. `stop` may be
    one string, and a constraint is written as `constraint={"json_schema": {...}}`. A field that is left out or None has
    the model's default (generation_config.json), or else the one documented in inference.proto. As in vLLM, a `top_k`
    of -1 is off, and a `seed` of -1 is none.

    Raises:
      TypeError: There is no such field, or a value has the wrong type.
      InvalidRequestError: A value is out of range. The message names the field and the range.
    """

    def __init__(self, **fields: Unpack[RequestFields]) -> None:
        for name in fields:
            if name not in _FIELDS:
                near = nearest(name, _FIELDS)
                hint = f"did you mean {near}?" if near else f"allowed are {', '.join(_FIELDS)}."
                raise TypeError(f"SamplingParams has no field {name!r}; {hint}")
        self._fields = dict(fields)
        for name, value in without_unset(fields).items():
            if name in params_table() and isinstance(value, int | float):
                params_table()[name].check(name, value)  # for an error that names the range
        if isinstance(stop := fields.get("stop"), str):
            fields["stop"] = [stop]
        self._request = messages.generate_request((), None, fields)
        self.prompt(())  # checks the values

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"

    def prompt(self, prompt: str | tuple[int, ...]) -> Prompt:
        """Returns a prompt of a batch with these parameters."""
        sampling = self._request.sampling
        params, options = proto_codec.sampling_params(sampling), proto_codec.request_options(self._request, None)
        return Prompt(prompt, params, options, sampling)
