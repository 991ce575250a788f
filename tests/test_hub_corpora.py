"""Corpora of the Hub: `datasets` on local Parquet, and the programs against a Hub on 127.0.0.1."""

import functools
import hashlib
import http.server
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import types
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import parse_qs, unquote

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import config
from data import corpora, loader, prepare, tokenizer
from data.corpora import Corpus

ROOT = Path(config.__file__).parent.parent
END = "<|endoftext|>"
TEXTS = [f"text {i}: ä∩😀, {i * 'word '}\r\n{END}" for i in range(300)]
COMMIT, NEWER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


def parquet(texts, column: str = "text", group: int = 7) -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"id": range(len(texts)), column: texts})
    pyarrow.parquet.write_table(table, file, row_group_size=group)
    return file.getvalue()


def ids_of(folder: Path, split: str) -> list[int]:
    """All ids of a split, read without the loader."""
    paths = sorted(folder.glob(f"{split}_*.bin"))
    return [int(i) for p in paths for i in np.frombuffer(p.read_bytes()[1024:], "<u2")]


def encoded(texts: list[str], name: str = "gpt2") -> dict[str, list[int]]:
    """The ids of both splits, made without the code under test: 1 % is chosen by its hash."""
    encoding, ids = tokenizer.load(name), {"train": [], "val": []}
    for text in texts:
        first = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        split = "val" if first < 0.01 * 2**64 else "train"
        ids[split] += [encoding.eot_token, *encoding.encode_ordinary(text)]
    return ids


def assert_holds(folder: Path, texts: list[str], revision: str, name: str = "gpt2") -> None:
    meta = loader.read_meta(folder)
    assert meta["complete"] is True
    assert meta["source"]["revision"] == revision
    wanted = encoded(texts, name)
    assert wanted["val"]
    assert {split: ids_of(folder, split) for split in wanted} == wanted
    assert sum(s["documents"] for s in meta["shards"]) == len(texts)


# `datasets` on a local folder


