from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class EmbeddingFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBEDDING_FORMAT_UNSPECIFIED: _ClassVar[EmbeddingFormat]
    EMBEDDING_FORMAT_FLOATS: _ClassVar[EmbeddingFormat]
    EMBEDDING_FORMAT_FLOAT32: _ClassVar[EmbeddingFormat]
    EMBEDDING_FORMAT_BFLOAT16: _ClassVar[EmbeddingFormat]
    EMBEDDING_FORMAT_BASE64: _ClassVar[EmbeddingFormat]

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_READY: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_FAILED: _ClassVar[ServerState]

class RunningRequests(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUNNING_REQUESTS_UNSPECIFIED: _ClassVar[RunningRequests]
    RUNNING_REQUESTS_CONTINUE: _ClassVar[RunningRequests]
    RUNNING_REQUESTS_FINISH: _ClassVar[RunningRequests]
    RUNNING_REQUESTS_ABORT: _ClassVar[RunningRequests]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason
EMBEDDING_FORMAT_UNSPECIFIED: EmbeddingFormat
EMBEDDING_FORMAT_FLOATS: EmbeddingFormat
EMBEDDING_FORMAT_FLOAT32: EmbeddingFormat
EMBEDDING_FORMAT_BFLOAT16: EmbeddingFormat
EMBEDDING_FORMAT_BASE64: EmbeddingFormat
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_READY: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_FAILED: ServerState
RUNNING_REQUESTS_UNSPECIFIED: RunningRequests
RUNNING_REQUESTS_CONTINUE: RunningRequests
RUNNING_REQUESTS_FINISH: RunningRequests
RUNNING_REQUESTS_ABORT: RunningRequests

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "sampling", "priority", "cache_salt", "n", "adapter", "adapter_digest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    sampling: SamplingParams
    priority: int
    cache_salt: str
    n: int
    adapter: str
    adapter_digest: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., n: _Optional[int] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_token_ids", "min_tokens", "logprobs", "prompt_logprobs", "processed_logprobs", "seed", "ignore_eos", "stop", "include_stop", "stop_token_ids", "skip_special_tokens", "constraint", "num_resumed_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROCESSED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    processed_logprobs: bool
    seed: int
    ignore_eos: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    constraint: Constraint
    num_resumed_tokens: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., processed_logprobs: _Optional[bool] = ..., seed: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., num_resumed_tokens: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choice")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: Choice
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "token_ids", "finish", "index", "logprobs", "prompt_logprobs", "adapter_digest")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: Finish
    index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    adapter_digest: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("request_id", "messages", "sampling", "enable_thinking", "tools", "add_generation_prompt", "continue_last_message", "priority", "cache_salt", "n", "answer", "resumed_token_ids", "adapter", "adapter_digest")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ENABLE_THINKING_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    sampling: SamplingParams
    enable_thinking: bool
    tools: _containers.RepeatedScalarFieldContainer[str]
    add_generation_prompt: bool
    continue_last_message: bool
    priority: int
    cache_salt: str
    n: int
    answer: AnswerOptions
    resumed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: str
    adapter_digest: str
    def __init__(self, request_id: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., enable_thinking: _Optional[bool] = ..., tools: _Optional[_Iterable[str]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_last_message: _Optional[bool] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., n: _Optional[int] = ..., answer: _Optional[_Union[AnswerOptions, _Mapping]] = ..., resumed_token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class AnswerOptions(_message.Message):
    __slots__ = ("thinking_token_budget", "any_tool", "tool", "parallel_tool_calls")
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ANY_TOOL_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    thinking_token_budget: int
    any_tool: bool
    tool: str
    parallel_tool_calls: bool
    def __init__(self, thinking_token_budget: _Optional[int] = ..., any_tool: _Optional[bool] = ..., tool: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning_content", "tool_calls")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    reasoning_content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., reasoning_content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("text", "token_ids", "finish", "index", "logprobs", "prompt_logprobs", "parts", "adapter_digest")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: Finish
    index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    parts: _containers.RepeatedCompositeFieldContainer[AnswerPart]
    adapter_digest: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[AnswerPart, _Mapping]]] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class AnswerPart(_message.Message):
    __slots__ = ("reasoning", "content", "call", "arguments")
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    reasoning: str
    content: str
    call: ToolCallStart
    arguments: ToolCallArguments
    def __init__(self, reasoning: _Optional[str] = ..., content: _Optional[str] = ..., call: _Optional[_Union[ToolCallStart, _Mapping]] = ..., arguments: _Optional[_Union[ToolCallArguments, _Mapping]] = ...) -> None: ...

class ToolCallStart(_message.Message):
    __slots__ = ("index", "name")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    index: int
    name: str
    def __init__(self, index: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class ToolCallArguments(_message.Message):
    __slots__ = ("index", "text")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "message", "usage", "weight_spans")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_SPANS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    message: str
    usage: Usage
    weight_spans: _containers.RepeatedCompositeFieldContainer[WeightSpan]
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., message: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., weight_spans: _Optional[_Iterable[_Union[WeightSpan, _Mapping]]] = ...) -> None: ...

