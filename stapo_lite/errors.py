"""The two errors that a user sees, each of one line, and how a message becomes one."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(Exception):
    """A mistake in the user's input. Its message is one line naming the key or file and the fix;
    the command-line programs print it and exit with status 2."""


class RunError(Exception):
    """A run that cannot go on through no mistake in its input. Its message is one line; the
    programs print it and exit with status 1."""


@contextmanager
def explained(
    what: str,
    *kinds: type[Exception],
    fix: str = "",
    kind: type[InputError | RunError] = InputError,
) -> Iterator[None]:
    """Turn errors into one for the user: `what (reason)fix`.

    Args:
        kinds: of errors to turn; by default all but those that are for the user already.
        kind: of the error that is raised.
    """
    caught = kinds or (Exception,)
    try:
        yield
    except caught as error:
        if isinstance(error, InputError | RunError) and not kinds:
            raise
        reason = one_line(error)
        if isinstance(error, OSError) and error.strerror:
            named = error.filename is None or str(error.filename) in what
            reason = error.strerror if named else f"{error.strerror}: {error.filename}"
        elif isinstance(error, KeyError) or not reason:
            reason = repr(error)
        raise kind(f"{what} ({reason}){fix}") from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an InputError or RunError as one line and exit with its status."""
    logging.basicConfig(format="%(levelname)s: %(message)s")  # of the warnings
    try:
        yield
    except (InputError, RunError) as error:
        rank = int(os.environ.get("RANK", "0"))
        print(f"error{f' (process {rank})' if rank else ''}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None


def one_line(error: BaseException) -> str:
    """An error's text, or its beginning, for an InputError to quote."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


def out_of_memory(error: RuntimeError) -> bool:
    """Whether the device's or the host's memory ran out, by the words of torch, CUDA, cuBLAS and
    vLLM."""
    kinds = (
        "out of memory",
        "can't allocate memory",
        "cublas_status_alloc_failed",
        "cudnn_status_not_supported.",
    )
    return any(kind in str(error).lower() for kind in kinds)
