"""Who may ask the job for what: decided from the client's address and the headers of a request alone.

Programs on this machine may read and scale out, as TCP does not tell whose they are; for the rest, and from elsewhere,
the token is needed. Web pages are not trusted wherever the browser runs: a page can make it send requests here, but it
cannot hide from which page they come, nor under which name it found us.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass

from starlette.datastructures import Headers

#: What a proxy adds: whoever asks is not the proxy, so where the proxy runs says nothing.
_PASSED_ON = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_OWN_PAGE = ("same-origin", "none")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Asked:
    """What there is to know about a request."""

    #: The client's IP address.
    client: str
    headers: Headers
    changes: bool = False
    by_get: bool = False
    #: Whether it is answered without a token.
    is_public: bool = False


@dataclass(frozen=True)
class Denial:
    """Why a request is not answered, and what to do."""

    status: int
    sentence: str


class Access:
    """The rules of one server."""

    def __init__(self, *, token: str, host: str) -> None:
        self._token = token.strip().encode()
        own = socket.gethostname().lower()
        self._names = frozenset({"localhost", own, own.partition(".")[0], host.lower()} - {""})

    def refusal(self, asked: Asked) -> Denial | None:
        """None: go ahead."""
        knows_token = self._knows_token(asked.headers)
        if knows_token is False:
            return Denial(401, "The token is wrong. Send the job's own: Authorization: Bearer TOKEN.")
        is_near = is_loopback(asked.client) and not any(name in asked.headers for name in _PASSED_ON)
        # A page that has its own name resolve to this machine does not know the token.
        if not knows_token and not self._is_own_name(asked.headers):
            return Denial(
                403, "The job goes by another name here. Use its IP address, localhost, or the name of its machine."
            )
        if not is_near and not knows_token and not asked.is_public:
            return Denial(401, self._token_needed("Requests from other machines"))
        return self._refused_change(asked, is_near, knows_token) if asked.changes else None

    def _refused_change(self, asked: Asked, is_near: bool, knows_token: bool | None) -> Denial | None:
        if _is_from_foreign_page(asked.headers):
            return Denial(403, "Web pages may not change the job. Use a terminal: curl or the anabranch command.")
        if asked.by_get:
            if not is_near:
                return Denial(403, "From other machines nothing can be changed by GET. Use POST.")
            # Browsers say where a request comes from only if they see by the name that it stays on this machine; and
            # they fetch addresses ahead while these are being typed.
            if not _is_loopback_name(asked.headers) or "sec-purpose" in asked.headers or "purpose" in asked.headers:
                return Denial(403, "Changes by GET work at http://localhost and http://127.0.0.1 only. Use POST.")
            return None
        if self._token and not knows_token:
            return Denial(401, self._token_needed("Changes"))
        return None

    def _knows_token(self, headers: Headers) -> bool | None:
        """None: no token was sent, or there is none to know."""
        sent = headers.getlist("authorization")
        if not self._token or not sent:
            return None
        scheme, _, value = sent[0].partition(" ")
        matches = hmac.compare_digest(value.strip().encode("latin-1"), self._token)
        return len(sent) == 1 and scheme.lower() == "bearer" and matches

    def _is_own_name(self, headers: Headers) -> bool:
        name = _asked_name(headers)
        return ip_address(name) is not None or name in self._names

    def _token_needed(self, what: str) -> str:
        if self._token:
            return f"{what} need the job's token. Send it: Authorization: Bearer TOKEN."
        return f"{what} need a token, and the job has none. Start it with anabranch.token set."


def ip_address(text: str) -> IpAddress | None:
    """An IP address, an IPv4 one also if it is written as IPv6; None if it is a name."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def is_loopback(address: str) -> bool:
    found = ip_address(address)
    return found is not None and found.is_loopback


def _asked_name(headers: Headers) -> str:
    """The name or address, without the port, under which the client found us."""
    host = headers.get("host", "").strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback_name(headers: Headers) -> bool:
    """Whether a browser sees by the name alone that it leads to this machine."""
    name = _asked_name(headers)
    return name == "localhost" or (is_loopback(name) and not name.startswith("::ffff"))


def _is_from_foreign_page(headers: Headers) -> bool:
    host = headers.get("host", "").strip().lower()
    origins = {f"http://{host}", f"https://{host}"}
    return any(origin.lower() not in origins for origin in headers.getlist("origin")) or any(
        site.lower() not in _OWN_PAGE for site in headers.getlist("sec-fetch-site")
    )