@pytest.fixture(autouse=True)
def _no_cache_at_home(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_parts(folder: Path, texts: list, sizes=(13, 1, 29)) -> Path:
    """Parquet files of these numbers of rows and the rest, named so that their order is plain."""
    folder.mkdir()
    ends = [0, *itertools.accumulate(sizes), len(texts)]
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        rows = pyarrow.array(texts[a:b], pyarrow.string())
        (folder / f"train-{i:05d}.parquet").write_bytes(parquet(rows, group=5))
    return folder


def streamed(folder: Path, **fields) -> Corpus:
    """The corpus of a dataset's repository that lies here."""
    corpus = corpora._from_hub("made", str(folder))
    return replace(corpus, **({"revision": lambda: COMMIT} | fields))


def test_skipping_rows_of_a_stream_gives_exactly_the_rows_from_there_on(tmp_path):
    """datasets #5454, #8145, #8308: streams did not go on where they were left."""
    from datasets import load_dataset

    texts = [f"row {i}" for i in range(50)]
    rows = load_dataset(str(write_parts(tmp_path / "d", texts)), split="train", streaming=True)
    for n in range(len(texts) + 2):
        assert [row["text"] for row in rows.select_columns(["text"]).skip(n)] == texts[n:]


def test_documents_of_a_stream_from_the_nth_on_are_the_rest_of_all(tmp_path):
    texts = [*TEXTS[:20], "", None, *TEXTS[20:60]]
    corpus = streamed(write_parts(tmp_path / "d", texts))
    wanted = [(text or "").encode() for text in texts]
    for start in (0, 1, 12, 13, 14, 15, 21, 42, 43, 44, 61, 62, 70):
        got = [b"".join(chunks) for _, chunks in corpus.documents(start, commit=COMMIT)]
        assert got == wanted[start:]


def test_a_validation_split_of_the_source_is_used_and_comes_first(tmp_path):
    folder = write_parts(tmp_path / "d", TEXTS[:100])
    (folder / "validation-00000.parquet").write_bytes(parquet(TEXTS[100:130]))
    wanted = [("val", t) for t in TEXTS[100:130]] + [("train", t) for t in TEXTS[:100]]
    corpus = streamed(folder)
    for start in (0, 1, 29, 30, 31, 43, 44, 129, 130, 131):
        documents = corpus.documents(start, commit=COMMIT)
        got = [(split, b"".join(chunks).decode()) for split, chunks in documents]
        assert got == wanted[start:]
    prepare.prepare(corpus, tokenizer.load("byte"), tmp_path / "out", shard_tokens=5000)
    for split in ("val", "train"):
        ids = [[256, *t.encode()] for s, t in wanted if s == split]
        assert ids_of(tmp_path / "out", split) == list(itertools.chain(*ids))


def test_a_long_validation_split_leaves_room_for_training_tokens(tmp_path):
    folder = write_parts(tmp_path / "d", ["t" * 99] * 60)
    (folder / "validation-00000.parquet").write_bytes(parquet(["v" * 99] * 70))
    byte, out = tokenizer.load("byte"), tmp_path / "out"
    meta = prepare.prepare(streamed(folder), byte, out, shard_tokens=5000, max_tokens=3000)
    counts = {split: len(ids_of(out, split)) for split in ("val", "train")}
    assert counts == {"val": 300, "train": 2700}
    assert sum(s["documents"] for s in meta["shards"]) == 30


def test_a_dataset_without_a_training_split_is_refused_with_those_it_has(tmp_path):
    (tmp_path / "test-00000.parquet").write_bytes(parquet(["a"]))
    with pytest.raises(ValueError, match=r"no split 'train', but test"):
        next(streamed(tmp_path).documents(commit=COMMIT))


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_a_stream_gives_the_same_bytes_as_the_same_texts_in_jsonl(name, tmp_path):
    texts = [*TEXTS, "", None]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "t.jsonl").write_text("".join(lines), encoding="utf-8")
    stream = streamed(write_parts(tmp_path / "d", texts))
    local = replace(corpora.find(str(tmp_path / "t.jsonl")), val_share=stream.val_share)
    metas = [
        prepare.prepare(corpus, tokenizer.load(name), tmp_path / str(i), shard_tokens=5000)
        for i, corpus in enumerate([stream, local])
    ]
    assert len(metas[0]["shards"]) > 3
    assert metas[0]["shards"] == metas[1]["shards"]
    assert [meta["empty_documents"] for meta in metas] == [2, 2]
    assert_holds(tmp_path / "0", TEXTS, COMMIT, name)


class Broken(Exception):
    pass


