"""How commands reach the HTTP API of a job: by its URL, its token, and TLS."""

from __future__ import annotations

import functools
import http.client
import inspect
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from anabranch.core.errors import AnabranchError, EpochError, SettingsError, WorkerError
from anabranch.core.settings import DEFAULT_CONTROL_PORT
from anabranch.wire import keyring
from anabranch.wire.credentials import Credentials, reason_of

DEFAULT_URL = f"http://localhost:{DEFAULT_CONTROL_PORT}"
#: The API answers at once, except that a change may wait for the epoch that runs.
_ANSWER_TIMEOUT_S = 120.0

Url = Annotated[str, typer.Option("--url", envvar="ANABRANCH_URL", help="Where the HTTP API of the job is.")]
Token = Annotated[
    str,
    typer.Option(
        "--token",
        envvar="ANABRANCH_TOKEN",
        help="The token, for jobs of others. Better in the environment: everybody can read command lines.",
    ),
]
TlsCertificate = Annotated[
    str, typer.Option("--tls-certificate", envvar="ANABRANCH_TLS_CERTIFICATE", help="PEM file: what to show for TLS.")
]
TlsKey = Annotated[
    str, typer.Option("--tls-key", envvar="ANABRANCH_TLS_KEY", help="PEM file: the private key of the certificate.")
]
TlsAuthority = Annotated[
    str, typer.Option("--tls-authority", envvar="ANABRANCH_TLS_AUTHORITY", help="PEM file: who signs certificates.")
]
#: What every command that reaches a job takes, with defaults.
_OPTIONS: dict[str, tuple[Any, str]] = {
    "url": (Url, DEFAULT_URL),
    "token": (Token, ""),
    "tls_certificate": (TlsCertificate, ""),
    "tls_key": (TlsKey, ""),
    "tls_authority": (TlsAuthority, ""),
}


def reaching_a_job(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say how to reach a job, and an `api` made of them."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        url, token, certificate, key, authority = (values.pop(name) for name in _OPTIONS)
        command(api=JobApi(url, Credentials(token.strip(), certificate, key, authority)), **values)

    declared = inspect.signature(command, eval_str=True)
    own = [each for name, each in declared.parameters.items() if name != "api"]
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, kind, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    parameters = [each.replace(kind=kind) for each in own] + added
    run.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    del run.__wrapped__
    return run


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The API never redirects, and the token is for nobody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


class JobApi:
    """The HTTP API of a job. Of jobs of the same user on this machine, the token is found."""

    def __init__(self, url: str, given: Credentials) -> None:
        self._url = _checked(url)
        credentials = given
        entry = keyring.find(self._url)
        if entry is not None and given.token in ("", entry.credentials.token):
            # What is found is for that job, and for nobody who goes by the same name.
            self._url = entry.url if entry.scheme == "http" else self._url.replace("http://", "https://", 1)
            credentials = replace(given if given.uses_tls else entry.credentials, token=entry.credentials.token)
        self.token = credentials.token
        credentials.check()
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if credentials.token:
            # Headers are sent as Latin-1, whatever the token is made of.
            self._headers["authorization"] = f"Bearer {credentials.token}".encode().decode("latin-1")
        # Never by way of a proxy: it would be shown the token.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirects()]
        if self._url.startswith("https://"):
            handlers.append(urllib.request.HTTPSHandler(context=credentials.client_context()))
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(self._url + path, headers=self._headers))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        return self._ask(urllib.request.Request(self._url + path, data, self._headers, method="POST"))

    def _ask(self, request: urllib.request.Request) -> Any:
        try:
            with self._opener.open(request, timeout=_ANSWER_TIMEOUT_S) as response:
                if "anabranch-api" not in response.headers:
                    raise self._no_job()
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read()) from None
        except TimeoutError:
            raise WorkerError(
                f"The job at {self._url} did not answer within {_ANSWER_TIMEOUT_S:g} s. See the log of its driver."
            ) from None
        except OSError as error:
            raise self._unreachable(getattr(error, "reason", error)) from None
        except (ValueError, http.client.HTTPException):
            raise self._no_job() from None

    def _unreachable(self, reason: Any) -> SettingsError:
        if isinstance(reason, ssl.SSLError):
            return SettingsError(
                f"The job at {self._url} cannot be reached by TLS: {reason_of(reason)}. Name who has signed its "
                "certificate with --tls-authority, and show one of your own with --tls-certificate and --tls-key if it "
                "asks for it."
            )
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        hint = ""
        if isinstance(reason, ConnectionResetError | BrokenPipeError):
            hint = " If it speaks TLS, write https://."
            if self._url.startswith("https://"):
                hint = " If it asks for certificates, show one with --tls-certificate and --tls-key."
        return SettingsError(
            f"No job answers at {self._url} ({text}). Start the job, or name its HTTP API with --url or "
            f"ANABRANCH_URL.{hint}"
        )

    def _refused(self, status: int, body: bytes) -> AnabranchError:
        try:
            sentence = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            return self._no_job()
        if status == 401:
            sentence += " Here: ANABRANCH_TOKEN, or as the user who runs the job."
        kind = {409: EpochError, 503: WorkerError}.get(status, SettingsError if status < 500 else AnabranchError)
        return kind(sentence)

    def _no_job(self) -> SettingsError:
        return SettingsError(
            f"What answers at {self._url} is not a job. Name the HTTP API of the job with --url or ANABRANCH_URL."
        )


def _checked(url: str) -> str:
    # Also in what is no URL: no error shows them.
    if any(mark in url for mark in "?#@"):
        raise SettingsError(
            "The URL of a job has no token, user or password in it. Set ANABRANCH_TOKEN, and write --url "
            "http://HOST:PORT."
        )
    try:
        parts = urllib.parse.urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_whole = False
    if not is_whole or not url.isprintable() or " " in url:
        raise SettingsError(f"{url!r} is not the URL of a job. Write --url http://HOST:PORT, such as {DEFAULT_URL}.")
    return url.rstrip("/")
