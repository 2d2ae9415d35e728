"""Writes the second model of the tests, whose tokenizer and template have the traits of the published Qwen3 models.

The demo model's tokenizer has no normalizer, and its template does not think. This one has an NFC normalizer, a
byte-level BPE that splits at letters and single digits, tokens added after its vocabulary (some special, such as
<|im_end|>, others with a text, such as <think>), two end tokens, and a template with tools that thinks unless
`enable_thinking` is false. The vocabulary of the model is padded, as the published ones are. Its weights are random.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from meshserve.runtime.model_files.generation_config import read_eos_token_ids

from .checkpoints import edit_config, save_checkpoint

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # have no text in outputs
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCAB_SIZE = 1024  # the model's
_NUM_MERGED = 640  # tokens before the added ones
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
_CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the other dogs think that they have seen this fox before.",
    "Think step by step, then answer. What is the weather like in Paris today? It is sunny, with 25 degrees.",
    'def main(argument: str) -> None:\n    """Prints it."""\n    return [each for each in argument if each != "\\n"]\n',
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": [1, 2, 3], "exact": true}}',
    '<html><body class="x"><|start|><think_more></think_more><tool name="call" /></body></html>\n\n</tool_call_list>',
    "Die größte Übung für Anfänger heißt „Grüße“. Ça dépend, mon chéri : où est la bibliothèque, près du café ?",
    "Tiếng Việt có nhiều dấu: một, hai, ba, bốn, năm, sáu, bảy, tám. Được rồi, cảm ơn anh rất nhiều.",
    "안녕하세요, 세계. 한국어 문장을 하나 더 써 봅시다. नमस्ते दुनिया, यह हिन्दी का एक वाक्य है। क़लम ज़मीन",
    "你好，世界。这是一个用来训练的句子，里面有一些常用的汉字。日本語の文章もここにあります。",
    "Привет, мир! Ещё один пример. Ёлка",
)
_MESSAGES = r"""
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools\n\nAnswer, or call functions of these:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nWrite each call as\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set parts = message.content.split('</think>') %}
        {%- set thoughts = message.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- parts[-1].lstrip('\n') if parts | length > 1 else message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\n' }}{% endif %}
            {%- set call = call.function or call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
_ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
CHAT_TEMPLATE = _MESSAGES.strip("\n")


def save_second_model(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes the model into `directory`, with random weights. `overrides` are of its config.json."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096, "rope_parameters": _ROPE}
    save_checkpoint(directory, seed=seed, **{**sizes, **overrides})
    ends = read_eos_token_ids(save_second_tokenizer(directory))
    edit_config(directory, eos_token_id=max(ends), bos_token_id=min(ends))
    return directory


def save_second_tokenizer(directory: Path) -> Path:
    """Writes the files of the model that concern text, without its weights."""
    tokenizer = _trained()
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {str(id_): _as_json(token) for id_, token in tokenizer.get_added_tokens_decoder().items()}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "errors": "replace",
        "model_max_length": 131_072,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    ends = [tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)]
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "bos_token_id": ends[1], **sampling}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = {"add_prefix_space": False, "use_regex": False}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(**byte_level)]
    )
    tokenizer.decoder = decoders.ByteLevel(**byte_level)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_NUM_MERGED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TEXT_TOKENS])
    return tokenizer


def _as_json(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}
