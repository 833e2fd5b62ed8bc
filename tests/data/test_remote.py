"""Remote files, from a server that fails, delays and truncates: never other text or a secret."""

import json
import random
import sys

import pytest
from failing_server import failing_server

from pentameter.config.data_schema import DataConfig
from pentameter.config.urls import last_part, shown_path, shown_url, url_problem
from pentameter.data.corpora import remote
from pentameter.data.corpora.remote import cached_file, remote_files
from pentameter.data.open_dataset import open_dataset
from pentameter.disk import file_systems
from pentameter.disk.cache import cache_folder
from pentameter.errors import ConfigError, CorruptError, StorageError

pytest.importorskip("fsspec", reason="needs the extra remote")
pytest.importorskip("aiohttp", reason="needs the extra remote")

BODY = random.Random(4).randbytes(3_000_000)


@pytest.fixture(scope="module")
def one_server():
    with failing_server() as server:
        yield server


@pytest.fixture
def server(one_server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(file_systems, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(file_systems, "SILENCE_SECONDS", 0.3)
    one_server.files = {"/a.txt": BODY}
    one_server.failures.clear()
    one_server.head_failures.clear()
    one_server.requests.clear()
    one_server.etag = ""
    one_server.types.clear()
    one_server.redirects.clear()
    one_server.has_ranges = one_server.has_length = one_server.has_etag = True
    return one_server


def copied(server, path="/a.txt"):
    (file,), _ = remote_files(server.url(path))
    return cached_file(file)


@pytest.mark.parametrize(
    "name", ["a" * 110 + ".jsonl", "b" * 99 + ".jsonl.gz", "c" * 95 + ".txt.gz.jsonl"]
)
def test_a_long_name_keeps_what_tells_its_format(server, name):
    server.files[f"/{name}"] = body = b'{"text": "a"}\n'
    suffixes = name[name.index(".") :]
    assert copied(server, f"/{name}").name.endswith(suffixes)
    assert copied(server, f"/{name}").read_bytes() == body


def test_a_file_is_copied_once(server):
    first = copied(server)
    assert first.read_bytes() == BODY
    assert first.name == "a.txt"
    assert copied(server) == first
    assert server.gets() == [None]
    server.files["/a.txt"] = BODY[::-1]  # of the same size
    assert copied(server).read_bytes() == BODY[::-1]
    assert first.read_bytes() == BODY


@pytest.mark.parametrize("failure", ["500", "503", "429", "drop", "cut", "cut:7", "stall", "slow"])
def test_a_failure_that_passes_leaves_the_whole_file(server, failure):
    server.failures += [failure]
    assert copied(server).read_bytes() == BODY


@pytest.mark.parametrize("failure", ["500", "drop", "delay"])
def test_a_failure_to_say_what_is_there_passes(server, failure):
    server.head_failures += [failure] * 2
    assert copied(server).read_bytes() == BODY


def test_what_has_come_is_not_asked_for_again(server):
    server.failures += ["cut:1500000", "500", "cut:1000000"]
    assert copied(server).read_bytes() == BODY
    assert server.gets()[0] is None
    starts = [int(given.removeprefix("bytes=").rstrip("-")) for given in server.gets()[1:]]
    assert starts == sorted(starts)
    assert 0 < starts[0] <= 1_500_000  # what a closed connection had buffered may be lost
    assert starts[0] == starts[1] < starts[2] <= 2_500_000


def test_a_server_without_ranges_is_asked_for_all_again(server):
    server.has_ranges = False
    server.failures += ["cut", "cut"]
    assert copied(server).read_bytes() == BODY
    assert len(server.gets()) == 3


def test_a_server_that_fails_for_good_is_named_and_what_came_is_kept(server):
    server.failures += ["cut:1500000", *["cut:10"] * 20]
    with pytest.raises(StorageError) as refused:
        copied(server)
    message = str(refused.value)
    assert server.url("/a.txt") in message
    assert f"after {remote.ATTEMPTS} attempts" in message
    assert "bytes are kept" in message
    assert "start again" in message
    assert len(server.gets()) <= remote.ATTEMPTS + 2
    assert not any(path.is_dir() for path in (cache_folder() / "remote").iterdir())
    server.failures.clear()
    server.requests.clear()
    assert copied(server).read_bytes() == BODY
    assert int(server.gets()[0].removeprefix("bytes=").rstrip("-")) > 0


@pytest.mark.parametrize("failure", ["stall", "delay", "500", "drop"])
def test_attempts_are_bounded(server, failure, monkeypatch):
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    monkeypatch.setattr(remote, "PROGRESS_BYTES", 1 << 30)
    server.failures += [failure] * 50
    with pytest.raises(StorageError, match="could not be read after 2 attempts"):
        copied(server)
    assert len(server.gets()) <= 4  # the HTTP library may ask once more over a new connection


def test_a_file_that_changes_while_it_is_copied_is_not_mixed(server, monkeypatch):
    (file,), _ = remote_files(server.url("/a.txt"))
    server.failures += ["cut"]
    append = remote._append

    def changing(*arguments):
        try:
            append(*arguments)
        finally:
            server.files["/a.txt"] = BODY[::-1]

    monkeypatch.setattr(remote, "_append", changing)
    monkeypatch.setattr(remote, "ATTEMPTS", 3)
    with pytest.raises(StorageError, match="it changed while it was copied"):
        cached_file(file)
    assert copied(server).read_bytes() == BODY[::-1]


@pytest.mark.parametrize("status", ["404", "410"])
def test_a_file_that_is_not_there(server, status):
    server.files.clear()
    if status == "410":
        server.files["/a.txt"] = BODY
        server.head_failures += ["410"] * 9
        server.failures += ["410"] * 9
    with pytest.raises(ConfigError, match=r"/a\.txt does not exist"):
        copied(server)
    assert len(server.requests) == 2  # asked by HEAD and by GET, once


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_file_that_may_not_be_read(server, status):
    server.head_failures += [status] * 9
    server.failures += [status] * 9
    with pytest.raises(StorageError, match=rf"may not be read \(HTTP status {status}\); log in"):
        copied(server)


def test_a_server_that_tells_no_size_is_refused(server):
    server.has_length = False
    with pytest.raises(StorageError, match="does not say how long the file is"):
        copied(server)


def test_without_a_version_the_size_is_what_is_known(server):
    server.has_etag = False
    (file,), _ = remote_files(server.url("/a.txt"))
    assert file.version is None
    server.failures += ["cut"] * 50
    with pytest.raises(StorageError):
        cached_file(file)
    server.failures.clear()
    server.requests.clear()
    assert cached_file(file).read_bytes() == BODY
    assert server.gets() == [None]  # nothing is added to a part that may be of another version


@pytest.mark.parametrize(("etag", "has_etag"), [("", False), ('W/"same"', True)])
def test_two_versions_that_nothing_tells_apart_are_not_joined(server, monkeypatch, etag, has_etag):
    """The second request meets another version, of the same size."""
    server.has_etag, server.etag = has_etag, etag
    server.failures += ["cut:1500000"]
    append = remote._append

    def changing(*arguments):
        try:
            append(*arguments)
        finally:
            server.files["/a.txt"] = BODY[::-1]

    monkeypatch.setattr(remote, "_append", changing)
    assert copied(server).read_bytes() == BODY[::-1]
    assert server.gets() == [None, None]


def test_attempts_from_the_start_are_bounded_too(server):
    server.has_etag = False
    server.failures += ["cut:1500000"] * 50
    with pytest.raises(StorageError, match=r"after 5 attempts \(.*\.'>\); check"):
        copied(server)
    assert len(server.gets()) <= 7


def test_a_copy_that_goes_on_asks_room_for_the_rest(server, monkeypatch):
    asked = []
    monkeypatch.setattr(remote, "check_free_space", lambda folder, n_bytes: asked.append(n_bytes))
    server.failures += ["cut:2500000", *["500"] * 9]
    with pytest.raises(StorageError, match="bytes are kept"):
        copied(server)
    server.failures.clear()
    assert copied(server).read_bytes() == BODY
    assert asked[0] == len(BODY)
    assert 0 < asked[1] < len(BODY)  # what had come by then is kept


# -- what is no file ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["204", "205", "302", "304"])
def test_a_status_without_a_file_is_refused(server, status):
    server.head_failures += [status]
    server.failures += [status]
    with pytest.raises(ConfigError, match=rf"a\.txt is no file: .*HTTP status {status}.*check the"):
        copied(server)
    assert not any(path.is_dir() for path in (cache_folder() / "remote").iterdir())


def test_a_redirect_that_leads_nowhere_is_no_empty_text(server):
    server.redirects["/r.txt"] = ""
    with pytest.raises(ConfigError, match=r"r\.txt is no file: .*HTTP status 302"):
        copied(server, "/r.txt")
    server.redirects["/r.txt"] = "/a.txt"
    assert copied(server, "/r.txt").read_bytes() == BODY


PAGE = b"\n<!-- x --> <!DOCTYPE html><html><body>Please log in</body></html>"


def test_a_login_page_is_not_taken_as_text(server):
    server.files |= {"/login": PAGE, "/b.txt": PAGE, "/page.html": PAGE, "/page": PAGE}
    server.types = dict.fromkeys(server.files, "text/html; charset=utf-8")
    server.redirects |= {"/c.jsonl": "/login", "/article": "/login", "/short": "/page"}
    for path in ("/b.txt", "/c.jsonl", "/article"):
        with pytest.raises(CorruptError, match=r"is not sent: .*a web page instead.*log in"):
            copied(server, path)
    # What was meant, or what only says that it is a page, is read.
    for path in ("/page.html", "/page", "/short"):
        assert copied(server, path).read_bytes() == PAGE
    assert copied(server).read_bytes() == BODY
    server.types["/b.txt"] = "text/plain"
    assert copied(server, "/b.txt").read_bytes() == PAGE


def test_nobody_answers(server, monkeypatch):
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    with pytest.raises(
        StorageError, match=r"http://127\.0\.0\.1:1/x\.txt could not be read after 2"
    ):
        remote_files("http://127.0.0.1:1/x.txt")


def test_a_damaged_copy_is_told(server):
    path = copied(server)
    path.write_bytes(BODY[:10])
    with pytest.raises(StorageError, match=r"has 10 bytes and not 3,000,000; delete"):
        copied(server)


def test_a_full_disk_is_no_failure_of_the_server(server, monkeypatch):
    def full(folder, n_bytes):
        raise StorageError("cannot write: no room")

    monkeypatch.setattr(remote, "check_free_space", full)
    with pytest.raises(StorageError, match="no room"):
        copied(server)
    assert server.gets() == []


# -- secrets ----------------------------------------------------------------------------------


SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{SECRET}@example.org/a.txt",
        f"https://{SECRET}@example.org/a.txt",
        f"https://example.org/a.txt?X-Amz-Signature={SECRET}",
        f"https://example.org/a.txt?download=1&access_token={SECRET}",
        f"s3://key:{SECRET}@bucket/a.txt",
        f"abfs://container:{SECRET}@account.dfs.core.windows.net/a.txt",
        *(
            f"https://example.org/a.txt?{key}={SECRET}"
            for key in (
                "sig",
                "sign",
                "apiKey",
                "api-key",
                "AWSAccessKeyId",
                "key",
                "auth",
                "oauth",
                "Authorization",
                "authToken",
                "accesstoken",
                "X-Goog-Signature",
                "sessionid",
                "session_id",
                "PHPSESSIONID",
                "userPwd",
                "password",
                "client_secret",
                "credentials",
            )
        ),
    ],
)
def test_a_url_with_a_secret_is_refused_without_showing_it(url):
    with pytest.raises(ConfigError) as refused:
        remote_files(url)
    assert SECRET not in str(refused.value)
    assert "~/.netrc" in str(refused.value)
    for section in ({"path": url}, {"sources": [{"path": url}]}, {"path": "a", "test_path": url}):
        with pytest.raises(ValueError, match="is given with") as refused:
            DataConfig(**section)
        assert SECRET not in refused.value.errors()[0]["msg"]


