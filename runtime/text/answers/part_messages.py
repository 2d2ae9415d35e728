"""Converts the parts of an answer to the messages of inference.proto, for the server, and back, for the client."""

from meshserve.protos import inference_pb2 as pb

from .answer_parts import AnswerPart, ArgumentsPart, CallPart, ContentPart, ReasoningPart


def part_message(part: AnswerPart) -> pb.AnswerPart:
    if isinstance(part, ReasoningPart):
        return pb.AnswerPart(reasoning=part.text)
    if isinstance(part, ContentPart):
        return pb.AnswerPart(content=part.text)
    if isinstance(part, CallPart):
        return pb.AnswerPart(call=pb.ToolCallStart(index=part.index, name=part.name))
    return pb.AnswerPart(arguments=pb.ToolCallArguments(index=part.index, text=part.text))


def answer_part(message: pb.AnswerPart) -> AnswerPart | None:
    """Returns the part; None if it is of a kind that this version does not know."""
    kind = message.WhichOneof("kind")
    if kind == "reasoning":
        return ReasoningPart(message.reasoning)
    if kind == "content":
        return ContentPart(message.content)
    if kind == "call":
        return CallPart(message.call.index, message.call.name)
    if kind == "arguments":
        return ArgumentsPart(message.arguments.index, message.arguments.text)
    return None
