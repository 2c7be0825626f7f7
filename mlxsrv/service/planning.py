"""The plan of a request, whichever kind of request it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsrv.prompts.messages import chat_messages
from mlxsrv.prompts.planning import PromptPlan, plan_chat, plan_completion, plan_infill
from mlxsrv.wire.infill import InfillRequest
from mlxsrv.wire.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

PromptRequest = ChatRequest | CompletionRequest | InfillRequest


def plan_request(request: PromptRequest, tokenizer: Tokenizer) -> PromptPlan:
    """The token ids of the request's prompts, and what its answers must follow.

    Runs in a worker thread, which has the tokenizer to itself.

    Raises:
        InvalidRequest, UnsupportedParameter: the model cannot do what is asked.
    """
    match request:
        case ChatRequest():
            return plan_chat(request, chat_messages(request.messages), tokenizer)
        case CompletionRequest():
            return plan_completion(request, request.prompts, tokenizer)
        case InfillRequest():
            return plan_infill(request, tokenizer)