class WeightSpan(_message.Message):
    __slots__ = ("version", "num_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: str
    num_tokens: int
    def __init__(self, version: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_reasoning_tokens")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_reasoning_tokens: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "conversation")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    text: str
    conversation: Conversation
    def __init__(self, text: _Optional[str] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages", "enable_thinking", "tools", "add_generation_prompt", "continue_last_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ENABLE_THINKING_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_LAST_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    enable_thinking: bool
    tools: _containers.RepeatedScalarFieldContainer[str]
    add_generation_prompt: bool
    continue_last_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., enable_thinking: _Optional[bool] = ..., tools: _Optional[_Iterable[str]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_last_message: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "inputs", "instruction", "dimensions", "normalize", "format", "truncate", "priority", "cache_salt", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    inputs: _containers.RepeatedCompositeFieldContainer[EmbedInput]
    instruction: str
    dimensions: int
    normalize: bool
    format: EmbeddingFormat
    truncate: bool
    priority: int
    cache_salt: str
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[EmbedInput, _Mapping]]] = ..., instruction: _Optional[str] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., format: _Optional[_Union[EmbeddingFormat, str]] = ..., truncate: _Optional[bool] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class EmbedInput(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings",)
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("index", "values", "data", "base64", "num_prompt_tokens", "num_cached_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    BASE64_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    values: _containers.RepeatedScalarFieldContainer[float]
    data: bytes
    base64: str
    num_prompt_tokens: int
    num_cached_tokens: int
    def __init__(self, index: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ..., data: _Optional[bytes] = ..., base64: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "pairs", "instruction", "truncate", "priority", "cache_salt", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pairs: _containers.RepeatedCompositeFieldContainer[ScorePair]
    instruction: str
    truncate: bool
    priority: int
    cache_salt: str
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., pairs: _Optional[_Iterable[_Union[ScorePair, _Mapping]]] = ..., instruction: _Optional[str] = ..., truncate: _Optional[bool] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class ScorePair(_message.Message):
    __slots__ = ("query", "document")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    query: str
    document: str
    def __init__(self, query: _Optional[str] = ..., document: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[RelevanceScore]
    def __init__(self, scores: _Optional[_Iterable[_Union[RelevanceScore, _Mapping]]] = ...) -> None: ...

class RelevanceScore(_message.Message):
    __slots__ = ("index", "score", "num_prompt_tokens", "num_cached_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    score: float
    num_prompt_tokens: int
    num_cached_tokens: int
    def __init__(self, index: _Optional[int] = ..., score: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class RerankRequest(_message.Message):
    __slots__ = ("request_id", "query", "documents", "top_n", "instruction", "truncate", "priority", "cache_salt", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    query: str
    documents: _containers.RepeatedScalarFieldContainer[str]
    top_n: int
    instruction: str
    truncate: bool
    priority: int
    cache_salt: str
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., query: _Optional[str] = ..., documents: _Optional[_Iterable[str]] = ..., top_n: _Optional[int] = ..., instruction: _Optional[str] = ..., truncate: _Optional[bool] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class RerankResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[RelevanceScore]
    def __init__(self, results: _Optional[_Iterable[_Union[RelevanceScore, _Mapping]]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_aborted",)
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    def __init__(self, num_aborted: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_context_tokens", "eos_token_ids", "tp_size", "dtype", "page_size_tokens", "num_parameters", "num_devices", "device_kind", "server_version", "default_sampling", "quantization", "kv_cache_dtype", "supports_chat", "supports_resume", "supports_logprobs", "supports_structured_output", "supports_penalties", "supports_text", "task", "embedding_dimensions", "draft_tokens", "draft_model", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_KIND_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_CHAT_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_RESUME_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_PENALTIES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_TEXT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tp_size: int
    dtype: str
    page_size_tokens: int
    num_parameters: int
    num_devices: int
    device_kind: str
    server_version: str
    default_sampling: SamplingParams
    quantization: str
    kv_cache_dtype: str
    supports_chat: bool
    supports_resume: bool
    supports_logprobs: bool
    supports_structured_output: bool
    supports_penalties: bool
    supports_text: bool
    task: str
    embedding_dimensions: int
    draft_tokens: int
    draft_model: str
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tp_size: _Optional[int] = ..., dtype: _Optional[str] = ..., page_size_tokens: _Optional[int] = ..., num_parameters: _Optional[int] = ..., num_devices: _Optional[int] = ..., device_kind: _Optional[str] = ..., server_version: _Optional[str] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., quantization: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., supports_chat: _Optional[bool] = ..., supports_resume: _Optional[bool] = ..., supports_logprobs: _Optional[bool] = ..., supports_structured_output: _Optional[bool] = ..., supports_penalties: _Optional[bool] = ..., supports_text: _Optional[bool] = ..., task: _Optional[str] = ..., embedding_dimensions: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., draft_model: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "parent", "digest", "rank", "targets", "path", "num_bytes", "is_on_device")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    parent: str
    digest: str
    rank: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    path: str
    num_bytes: int
    is_on_device: bool
    def __init__(self, name: _Optional[str] = ..., parent: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ..., path: _Optional[str] = ..., num_bytes: _Optional[int] = ..., is_on_device: _Optional[bool] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("state", "progress", "uptime_seconds", "server_version", "num_open_requests", "max_message_bytes", "max_stop_strings", "max_stop_string_chars")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRING_CHARS_FIELD_NUMBER: _ClassVar[int]
    state: ServerState
    progress: str
    uptime_seconds: float
    server_version: str
    num_open_requests: int
    max_message_bytes: int
    max_stop_strings: int
    max_stop_string_chars: int
    def __init__(self, state: _Optional[_Union[ServerState, str]] = ..., progress: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., server_version: _Optional[str] = ..., num_open_requests: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., max_stop_string_chars: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_pages", "num_free_pages")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_free_pages: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_open_requests",)
    NUM_OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_open_requests: int
    def __init__(self, num_open_requests: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("num_flushed_pages",)
    NUM_FLUSHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_flushed_pages: int
    def __init__(self, num_flushed_pages: _Optional[int] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replaces")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replaces: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replaces: _Optional[bool] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("directory", "version", "running")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    directory: str
    version: str
    running: RunningRequests
    def __init__(self, directory: _Optional[str] = ..., version: _Optional[str] = ..., running: _Optional[_Union[RunningRequests, str]] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("version", "num_bytes", "seconds", "paused_seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    num_bytes: int
    seconds: float
    paused_seconds: float
    def __init__(self, version: _Optional[str] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., paused_seconds: _Optional[float] = ...) -> None: ...

class GetWeightVersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWeightVersionResponse(_message.Message):
    __slots__ = ("version", "is_paused", "is_asleep")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    IS_ASLEEP_FIELD_NUMBER: _ClassVar[int]
    version: str
    is_paused: bool
    is_asleep: bool
    def __init__(self, version: _Optional[str] = ..., is_paused: _Optional[bool] = ..., is_asleep: _Optional[bool] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: RunningRequests
    def __init__(self, running: _Optional[_Union[RunningRequests, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ContinueRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ContinueResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("drop_weights",)
    DROP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    drop_weights: bool
    def __init__(self, drop_weights: _Optional[bool] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("num_freed_bytes",)
    NUM_FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_freed_bytes: int
    def __init__(self, num_freed_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("has_continued",)
    HAS_CONTINUED_FIELD_NUMBER: _ClassVar[int]
    has_continued: bool
    def __init__(self, has_continued: _Optional[bool] = ...) -> None: ...