@pytest.mark.parametrize("n", [0, 1, 20, 100, 201, 499])
def test_a_stream_that_breaks_is_continued_at_the_same_revision(n, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SNAPSHOT_SECONDS", 0)
    monkeypatch.setattr(prepare, "PIECE_BYTES", 300)
    texts = [f"text {i}: ä∩😀\r\n" for i in range(500)]
    stream, calls = streamed(write_parts(tmp_path / "d", texts, (200, 1, 100))), []

    def until(stop, start, commit):
        calls.append((start, commit))
        yield from itertools.islice(stream.documents(start, commit=commit), stop - start)
        if stop < len(texts):
            raise Broken

    before = replace(stream, documents=lambda start=0, commit=None: until(n, start, commit))
    after = replace(stream, documents=lambda start=0, commit=None: until(500, start, commit))
    encoding, out = tokenizer.load("byte"), tmp_path / "out"
    with pytest.raises(Broken):
        prepare.prepare(before, encoding, out, shard_tokens=1000)
    prepare.prepare(replace(after, revision=lambda: NEWER), encoding, out, shard_tokens=1000)
    first, (start, commit) = calls
    assert first == (0, COMMIT)
    if n < 50:  # nothing was written yet
        assert (start, commit) == (0, NEWER)
    else:
        assert n - 100 < start <= n
        assert commit == COMMIT
    assert_holds(out, texts, commit, "byte")
    fresh = prepare.prepare(stream, encoding, tmp_path / "fresh", shard_tokens=1000)
    assert loader.read_meta(out)["shards"] == fresh["shards"]


class NetworkError(Exception):
    """As the Hub's HTTP client raises it: no OSError."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Dataset scripts are no longer supported, but found x.py"), "in Parquet"),
        (ValueError("Config name is missing."), "hf:owner/name:config:column"),
        (KeyError("text"), "hf:owner/name:config:column"),
        (NetworkError("Connection refused\nfor a long reason"), r"\(Connection refused\)"),
        (ConnectionError("Server Disconnected"), "Server Disconnected"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "while streaming"])
def test_what_datasets_can_not_stream_is_told_with_what_to_do(late, error, said, monkeypatch):
    """nanoGPT #633: `datasets` runs no loading scripts any more."""

    class Rows:
        def select_columns(self, _):
            return self

        def skip(self, _):
            yield {"text": "the first"}
            raise error

    def load_dataset(*_, **__):
        if late:
            return {"train": Rows()}
        raise error

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    documents = corpora.find("hf:owner/name").documents()
    if late:
        assert next(documents)[0] is None
    with pytest.raises(ValueError, match=said) as refusal:
        next(documents)
    assert "owner/name" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("values", [[1, 2], [["a"], ["b"]], [True, False], [0.5, 0.0]])
def test_a_column_of_a_dataset_that_is_no_text_is_refused(values, tmp_path):
    corpus = streamed(tmp_path)
    (tmp_path / "train.parquet").write_bytes(parquet(values))
    with pytest.raises(ValueError, match=r"column text .*no text"):
        list(corpus.documents(commit=COMMIT))


def test_two_datasets_never_share_a_folder():
    names = ["hf:a/b", "hf:a/b:c", "hf:a/b::c", "hf:a/b_c", "hf:a/b:c:d", "hf:a/b:c_d", "hf:a_b/c"]
    folders = {corpora.folder_name(name) for name in names}
    assert len(folders) == len(names)
    assert not any(set(folder) & set("/\\: ") for folder in folders)
    assert {corpora.find(name).name for name in names} == folders


# A Hub on 127.0.0.1


@dataclass
class Repo:
    """Branches lead to commits, and these hold files. Of a list, each but the last is given once;
    a number in place of a file is an error's status, and counts when the file itself is asked."""

    commits: dict[str, dict[str, bytes | list[bytes | int]]]
    branches: dict[str, list[str]] = field(default_factory=lambda: {"main": [COMMIT]})


@dataclass
class Hub:
    repos: dict[str, Repo]
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def asked_for(self, part: str) -> list[str]:
        return [line for line in self.asked if part in line]


class HubStandIn(http.server.BaseHTTPRequestHandler):
    """What `datasets` and huggingface_hub ask of huggingface.co for datasets."""

    def __init__(self, *args, hub: Hub):
        self.hub = hub
        super().__init__(*args)

    def do_GET(self):
        with self.hub.lock:
            self.hub.asked.append(f"{self.command} {self.path}")
            self.answer(*self.reply())

    do_HEAD = do_GET

    def reply(self) -> tuple:
        """Status, content and headers for /[api/]datasets/OWNER/NAME/KIND/REVISION/PATH."""
        path, _, query = self.path.partition("?")
        parts = [unquote(p) for p in path.removeprefix("/api").strip("/").split("/")]
        if parts[0] != "datasets":  # of telemetry
            return error("EntryNotFound")
        _, owner, name, kind, revision, *rest = [*parts, "", ""]
        repo, path = self.hub.repos.get(f"{owner}/{name}"), "/".join(rest).strip("/")
        if not repo:
            return error("RepoNotFound")
        commit = given(repo.branches[revision]) if revision in repo.branches else revision
        if commit not in repo.commits:
            return error("RevisionNotFound")
        files = repo.commits[commit]
        sizes = {name: len(first_bytes(content)) for name, content in files.items()}
        entries = [
            {"type": "file", "path": p, "size": n, "oid": "0" * 40} for p, n in sizes.items()
        ]
        above = {"/".join(p.split("/")[:i]) for p in files for i in range(1, p.count("/") + 1)}
        entries += [{"type": "directory", "path": p, "size": 0, "oid": "1" * 40} for p in above]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return found({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})
        if kind == "tree" and (not path or path in above):
            entries = [e for e in entries if e["path"].startswith(path and path + "/")]
            if parse_qs(query)["recursive"] != ["true"]:
                level = path.count("/") + bool(path)
                entries = [e for e in entries if e["path"].count("/") == level]
            return found(entries)
        if kind == "resolve" and path in files:
            return self.file(files[path], commit)
        return error("EntryNotFound")

    def file(self, content, commit: str) -> tuple:
        if self.command == "HEAD":
            content = first_bytes(content)
        elif isinstance(content := given(content), int):
            return content, b"", {}
        tag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            return 200, content, headers
        start, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return 206, content[start : end + 1], headers

    def answer(self, status: int, content: bytes, headers: dict) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def found(content) -> tuple:
    return 200, json.dumps(content).encode(), {"Content-Type": "application/json"}


def error(code: str) -> tuple:
    return 404, b"{}", {"X-Error-Code": code}


def given(content):
    """The next of a list, whose last one stays."""
    if isinstance(content, list):
        return content.pop(0) if len(content) > 1 else content[0]
    return content


def first_bytes(content) -> bytes:
    """What comes next and is no error."""
    return (
        next(c for c in content if isinstance(c, bytes)) if isinstance(content, list) else content
    )


def card(**patterns: str) -> bytes:
    """A dataset's README.md that names configs and their files."""
    lines = ["---", "configs:"]
    for name, pattern in patterns.items():
        lines += [f"- config_name: {name}", "  data_files:", "  - split: train"]
        lines += [f"    path: {pattern}"]
    return "\n".join([*lines, "---", "# A dataset", ""]).encode()


def shard(n: int, seed: int) -> bytes:
    ids = np.random.default_rng(seed).integers(0, 50257, n, dtype="<u2")
    ids[0] = 50256
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, n
    return header.tobytes() + ids.tobytes()


SHARDS = {
    "fineweb_val_000000.bin": shard(500, 0),
    "fineweb_train_000001.bin": shard(700, 1),
    "fineweb_train_000002.bin": shard(600, 2),
}
DAMAGES = {
    lambda data: data[:-2]: "is damaged: 600 tokens need 2224 bytes, it has 2222",
    lambda data: data[:-2] + b"\x51\xc4": "holds id 50257, but GPT-2's end at 50256",
    lambda data: b"\0" + data[1:]: "is no token shard",
    lambda data: b"<html>log in, please</html>": "is no token shard",
}
# Enough text for a shard to be finished before the second file is asked for.
LONG = [f"{text} " + "many words " * 700 for text in TEXTS]


def made_hub() -> Hub:
    wrong = parquet(["wrong"])
    fineweb_edu = {
        "README.md": card(**{"default": "data/*/*", "sample-10BT": "sample/10BT/*"}),
        ".gitattributes": b"",
        "data/CC-MAIN-2013-20/train-00000-of-00014.parquet": wrong,
        "sample/10BT/000_00000.parquet": parquet(TEXTS[:120]),
        "sample/10BT/001_00000.parquet": parquet(TEXTS[120:]),
        "sample/100BT/000_00000.parquet": wrong,
    }
    converted = {
        "plain_text/train/0000.parquet": parquet(TEXTS[:299]),
        "plain_text/train/0001.parquet": parquet(TEXTS[299:]),
    }
    data = {"README.md": card(one="one/*.parquet", two="two/*.parquet"), "one/a.parquet": wrong}
    data |= {"two/a.parquet": parquet(TEXTS, "body"), "two/notes.txt": b"no data"}
    moving = {
        "README.md": b"# No configs",
        "data/train-00000-of-00002.parquet": parquet(LONG[:150]),
        "data/train-00001-of-00002.parquet": [404, parquet(LONG[150:])],
    }
    name, whole = "fineweb_train_000002.bin", SHARDS["fineweb_train_000002.bin"]
    shards = SHARDS | {name: [404, *(damage(whole) for damage in DAMAGES), whole], "README.md": b""}
    newer = {name: shard(400, 9) for name in SHARDS}
    return Hub(
        {
            "HuggingFaceFW/fineweb-edu": Repo({COMMIT: fineweb_edu}),
            "Skylion007/openwebtext": Repo(
                {NEWER: {"openwebtext.py": b"raise SystemExit"}, COMMIT: converted},
                {"main": [NEWER], "refs/convert/parquet": [COMMIT]},
            ),
            "kjj0/fineweb10B-gpt2": Repo(
                {COMMIT: shards, NEWER: newer}, {"main": [COMMIT, COMMIT, NEWER]}
            ),
            "own/data": Repo({COMMIT: data}),
            "own/moving": Repo(
                {COMMIT: moving, NEWER: {"a.parquet": wrong}}, {"main": [COMMIT, NEWER]}
            ),
            "own/numbers": Repo({COMMIT: {"a.parquet": parquet([1, 2, 3])}}),
            "old/script": Repo({COMMIT: {"README.md": b"", "script.py": b"raise SystemExit"}}),
        }
    )


def environment(endpoint: str, home: Path) -> dict[str, str]:
    names = ("HF_", "HUGGINGFACE_", "PYTHON")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    kept = {k: v for k, v in kept.items() if not k.lower().endswith("_proxy")}
    kept |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return kept | {"https_proxy": "http://127.0.0.1:9"}  # all other hosts refuse


# The program, called several times in one process: importing what it needs takes seconds.
CALLS = """
import contextlib, io, json, sys, time
from pathlib import Path
import datasets
import config
from data import prepare

for data_dir, *argv in json.loads(sys.argv[1]):
    start, out, err = time.monotonic(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = config.run_program(prepare.main, [*argv, "--data-dir", data_dir])
        except Exception as error:
            code = f"escaped: {error!r}"
    result = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
    result["seconds"] = time.monotonic() - start
    files = [p for p in Path(data_dir).rglob("*") if p.is_file()]
    result["files"] = [p.relative_to(data_dir).as_posix() for p in files]
    print(json.dumps(result), flush=True)
"""


def start(endpoint: str, home: Path, calls: list[list[str]]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CALLS, json.dumps([[str(a) for a in call] for call in calls])],
        cwd=ROOT,
        env=environment(endpoint, home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def results(process: subprocess.Popen) -> list[dict]:
    with process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err.decode()
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def hub():
    """The stand-in, and its address."""
    hub = made_hub()
    handler = functools.partial(HubStandIn, hub=hub)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield hub, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


MOVING = ["hf:own/moving", "--shard-tokens", "300000", "--workers", "1", "--tokenizer", "byte"]
WRONG = ["hf:own/data", "hf:own/data:nine", "hf:own/data:two", "hf:own/numbers"]
WRONG += ["hf:old/script", "hf:no/such"]


@pytest.fixture(scope="module")
def ran(hub, tmp_path_factory):
    """The data folder, and what each call said, by its first argument."""
    home = tmp_path_factory.mktemp("hub")
    names = ["openwebtext", "hf:own/data:two:body", *["fineweb10B-gpt2"] * (2 + len(DAMAGES))]
    calls = [[home / "data", name, "--max-tokens", "1000000"] for name in names]
    calls += [[home / "data", *MOVING], [home / "data", *MOVING]]
    calls += [[home / name.replace(":", "_"), name] for name in WRONG]
    said = {}
    for call, result in zip(calls, results(start(hub[1], home, calls)), strict=True):
        said.setdefault(call[1], []).append(result)
    return home, said


def test_fineweb_edu_is_prepared_from_its_sample_with_one_command(hub, tmp_path):
    argv = ["fineweb_edu", "--max-tokens", "1000000", "--data-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "data.prepare", *argv],
        cwd=ROOT,
        env=environment(hub[1], tmp_path / "home"),
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert_holds(tmp_path / "fineweb_edu-gpt2", TEXTS, COMMIT)
    source = loader.read_meta(tmp_path / "fineweb_edu-gpt2")["source"]
    assert source["text"] == "HuggingFaceFW/fineweb-edu"
    assert source["subset"] == "sample-10BT"
    assert f"train {len(encoded(TEXTS)['train']):,} tokens".encode() in done.stdout


def test_openwebtext_comes_from_its_converted_branch_and_no_script_is_fetched(hub, ran):
    home, said = ran
    assert [result["code"] for result in said["openwebtext"]] == [0]
    assert_holds(home / "data" / "openwebtext-gpt2", TEXTS, COMMIT)
    asked = hub[0].asked_for("/openwebtext/")
    assert asked[0].endswith("/revision/refs%2Fconvert%2Fparquet")
    assert [
        line for line in asked if "openwebtext.py" in line and not line.startswith("HEAD")
    ] == []
    assert [line for line in asked if "/main" in line or NEWER in line] == []


def test_any_dataset_is_prepared_by_repository_config_and_column(ran):
    home, said = ran
    assert [result["code"] for result in said["hf:own/data:two:body"]] == [0]
    folder = prepare.folder_of("hf:own/data:two:body", "gpt2", home / "data")
    assert_holds(folder, TEXTS, COMMIT)
    source = loader.read_meta(folder)["source"]
    assert (source["text"], source["subset"], source["column"]) == ("own/data", "two", "body")


def test_an_interrupted_stream_goes_on_with_the_commit_that_it_began_with(hub, ran):
    home, said = ran
    first, second = said["hf:own/moving"]
    assert (first["code"], second["code"]) == (2, 0)
    assert "datasets can't stream own/moving" in first["err"]
    folder = prepare.folder_of(MOVING[0], "byte", home / "data")
    assert loader.read_meta(folder)["shards"][0]["file"] == "val_000000.bin"
    assert f"{folder.name}/train_000000.bin" in first["files"]
    assert f"{folder.name}/train_000009.bin" not in first["files"]
    assert_holds(folder, LONG, COMMIT, "byte")
    assert hub[0].asked_for(f"own/moving/resolve/{NEWER}") == []


def test_ready_shards_are_used_as_they_are(ran):
    home, said = ran
    assert said["fineweb10B-gpt2"][-1]["code"] == 0
    folder = home / "data" / "fineweb10B-gpt2-gpt2"
    ours = ["val_000000.bin", "train_000000.bin", "train_000001.bin"]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*ours, "meta.json"])
    meta = loader.read_meta(folder)
    assert meta["complete"] is True
    assert meta["source"] == {"text": "kjj0/fineweb10B-gpt2", "revision": COMMIT}
    encoding = tokenizer.load("gpt2")
    for entry, name, content in zip(meta["shards"], ours, SHARDS.values(), strict=True):
        assert (folder / name).read_bytes() == content
        ids = np.frombuffer(content[1024:], "<u2").tolist()
        texts = [encoding.decode_bytes([i]) for i in ids if i != encoding.eot_token]
        assert entry == {
            "file": name,
            "tokens": len(ids),
            "documents": ids.count(encoding.eot_token),
            "bytes": len(b"".join(texts)),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


def test_an_interrupted_fetch_goes_on_without_fetching_again_what_is_there(hub, ran):
    """Its branch moves meanwhile: the shards are all of the commit that it began with."""
    _, said = ran
    interrupted, *damaged, complete = said["fineweb10B-gpt2"]
    assert (interrupted["code"], complete["code"]) == (2, 0)
    assert "kjj0/fineweb10B-gpt2" in interrupted["err"]
    assert "try again" in interrupted["err"]
    for result in (interrupted, *damaged):
        shards = {f for f in result["files"] if re.match(r"fineweb10B-gpt2-gpt2/[^/]+\.bin$", f)}
        assert shards == {f"fineweb10B-gpt2-gpt2/{split}_000000.bin" for split in ("val", "train")}
    for name, times in zip(SHARDS, (1, 1, 2 + len(damaged)), strict=True):
        gets = [line for line in hub[0].asked_for(name) if line.startswith("GET")]
        assert gets == [f"GET /datasets/kjj0/fineweb10B-gpt2/resolve/{COMMIT}/{name}"] * times


def test_a_damaged_shard_is_refused_by_its_name(ran):
    _, *damaged, _ = ran[1]["fineweb10B-gpt2"]
    for result, said in zip(damaged, DAMAGES.values(), strict=True):
        assert result["code"] == 2
        assert re.search(rf"^error: .*fineweb_train_000002\.bin {said}", result["err"], re.M)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hf:own/data", "Config name is missing.*hf:owner/name:config:column"),
        ("hf:own/data:nine", "'nine' not found.*'one', 'two'.*hf:owner/name:config:column"),
        ("hf:own/data:two", "column text.*'body'.*hf:owner/name:config:column"),
        ("hf:own/numbers", "own/numbers, column text.*int"),
        ("hf:old/script", "no longer supported.*take a dataset in Parquet"),
        ("hf:no/such", "the Hub does not give the dataset no/such"),
    ],
)
def test_a_dataset_that_can_not_be_had_is_one_error_and_leaves_no_file(name, said, ran):
    (result,) = ran[1][name]
    assert result["code"] == 2
    (message,) = [line for line in result["err"].splitlines() if line.startswith("error: ")]
    assert re.search(said, message)
    assert [file for file in result["files"] if not file.endswith(".lock")] == []


