"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response

from speccompile.serve.api_error import ApiError
from speccompile.serve.prompts import chat_ids, text_ids
from speccompile.serve.service import Service
from speccompile.serve.tokenize_fields import DetokenizeBody, TokenizeBody


async def tokenize(service: Service, body: TokenizeBody) -> Response:
    """The token ids of a text, or of a conversation.

    Raises:
        ApiError: it cannot fit into a sequence, or the chat template refuses the conversation.
    """
    service.check_model(body.model)
    if body.messages is not None:
        service.check_conversation(body.messages, body.tools, body)
    if body.prompt is not None:
        service.check_text(body.prompt, "prompt")
    response: Response = await service.in_thread(_answer, service, body)
    return response


def _answer(service: Service, body: TokenizeBody) -> Response:
    if body.messages is not None:
        ids = chat_ids(service.tokenizer, body.messages, body.tools, body)
    else:
        assert body.prompt is not None
        ids = text_ids(service.tokenizer, body.prompt, special=body.add_special_tokens)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.vocabulary.text_of(token) for token in ids]
    return JSONResponse(answer)


async def detokenize(service: Service, body: DetokenizeBody) -> Response:
    """The text of token ids, names of special tokens included.

    Raises:
        ApiError: an id is not in the vocabulary.
    """
    service.check_model(body.model)
    service.check_tokens(body.tokens, "tokens")
    response: Response = await service.in_thread(_text, service, body)
    return response


def _text(service: Service, body: DetokenizeBody) -> Response:
    size = len(service.tokenizer)
    for index, token in enumerate(body.tokens):
        if not 0 <= token < size:
            param = f"tokens[{index}]"
            raise ApiError(f"{param}: token ids are 0 .. {size - 1}, got {token}", param=param, code="invalid_value")
    return JSONResponse({"prompt": service.tokenizer.decode(body.tokens)})
