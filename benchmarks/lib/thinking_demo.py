"""A copy of the demo model that thinks and calls tools: its tokenizer has the tokens, its template asks for them.

Nothing has taught the model when to use them. Requests must bound its reasoning (`thinking_token_budget`) and demand
its calls (`tool_choice`); then pages and clients see what they see of larger models.
"""

import json
import shutil
from pathlib import Path

from meshserve.runtime.weights.locate import DEMO_DIRECTORY

_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_TEMPLATE = r"""
{%- if tools %}{{- '<|im_start|>system\nCall one of:\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\n' }}{% endfor %}
    {{- '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}
        {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
        {{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\n</think>\n\n' }}{% endif %}
{%- endif %}
"""


def save_thinking_demo(directory: Path) -> Path:
    """Writes the model's files."""
    import jax.numpy as jnp
    from safetensors.flax import load_file, save_file

    shutil.copytree(DEMO_DIRECTORY, directory, ignore=shutil.ignore_patterns("model.safetensors", "__pycache__"))
    (directory / "chat_template.jinja").write_text(_TEMPLATE.strip())
    config = json.loads((directory / "config.json").read_text())
    first, name = config["vocab_size"], "model.embed_tokens.weight"
    config["vocab_size"] += len(_TOKENS)
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": first + index, "content": text, "special": False} for index, text in enumerate(_TOKENS)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(DEMO_DIRECTORY / "model.safetensors")
    rows = jnp.zeros((len(_TOKENS), weights[name].shape[1]), weights[name].dtype)
    weights[name] = jnp.concatenate([weights[name], rows])
    save_file(weights, directory / "model.safetensors")
    return directory
