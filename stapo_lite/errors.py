"""The two errors that users see, one line each, and helpers to raise and print them."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(Exception):
    """A mistake in the user's input. Its message is one line naming the key or file and the fix;
    the command-line programs print it and exit with status 2."""


class RunError(Exception):
    """A failure that is not a mistake in the input, after which a run cannot go on. Its message is
    one line; the command-line programs print it and exit with status 1."""


class Terminated(SystemExit):
    """Raised at SIGTERM and its like; what contains the SystemExit of a tool lets it through."""


@contextmanager
def explained(
    what: str,
    *kinds: type[Exception],
    fix: str = "",
    kind: type[InputError | RunError] = InputError,
) -> Iterator[None]:
    """Turn exceptions into an error for the user.

        with explained("data.source=a.jsonl: cannot be read", OSError, fix="; give another file"):
            ...     # data.source=a.jsonl: cannot be read (No such file or directory); give ...

    Args:
        what: the beginning of the message; the exception's own text follows in brackets.
        kinds: exceptions to convert; by default all but InputError and RunError.
        fix: the end of the message.
        kind: the error to raise.
    """
    caught = kinds or (Exception,)
    try:
        yield
    except caught as error:
        if not kinds and isinstance(error, InputError | RunError):
            raise  # it is one for the user already
        raise kind(f"{what} ({reason(error, what)}){fix}") from error


def reason(error: Exception, what: str) -> str:
    """An exception in a few words. A file is named only if `what` does not name it."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None or str(error.filename) in what:
            return error.strerror
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, KeyError):
        return repr(error)  # its text is the key alone
    return one_line(error) or repr(error)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an InputError or RunError as one line and exit with its status."""
    logging.basicConfig(format="%(levelname)s: %(message)s")  # for warnings
    try:
        yield
    except (InputError, RunError) as error:
        rank = int(os.environ.get("RANK", "0"))
        print(f"error{f' (process {rank})' if rank else ''}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None


def one_line(error: BaseException) -> str:
    """An error's text on one line, cut to 300 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


def out_of_memory(error: RuntimeError) -> bool:
    """Whether device or host memory ran out, judging by the messages of torch, CUDA, cuBLAS, cuDNN
    and vLLM."""
    kinds = (
        "out of memory",
        "can't allocate memory",
        "cublas_status_alloc_failed",
        "cudnn_status_not_supported.",
    )
    return any(kind in str(error).lower() for kind in kinds)
