"""Downloads over HTTP from a stand-in of the hub."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from tests.tools.hub_server import LISTING, Alter, Cut, HubServer, IgnoreRange, Refuse, checksum
from tests.unit.hub.conftest import CONFIG, model, weights
from tgi_cli.errors import (
    CorruptFileError,
    DiskFullError,
    ExitCode,
    GatedModelError,
    HubError,
    ModelError,
    ModelNotFoundError,
    OfflineError,
)
from tgi_cli.hub.download import download_progress, tqdm_class
from tgi_cli.hub.resolve import LocalModel, resolve_model
from tgi_cli.process.progress import ProgressReporter

WEIGHTS = "model.safetensors"


class Counter(ProgressReporter):
    """Records what is reported."""

    def __init__(self) -> None:
        super().__init__(show_bar=False, log_interval=None)
        self.total = self.have = 0.0
        self.note = ""

    def start(self, title: str, total: float, completed: float = 0) -> None:
        self.total, self.have = total, completed

    def advance(self, count: float, note: str | None = None) -> None:
        self.have += count
        self.note = note or self.note


def blobs(tmp_path: Path) -> dict[str, int]:
    folder = tmp_path / "hub" / "models--org--m" / "blobs"
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def test_without_weights_configuration_and_tokenizer_are_enough(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/m", model())
    found = resolve_model("org/m", weights=False)
    assert (found.path / "config.json").is_file()
    assert not (found.path / WEIGHTS).exists()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model("org/m", weights=False).path == found.path
    with pytest.raises(OfflineError):
        resolve_model("org/m")


def test_only_what_serving_needs_is_fetched(hub: HubServer) -> None:
    commit = hub.add(
        "org/m",
        model(
            README__md=b"long",
            training_args__bin=b"x",
            modeling__py=b"import os",
            consolidated__safetensors=weights(),
        ),
    )
    found = resolve_model("org/m")
    assert found == LocalModel(found.path, "org/m", commit)
    wanted = {"config.json", "tokenizer.json", WEIGHTS}
    assert hub.fetched() == wanted
    assert {path.name for path in found.path.iterdir()} == wanted
    assert (found.path / WEIGHTS).read_bytes() == weights()


def test_code_is_fetched_only_with_trust_remote_code(hub: HubServer) -> None:
    hub.add("org/m", model(modeling__py=b"import os"))
    assert not (resolve_model("org/m").path / "modeling.py").exists()
    assert (resolve_model("org/m", trust_remote_code=True).path / "modeling.py").exists()


def test_the_cache_is_shared_with_huggingface_hub(hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir

    hub.add("org/m", model(), revisions={"main", "v1"})
    path = resolve_model("org/m", revision="v1").path
    cache = tmp_path / "hub"
    theirs = hf_hub_download(
        "org/m", WEIGHTS, revision="v1", cache_dir=cache, local_files_only=True
    )
    assert Path(theirs) == path / WEIGHTS
    report = scan_cache_dir(cache)
    assert not report.warnings
    assert [repo.repo_id for repo in report.repos] == ["org/m"]


def test_a_second_run_fetches_nothing(hub: HubServer) -> None:
    hub.add("org/m", model())
    first = resolve_model("org/m")
    hub.seen.clear()
    assert resolve_model("org/m", progress=download_progress(json_output=True)) == first
    assert hub.seen == []


def test_a_listing_without_sizes_is_completed_file_by_file(hub: HubServer) -> None:
    hub.add("org/m", model(), bare_listing=True)
    assert (resolve_model("org/m").path / WEIGHTS).read_bytes() == weights()


def test_a_cut_transfer_resumes(hub: HubServer, waits: list[float | None]) -> None:
    hub.add("org/m", model())
    for after in (1000, 50_000, 9):
        hub.fault(WEIGHTS, Cut(after))
    counter = Counter()
    path = resolve_model("org/m", progress=counter).path
    assert hub.ranges(WEIGHTS) == [None, "bytes=1000-", "bytes=51000-", "bytes=51009-"]
    assert (path / WEIGHTS).read_bytes() == weights()
    assert counter.have == counter.total
    assert counter.note == "3 of 3 files"


def test_the_next_run_resumes_a_partial_file(
    hub: HubServer, tmp_path: Path, waits: list[float | None]
) -> None:
    hub.add("org/m", model())
    hub.fault(WEIGHTS, Cut(70_000))
    hub.fault(WEIGHTS, Cut(0), times=5)
    with pytest.raises(OfflineError) as caught:
        resolve_model("org/m")
    assert caught.value.exit_code == ExitCode.MODEL_UNAVAILABLE
    partial = f"{checksum(WEIGHTS, weights())}.incomplete"
    assert blobs(tmp_path)[partial] == 70_000

    hub.seen.clear()
    hub.clear_faults()
    counter = Counter()
    path = resolve_model("org/m", progress=counter).path
    assert hub.ranges(WEIGHTS) == ["bytes=70000-"]
    assert hub.fetched() == {WEIGHTS}
    assert (path / WEIGHTS).read_bytes() == weights()
    assert partial not in blobs(tmp_path)
    assert counter.have == counter.total


def test_a_server_without_ranges_starts_over(hub: HubServer, waits: list[float | None]) -> None:
    hub.add("org/m", model())
    hub.fault(WEIGHTS, Cut(1000))
    hub.fault(WEIGHTS, IgnoreRange())
    path = resolve_model("org/m").path
    assert hub.ranges(WEIGHTS) == [None, "bytes=1000-", None]
    assert (path / WEIGHTS).read_bytes() == weights()


@pytest.mark.parametrize("what", [LISTING, WEIGHTS])
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_respected(
    hub: HubServer, waits: list[float | None], what: str, status: int
) -> None:
    hub.add("org/m", model())
    hub.fault(what, Refuse(status, retry_after=7), times=3)
    hub.fault(what, Refuse(status))
    resolve_model("org/m")
    assert waits == [7.0, 7.0, 7.0, None]


@pytest.mark.parametrize("what", [LISTING, WEIGHTS])
def test_retries_are_exhausted_after_five_attempts(
    hub: HubServer, waits: list[float | None], what: str
) -> None:
    hub.add("org/m", model())
    hub.fault(what, Refuse(503), times=20)
    with pytest.raises(OfflineError, match="keeps answering 503") as caught:
        resolve_model("org/m")
    assert "again later" in caught.value.remedy
    assert len(waits) == 4


def test_a_delay_of_an_hour_is_reported_at_once(hub: HubServer, waits: list[float | None]) -> None:
    hub.add("org/m", model())
    hub.fault(LISTING, Refuse(429, retry_after=3600))
    with pytest.raises(OfflineError, match=r"429.*3600 s"):
        resolve_model("org/m")
    assert waits == []


def test_altered_bytes_are_fetched_again(hub: HubServer) -> None:
    hub.add("org/m", model())
    hub.fault(WEIGHTS, Alter())
    hub.fault("tokenizer.json", Alter())
    counter = Counter()
    path = resolve_model("org/m", progress=counter).path
    assert (path / WEIGHTS).read_bytes() == weights()
    assert (path / "tokenizer.json").read_bytes() == b"{}"
    assert hub.ranges(WEIGHTS) == [None, None]
    assert counter.have == counter.total


def test_a_second_checksum_error_is_reported_and_leaves_nothing(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("org/m", model())
    hub.fault(WEIGHTS, Alter(), times=2)
    with pytest.raises(CorruptFileError, match=rf"{WEIGHTS}.*checksum"):
        resolve_model("org/m")
    assert not any(name.startswith(checksum(WEIGHTS, weights())) for name in blobs(tmp_path))


def test_a_damaged_partial_file_is_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/m", model())
    folder = tmp_path / "hub" / "models--org--m" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{checksum(WEIGHTS, weights())}.incomplete").write_bytes(b"\0" * 1000)
    path = resolve_model("org/m").path
    assert (path / WEIGHTS).read_bytes() == weights()
    assert hub.ranges(WEIGHTS) == ["bytes=1000-", None]


def test_a_cached_file_of_the_wrong_size_is_fetched_again(hub: HubServer) -> None:
    hub.add("org/m", model())
    blob = (resolve_model("org/m").path / WEIGHTS).resolve()
    blob.write_bytes(b"short")
    path = resolve_model("org/m").path
    assert (path / WEIGHTS).read_bytes() == weights()


def test_weights_truncated_in_the_repository_are_refused(hub: HubServer) -> None:
    hub.add("org/m", model(model__safetensors=weights()[:-100]))
    with pytest.raises(CorruptFileError, match="truncated"):
        resolve_model("org/m")


def test_missing_shards_of_the_index_are_named(hub: HubServer) -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(shards)}}
    files = {"config.json": CONFIG, "model.safetensors.index.json": json.dumps(index).encode()}
    hub.add("org/m", files | {shards[0]: weights()})
    with pytest.raises(ModelError, match=f"lacks {shards[1]}, {shards[2]}"):
        resolve_model("org/m")


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ({"config.json": CONFIG, "mmproj-F16.gguf": b"GGUF"}, "GGUF"),
        ({"config.json": CONFIG, "tf_model.h5": b"x"}, "safetensors"),
    ],
)
def test_a_repository_without_weights_is_refused_with_advice(
    hub: HubServer, files: dict[str, bytes], remedy: str
) -> None:
    hub.add("org/m", files)
    with pytest.raises(ModelError, match=r"org/m has no .safetensors weights") as caught:
        resolve_model("org/m")
    assert remedy in caught.value.remedy
    assert hub.seen == []


def test_unknown_models_and_revisions_are_not_found(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/m", model())
    with pytest.raises(ModelNotFoundError, match="'org/typo'") as caught:
        resolve_model("org/typo")
    assert "spelling" in caught.value.remedy
    assert "./org/typo" in caught.value.remedy
    with pytest.raises(ModelNotFoundError, match="no revision 'v9'"):
        resolve_model("org/m", revision="v9")
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a model id"):
        resolve_model("a/b/c")
    monkeypatch.setenv("HF_TOKEN", hub.reader)
    with pytest.raises(ModelNotFoundError, match="this token"):
        resolve_model("org/typo")


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_private_model_needs_a_token(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    hub.add("org/m", model(), private=True)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("org/m")
    assert "HF_TOKEN" in caught.value.remedy
    monkeypatch.setenv(variable, hub.reader)
    resolve_model("org/m")
    # The large files' second host must not see the token.
    sent = {(seen.host.partition(":")[0], seen.authorization) for seen in hub.seen}
    assert sent == {("127.0.0.1", f"Bearer {hub.reader}"), ("localhost", None)}


def test_a_gated_model_needs_a_token_with_access(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/m", model(), gated=True)
    with pytest.raises(GatedModelError, match="no token is set") as caught:
        resolve_model("org/m")
    assert "HF_TOKEN" in caught.value.remedy
    monkeypatch.setenv("HF_TOKEN", hub.stranger)
    with pytest.raises(GatedModelError, match="no access") as caught:
        resolve_model("org/m")
    assert f"{hub.url}/org/m" in caught.value.remedy
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelNotFoundError, match="does not accept this token"):
        resolve_model("org/m")
    monkeypatch.setenv("HF_TOKEN", hub.reader)
    resolve_model("org/m")


@pytest.mark.tgi_pain(13)
def test_offline_mode_uses_complete_snapshots(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/m", model())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE"):
        resolve_model("org/m")
    assert hub.listings == 0
    monkeypatch.delenv("HF_HUB_OFFLINE")
    online = resolve_model("org/m")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    listings = hub.listings
    assert resolve_model("org/m") == online
    assert resolve_model("org/m", revision=online.revision) == online
    assert hub.listings == listings
    (online.path / WEIGHTS).unlink()
    with pytest.raises(OfflineError):
        resolve_model("org/m")


def test_an_unreachable_hub_falls_back_to_the_cache(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/m", model())
    online = resolve_model("org/m")
    with socket.socket() as taken:
        # Bound and not listening: connections are refused.
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert resolve_model("org/m") == online
        assert "using the cached snapshot" in caplog.text
        with pytest.raises(OfflineError, match=r"cannot reach http://127.0.0.1") as caught:
            resolve_model("org/other")
    assert "HF_ENDPOINT" in caught.value.remedy
    assert "a folder is ./org/other" in caught.value.remedy


def test_free_space_is_checked_before_the_first_byte(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, waits: list[float | None]
) -> None:
    hub.add("org/m", model())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 150_000))
    with pytest.raises(DiskFullError, match=r"needs 200.\d kB .* 150.0 kB free") as caught:
        resolve_model("org/m")
    assert "HF_HUB_CACHE" in caught.value.remedy
    assert hub.seen == []


def test_downloaded_bytes_need_no_space(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("org/m", model())
    folder = tmp_path / "hub" / "models--org--m" / "blobs"
    folder.mkdir(parents=True)
    name = checksum(WEIGHTS, weights())
    (folder / f"{name}.incomplete").write_bytes(weights()[:100_000])
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 150_000))
    assert resolve_model("org/m").path.is_dir()


def test_a_full_disk_is_an_error_with_a_remedy(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/m", model())
    folder = tmp_path / "hub" / "models--org--m" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{checksum(WEIGHTS, weights())}.incomplete").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="is full") as caught:
        resolve_model("org/m")
    assert "resumes" in caught.value.remedy


def test_an_invalid_listing_is_an_error_of_the_endpoint(hub: HubServer) -> None:
    hub.add("org/m", model())
    hub.repos["org/m"].commit = "../../elsewhere"
    with pytest.raises(HubError, match="does not answer as a hub") as caught:
        resolve_model("org/m")
    assert "HF_ENDPOINT" in caught.value.remedy


def test_a_revision_is_not_a_path(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="no revision"):
        resolve_model("org/m", revision="../../../secret")


def test_names_that_escape_the_snapshot_are_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/m", model() | {"additional_chat_templates/../../../../x.jinja": b"x"})
    with pytest.raises(CorruptFileError, match="path"):
        resolve_model("org/m")
    assert not list(tmp_path.rglob("x.jinja"))


def test_downloads_by_huggingface_hub_report_progress(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/m", model())
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "1")
    counter = Counter()
    path = resolve_model("org/m", progress=counter).path
    assert (path / WEIGHTS).read_bytes() == weights()
    assert counter.have == counter.total
    hub.add("org/n", model(), gated=True)
    with pytest.raises(GatedModelError):
        resolve_model("org/n")


def test_progress_is_silent_a_bar_or_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert download_progress().show_bar
    assert not download_progress(quiet=True).show_bar
    assert not download_progress(json_output=True).show_bar


def test_libraries_that_require_tqdm_feed_the_reporter() -> None:
    counter = Counter()
    with tqdm_class(counter)(total=100, desc="x", unit="B", initial=0) as bar:
        bar.update(30)
        bar.update_transfer(25)
        bar.update(70)
    assert counter.have == 100
