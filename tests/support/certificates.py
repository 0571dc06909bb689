"""Certificates for tests: authorities, what they sign, and what nobody should trust."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from anabranch.wire.credentials import Credentials

HERE = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Authority:
    """Signs certificates, and puts them into a folder."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @staticmethod
    def make(folder: Path, name: str = "ours") -> Authority:
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, key, days=2).add_extension(x509.BasicConstraints(True, None), critical=True)
        made = Authority(folder, name, key, builder.sign(key, hashes.SHA256()))
        Path(made.path).write_bytes(made.certificate.public_bytes(Encoding.PEM))
        return made

    @property
    def path(self) -> str:
        return str(self.folder / f"{self.name}-authority.pem")

    def sign(self, name: str = "one", *, days: int = 1, names: tuple[str, ...] = HERE) -> tuple[str, str]:
        """The files of a certificate for these hosts, and of its key. It has expired if its days are negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = x509.SubjectAlternativeName([_host(each) for each in names])
        signed = (
            _builder(name, self.name, key, days).add_extension(hosts, critical=False).sign(self.key, hashes.SHA256())
        )
        certificate, secret = (self.folder / f"{self.name}-{name}{end}" for end in (".pem", "-key.pem"))
        certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return str(certificate), str(secret)

    def credentials(self, token: str, *, is_mutual: bool = True) -> Credentials:
        """What a process of ours has: with a certificate, or only able to check those of others."""
        return Credentials(token, *(self.sign() if is_mutual else ("", "")), self.path)


def _builder(name: str, issuer: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    subject, signer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, issuer))
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(signer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=9))
    return builder.not_valid_after(now + timedelta(days=days))


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
