"""Repositories on the Hub: created before slow work, filled at its end or during a run."""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi

from stapo_lite.errors import InputError, explained, one_line
from stapo_lite.extras.publish.card import FinishedRun, model_card, public_name, read_run
from stapo_lite.files import read_object, write_text
from stapo_lite.training.callbacks import Callback
from stapo_lite.training.run import Run

logger = logging.getLogger(__name__)


def prepare_repository(name: str, private: bool, asked: str = "--push-to-hub") -> str:
    """Create the repository if there is none; return its full name.

    Args:
        asked: the option or key that named it, for messages.

    Raises:
        InputError: there is no token, or it cannot write; the repository should be private but is
            public; the Hub refuses.
    """
    api = HfApi()
    fix = "; a token that can write comes from `hf auth login`, or HF_TOKEN"
    with explained(f"{asked}={name}: cannot be written", fix=fix):
        repository = api.create_repo(name, private=private or None, exist_ok=True).repo_id
        api.auth_check(repository, write=True)
        public = private and not api.model_info(repository).private
    if public:
        fix = "choose another name, or do not ask for a private one"
        raise InputError(f"{asked}={name}: {repository} exists and is public; {fix}")
    return repository


def push_folder(folder: Path, repository: str) -> str:
    """Upload a folder; return its address.

    Raises:
        InputError: the Hub refuses, or the connection is lost for good.
    """
    again = f"; {folder} is complete; upload it with: hf upload {repository} {folder}"
    with explained(f"--push-to-hub={repository}: not pushed", fix=again):
        return upload(folder, repository)


def upload(folder: Path, repository: str) -> str:
    """Commit a folder's files to a repository; return its address."""
    message = f"stapo_lite {version('stapo-lite')}"
    commit = HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    return str(commit.repo_url)


class HubMirror(Callback):
    """Uploads a run's newest adapter, with its card, in a background thread.

    A failed upload only warns, since the next save uploads newer values. A save during an upload is
    skipped.

    Args:
        run_folder: must have a checkpoint or the adapter before each upload.
        stops: tokens that ended a completion, for the card.

    Raises:
        InputError: the repository cannot be created or written.
    """

    def __init__(
        self, name: str, private: bool, run_folder: Path, tokenizer: Any, stops: tuple[int, ...]
    ):
        self.repository = prepare_repository(name, private, "log.hub_model_id")
        self._run_folder, self._tokenizer, self._stops = run_folder, tokenizer, stops
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hub")
        self._under_way: Future[None] | None = None

    def on_save(self, run: Run, folder: Path) -> None:
        if self._under_way is None or self._under_way.done():
            self._push()

    def on_train_end(self, run: Run) -> None:
        self._push()
        self.close()

    def _push(self) -> None:
        """Start uploading what was saved last."""
        with self._warned():
            run = read_run(self._run_folder, None)
            # Read now, since a newer checkpoint may replace it.
            files = {path.name: path.read_bytes() for path in run.adapter.glob("adapter_*")}
            self._under_way = self._thread.submit(self._upload, files, run)

    def _upload(self, files: dict[str, bytes], run: FinishedRun) -> None:
        with self._warned(), TemporaryDirectory(prefix="stapo_lite-hub-") as name:
            folder, base = Path(name), run.config.model
            for file, content in files.items():
                (folder / file).write_bytes(content)
            self._tokenizer.save_pretrained(folder)
            config = read_object(folder / "adapter_config.json")
            config["base_model_name_or_path"] = public_name(base)
            write_text(folder / "adapter_config.json", json.dumps(config, indent=2))
            card = model_card(self.repository, run, base, merged=False, stops=self._stops)
            write_text(folder / "README.md", card)
            upload(folder, self.repository)

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Turn errors into warnings; of any type, as disk, network and the Hub's client raise
        many."""
        try:
            yield
        except Exception as error:
            logger.warning("log.hub_model_id: not pushed this time (%s)", one_line(error))

    def close(self) -> None:
        """Wait for a running upload."""
        self._thread.shutdown()
