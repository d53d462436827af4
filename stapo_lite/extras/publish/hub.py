"""Repositories on the Hub: created before slow work, filled at its end or during a run."""

from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import HfApi

from stapo_lite.errors import InputError, explained
from stapo_lite.training.callbacks import Callback, Phase
from stapo_lite.training.run import Run


def prepare_repository(name: str, private: bool, asked: str = "--push-to-hub") -> str:
    """Create the repository if there is none; return its full name.

    Args:
        asked: the option or key that named it, for messages.

    Raises:
        InputError: there is no token, or the token cannot write; the repository should be private
            but is public; the Hub refuses.
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
    fix = f"; {folder} is complete; upload it with: hf upload {repository} {folder}"
    with explained(f"--push-to-hub={repository}: not pushed", fix=fix):
        commit = HfApi().upload_folder(repo_id=repository, folder_path=folder)
    return str(commit.repo_url)


class HubMirror(Callback):
    """Uploads the adapter of each checkpoint. The Hub client's background thread uploads one after
    the other.

    Raises:
        InputError: the repository cannot be created or written.
    """

    phase = Phase.PUBLISH

    def __init__(self, name: str, private: bool):
        self._repository = prepare_repository(name, private, "log.hub_model_id")
        self._api = HfApi()

    def on_save(self, run: Run, folder: Path) -> None:
        self._push(folder)

    def on_train_end(self, run: Run) -> None:
        self._push(run.folder / "adapter").result()

    def _push(self, folder: Path) -> Future:
        return self._api.upload_folder(
            repo_id=self._repository,
            folder_path=folder,
            allow_patterns="adapter_*",
            run_as_future=True,
        )
