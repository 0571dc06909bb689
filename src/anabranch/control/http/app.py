"""The application behind the HTTP API: routes made from the table, calls of the job on threads, errors as sentences."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.control.http.access import Access, Asked
from anabranch.control.http.endpoints import (
    API_VERSION,
    CHANGED_BY_GET,
    ENDPOINTS,
    LINKS,
    PATHS,
    PUBLIC,
    Endpoint,
    ErrorReport,
    HealthReport,
    IndexReport,
    JobControl,
    StoppingReport,
    Values,
    description,
)
from anabranch.control.http.requests import RequestError, nearest, read_values
from anabranch.core.errors import (
    AnabranchError,
    CheckpointError,
    EpochError,
    FencedError,
    SettingsError,
    UnsupportedError,
    WorkerError,
)
from anabranch.core.reports import as_json

logger = logging.getLogger(__name__)

#: Calls of the job that are under way at the same time.
CALLS_AT_ONCE = 32
_READING = ("GET", "HEAD")
_STOPPING = "The job is stopping. Ask again when it has been started again."
#: What some put into the address, where it does not belong.
_SECRETS = frozenset({"token", "access_token", "anabranch.token", "authorization", "bearer", "auth"})
_TOKEN_IN_ADDRESS = (
    "A token does not belong into the address, which histories and logs keep. Send it as a header: Authorization: "
    "Bearer TOKEN. If it was the right one, start the job with another."
)
#: The first kind that fits counts.
_STATUSES: tuple[tuple[type[AnabranchError], int], ...] = (
    (SettingsError, 400),
    (UnsupportedError, 400),
    (EpochError, 409),
    (CheckpointError, 409),
    (FencedError, 409),
    (WorkerError, 503),
)
_HEADERS = {
    # By which clients know a job from anything else that speaks JSON.
    "anabranch-api": API_VERSION,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}


class ControlApp:
    """An ASGI application for one job."""

    def __init__(self, control: JobControl, access: Access) -> None:
        self._control = control
        self._calls = _Calls()
        self._stop_asked = threading.Lock()
        self.routes = [Route(path, _ByMethod(path, self._answer)) for path in PATHS]
        routed = Starlette(routes=self.routes, exception_handlers={HTTPException: _not_found})
        routed.router.redirect_slashes = False
        self._gate = _Gate(routed, access)
        self.asgi: ASGIApp = self._gate

    def abandon(self) -> None:
        """Refuse everything that is under way, and everything that still comes. Called in the server's loop."""
        self._gate.close()

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        try:
            values = await read_values(request, endpoint)
            if endpoint.changes:
                client = request.client.host if request.client else "?"
                logger.info("%s asks for %s %s", client, endpoint.name, as_json(values))
            if endpoint.name == "stop":
                return _json(StoppingReport(stopping=True), endpoint.status, then=self._stop)
            return _json(await self._result(endpoint, values), endpoint.status)
        except RequestError as error:
            return _refuse(error.status, error.sentence)
        except AnabranchError as error:
            status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
            return _refuse(status, str(error))
        except Exception:
            logger.exception("%s %s failed", endpoint.method, endpoint.path)
            return _refuse(500, f"{endpoint.method} {endpoint.path} failed. The log of the driver says why.")

    async def _result(self, endpoint: Endpoint, values: Values) -> Any:
        if endpoint.call is not None:
            call = endpoint.call
            return await self._calls.run(lambda: call(self._control, values))
        if endpoint.name == "index":
            return IndexReport(job=await self._calls.run(self._control.job), links=LINKS)
        return description() if endpoint.name == "openapi" else HealthReport(status="ok")

    def _stop(self) -> None:
        """On a thread of its own: stopping the job closes the server that runs this."""
        if self._stop_asked.acquire(blocking=False):
            threading.Thread(target=self._run_stop, name="anabranch-http-stop", daemon=True).start()

    def _run_stop(self) -> None:
        try:
            self._control.stop()
        except Exception:
            logger.exception("the job could not be stopped")
        finally:
            self._stop_asked.release()


class _ByMethod:
    """One path: picks the endpoint by the method. A class, because Starlette then leaves methods to it."""

    def __init__(self, path: str, answer: Callable[[Request, Endpoint], Any]) -> None:
        self._endpoints = {each.method: each for each in ENDPOINTS if each.path == path}
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["method"])
        if endpoint is None and scope["method"] == "HEAD" and not self._changes_by_get():
            endpoint = self._endpoints.get("GET")
        if endpoint is None:
            allowed = ", ".join(self._endpoints)
            sentence = f"{scope['path']} does not know {scope['method'][:20]}. Use {allowed.replace(', ', ' or ')}."
            response = _refuse(405, sentence, {"allow": allowed})
        else:
            response = await self._answer(Request(scope, receive), endpoint)
        await response(scope, receive, send)

    def _changes_by_get(self) -> bool:
        found = self._endpoints.get("GET")
        return found is not None and found.changes


class _Gate:
    """Lets in who may enter, while the server is open; and sends everybody away when it closes."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._inside: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        for task in self._inside:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._is_closed:
            await _refuse(503, _STOPPING)(scope, receive, send)
            return
        request = Request(scope)
        if any(name.lower() in _SECRETS for name in request.query_params):
            await _refuse(400, _TOKEN_IN_ADDRESS)(scope, receive, send)
            return
        refusal = self._access.refusal(_asked(request))
        if refusal is not None:
            headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
            await _refuse(refusal.status, refusal.sentence, headers)(scope, receive, send)
            return
        await self._pass(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._inside.add(task)
        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            if not has_begun:
                await _refuse(503, _STOPPING)(scope, receive, send)
        finally:
            self._inside.discard(task)


class _Calls:
    """Runs what may take long on threads. They are daemons, so a call that never ends does not hold up the driver."""

    def __init__(self) -> None:
        self._under_way = 0

    async def run(self, call: Callable[[], Any]) -> Any:
        if self._under_way >= CALLS_AT_ONCE:
            raise RequestError(503, f"{CALLS_AT_ONCE} requests are under way already. Ask again in a moment.")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            self._under_way -= 1
            if not outcome.done():
                outcome.set_result((result, error))

        def body() -> None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            # Nobody waits any more if the server has closed meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        self._under_way += 1
        threading.Thread(target=body, name="anabranch-http-call", daemon=True).start()
        result, error = await outcome
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(repr(error)) from error
        return result


def _asked(request: Request) -> Asked:
    reads = request.method in _READING
    path = request.scope["path"]
    return Asked(
        client=request.client.host if request.client else "",
        headers=request.headers,
        changes=not reads or path in CHANGED_BY_GET,
        by_get=reads,
        is_public=reads and path in PUBLIC,
    )


async def _not_found(request: Request, _: Exception) -> Response:
    path = request.scope["path"]
    advice = nearest(path, PATHS, "paths")
    return _refuse(404, f"There is no {path[:60]}. {advice}")


def _refuse(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json(ErrorReport(error=sentence), status, headers=headers)


def _json(
    document: Any,
    status: int = 200,
    *,
    headers: Mapping[str, str] | None = None,
    then: Callable[[], None] | None = None,
) -> Response:
    text = json.dumps(as_json(document), allow_nan=False) + "\n"
    task = None if then is None else BackgroundTask(_as_async(then))
    return Response(
        text, status, headers={**_HEADERS, **(headers or {})}, media_type="application/json", background=task
    )


def _as_async(function: Callable[[], None]) -> Callable[[], Any]:
    """In the loop itself: a thread of Starlette's pool would outlive the server."""

    async def run() -> None:
        function()

    return run