# Without a network


def interrupted(corpus: str, data_dir: Path) -> None:
    """The beginning of a preparation."""

    def documents(*_, **__):
        for _ in range(9):
            yield "train", iter((b"words " * 50_000,))
        raise Broken

    made = replace(corpora.find(corpus), documents=documents, shards=None, revision=lambda: COMMIT)
    folder = prepare.folder_of(corpus, "gpt2", data_dir)
    with pytest.raises(Broken):
        prepare.prepare(made, tokenizer.load("gpt2"), folder, shard_tokens=10_000)
    assert json.loads((folder / "meta.json").read_text(encoding="utf-8"))["progress"]


def contents(folder: Path) -> dict[Path, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"]
    return {p: p.read_bytes() for p in files}


REMOTE = ["fineweb_edu", "openwebtext", "fineweb10B-gpt2", "hf:own/data:two:body", "shakespeare"]
BEGUN = ["fineweb_edu", "fineweb10B-gpt2"]


def test_without_a_network_each_corpus_says_within_10_s_what_to_do(tmp_path):
    """One of the two hosts refuses to talk, and one never answers."""
    for name in BEGUN:
        interrupted(name, tmp_path / "begun")
    before = contents(tmp_path / "begun")
    calls = [[tmp_path / "new", name, "--max-tokens", "1000000"] for name in REMOTE]
    calls += [
        [tmp_path / "begun", name, "--max-tokens", "1000000", "--shard-tokens", "10000"]
        for name in BEGUN
    ]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        second = start(address, tmp_path / "home", [[tmp_path / "silent", "fineweb10B-gpt2"]])
        first = results(start("http://127.0.0.1:9", tmp_path / "home", calls))
        calls += [[tmp_path / "silent", "fineweb10B-gpt2"]]
        first += results(second)
    for (_, name, *_), result in zip(calls, first, strict=True):
        assert result["code"] == 2, result
        assert result["seconds"] < 10, (name, result)
        assert result["err"].startswith("error: "), result
        assert result["err"].count("\n") == 1
        said = "put the file anywhere" if name == "shakespeare" else "look at the connection"
        assert said in result["err"]
    assert contents(tmp_path / "new") == contents(tmp_path / "silent") == {}
    assert contents(tmp_path / "begun") == before


def test_what_is_prepared_survives_an_attempt_without_a_network_to_prepare_it_again(
    tmp_path, monkeypatch
):
    def unreachable():
        raise ValueError("the Hub does not give the dataset")

    texts = streamed(write_parts(tmp_path / "d", TEXTS))
    monkeypatch.setitem(corpora.NAMED, "openwebtext", lambda _: texts)
    argv = ["openwebtext", "--tokenizer", "byte", "--data-dir", str(tmp_path / "data")]
    assert config.run_program(prepare.main, argv) == 0
    before = contents(tmp_path / "data")
    lost = replace(texts, revision=unreachable)
    monkeypatch.setitem(corpora.NAMED, "openwebtext", lambda _: lost)
    assert config.run_program(prepare.main, [*argv, "--force"]) == 2
    assert contents(tmp_path / "data") == before
    assert_holds(tmp_path / "data" / "openwebtext-byte", TEXTS, COMMIT, "byte")
