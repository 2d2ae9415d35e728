"""Tests kernels/cuda/mail.cuh compiled for the host, and the letters that wait for what it has mailed."""

import ctypes
import threading

import numpy as np
import pytest

from meshserve.kernels.mail.gpu import Letter, Mailbox

from . import on_host

pytestmark = on_host.needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulated")
    return on_host.compiled(folder, "emulated_mail", "mail.cpp", "mail.cuh", flags=(f"-I{folder}",))


def mail(library: ctypes.CDLL, number: int, tokens: np.ndarray) -> None:
    out = np.zeros_like(tokens)
    library.mail_tokens(ctypes.c_void_p(tokens.ctypes.data), number, ctypes.c_void_p(out.ctypes.data), len(tokens))
    np.testing.assert_array_equal(out, tokens)


@pytest.fixture
def mailbox(library: ctypes.CDLL) -> Mailbox:
    box = Mailbox.__new__(Mailbox)
    box.seconds = {}
    library.take_mail.argtypes = (
        ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p, ctypes.c_double, ctypes.c_double
    )  # fmt: skip
    box._boxes, box._take = None, lambda _, *arguments: library.take_mail(*arguments)
    return box


class OnDevice:
    """Tokens as an array of a device, which the host should not have to ask for."""

    def __init__(self, tokens: np.ndarray, *, is_ready: bool):
        self.shape, self.dtype, self._tokens, self._is_ready = tokens.shape, tokens.dtype, tokens, is_ready

    def is_ready(self) -> bool:
        return self._is_ready

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        assert self._is_ready, "the tokens came by mail"
        return self._tokens


def test_each_letter_has_the_tokens_of_its_step(library: ctypes.CDLL, mailbox: Mailbox) -> None:
    """The last eight steps are kept, so that several may be in flight."""
    draw = np.random.default_rng(0)
    steps = {
        mailbox.next_number(): draw.integers(-1, 1 << 20, size, np.int32) for size in (4, 1, 1024, 7, 4, 300, 2, 4)
    }
    for number, tokens in steps.items():
        mail(library, number, tokens)
    for number, tokens in steps.items():
        np.testing.assert_array_equal(Letter(mailbox, number, OnDevice(tokens, is_ready=False)), tokens)
    assert set(mailbox.seconds) == {len(tokens) for tokens in steps.values()}


def test_a_letter_waits_for_its_step(library: ctypes.CDLL, mailbox: Mailbox) -> None:
    tokens, number = np.arange(5, dtype=np.int32), mailbox.next_number()
    mail(library, number - 8, tokens + 1)  # an earlier step in the same box
    letter = Letter(mailbox, number, OnDevice(tokens, is_ready=False))
    sender = threading.Timer(0.12, mail, (library, number, tokens))
    sender.start()
    np.testing.assert_array_equal(letter, tokens)
    sender.join()


@pytest.mark.parametrize("usual_seconds", [0.0, 0.02])
def test_the_tokens_of_a_step_that_mails_none_are_fetched(mailbox: Mailbox, usual_seconds: float) -> None:
    """So the error of a step that has failed is raised, as by any array."""
    tokens = np.arange(3, dtype=np.int32)
    mailbox.seconds[3] = usual_seconds
    np.testing.assert_array_equal(Letter(mailbox, mailbox.next_number(), OnDevice(tokens, is_ready=True)), tokens)


def test_steps_of_number_0_are_not_mailed(library: ctypes.CDLL, mailbox: Mailbox) -> None:
    tokens = np.arange(3, dtype=np.int32)
    mail(library, 8 * mailbox.next_number(), tokens)
    mail(library, 0, tokens + 1)  # of the same box
    assert not mailbox.take(0xFFFFFFF8, np.empty(3, np.int32), 0.0, 0.01)
