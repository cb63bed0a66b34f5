"""The server as a Ray Serve application: an ingress passes requests to replicas, each with its own speculator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import torch
from ray import serve
from ray.exceptions import NodeDiedError, RayActorError, WorkerCrashedError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response

from speccompile.serve.api_error import ApiError
from speccompile.serve.app import create_app
from speccompile.serve.options import ServeOptions
from speccompile.serve.replicas.affinity import by_preference, conversation
from speccompile.serve.replicas.call import Head, ReplicaCall, answer, read_call
from speccompile.serve.replicas.relay import Parts, relay
from speccompile.serve.service import Service

#: Exceptions by which Ray reports that the replica of a call has died.
LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ReplicaUnavailableError)
#: Paths that any replica answers. Metrics and the page describe one server, and are left out.
PATHS = ("/v1/", "/tokenize", "/tokenizer_info", "/detokenize", "/version", "/health", "/ping")


def ray_app(
    make_service: Callable[[], Service],
    options: ServeOptions | None = None,
    *,
    threads: int | None = None,
    imbalance: int = 8,
    **deployment: Any,
) -> Application:
    """Create the application for ``ray.serve.run``. Replicas share no state.

    A request is sent to the replica on which its conversation began, unless that has ``imbalance`` more requests than
    the least loaded one. If a replica dies before a part of an answer was passed on, the request is sent to another
    one; otherwise it ends with an error.

    Args:
        make_service: builds the service of a replica, in the replica's process. Ray pickles it.
        options: options of the service. The ingress needs the limits of bodies.
        threads: number of threads of torch in a replica; by default torch's own choice.
        deployment: options of the replicas for ``serve.deployment``: ``num_replicas``, ``autoscaling_config``,
            ``ray_actor_options``, ... ``max_ongoing_requests`` is 64 by default. Beyond the engine's slots and
            ``max_waiting`` together, requests receive status 429.
    """
    options = ServeOptions() if options is None else options
    router = RequestRouterConfig(
        request_router_class=ConversationRouter, request_router_kwargs={"imbalance": imbalance}
    )
    given = {"max_ongoing_requests": 64, "request_router_config": router, **deployment}
    replicas = serve.deployment(Replica).options(**given).bind(make_service, threads)
    # The ingress only passes bytes on and needs no core.
    ingress = serve.deployment(Ingress).options(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
    return ingress.bind(replicas, options.max_body_bytes, options.max_body_seconds)


class Replica:
    """A server without a socket."""

    def __init__(self, make_service: Callable[[], Service], threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._service = make_service()
        self._app = create_app(self._service)

    def check_health(self) -> None:
        """Raise if the engine has stopped. Ray then restarts the replica."""
        if not self._service.is_alive:
            raise RuntimeError("the engine has stopped")

    async def answer(self, call: ReplicaCall) -> AsyncGenerator[Head | bytes, None]:
        async for part in answer(self._app, call):
            yield part

    def __del__(self) -> None:
        """Close the service. Ray calls this when the replica ends, even if ``make_service`` raised."""
        if service := vars(self).get("_service"):
            service.close()


class Ingress:
    """Receives HTTP requests and passes them to replicas."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int, max_body_seconds: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._limits = (max_body_bytes, max_body_seconds)

    async def __call__(self, request: Request) -> Response:
        try:
            if not request.url.path.startswith(PATHS):
                raise ApiError(f"{request.url.path}: replicas answer only {', '.join(PATHS)}", status=404)
            return await relay(await read_call(request, *self._limits), self._ask, LOST)
        except ApiError as error:
            return error.response()
        except BackPressureError:
            return ApiError("the queue is full; try again later", status=429, code="queue_full").response()

    async def _ask(self, call: ReplicaCall) -> Parts:
        parts = self._replicas.answer.remote(call)
        try:
            async for part in parts:
                yield part
        finally:
            parts.cancel()


class ConversationRouter(RequestRouter):
    """Router that sends the turns of a conversation to one replica, which has their KV."""

    def initialize_state(self, imbalance: int) -> None:
        self._imbalance = imbalance

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return each replica as a separate rank. Ray uses the first one that may accept another request."""
        if not candidate_replicas:
            return []
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        text = conversation(call) if isinstance(call, ReplicaCall) else ""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        known = self.replica_queue_len_cache
        queues = {name: known.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        return [[replicas[name]] for name in by_preference(text, queues, self._imbalance)]
