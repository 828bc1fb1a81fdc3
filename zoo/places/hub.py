"""A repository on the Hugging Face Hub: `hf://OWNER/REPO`, `hf://OWNER/REPO@REVISION`."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from zoo.digest import check_path
from zoo.errors import UnreachableError, ZooError
from zoo.places.base import Stream, WritablePlace
from zoo.places.http import HttpPlace
from zoo.places.offline import refuse_when_offline

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SCHEME = "hf://"
ADDRESS = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?/?")


@dataclass(frozen=True)
class HubPlace(WritablePlace):
    """Files come by plain requests to the Hub's own addresses, so that a download resumes and its
    bytes are hashed as they arrive: the Hub's client does neither over plain HTTP.

    All of an addition is one commit, refused when another came between.
    """

    repo: str
    revision: str | None = None
    endpoint: str | None = None
    """HF_ENDPOINT unless given."""
    _heads: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def where(self) -> str:
        return f"{SCHEME}{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def has_front_page(self) -> bool:
        return True

    @property
    def _branch(self) -> str:
        return self.revision or "main"

    @cached_property
    def _api(self) -> "HfApi":
        from huggingface_hub import HfApi

        refuse_when_offline(self.where)
        return HfApi(endpoint=self.endpoint, library_name="moecast")

    @cached_property
    def _files(self) -> HttpPlace:
        from huggingface_hub import is_offline_mode
        from huggingface_hub.utils import build_hf_headers

        if is_offline_mode():
            raise UnreachableError(f"{self.where} is on the network, and HF_HUB_OFFLINE is set")
        address = f"{self._api.endpoint}/{self.repo}/resolve/{self._branch}"
        return HttpPlace(address, headers=build_hf_headers(library_name="moecast"))

    def stream(self, path: str, *, offset: int = 0) -> AbstractContextManager[Stream]:
        return self._files.stream(path, offset=offset)

    def has(self, path: str) -> bool:
        with self._told():
            return self._api.file_exists(self.repo, check_path(path), revision=self._branch)

    def names(self, folder: str) -> list[str]:
        with self._told():
            found = self._api.list_repo_files(self.repo, revision=self._branch)
        inside = f"{check_path(folder)}/"
        return sorted(one.removeprefix(inside) for one in found if one.startswith(inside))

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Remembers the commit that the index is read from: only on top of it is one made."""
        with self._told():
            self._api.create_repo(self.repo, exist_ok=True)
            head = self._api.repo_info(self.repo, revision=self._branch).sha
        assert head is not None
        self._heads["head"] = head
        try:
            yield
        finally:
            del self._heads["head"]

    def publish(
        self, files: Mapping[str, bytes], *, index: tuple[str, bytes], removed: Collection[str] = ()
    ) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        written = {**files, index[0]: index[1]}
        operations = [
            *(
                CommitOperationAdd(path_in_repo=check_path(path), path_or_fileobj=data)
                for path, data in written.items()
            ),
            *(CommitOperationDelete(path_in_repo=check_path(path)) for path in removed),
        ]
        with self._told():
            self._api.create_commit(
                self.repo,
                operations,
                commit_message="Publish predictors for expert prefetching",
                revision=self._branch,
                parent_commit=self._heads.get("head"),
            )

    @contextmanager
    def _told(self) -> Iterator[None]:
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            yield
        except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError, OSError) as error:
            first = str(error).strip().splitlines()[0]
            raise UnreachableError(
                f"{self.where}: the Hub refuses or does not answer ({first}); check the name, "
                "the network and your login (hf auth login); after a conflict, ask again"
            ) from error


def hub_place(address: str) -> HubPlace:
    """ZooError unless the address is hf://OWNER/REPO, with @REVISION if wanted."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise ZooError(f"{address!r} is not hf://OWNER/REPO or hf://OWNER/REPO@REVISION")
    return HubPlace(match["repo"], match["revision"])
