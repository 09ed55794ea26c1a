"""Upload an export to the Hugging Face hub: private unless asked otherwise.

The token is that of huggingface_hub: ``HF_TOKEN``, or the login of ``hf auth login``. It is no argument of anything
here, so that it ends up in no shell history.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import HFValidationError, validate_repo_id

from mmrl.core.errors import UserError


class Upload:
    """A model repository ``name`` (``ORG/NAME``) that may be written to.

    The hub is asked who the token belongs to when this is made, so that what cannot work is known before a model is
    loaded. Raises ``UserError`` without a token, for one that the hub refuses, and where the hub cannot be reached.
    """

    def __init__(self, name: str, *, public: bool = False) -> None:
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise UserError(f"--push-to-hub {name}: {error}; write ORG/NAME") from error
        if name.count("/") != 1:
            raise UserError(f"--push-to-hub {name}: write ORG/NAME, with your user name or an organisation before it")
        if huggingface_hub.get_token() is None:
            raise UserError("--push-to-hub: there is no token; set HF_TOKEN, or run hf auth login, and try again")
        self.name, self.public, self._api = name, public, huggingface_hub.HfApi()
        try:
            self._api.whoami()
        except Exception as error:
            raise _explained(error, self._api, "nothing was exported") from error

    def send(self, folder: Path, message: str) -> str:
        """Upload ``folder`` in one commit and return the repository's address. Raises ``UserError``; then ``folder`` is
        still there."""
        try:
            url = self._create()
            self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except UserError:
            raise
        except Exception as error:
            later = f"the export is in {folder}; upload it later: hf upload {self.name} {folder} ."
            raise _explained(error, self._api, later) from error
        return url

    def _create(self) -> str:
        """Make the repository, or find it as it is asked for. Raises ``UserError`` for one that others can read."""
        try:
            return str(self._api.create_repo(self.name, private=not self.public))
        except HfHubHTTPError as error:
            if error.response.status_code != 409:  # it is there already
                raise
        if not self.public and not self._api.model_info(self.name).private:
            raise UserError(
                f"--push-to-hub: {self.name} is there and public, and an export is private unless you say otherwise; "
                "add --public, or name another repository"
            )
        return f"{self._api.endpoint}/{self.name}"


def _explained(error: Exception, api: huggingface_hub.HfApi, then: str) -> UserError:
    """What the user can do about ``error``."""
    if isinstance(error, OfflineModeIsEnabled):
        return UserError(f"--push-to-hub: HF_HUB_OFFLINE is set, so the hub is not asked; unset it. {then}")
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        why = {401: "refuses the token", 403: "does not let this token write there"}.get(status, f"answered {status}")
        mend = "give HF_TOKEN a token with write access, or run hf auth login" if status in (401, 403) else "try again"
        return UserError(f"--push-to-hub: {api.endpoint} {why}; {mend}. {then}")
    if isinstance(error, LocalTokenNotFoundError):
        return UserError("--push-to-hub: there is no token; set HF_TOKEN, or run hf auth login, and try again")
    # What fails on the way is of the HTTP library that huggingface_hub has, which differs between its versions.
    failed = tuple(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ in ("HTTPError", "OSError"))
    if isinstance(error, (OSError, *failed)):
        kind = f"{type(error).__name__} {error}".strip()
        return UserError(f"--push-to-hub: {api.endpoint} cannot be reached ({kind}); {then}")
    raise error
