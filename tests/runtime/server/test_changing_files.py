"""Files that change while the server runs: tokens and certificates, good ones, bad ones, and what is no file at all."""

import datetime
import functools
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.tenants import new_token
from meshserve.runtime.client.client import CallError, Client
from meshserve.runtime.server.certificate_dates import Validity, validity
from meshserve.runtime.server.lifecycle import Listen
from meshserve.runtime.server.tls import Certificates, TlsFiles
from tests.certificates import certificate
from tests.runtime.loopback import running
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode


def write(path: Path, content: str | bytes) -> None:
    """In one go, as an operator should."""
    new = path.with_suffix(".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(new, path)


def refused(target: str, token: str, **options: Any) -> bool:
    with Client(target, token=token, **options) as client:
        try:
            client.load(timeout_seconds=WAIT_SECONDS)
        except CallError as error:
            assert error.code is Code.UNAUTHENTICATED
            return True
        return False


def test_a_revoked_token_is_refused_and_a_new_one_let_in(tmp_path, caplog):
    path = tmp_path / "tokens.toml"
    token, lines = new_token("first")
    write(path, lines)
    with running(tokens=path) as server, Client(server.target, token=token) as client:
        stream = client.generate("a", max_tokens=60)
        with server.engine.holding(60):
            next(stream)
            other, lines = new_token("second")
            write(path, lines)
            wait_for(lambda: refused(server.target, token))
            assert not refused(server.target, other)
            server.handle.request_stop()  # also while it drains
            wait_for(lambda: server.handle.is_stopping)
            write(path, new_token("third")[1])
            wait_for(lambda: refused(server.target, other))
        assert list(stream)[-1].finish.usage.num_output_tokens == 60  # what runs may end


def test_a_broken_file_of_tokens_changes_nothing(tmp_path, caplog):
    path = tmp_path / "tokens.toml"
    token, lines = new_token("first")
    write(path, lines)
    with running(tokens=path) as server:
        write(path, "nonsense")
        wait_for(lambda: "the previous tokens stay in force" in caplog.text)
        assert not refused(server.target, token)


# What a tokens file may hold or be that no good one is, and what is said about it.
BROKEN = {
    "a number of 5,000 digits": ("max_requests = " + "1" * 5_000, "max_requests|digits"),
    "arrays nested 5,000 deep": ("a = " + "[" * 5_000, "nested too deeply"),
    "no UTF-8": (b"\xff", "utf-8"),
    "larger than any": (b"#" * (16 << 20) + b"#", "it has more than 16777216 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_next_good_file_of_tokens_is_read_after_any_other(name, tmp_path, caplog):
    """Otherwise a token that it revokes would stay valid for ever."""
    path, (content, words) = tmp_path / "tokens.toml", BROKEN[name]
    token, lines = new_token("first")
    write(path, lines)
    with running(tokens=path) as server:
        write(path, content)
        wait_for(lambda: "the previous tokens stay in force" in caplog.text)
        assert re.search(words, caplog.text) and "Traceback" not in caplog.text
        assert not refused(server.target, token)
        write(path, new_token("second")[1])
        wait_for(lambda: refused(server.target, token))
        assert caplog.text.count("the previous tokens stay in force") == 1


@pytest.mark.parametrize("kind", ["FIFO", "directory", "device"])
def test_what_is_no_file_in_place_of_the_tokens_stops_nothing(kind, tmp_path, caplog):
    path = tmp_path / "tokens.toml"
    token, lines = new_token("first")
    write(path, lines)
    with running(tokens=path) as server:
        path.unlink()
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        wait_for(lambda: f"it is a {kind}; it must be a regular file" in caplog.text)
        assert not refused(server.target, token)
        path.rmdir() if kind == "directory" else path.unlink()
        write(path, new_token("second")[1])
        wait_for(lambda: refused(server.target, token))
        assert server.counted("meshserve_background_task_failures_total", task="tokens") == 0


def test_a_file_of_tokens_that_others_may_write_is_read_once_it_is_mended(tmp_path, caplog):
    """Only its mode changes: neither its content nor its time does."""
    path = tmp_path / "tokens.toml"
    token, lines = new_token("first")
    write(path, lines)
    with running(tokens=path) as server:
        new = tmp_path / "new"
        new.write_text(new_token("second")[1])
        new.chmod(0o666)
        os.replace(new, path)
        wait_for(lambda: "it has mode 666, so that other users may write to it. Run chmod go-w" in caplog.text)
        assert not refused(server.target, token)
        path.chmod(0o600)
        wait_for(lambda: refused(server.target, token))
        assert caplog.text.count("the previous tokens stay in force") == 1


def test_an_error_that_was_not_foreseen_is_counted_and_the_next_file_is_read(tmp_path, caplog, monkeypatch):
    path = tmp_path / "tokens.toml"
    token, lines = new_token("first")
    write(path, lines)
    with running(tokens=path) as server:
        monkeypatch.setattr("meshserve.runtime.server.auth.read_tokens", lambda path: 1 / 0)
        write(path, new_token("second")[1])
        failures = functools.partial(server.counted, "meshserve_background_task_failures_total", task="tokens")
        wait_for(failures)
        assert "the background task 'tokens' has failed" in caplog.text and "ZeroDivisionError" in caplog.text
        wait_for(lambda: not server.edge.is_ready)  # after some failures in a row
        with grpc.insecure_channel(server.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            wait_for(lambda: health.Check(health_pb2.HealthCheckRequest()).status == 2)
            assert not refused(server.target, token), "what runs goes on"
            monkeypatch.undo()
            wait_for(lambda: refused(server.target, token))
            wait_for(lambda: health.Check(health_pb2.HealthCheckRequest()).status == 1)
        assert "ready again" in caplog.text


def trust(files: TlsFiles, caller: TlsFiles | None = None) -> grpc.ChannelCredentials:
    own = (caller.key.read_bytes(), caller.certificate.read_bytes()) if caller is not None else (None, None)
    return grpc.ssl_channel_credentials(files.certificate.read_bytes(), *own)


def test_tls_rotation_drops_no_stream(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    old, new = certificate(tmp_path, "old"), certificate(tmp_path, "new")
    live = TlsFiles(certificate=tmp_path / "live.pem", key=tmp_path / "live.key")
    shutil.copy(old.certificate, live.certificate)
    shutil.copy(old.key, live.key)
    token, lines = new_token("a")
    (tmp_path / "tokens.toml").write_text(lines)
    listen = Listen(tls=live)
    with running(tokens=tmp_path / "tokens.toml", listen=listen) as server:
        with Client(server.target, credentials=trust(old), token=token) as client:
            stream = client.generate("a", max_tokens=60)
            with server.engine.holding(60):
                next(stream)
                assert refused(server.target, "wrong", credentials=trust(old))
                for source, target in ((new.key, live.key), (new.certificate, live.certificate)):
                    shutil.copy(source, tmp_path / "next")
                    os.replace(tmp_path / "next", target)
                wait_for(lambda: "reloaded the certificate" in caplog.text)
                with Client(server.target, credentials=trust(new), token=token) as another:
                    assert another.complete("a", max_tokens=2).token_ids == (98, 99)
                with Client(server.target, credentials=trust(old), token=token) as stranger:
                    with pytest.raises(CallError) as caught:
                        stranger.load(timeout_seconds=WAIT_SECONDS)
                    assert caught.value.code is Code.UNAVAILABLE
            assert list(stream)[-1].finish.usage.num_output_tokens == 60


@pytest.mark.parametrize("what", ["no key", "a FIFO", "a key of others"])
def test_a_certificate_that_cannot_be_used_changes_nothing_and_is_told_once(what, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    files = certificate(tmp_path, "server")
    trusted, spare = trust(files), tmp_path / "spare"
    with running(listen=Listen(tls=files)) as server:
        shutil.copy(files.key, spare)
        files.key.unlink()
        if what == "no key":
            files.key.write_text("no key")
        elif what == "a FIFO":
            os.mkfifo(files.key)
        else:
            shutil.copy(spare, files.key)
            files.key.chmod(0o666)
        wait_for(lambda: "the changed certificates are not used" in caplog.text)
        with Client(server.target, credentials=trusted) as client:  # a new handshake
            assert client.complete("a", max_tokens=1).token_ids == (98,)
        os.replace(spare, files.key)
        wait_for(lambda: "reloaded the certificate" in caplog.text)
        with Client(server.target, credentials=trusted) as client:
            assert client.complete("a", max_tokens=1).token_ids == (98,)
        assert caplog.text.count("the changed certificates are not used") <= 2  # a key may be missing for a moment


def test_a_certificate_that_is_not_valid_now_is_warned_of_with_the_date(tmp_path, caplog):
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    files = certificate(tmp_path, "server")  # valid for a day
    certificates = Certificates(files, now=lambda: now)
    ends = certificates.content.validity.ends
    assert ends is not None and abs(ends - now - datetime.timedelta(days=1)) < datetime.timedelta(hours=1)
    assert not caplog.records
    now = ends + datetime.timedelta(seconds=1)
    for _ in range(3):
        certificates.reload()
    assert caplog.text.count(f"expired at {ends.isoformat()}; callers will refuse it") == 1
    now -= datetime.timedelta(days=3)
    Certificates(files, now=lambda: now)
    assert "is not valid before" in caplog.text


def test_the_dates_of_a_certificate_are_those_that_openssl_reads(tmp_path):
    for index, days in enumerate((1, 400, 40_000)):  # the last one has four digits of the year
        files = certificate(tmp_path, str(index), days=days)
        said = subprocess.run(
            ["openssl", "x509", "-in", files.certificate, "-noout", "-enddate", "-startdate", "-dateopt", "iso_8601"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        found = validity(files.certificate.read_bytes())
        assert found.ends is not None and found.begins is not None
        written = [datetime.datetime.fromisoformat(line.partition("=")[2]) for line in said.splitlines()]
        assert written == [found.ends, found.begins]
    for damaged in (b"", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"):
        assert validity(damaged) == Validity()


def test_mutual_tls_wants_a_certificate_of_the_authority(tmp_path):
    files, authority = certificate(tmp_path, "server"), certificate(tmp_path, "authority")
    caller, stranger = certificate(tmp_path, "caller", "authority"), certificate(tmp_path, "stranger")
    listen = Listen(tls=TlsFiles(certificate=files.certificate, key=files.key, client_ca=authority.certificate))
    with running(listen=listen) as server:
        with Client(server.target, credentials=trust(files, caller)) as client:
            assert client.complete("a", max_tokens=1).token_ids == (98,)
        for credentials in (trust(files), trust(files, stranger), None):
            with Client(server.target, credentials=credentials, ready_seconds=0) as client, pytest.raises(CallError):
                client.load(timeout_seconds=WAIT_SECONDS)


@pytest.mark.parametrize("text", ["", "no certificate"])
def test_an_authority_that_is_none_is_refused(tmp_path: Path, text: str):
    files = certificate(tmp_path, "server")
    (tmp_path / "authority.pem").write_text(text)
    with pytest.raises(ConfigError, match="the certificate authority .*authority.pem"):
        TlsFiles(certificate=files.certificate, key=files.key, client_ca=tmp_path / "authority.pem").read()


def test_a_key_with_a_passphrase_is_refused_without_a_question(tmp_path: Path):
    plain = certificate(tmp_path, "server")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", plain.key, "-out", locked, "-passout", "pass:secret"]
    subprocess.run(command, check=True)
    with pytest.raises(ConfigError, match="locked.key has a passphrase; save it without one"):
        TlsFiles(certificate=plain.certificate, key=locked).read()
