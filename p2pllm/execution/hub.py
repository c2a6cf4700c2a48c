"""Models on the Hugging Face hub, of which a peer downloads only the files that hold its own layers.

Headers and the first bytes of tensors (for the fingerprint) come through range requests. All of a model's
files are taken from one commit, the newest when the model was opened. Of large files the hub knows the
SHA-256 (it keeps them by it, as Git LFS does), and what arrives must have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pllm.errors import ModelError
from p2pllm.execution.safetensors_files import Files, LocalFiles

__all__ = ["hub_files"]

_CONNECTIONS = 8
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def hub_files(repo: str) -> Files:
    """The files of hub model ``repo``, or the copy of them in the local cache where the hub cannot be
    reached.

    Raises `ModelError` if there is no such model, it needs a login, or neither hub nor copy is there.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        model = huggingface_hub.HfApi().model_info(repo, timeout=10, files_metadata=True)
    except errors.GatedRepoError as error:
        raise ModelError(f"{repo} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"there is no model {repo} on the hub (or it is private: set HF_TOKEN)") from error
    except Exception as error:  # whatever the HTTP library of the day raises when there is no network
        return _cached(repo, error)
    stored = ((file.rfilename, file.lfs) for file in model.siblings or ())
    return HubFiles(repo, str(model.sha), {name: lfs.sha256 for name, lfs in stored if lfs is not None})


def _cached(repo: str, reason: Exception) -> Files:
    import huggingface_hub

    try:
        return LocalFiles(Path(huggingface_hub.snapshot_download(repo, local_files_only=True)))
    except OSError:
        raise ModelError(
            f"cannot reach the hub for {repo} ({reason}), and it is not in the local cache"
        ) from reason


@contextmanager
def _reaching(repo: str) -> Iterator[None]:
    """What goes wrong between us and the hub, as one line; which HTTP library raises it changes over time.

    Only a file that the model does not have stays an EntryNotFoundError.
    """
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"cannot get {repo} from the hub ({reason}): try again, what is here stays"
        ) from error


def _ignore(_: int) -> None:
    """Small files need no progress."""


@dataclass(frozen=True, slots=True)
class HubFiles:
    """The files of one commit of a hub model, with the SHA-256 (hex) of those of which the hub knows it."""

    repo: str
    commit: str
    hashes: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        """A small file's text, or None if the model has no such file."""
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return self._download(name).read_text("utf-8")
        except EntryNotFoundError:
            return None

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Parts of files, from the local cache where the file is there, else by range requests."""
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return list(pool.map(lambda part: self._range(*part), wanted))

    def is_here(self, name: str) -> bool:
        """Whether the file is in the hub's cache."""
        return self._cached(name) is not None

    def path(self, name: str) -> Path:
        """The whole file, downloaded if it is not in the hub's cache."""
        return self._cached(name) or self.fetch(name, _ignore)

    def fetch(self, name: str, received: Callable[[int], None]) -> Path:
        """Download a whole file into the hub's cache, going on where it was when a connection is cut.

        ``received`` hears how many bytes have come, again and again. Raises `ModelError` if the hub cannot be
        reached or has no such file, or if what came is not what the hub says it is; then it is removed.
        """
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = self._download(name, received)
        except EntryNotFoundError as error:
            raise ModelError(f"{self.repo} has no file {name}: it is not a safetensors model") from error
        wanted = self.hashes.get(name)
        if wanted is not None and (found := _sha256(path)) != wanted:
            for damaged in {path.resolve(), path}:  # the cache's file, and the model's link to it
                damaged.unlink(missing_ok=True)
            raise ModelError(
                f"{name} of {self.repo} came damaged (SHA-256 {found[:12]}…, not {wanted[:12]}…): "
                "it is removed, try again"
            )
        return path

    def directory(self) -> Path:
        """The cache's directory of this commit, with the configuration and tokenizer files in it."""
        import huggingface_hub

        with _reaching(self.repo):
            return Path(
                huggingface_hub.snapshot_download(
                    self.repo,
                    revision=self.commit,
                    allow_patterns=list(_SMALL_FILES),
                    tqdm_class=_listener(_ignore),
                )
            )

    def _download(self, name: str, received: Callable[[int], None] = _ignore) -> Path:
        import huggingface_hub

        bar = _listener(received)
        with _reaching(self.repo):
            return Path(
                huggingface_hub.hf_hub_download(self.repo, name, revision=self.commit, tqdm_class=bar)
            )

    def _cached(self, name: str) -> Path | None:
        import huggingface_hub

        found = huggingface_hub.try_to_load_from_cache(self.repo, name, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def _range(self, name: str, start: int, length: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

        if length == 0:
            return b""
        cached = self._cached(name)
        if cached is not None:
            return LocalFiles(cached.parent).ranges([(cached.name, start, length)])[0]
        headers = build_hf_headers() | {"Range": f"bytes={start}-{start + length - 1}"}
        url = hf_hub_url(self.repo, name, revision=self.commit)
        stream = get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=30)
        with _reaching(self.repo), stream as response:
            # A server that ignores the range would send the whole file: leave before reading any of it.
            if response.status_code != 206:
                raise ModelError(
                    f"the hub answered {response.status_code} for a part of {name} of {self.repo}"
                )
            return bytes(response.read())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _listener(received: Callable[[int], None]) -> type[Any]:
    """A progress bar of the hub's library that shows nothing and tells ``received`` instead."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Listener(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            received(int(n or 0))

        def update_transfer(self, _: float) -> None:
            """What came compressed; ``update`` hears of the bytes that it makes."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            """How fast it came, to be shown."""

    return Listener
