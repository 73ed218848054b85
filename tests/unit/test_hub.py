"""Model names become local files: the Hub's real client against a small Hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from stub_hub import COMMIT, StubHub, serve

from specq import hub, storage
from specq.errors import DiskFullError, UsageError
from specq.hub_download import wanted_files

MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"x",
    "model.safetensors": bytes(300_000),
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
    "README.md": b"hi",
}
SCRIPT = """
import json, logging, sys
from specq import errors, hub
logging.basicConfig(format="%(message)s", level=logging.WARNING)
name, options = sys.argv[1], json.loads(sys.argv[2])
lines = []
try:
    found = hub.resolve_model(name, progress=lines.append, **options)
    answer = {"path": str(found.path), "repo_id": found.repo_id, "revision": found.revision}
except errors.SpecqError as error:
    answer = {"kind": type(error).__name__, "code": error.exit_code, "message": error.message, "hint": error.hint}
print(json.dumps({"lines": lines, "path": None, "code": 0, **answer}))
"""


@dataclass
class Client:
    """Runs resolve_model in a process of its own: the Hub's client reads its environment at import."""

    hub: StubHub
    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def __call__(self, name: str = "org/model", **options: object) -> dict:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
        settings = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, name, json.dumps(options)],
            env={**clean, **settings, **self.environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout), "stderr": done.stderr}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with serve(StubHub({"org/model": dict(MODEL)})) as stub:
        yield Client(stub, tmp_path / "home")


def files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_model_is_fetched_at_one_commit_without_code_or_pickles(client: Client) -> None:
    found = client()
    assert (found["repo_id"], found["revision"]) == ("org/model", COMMIT)
    assert files(found["path"]) == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert found["lines"][0] == "fetching org/model: 0 of 0 MB"
    assert found["stderr"] == ""


def test_cached_model_needs_no_network(client: Client) -> None:
    path = client()["path"]
    client.hub.requests.clear()
    assert client(offline=True)["path"] == path
    client.environment["HF_HUB_OFFLINE"] = "1"
    assert client()["path"] == path
    assert client(revision=COMMIT)["path"] == path
    assert client.hub.requests == []


def test_pinned_commit_in_the_cache_asks_nobody(client: Client) -> None:
    path = client()["path"]
    client.hub.requests.clear()
    assert client(revision=COMMIT)["path"] == path
    assert [path for _, path, _ in client.hub.requests if "org/model" in path] == []


