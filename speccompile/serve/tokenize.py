"""``/tokenize``, as vLLM has it."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response

from speccompile.serve.fields import TokenizeBody
from speccompile.serve.prompts import chat_ids, text_ids
from speccompile.serve.service import Service


async def tokenize(service: Service, body: TokenizeBody) -> Response:
    """The token ids of a text, or of a conversation.

    Raises:
        ApiError: it cannot fit into a sequence, or the chat template refuses the conversation.
    """
    service.check_model(body.model)
    if body.messages is not None:
        service.check_conversation(body.messages, body.tools)
    if body.prompt is not None:
        service.check_text(body.prompt, "prompt")
    response: Response = await service.in_thread(_answer, service, body)
    return response


def _answer(service: Service, body: TokenizeBody) -> Response:
    if body.messages is not None:
        ids = chat_ids(service.tokenizer, body.messages, body.tools, generation_prompt=body.add_generation_prompt)
    else:
        assert body.prompt is not None
        ids = text_ids(service.tokenizer, body.prompt, special=body.add_special_tokens)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.vocabulary.text_of(token) for token in ids]
    return JSONResponse(answer)
