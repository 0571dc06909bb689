"""What a process shows to others, and how it checks them: the token of the job, and the files of TLS."""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.core.errors import SettingsError
from anabranch.core.settings import Settings

#: Longer ones do not fit into the headers of a request.
TOKEN_BYTES_MAX = 4096
_MORE = "docs/security.md shows how to make certificates."


@dataclass(frozen=True)
class Credentials:
    """The same for the servers and the clients of a process. Files are named, not held: they may be renewed."""

    token: str = field(default="", repr=False)
    #: PEM files: what this process shows of itself, with its private key; empty: it serves without TLS.
    certificate: str = ""
    key: str = ""
    #: PEM file: who signs the certificates of others; empty: whom this machine trusts. Servers that have one let
    #: nobody in without a certificate of its own.
    authority: str = ""

    @staticmethod
    def of(settings: Settings) -> Credentials:
        """The credentials that a query's settings name."""
        return Credentials(settings.token, settings.tls_certificate, settings.tls_key, settings.tls_authority)

    @property
    def serves_tls(self) -> bool:
        return bool(self.certificate)

    @property
    def uses_tls(self) -> bool:
        """Whether this process speaks TLS to the servers of others."""
        return bool(self.certificate or self.authority)

    def check(self) -> None:
        """Raises a SettingsError, which says what to do, if the token or the files cannot be used."""
        if len(self.token.encode()) > TOKEN_BYTES_MAX or not self.token.isprintable():
            raise SettingsError(
                f"The token is longer than {TOKEN_BYTES_MAX} bytes, or has characters that cannot be sent. Set "
                "anabranch.token to letters and digits."
            )
        if bool(self.certificate) != bool(self.key):
            given, missing = ("tlsCertificate", "tlsKey") if self.certificate else ("tlsKey", "tlsCertificate")
            raise SettingsError(f"anabranch.{given} is set, but anabranch.{missing} is not. Set both. {_MORE}")
        client = self.client_context() if self.uses_tls else None
        if client is not None and self.serves_tls and self.authority:
            self._check_own_certificate(client)

    def server_context(self) -> ssl.SSLContext:
        """For an HTTP server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_certificate(context)
        if self.authority:
            _load_authority(context, self.authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """For an HTTP client."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.certificate:
            self._load_certificate(context)
        if self.authority:
            _load_authority(context, self.authority)
        else:
            context.load_default_certs()
        return context

    def flight_server(self) -> dict[str, Any]:
        """The arguments of a Flight server."""
        if not self.serves_tls:
            return {}
        return {
            "tls_certificates": [(_content(self.certificate, "tlsCertificate"), _content(self.key, "tlsKey"))],
            "verify_client": bool(self.authority),
            "root_certificates": _content(self.authority, "tlsAuthority") if self.authority else None,
        }

    def flight_client(self) -> dict[str, Any]:
        """The arguments of a Flight client."""
        if not self.uses_tls:
            return {}
        named: dict[str, Any] = {}
        if authority := self.authority or ssl.get_default_verify_paths().cafile:
            named["tls_root_certs"] = _content(authority, "tlsAuthority")
        if self.certificate:
            named["cert_chain"] = _content(self.certificate, "tlsCertificate")
            named["private_key"] = _content(self.key, "tlsKey")
        return named

    def location(self, address: str, *, serves: bool = False) -> str:
        """The Flight location of an address, host:port, as a server or as a client of it."""
        if self.serves_tls if serves else self.uses_tls:
            return f"grpc+tls://{address}"
        host, _, port = address.rpartition(":")
        if host == "localhost" and not serves:
            # A worker there listens on this one. Whoever takes the same port of ::1 would be asked first.
            return f"grpc://127.0.0.1:{port}"
        return f"grpc://{address}"

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        _content(self.certificate, "tlsCertificate")
        _content(self.key, "tlsKey")
        try:
            # An empty password: nobody is there to be asked for one.
            context.load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError as error:
            raise SettingsError(
                f"The certificate {self.certificate} (anabranch.tlsCertificate) and the key {self.key} "
                f"(anabranch.tlsKey) cannot be used: {reason_of(error)}. Both are PEM files that belong together, and "
                f"the key has no password. {_MORE}"
            ) from None

    def _check_own_certificate(self, client: ssl.SSLContext) -> None:
        """That others who have the same authority will accept it: a handshake with ourselves, in memory."""
        client.check_hostname = False
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(back, there, server_side=False),
            self.server_context().wrap_bio(there, back, server_side=True),
        )
        try:
            for _ in range(3):
                for end in ends:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        end.do_handshake()
        except ssl.SSLError as error:
            raise SettingsError(
                f"The certificate {self.certificate} (anabranch.tlsCertificate) does not pass the check against "
                f"{self.authority} (anabranch.tlsAuthority): {reason_of(error)}. Use one that this authority has "
                f"signed, for servers and clients, and that is valid today. {_MORE}"
            ) from None


def is_loopback_host(host: str) -> bool:
    """Whether a name or address is sure to be of this machine."""
    host = host.strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _load_authority(context: ssl.SSLContext, authority: str) -> None:
    _content(authority, "tlsAuthority")
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        raise SettingsError(
            f"{authority} (anabranch.tlsAuthority) has no certificate that can be read: {reason_of(error)}. Name a PEM "
            f"file. {_MORE}"
        ) from None


def _content(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(
            f"anabranch.{setting} names {path}, which cannot be read: {error.strerror}. Name a PEM file that is "
            "there on every machine that runs the driver, tasks or workers."
        ) from None


def reason_of(error: ssl.SSLError) -> str:
    """Why TLS failed, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    words = {
        "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
        "NO_START_LINE": "it is not PEM",
        "NO_CERTIFICATE_OR_CRL_FOUND": "it is not PEM",
    }
    return words.get(error.reason or "", (error.reason or str(error)).replace("_", " ").lower())
