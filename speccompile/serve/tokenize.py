"""Endpoints ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, compatible with vLLM."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from speccompile.serve.api_error import ApiError
from speccompile.serve.prompts import chat_prompt, text_ids
from speccompile.serve.service import Service
from speccompile.serve.tokenize_fields import DetokenizeBody, TokenizeBody
from speccompile.utils.mistral_common import is_mistral_common


async def tokenize(service: Service, body: TokenizeBody) -> Response:
    """Token ids of a text, or of a conversation.

    Raises:
        ApiError: the text does not fit into a sequence, or the chat template refuses the conversation.
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
        ids = chat_prompt(service.tokenizer, service.images, body.messages, body.tools, body).ids
    else:
        assert body.prompt is not None
        ids = text_ids(service.tokenizer, body.prompt, special=body.add_special_tokens)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.vocabulary.text_of(token) for token in ids]
    return JSONResponse(answer)


async def detokenize(service: Service, body: DetokenizeBody) -> Response:
    """Text of token ids, with the names of special tokens.

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


def tokenizer_info(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Names of special tokens and the chat template; null if the tokenizer has none. Clients such as lm-eval use them
    with ``/tokenize`` and need no local tokenizer."""
    template: Any = None if is_mistral_common(tokenizer) else tokenizer.chat_template
    # Some tokenizers have several templates, by name.
    template = template.get("default") if isinstance(template, dict) else template
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {"tokenizer_class": type(tokenizer).__name__, **names, "chat_template": template}
