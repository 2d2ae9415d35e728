"""Random requests: any fields of any message of any RPC, bytes that are none, and valid requests at their limits."""

import random
from collections.abc import Iterable
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2

from meshserve.protos import inference_pb2 as pb
from tests.hostile.corpus import random_constraint

# Drain, Pause and Sleep would do what they are asked; Watch never ends, and is among the floods.
_LEFT_OUT = {"Drain", "Pause", "Sleep", "Watch"}


def methods_of(*files: Any) -> list[Any]:
    """Returns the methods that the files of a protocol describe, without those left out."""
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods if method.name not in _LEFT_OUT]


METHODS = methods_of(pb, health_pb2)

_NUMBERS = [0, 1, 2, 5, 63, 64, 127, 128, 2**31 - 1, 2**31, 2**32 - 1]
_TEXTS = ["", "a", "x" * 50, "x" * 300, "\x00", "é", "<|im_end|>", "\n", "user"]


def _random_value(draw: random.Random, field: FieldDescriptor, depth: int) -> Any:
    if field.message_type is not None:
        return random_message(draw, field.message_type, depth + 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.choice(_TEXTS).encode()
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return draw.choice([0.0, -1.0, 0.5, 1.0, 1e308, float("nan"), float("inf"), 5e-324])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return draw.random() < 0.5
    if field.type == FieldDescriptor.TYPE_ENUM:
        return draw.choice(field.enum_type.values).number
    number = draw.choice(_NUMBERS)
    if field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64):
        return draw.choice([1, -1]) * min(number, 2**31 - 1)
    return number | (draw.choice([0, 2**63]) if field.type == FieldDescriptor.TYPE_UINT64 else 0)


def random_message(draw: random.Random, descriptor: Any, depth: int = 0) -> Any:
    """Returns a message with random fields."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if draw.random() < 0.4 or depth > 3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(draw.choice([0, 1, 2, 20])):
                item = _random_value(draw, value, depth)
                if value.message_type is not None:
                    getattr(message, field.name)[_random_value(draw, key, depth)].CopyFrom(item)
                else:
                    getattr(message, field.name)[_random_value(draw, key, depth)] = item
        elif field.is_repeated:
            values = [_random_value(draw, field, depth) for _ in range(draw.choice([0, 1, 2, 20]))]
            if field.message_type is not None:
                getattr(message, field.name).extend(values)
            else:
                getattr(message, field.name)[:] = values
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_random_value(draw, field, depth))
        else:
            setattr(message, field.name, _random_value(draw, field, depth))
    return message


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Returns half of the time the data as it is, else with bytes changed, lost or added."""
    changed = bytearray(data)
    if draw.random() < 0.5:
        return data
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(3)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + draw.randrange(1, 4)]
        else:
            changed[at:at] = draw.randbytes(draw.choice([1, 2, 10]))
    return bytes(changed)


def random_call(draw: random.Random, methods: Iterable[Any] = METHODS) -> tuple[str, bytes]:
    """Returns the full name of a random method, and the bytes that are sent to it."""
    method = draw.choice(list(methods))
    data = random_message(draw, method.input_type).SerializeToString()
    return f"/{method.containing_service.full_name}/{method.name}", mutated(draw, data)


VOCAB_SIZE = 2048  # the demo model's
_TOKEN_IDS = (0, 2, 300, 301, 500, VOCAB_SIZE - 1)
# What a valid request may ask for: the ends of each range, and what is usual.
SAMPLING: dict[str, Any] = {
    "max_tokens": (1, 2, 9, 60, 2**31 - 1, 2**32 - 1),
    "temperature": (0.0, 0.0, 1e-6, 0.7, 100.0),
    "top_k": (0, 1, 40, VOCAB_SIZE, 2**31 - 1),
    "top_p": (5e-324, 1e-6, 0.5, 1.0),
    "min_p": (0.0, 0.1, 1.0),
    "frequency_penalty": (-2.0, 0.5, 2.0),
    "presence_penalty": (-2.0, 0.5, 2.0),
    "repetition_penalty": (0.01, 1.1, 100.0),
    "min_tokens": (0, 1, 30, 2**31 - 1),
    "logprobs": (0, 3, 20),
    "prompt_logprobs": (0, 3, 20),
    "seed": (0, 1, 2**63 - 1),
    "ignore_eos": (False, True),
    "include_stop": (False, True),
    "skip_special_tokens": (False, True),
    "num_resumed_tokens": (0, 1, 5),
    "stop": (["e"], [" "], ["zzz" * 80], ["a" * n for n in range(1, 17)]),
    "stop_token_ids": ([2], [300], list(range(64))),
    "allowed_token_ids": ([300, 301, 302], [2], list(range(1024))),
    "bad_token_ids": ([300], [0, 2], list(range(1024))),
    "logit_bias": ({300: 100.0}, {2: 100.0}, {token_id: -100.0 for token_id in range(1024)}),
}


def random_sampling(draw: random.Random) -> pb.SamplingParams:
    """Returns valid sampling parameters; a few contradict each other."""
    sampling = pb.SamplingParams()
    for name in draw.sample(sorted(SAMPLING), draw.choice([0, 1, 2, 3, 5, 8])):
        value = draw.choice(SAMPLING[name])
        if isinstance(value, dict):
            sampling.logit_bias.update(value)
        elif isinstance(value, list):
            getattr(sampling, name).extend(value)
        else:
            setattr(sampling, name, value)
    if draw.random() < 0.2:
        sampling.constraint.CopyFrom(random_constraint(draw))
    return sampling


def random_request(draw: random.Random) -> pb.GenerateRequest:
    """Returns a valid request. Some prompts begin alike, some fill the context."""
    token_ids = [draw.choice(_TOKEN_IDS[2:])] * draw.choice([1, 8, 40]) + draw.choices(_TOKEN_IDS, k=draw.randrange(60))
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(token_ids=token_ids),
        sampling=random_sampling(draw),
        n=draw.choice([None, None, 1, 2, 9]),
        priority=draw.choice([None, -100, 0]),
        cache_salt=draw.choice([None, "a"]),
    )