def test_what_only_holds_the_letters_of_a_secret_is_none():
    for key in ("design", "assigned", "signal", "keyword", "author", "authors", "tokenizer", "x"):
        assert url_problem(f"https://example.org/a.txt?{key}=1") is None
    url = "abfs://container@account.dfs.core.windows.net/set/a.txt"
    assert url_problem(url) is None
    assert (shown_url(url), last_part(url)) == (url, "a.txt")
    for kind in ("s3", "https", "sftp"):
        assert url_problem(f"{kind}://user@host/a.txt") is not None


def test_a_container_keeps_its_account(server, monkeypatch):
    """As adlfs, whose paths leave out the account and whose options have it."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    accounts = []

    class Azure(MemoryFileSystem):
        protocol = ("abfs", "abfss", "az")

        def __init__(self, account_name=None, **options):
            accounts.append(account_name)
            super().__init__(**options)

        @classmethod
        def _strip_protocol(cls, path):
            netloc, _, rest = path.partition("://")[2].partition("/")
            return f"/{netloc.partition('@')[0]}/{rest}".rstrip("/") if netloc else path.rstrip("/")

        @staticmethod
        def _get_kwargs_from_urls(url):
            return {"account_name": url.partition("@")[2].partition(".")[0]}

    fsspec.register_implementation("abfs", Azure, clobber=True)
    fs = fsspec.filesystem("memory")
    try:
        fs.pipe("/container/set/a.txt", b"text")
        url = "abfs://container@account.dfs.core.windows.net/set"
        for asked in (url, f"{url}/*.txt", f"{url}/a.txt"):
            accounts.clear()
            (file,), _ = remote_files(asked)
            assert file.url == f"{url}/a.txt"
            assert cached_file(file).read_bytes() == b"text"
            assert {*accounts} <= {"account"}
    finally:
        fs.store.clear()


def test_a_query_is_sent_and_never_shown(server):
    server.files["/b.txt"] = b"text"
    url = server.url("/b.txt?download=hunter2#part")
    assert url_problem(url) is None
    (file,), _ = remote_files(url)
    assert cached_file(file).read_bytes() == b"text"
    assert server.requests[0][1] == "/b.txt?download=hunter2"
    server.failures += ["500"] * 9
    server.head_failures += ["500"] * 9
    with pytest.raises(StorageError) as refused:
        remote_files(url)
    assert SECRET not in f"{refused.value} {file} {file!r}"
    assert shown_url(url) == shown_path(url) == server.url("/b.txt")
    assert (last_part(url), last_part("a/b?.txt"), shown_path("a@b?c")) == (
        "b.txt",
        "b?.txt",
        "a@b?c",
    )


# -- what is trained on -----------------------------------------------------------------------


def opened(path, **changes):
    return open_dataset(DataConfig(path=path, **changes))


def decoded(dataset, split="train"):
    return dataset.tokenizer.decode(dataset.split(split).tokens[:])


def test_text_that_was_cut_short_is_whole_or_nothing(server, monkeypatch):
    text = "".join(random.Random(1).choices("abc d", k=200_000))
    server.files["/t.txt"] = text.encode()
    server.failures += ["cut", "stall", "500"]
    dataset = opened(server.url("/t.txt"), validation_fraction=0.0)
    assert decoded(dataset) == text
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    server.files["/u.txt"] = text[::-1].encode()
    server.failures += ["cut:99"] * 99
    with pytest.raises(StorageError, match=r"u\.txt could not be read"):
        opened(server.url("/u.txt"))
    assert len([*(cache_folder() / "prepared").iterdir()]) == 1


def test_shards_are_found_by_what_the_server_tells_and_made_anew_for_another_version(server):
    server.files["/t.jsonl"] = b'{"text": "abab"}\n{"text": "bb"}\n'
    url = server.url("/t.jsonl")
    first = opened(url, validation_fraction=0.0)
    assert decoded(first) == "ababbb"
    server.requests.clear()
    again = opened(url, validation_fraction=0.0)
    assert again.hash == first.hash
    assert server.gets() == []
    server.files["/t.jsonl"] = b'{"text": "baba"}\n{"text": "aa"}\n'
    assert decoded(opened(url, validation_fraction=0.0)) == "babaaa"
    server.files["/t.jsonl"] = b'{"note": "baba", "text": "aa"}\n'
    assert decoded(opened(url, validation_fraction=0.0)) == "aa"
    assert decoded(opened(url, validation_fraction=0.0, text_field="note")) == "baba"


def test_held_out_text_is_a_part_of_what_is_known(server):
    server.files |= {"/t.txt": b"abab", "/v.txt": b"ba"}
    data = {"path": server.url("/t.txt"), "validation_path": server.url("/v.txt")}
    assert decoded(open_dataset(DataConfig(**data)), "val") == "ba"
    server.files["/v.txt"] = b"bb"
    assert decoded(open_dataset(DataConfig(**data)), "val") == "bb"


def test_parquet_and_conversations_from_a_server(server, tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    pq.write_table(pa.table({"text": ["abc", "cba"]}), tmp_path / "a.parquet")
    server.files["/d/train-0.parquet"] = (tmp_path / "a.parquet").read_bytes()
    server.failures += ["cut"]
    dataset = opened(server.url("/d/train-0.parquet"), validation_fraction=0.0)
    assert decoded(dataset) == "abccba"
    record = {"prompt": "ab", "completion": "ba"}
    server.files["/c.jsonl"] = (json.dumps(record) + "\n").encode() * 3
    dataset = opened(server.url("/c.jsonl"), validation_fraction=0.0)
    assert dataset.has_conversations


# -- other kinds of storage -------------------------------------------------------------------


@pytest.fixture
def memory(server):
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def test_a_folder_and_a_pattern(memory):
    for name in ("data/part-1.txt", "data/part-0.txt", "data/.hidden", "data/other.jsonl"):
        memory.pipe(f"/set/{name}", name.encode())
    found, root = remote_files("memory://set")
    assert [file.name for file in found] == ["other.jsonl", "part-0.txt", "part-1.txt"]
    assert root == "memory://set"
    assert remote_files("memory://set/data/other.jsonl")[1] == ""  # one file, and no folder
    found, _ = remote_files("memory://set/data/part-*.txt")
    assert [cached_file(file).read_bytes() for file in found] == [
        b"data/part-0.txt",
        b"data/part-1.txt",
    ]
    with pytest.raises(ConfigError, match="holds no file, or matches none"):
        remote_files("memory://set/*.parquet")
    with pytest.raises(ConfigError, match="does not exist"):
        remote_files("memory://set/none.txt")


def test_hidden_files_are_those_below_what_is_named(memory):
    for name in ("a.txt", ".b.txt", ".c/d.txt", "e/f.txt"):
        memory.pipe(f"/home/.cache/set/{name}", name.encode())

    def names(url):
        return [file.name for file in remote_files(url)[0]]

    for folder in ("memory://home/.cache/set", "memory://home/.cache/set/"):
        assert names(folder) == ["a.txt", "f.txt"]
    assert names("memory://home/.cache/set/*.txt") == ["a.txt"]
    assert names("memory://home/.cache/set/.c/*.txt") == ["d.txt"]
    assert names("memory://home/.cache/set/.*.txt") == [".b.txt"]
    assert names("memory://home/.cache/set/.b.txt") == [".b.txt"]


def test_a_data_set_with_splits_in_a_folder(memory, tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    for split in ("train", "validation"):
        pq.write_table(pa.table({"text": [split]}), tmp_path / "x.parquet")
        memory.pipe(f"/set/data/{split}-0.parquet", (tmp_path / "x.parquet").read_bytes())
    memory.pipe("/set/README.md", b"a card")
    dataset = opened("memory://set")
    assert (decoded(dataset), decoded(dataset, "val")) == ("train", "validation")


def test_unknown_kinds_and_missing_packages(server, monkeypatch):
    with pytest.raises(ConfigError, match=r"nothing://x/y: .*nothing"):
        remote_files("nothing://x/y")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"s3://x/y needs .*pip install 'pentameter\[remote\]'"):
        remote_files("s3://x/y")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"pip install 'pentameter\[remote\]'"):
        remote_files(server.url("/a.txt"))
