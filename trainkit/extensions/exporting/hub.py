"""The hub of models behind the wall: the only home of huggingface_hub, which transformers brings.

The token is huggingface_hub's own: HF_TOKEN, or that of `hf auth login`. It goes into no file and
no message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigError, TrainkitError
from trainkit.safety.masking import scrubbed

_REASONS: dict[int | None, str] = {
    401: "the hub does not know the token: it is mistyped, expired or revoked. Make one at"
    " https://huggingface.co/settings/tokens, and set HF_TOKEN.",
    403: "the token must not write there: make one with write access, or choose a name below your"
    " user or organization.",
    404: "the hub has no such user or organization, or the token must not see it.",
    429: "the hub asks to wait before more requests.",
}
_OTHERWISE = "try again later."
_MOST = 400  # letters of the hub's own message


class Hub:
    """A repository of the hub, to be written to.

    Args:
        name: as "user/model".
        private: whether it is private; None for the hub's default, and for one that is there.
    """

    def __init__(self, name: str, private: bool | None = None) -> None:
        self.name, self.private = name, private
        self._own = _library()
        self._token = _token(self._own)
        try:
            self._own.utils.validate_repo_id(name)
        except self._own.errors.HFValidationError as error:
            raise ConfigError(f"push_to_hub is '{name}': {error}") from None
        if "/" not in name:
            raise ConfigError(
                f"push_to_hub is '{name}'; it must be a user or an organization and the model's"
                f" name, as me/{name}."
            )

    def push(self, folder: Path, message: str) -> str:
        """Upload a folder as one commit, into a repository that is made if it is not there; return
        its address.

        Raises:
            TrainkitError: the hub refuses, or cannot be reached.
            ConfigError: `private` is not what the repository that is there is.
        """
        api = self._own.HfApi(token=self._token)
        with self._refusals():
            api.create_repo(self.name, private=self.private, exist_ok=True)
            if self.private is not None:
                self._compare(bool(api.repo_info(self.name).private))
            done = api.upload_folder(
                repo_id=self.name, folder_path=str(folder), commit_message=message
            )
            return str(done.repo_url)

    def _compare(self, is_private: bool) -> None:
        if is_private != self.private:
            there = "private" if is_private else "public"
            raise ConfigError(
                f"private is {str(self.private).lower()}, but {self.name} is there, and {there}."
                " Nothing was uploaded. Change it in its settings on the hub, leave private out, or"
                " push to another name."
            )

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn the errors of the hub and of the network into one sentence, without the token."""
        try:
            yield
        except (self._own.errors.HTTPError, OSError, ValueError, RuntimeError) as error:
            # without the chain: its errors hold the request's headers
            raise TrainkitError(self._sentence(_cause(error))) from None

    def _sentence(self, error: BaseException) -> str:
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = " ".join(str(error).split()) or type(error).__name__
        said = scrubbed(said, [self._token])[:_MOST]  # before a cut that would leave a part of it
        answer = f"answered {status}" if status else "cannot be written to"
        return (
            f"push_to_hub is '{self.name}': {self._own.constants.ENDPOINT} {answer}"
            f" ({said}); {_REASONS.get(status, _OTHERWISE)}"
            " The folder is written; push it again with the same command."
        )


def _cause(error: BaseException) -> BaseException:
    """Return the error of a chain that holds the hub's answer: that to a file is within a
    RuntimeError.
    """
    while error.__cause__ is not None and getattr(error, "response", None) is None:
        error = error.__cause__
    return error


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ConfigError(
            "push_to_hub needs huggingface_hub, which is not installed. Install: pip install"
            " 'trainkit[transformers]'"
        ) from error
    library: Any = huggingface_hub
    return library


def _token(library: Any) -> str:
    token: str | None = library.get_token()
    if not token:
        raise ConfigError(
            "push_to_hub needs a token of the hub, and none is set. Set HF_TOKEN to one with write"
            " access (https://huggingface.co/settings/tokens), or log in: hf auth login."
        )
    return token
