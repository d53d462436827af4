"""Repositories on the Hub: made before anything slow begins, and filled."""

from pathlib import Path

from huggingface_hub import HfApi

from stapo_lite import __version__
from stapo_lite.errors import InputError, one_line


def prepare_repository(name: str, private: bool) -> str:
    """Make the repository unless it is there; returns its full name.

    Raises:
        InputError: there is no token, it can only read, the repository is public and must not be, or the Hub refuses.
    """
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private or None, exist_ok=True).repo_id
        api.auth_check(repository, write=True)
        public = private and not api.model_info(repository).private
    except Exception as error:  # the Hub's client raises of many kinds
        raise InputError(
            f"--push-to-hub={name}: {one_line(error)}; a token that can write comes from `hf auth login`, or HF_TOKEN"
        ) from None
    if public:
        raise InputError(f"--private: {repository} is there already, and public")
    return repository


def push(folder: Path, repository: str) -> str:
    """Upload a folder; returns the address.

    Raises:
        InputError: the Hub refuses, or the connection is lost for good.
    """
    try:
        message = f"stapo_lite {__version__}"
        return str(HfApi().upload_folder(repo_id=repository, folder_path=folder, commit_message=message).repo_url)
    except Exception as error:  # the Hub's client raises of many kinds
        again = f"{folder} is there; go on with: hf upload {repository} {folder}"
        raise InputError(f"--push-to-hub={repository}: {one_line(error)}; {again}") from None
