"""Storage in a repository of the Hugging Face Hub: `hf://OWNER/REPO`, `hf://OWNER/REPO@REVISION`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from zoo.digest import check_path
from zoo.errors import StorageError, UnreachableError
from zoo.storage.base import WritableStorage, refuse_when_offline
from zoo.storage.remote import HttpStorage

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ADDRESS = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?/?")


@dataclass(frozen=True)
class HubStorage(WritableStorage):
    """Files of a repository, read by plain HTTP requests.

    So its bytes are hashed as they arrive, which the Hub's client does not do over plain HTTP. A
    publication is one commit, refused if another commit came in between.
    """

    repo: str
    revision: str | None = None
    endpoint: str | None = None
    """Default: HF_ENDPOINT."""
    has_front_page: ClassVar[bool] = True

    @property
    def address(self) -> str:
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def _branch(self) -> str:
        return self.revision or "main"

    @cached_property
    def _api(self) -> "HfApi":
        from huggingface_hub import HfApi

        refuse_when_offline(self.address)
        return HfApi(endpoint=self.endpoint, library_name="moecast")

    @cached_property
    def _files(self) -> HttpStorage:
        from huggingface_hub import is_offline_mode
        from huggingface_hub.utils import build_hf_headers

        if is_offline_mode():
            raise UnreachableError(f"{self.address} is on the network, and HF_HUB_OFFLINE is set")
        address = f"{self._api.endpoint}/{self.repo}/resolve/{self._branch}"
        return HttpStorage(address, headers=build_hf_headers(library_name="moecast"))

    def stream(self, path: str) -> AbstractContextManager[Iterator[bytes]]:
        return self._files.stream(path)

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        return self._files.read(path, limit=limit)

    def has(self, path: str) -> bool:
        with self._translate_errors():
            return self._api.file_exists(self.repo, check_path(path), revision=self._branch)

    def names(self, folder: str = "") -> list[str]:
        with self._translate_errors():
            paths = self._api.list_repo_files(self.repo, revision=self._branch)
        prefix = f"{check_path(folder)}/" if folder else ""
        return sorted(path.removeprefix(prefix) for path in paths if path.startswith(prefix))

    def exclusive(self) -> AbstractContextManager[str]:
        """Yields the commit that the index is read from: `publish` commits on top of it only."""
        with self._translate_errors():
            self._api.create_repo(self.repo, exist_ok=True)
            head = self._api.repo_info(self.repo, revision=self._branch).sha
        assert head is not None
        return nullcontext(head)

    def publish(
        self,
        files: Mapping[str, bytes],
        index: tuple[str, bytes],
        removed: Iterable[str],
        seen: str,
    ) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        added = [
            CommitOperationAdd(path_in_repo=check_path(path), path_or_fileobj=data)
            for path, data in (*files.items(), index)
        ]
        deleted = [CommitOperationDelete(path_in_repo=check_path(path)) for path in removed]
        with self._translate_errors():
            self._api.create_commit(
                self.repo,
                [*added, *deleted],
                commit_message="Publish predictors for expert prefetching",
                revision=self._branch,
                parent_commit=seen,
            )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            yield
        except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError, OSError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnreachableError(
                f"{self.address}: the Hub refuses or does not answer ({first}); check the name, "
                "the network and your login (hf auth login); after a conflict, try again"
            ) from error


def open_hub_storage(address: str) -> HubStorage:
    """Parses hf://OWNER/REPO or hf://OWNER/REPO@REVISION; StorageError for anything else."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise StorageError(f"{address!r} is not hf://OWNER/REPO or hf://OWNER/REPO@REVISION")
    return HubStorage(match["repo"], match["revision"])
