"""What answers requests, by path."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..server.edge import Edge
from ..server.method_permissions import ADMIN_SERVICE_NAME
from .adapter_routes import AdapterRoutes
from .anthropic_messages import AnthropicMessages, anthropic_error
from .api_errors import ErrorForm, openai_error
from .chat_completions import ChatCompletions
from .completions import Completions
from .embeddings import Retrieval
from .http_call import HttpCall
from .information import Information
from .responses import Responses
from .trainer_routes import TrainerRoutes
from .web_page.page_files import FILES, PageFile
from .web_page.server_status import ServerStatus

if TYPE_CHECKING:
    from aiohttp import web

Answer = Callable[["web.Request", Any, HttpCall], Awaitable["web.StreamResponse"]]


@dataclass(frozen=True, kw_only=True)
class Route:
    """What answers requests to a path.

    Attributes:
      method: The HTTP method.
      like: The method that needs the same permission: of the InferenceService, or with its service's name before it;
        None needs none.
      is_queued: Whether a request takes a place in the queue.
      answer: Answers a request with a parsed body, None without one.
      reads_body: Whether `answer` reads the body itself.
      error_form: The form of its errors.
    """

    method: str
    like: str | None
    is_queued: bool = False
    answer: Answer
    reads_body: bool = False
    error_form: ErrorForm = openai_error


def routes(edge: Edge, *, has_page: bool) -> Mapping[str, Route]:
    """Returns what answers, by path."""
    information, retrieval, messages = Information(edge), Retrieval(edge), AnthropicMessages(edge)
    adapters = AdapterRoutes(edge)
    page = {}
    if has_page:
        page = {path: Route(method="GET", like=None, answer=PageFile(name, kind).answer) for path, name, kind in FILES}
        page["/status.json"] = Route(method="GET", like="GetLoad", answer=ServerStatus(edge).answer)
    return {
        "/v1/models": Route(method="GET", like="GetModelInfo", answer=information.models),
        "/v1/chat/completions": Route(method="POST", like="Chat", is_queued=True, answer=ChatCompletions(edge).answer),
        "/v1/completions": Route(method="POST", like="Generate", is_queued=True, answer=Completions(edge).answer),
        "/v1/responses": Route(method="POST", like="Chat", is_queued=True, answer=Responses(edge).answer),
        "/v1/messages": Route(
            method="POST", like="Chat", is_queued=True, answer=messages.answer, error_form=anthropic_error
        ),
        "/v1/messages/count_tokens": Route(
            method="POST", like="Tokenize", answer=messages.count_tokens, error_form=anthropic_error
        ),
        "/v1/embeddings": Route(method="POST", like="Embed", is_queued=True, answer=retrieval.embeddings),
        "/v1/score": Route(method="POST", like="Score", is_queued=True, answer=retrieval.score),
        "/v1/rerank": Route(method="POST", like="Rerank", is_queued=True, answer=retrieval.rerank),
        "/v1/load_lora_adapter": Route(method="POST", like=f"{ADMIN_SERVICE_NAME}/LoadAdapter", answer=adapters.load),
        "/v1/unload_lora_adapter": Route(
            method="POST", like=f"{ADMIN_SERVICE_NAME}/UnloadAdapter", answer=adapters.unload
        ),
        "/tokenize": Route(method="POST", like="Tokenize", answer=information.tokenize),
        "/detokenize": Route(method="POST", like="Detokenize", answer=information.detokenize),
        "/tokenizer_info": Route(method="GET", like="GetModelInfo", answer=information.tokenizer_info),
        "/health": Route(method="GET", like=None, answer=information.health),
        "/version": Route(method="GET", like=None, answer=information.version),
        **{
            path: Route(method=method, like=like, answer=answer)
            for path, (method, like, answer) in TrainerRoutes(edge).answers().items()
        },
        **page,
    }


def line_routes(edge: Edge) -> Mapping[str, Route]:
    """Returns what answers the lines of batches, by path."""
    return {path: route for path, route in routes(edge, has_page=False).items() if route.is_queued}
