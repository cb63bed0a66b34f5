"""The application: routes, error handlers, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

import speccompile
from speccompile.errors.base import clipped
from speccompile.serve.api_error import ApiError, drop_frames
from speccompile.serve.api_key import CheckKey
from speccompile.serve.body import BodyReader
from speccompile.serve.chat import chat
from speccompile.serve.completions import complete
from speccompile.serve.disconnect import CLIENT_LEFT, ClientLeft, answer_while_connected
from speccompile.serve.fields import ChatBody, CompletionBody
from speccompile.serve.freed_memory import return_freed_memory
from speccompile.serve.hosts import CheckHost
from speccompile.serve.live import live_state
from speccompile.serve.metrics import metrics_text
from speccompile.serve.request_log import RequestLog, current
from speccompile.serve.responses import respond
from speccompile.serve.responses_fields import ResponsesBody
from speccompile.serve.service import Service
from speccompile.serve.shutdown import EndWithServer
from speccompile.serve.tokenize import detokenize, tokenize, tokenizer_info
from speccompile.serve.tokenize_fields import DetokenizeBody, TokenizeBody
from speccompile.serve.unread import CloseUnread

PAGE = Path(__file__).parent / "page"
#: Methods of routes without a body. The server leaves out the body of an answer to HEAD.
_READ = ["GET", "HEAD"]
#: The page loads nothing from other sites, and they may not embed it in a frame.
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'"}


def create_app(service: Service, host: str | None = None) -> ASGIApp:
    """Create the application that serves ``service``, and closes it in the end.

    Args:
        host: the address of the server, which is one of its names; None if it is not known.
    """
    options, bodies = service.options, BodyReader(service.options)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        returning = asyncio.create_task(return_freed_memory())
        yield
        returning.cancel()
        bodies.close()
        await asyncio.to_thread(service.close)

    app = FastAPI(title="speccompile", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app)
    _add_api(app, service, bodies)
    _add_state(app, service)
    served: ASGIApp = EndWithServer(app, service)
    if not options.keys:
        own = [] if host is None else [host]
        served = CheckHost(served, [*own, *options.allowed_hosts], options.allowed_origins)
    served = CheckKey(served, options.keys)
    if options.allowed_origins:
        # CORS is outside of the check of the key: preflight requests of browsers have no key.
        served = CORSMiddleware(
            served,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return CloseUnread(RequestLog(served, service.counts))


def _add_api(app: FastAPI, service: Service, bodies: BodyReader) -> None:
    created = int(time.time())

    def model_object(name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": created, "owned_by": "speccompile"}
        # Of vLLM.
        model |= {"max_model_len": service.max_len}
        # As in vLLM, an adapter has the name of the base model.
        return model if name == service.name else model | {"parent": service.name}

    @app.api_route("/v1/models", methods=_READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_object(name) for name in service.models]}

    @app.api_route("/v1/models/{name:path}", methods=_READ)
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_object(name)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await bodies.read(request, CompletionBody)
        return await answer_while_connected(request, complete(service, body))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await bodies.read(request, ChatBody)
        return await answer_while_connected(request, chat(service, body))

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await bodies.read(request, ResponsesBody)
        return await answer_while_connected(request, respond(service, body))

    @app.post("/tokenize")
    async def tokens(request: Request) -> Response:
        body = await bodies.read(request, TokenizeBody)
        return await answer_while_connected(request, tokenize(service, body))

    @app.post("/detokenize")
    async def text(request: Request) -> Response:
        body = await bodies.read(request, DetokenizeBody)
        return await answer_while_connected(request, detokenize(service, body))

    @app.api_route("/tokenizer_info", methods=_READ)
    async def info() -> dict[str, Any]:
        return tokenizer_info(service.tokenizer)


def _add_state(app: FastAPI, service: Service) -> None:
    # /ping, and its POST, are SageMaker's.
    @app.api_route("/health", methods=_READ)
    @app.api_route("/ping", methods=[*_READ, "POST"])
    async def health() -> Response:
        if service.is_alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the engine has stopped"}, 503)

    @app.api_route("/version", methods=_READ)
    async def version() -> dict[str, str]:
        return {"version": speccompile.__version__}

    @app.api_route("/metrics", methods=_READ)
    async def metrics() -> Response:
        return PlainTextResponse(metrics_text(service), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/live", methods=_READ)
    async def live() -> dict[str, Any]:
        return live_state(service)

    @app.api_route("/", methods=_READ)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=_PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=PAGE))


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def of_api(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        drop_frames(error)
        current.get().error = error
        return error.response()

    @app.exception_handler(ClientDisconnect)
    @app.exception_handler(ClientLeft)
    async def of_client(_: Request, error: Exception) -> Response:
        # The client left before its body was read.
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(HTTPException)
    async def of_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {clipped(request.url.path)}: {error.detail}"
        return ApiError(message, status=error.status_code).response(error.headers)

    @app.exception_handler(Exception)
    async def of_server(_: Request, error: Exception) -> Response:
        # The error is raised again after the answer, and the server logs it.
        return ApiError("the server failed; its log has the reason", status=500).response()
