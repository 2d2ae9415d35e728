"""Reads from a PEM certificate when it is valid, which Python's ssl tells of a peer's certificate only."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

_VERSION, _UTC_TIME = 0xA0, 0x17
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True)
class Validity:
    """The times between which a certificate is valid; None if they cannot be read."""

    begins: datetime | None = None
    ends: datetime | None = None

    def problem(self, now: datetime) -> str:
        """Describes why the certificate is not valid now; empty if it is."""
        if self.ends is not None and now > self.ends:
            return f"expired at {self.ends.isoformat()}"
        if self.begins is not None and now < self.begins:
            return f"is not valid before {self.begins.isoformat()}"
        return ""


def validity(pem: bytes) -> Validity:
    """Returns when the first certificate of a PEM file is valid (RFC 5280, section 4.1.2.5)."""
    try:
        text = pem.decode("ascii", "replace")
        der = ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE-----") : text.index(_END)] + _END)
        certificate = _fields(der)[0][1]
        fields = _fields(_fields(certificate)[0][1])
        # [version], serial number, algorithm, issuer, validity, ...
        begins, ends = _fields(fields[4 if fields[0][0] == _VERSION else 3][1])
        return Validity(_time(*begins), _time(*ends))
    except (ValueError, IndexError):  # a file that OpenSSL has read may be read differently here
        return Validity()


def _fields(der: bytes) -> list[tuple[int, bytes]]:
    """Returns the tags and contents of the DER values that follow each other."""
    found, place = [], 0
    while place < len(der):
        tag, length, place = der[place], der[place + 1], place + 2
        if length & 0x80:  # so many bytes hold the length
            num_bytes = length & 0x7F
            length, place = int.from_bytes(der[place : place + num_bytes], "big"), place + num_bytes
        found.append((tag, der[place : place + length]))
        place += length
    return found


def _time(tag: int, value: bytes) -> datetime:
    text = value.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 50 to 99 are of the 20th century
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