@pytest.mark.parametrize("how", ["flag", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_uncached_model_offline_is_named(how: str, client: Client) -> None:
    if how != "flag":
        client.environment[how] = "1"
    found = client(**({"offline": True} if how == "flag" else {}))
    assert (found["code"], found["kind"]) == (5, "OfflineError")
    assert "`org/model`" in found["message"]
    assert client.hub.requests == []


def test_unreachable_hub_without_a_cache_is_a_network_error(client: Client) -> None:
    client.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    found = client()
    assert found["code"] == 5
    assert "http://127.0.0.1:9" in found["message"]
    assert "network" in found["hint"]


def test_unreachable_hub_with_a_cache_says_what_is_used(client: Client) -> None:
    path = client()["path"]
    client.hub.status = 503
    found = client()
    assert found["path"] == path
    assert f"the cached commit {COMMIT}" in found["stderr"]


def test_gated_model_says_where_to_ask(client: Client) -> None:
    client.hub.gated.add("org/model")
    found = client()
    assert (found["code"], found["message"]) == (4, "`org/model` is gated")
    assert f"{client.hub.url}/org/model" in found["hint"]
    assert "hf auth login" in found["hint"]
    client.hub.good_token = client.environment["HF_TOKEN"] = "hf_good"
    assert "your token has no access" in client()["hint"]


@pytest.mark.parametrize("token", [None, "hf_good"])
def test_missing_or_private_model_is_told_from_a_gated_one(token: str | None, client: Client) -> None:
    client.hub.good_token = token
    if token:
        client.environment["HF_TOKEN"] = token
    found = client("org/absent")
    assert found["code"] == 4
    assert "does not exist, or is private" in found["message"]
    assert ("your token" in found["message"]) == bool(token)


def test_bad_token_is_told_from_a_missing_model(client: Client) -> None:
    client.environment["HF_TOKEN"] = "hf_old"
    found = client()
    assert (found["code"], "your token" in found["message"]) == (4, True)
    assert "HF_TOKEN" in found["hint"]


def test_misspelt_hub_id_is_corrected_from_the_cache(client: Client) -> None:
    client()
    assert client("org/modle")["hint"] == "did you mean org/model?"


def test_missing_revision_is_named(client: Client) -> None:
    found = client(revision="v9")
    assert (found["code"], found["message"]) == (2, "`org/model` has no revision `v9`")


def test_connection_that_breaks_is_taken_up_where_it_broke(client: Client) -> None:
    # larger than the 10 MiB that the client writes at a time
    weights = client.hub.repos["org/model"]["model.safetensors"] = os.urandom(13 << 20)
    client.hub.cut["model.safetensors"] = 11 << 20
    assert Path(client()["path"], "model.safetensors").read_bytes() == weights
    assert [asked for *_, asked in client.hub.requests if asked] == [f"bytes={10 << 20}-"]


def test_download_that_died_is_no_model_and_keeps_whole_files(client: Client) -> None:
    client.hub.cut["model.safetensors"] = 1000
    client.hub.is_down_after_cut = True
    found = client()
    assert (found["code"], found["kind"]) == (5, "OfflineError")
    assert "finished files are kept" in found["hint"]
    assert client(offline=True)["code"] == 5
    client.hub.status = 200
    client.hub.requests.clear()
    assert Path(client()["path"], "model.safetensors").stat().st_size == 300_000
    fetched = [path for command, path, _ in client.hub.requests if command == "GET" and "resolve" in path]
    assert [path.rpartition("/")[2] for path in fetched] == ["model.safetensors"]


def test_shard_that_is_missing_makes_the_cache_incomplete(client: Client) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    client.hub.repos["org/model"] = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00002.safetensors": b"1",
        "model-00002-of-00002.safetensors": b"2",
    }
    folder = Path(client()["path"])
    assert client(offline=True)["path"] == str(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert client(offline=True)["code"] == 5


def test_full_disk_is_seen_before_the_download(client: Client) -> None:
    client.hub.sizes["model.safetensors"] = 10**17
    found = client()
    assert (found["code"], found["kind"]) == (8, "DiskFullError")
    assert [path for _, path, _ in client.hub.requests if "resolve" in path] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"README.md": b""}, "has no config.json, but README.md"),
        ({"config.json": b"{}"}, "has no weights"),
        ({"x-Q4_0.gguf": b"", "x-Q8_0.gguf": b""}, "holds 2 GGUF files"),
    ],
)
def test_repository_without_a_model_says_what_it_holds(content: dict, message: str, client: Client) -> None:
    client.hub.repos["org/other"] = content
    found = client("org/other")
    assert found["code"] == 2
    assert message in found["message"]


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["gptq_model-4bit-128g.safetensors"], ["gptq_model-4bit-128g.safetensors"]),
        (["pytorch_model.bin", "training_args.bin", "optimizer.bin"], ["pytorch_model.bin"]),
        (["original/model.safetensors", "pytorch_model-00001-of-00001.bin"], ["pytorch_model-00001-of-00001.bin"]),
        (
            ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"],
            ["model-00001-of-00001.safetensors", "model.safetensors.index.json"],
        ),
        (["tokenizer.model", "trainer_state.json", "evil.py", "vocab.txt"], ["tokenizer.model", "vocab.txt"]),
    ],
)
def test_one_set_of_weights_is_chosen(names: list[str], weights: list[str]) -> None:
    assert wanted_files([*names, "config.json"]) == sorted(["config.json", *weights])


@pytest.mark.parametrize("name", ["model.gguf", "folder"])
def test_local_models_are_taken_as_they_are(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        (path / "config.json").touch()
    else:
        path.touch()
    assert hub.resolve_model(str(path)) == hub.Snapshot(path)


@pytest.mark.parametrize("name", ["specq:demo", "specq:demo-head", "{folder}"])
def test_a_revision_of_what_has_none_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="has no revision `main`"):
        hub.resolve_model(name.format(folder=tmp_path), revision="main")


def test_folder_without_a_model_says_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match=r"neither a config\.json nor a \.gguf file: notes\.txt"):
        hub.resolve_model(str(tmp_path))
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "config.json").touch()
    with pytest.raises(UsageError) as caught:
        hub.resolve_model(str(tmp_path))
    assert caught.value.hint == f"did you mean {tmp_path / 'inside'}?"


def test_cache_that_cannot_be_written_is_named(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    client.environment["HF_HUB_CACHE"] = str(tmp_path / "file")
    found = client()
    assert found["code"] == 2
    assert "cannot be written" in found["message"]


def test_folder_that_only_looks_like_a_hub_id_does_not_hide_the_model(client: Client, tmp_path: Path) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    client.folder = tmp_path
    assert client("org/model")["repo_id"] == "org/model"
    (tmp_path / "org" / "model" / "config.json").touch()
    assert client("org/model")["repo_id"] is None


@pytest.mark.parametrize("name", ["./my-modle", "my-modle"])
def test_misspelt_folder_gets_a_suggestion(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="my-modle") as caught:
        hub.resolve_model(name)
    assert caught.value.hint == "did you mean my-model?"


@pytest.mark.parametrize("name", ["gpt2", "a/b/c", "org/", "https://huggingface.co/org/model", "org/model name"])
def test_name_that_is_no_hub_id_is_refused_without_a_request(name: str) -> None:
    with pytest.raises(UsageError, match="neither a folder"):
        hub.resolve_model(name)


def test_space_is_asked_of_the_disk_itself(tmp_path: Path) -> None:
    storage.require_space(tmp_path, 1)
    with pytest.raises(DiskFullError, match="are needed"):
        storage.require_space(tmp_path, 10**18)
