import hashlib
import http.server
import os
import threading
from pathlib import Path

import pytest

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora import registry as corpora
from pentameter.data.corpora.registry import corpus_of
from pentameter.data.open_dataset import open_dataset
from pentameter.disk.cache import PublicFile, cache_folder, known_files, public_file
from pentameter.errors import ConfigError, CorruptError, StorageError

CONTENT = b"public text\n" * 100


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pentameter"


@pytest.fixture
def served(monkeypatch):
    """A public file on a loopback server, which counts the requests."""
    monkeypatch.delenv("PENTAMETER_DATA_DIR", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200 if self.path == "/text" else 404)
            self.end_headers()
            self.wfile.write(CONTENT if self.path == "/text" else b"no")

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/text"
    yield PublicFile("some/text.txt", url, 1200, hashlib.sha256(CONTENT).hexdigest()), requests
    server.shutdown()
    thread.join()
    server.server_close()


def replaced(file, **changes):
    return PublicFile(**{**vars(file), **changes})


def test_a_public_file_is_downloaded_once(served, cache):
    file, requests = served
    for _ in range(2):
        assert public_file(file).read_bytes() == CONTENT
    assert len(requests) == 1
    assert [path.name for path in (cache / "some").iterdir()] == ["text.txt"]


def test_a_download_with_another_content_is_refused_and_not_kept(served, cache):
    file, _ = served
    for wrong in (replaced(file, sha256="0" * 64), replaced(file, n_bytes=10)):
        with pytest.raises(CorruptError, match="nothing was kept"):
            public_file(wrong)
    assert not (cache / "some").exists()


def test_a_file_may_be_known_by_its_git_id(served, cache):
    file, _ = served
    # What `git hash-object` prints of the content.
    git_blob = hashlib.sha1(b"blob 1200\0" + CONTENT).hexdigest()
    known = replaced(file, sha256=None, n_bytes=5000, git_blob=git_blob)
    assert public_file(known).read_bytes() == CONTENT
    path = cache / "some" / "text.txt"
    path.write_bytes(b"other")
    with pytest.raises(CorruptError, match=f"git blob id .*, expected git blob id {git_blob}"):
        public_file(known)


def test_without_a_network_the_error_says_what_to_put_where(served, cache):
    file, _ = served
    for url in ("http://127.0.0.1:1/text", file.url + "/missing"):
        with pytest.raises(StorageError) as error:
            public_file(replaced(file, url=url))
        for part in (url, file.sha256, str(cache / "some/text.txt"), "PENTAMETER_DATA_DIR"):
            assert part in str(error.value)


def test_the_data_folder_comes_first_and_is_checked(served, tmp_path, monkeypatch):
    file, requests = served
    monkeypatch.setenv("PENTAMETER_DATA_DIR", str(tmp_path / "data"))
    path = tmp_path / "data" / "some" / "text.txt"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert public_file(file) == path
    path.write_bytes(CONTENT[1:])
    with pytest.raises(CorruptError, match=rf"{path} is not the expected file: sha256"):
        public_file(file)
    assert requests == []


def test_the_cache_follows_the_xdg_rules(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache" / "pentameter"
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path.home() / ".cache" / "pentameter"


def test_stdlib_is_python_source_of_this_machine_and_always_the_same():
    data = DataConfig(corpus="stdlib", max_bytes=300_000)
    text = corpus_of(data)
    content = "".join(text.chunks())
    assert content == "".join(corpus_of(data).chunks())
    assert 299_990 <= len(content.encode()) <= 300_000
    assert "def " in content
    # All of it is UTF-8, whatever the size.
    assert sum(len(piece) for piece in corpora.stdlib(data).chunks()) > 3_000_000


def test_stdlib_without_source_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match="holds no Python source"):
        corpus_of(DataConfig(corpus="stdlib"))


def test_an_unknown_corpus_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'shakespeare'"):
        corpus_of(DataConfig(corpus="shakespear"))


def test_wikitext_has_splits_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PENTAMETER_DATA_DIR", str(tmp_path))
    (tmp_path / "wikitext-2").mkdir()
    files = {}
    for split in ("train", "val", "test"):
        name, text = f"wikitext-2-{split}", f" = {split} = \n"
        file = known_files()[name]
        (tmp_path / file.path).write_text(text)
        files[name] = replaced(file, sha256=hashlib.sha256(text.encode()).hexdigest())
    monkeypatch.setattr(corpora, "known_files", lambda: files)
    dataset = open_dataset(DataConfig(corpus="wikitext-2", tokenizer="word", test_fraction=0.5))
    assert dataset.tokenizer.words == ("<unk>", "=", "train")
    for split, ids in (("train", [1, 2, 1]), ("val", [1, 0, 1]), ("test", [1, 0, 1])):
        assert dataset.split(split).tokens[:].tolist() == ids


def test_wikitext_without_its_train_split_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.setenv("PENTAMETER_DATA_DIR", str(tmp_path))
    file = replaced(known_files()["wikitext-2-train"], url="http://127.0.0.1:1/train.txt")
    monkeypatch.setattr(corpora, "known_files", lambda: {"wikitext-2-train": file})
    with pytest.raises(StorageError, match=r"git blob id 2d84b35a.* at .*wikitext-2/train\.txt"):
        corpus_of(DataConfig(corpus="wikitext-2"))


@pytest.mark.skipif(
    not (Path(os.environ.get("PENTAMETER_DATA_DIR", "/nowhere")) / "shakespeare").is_dir(),
    reason="needs PENTAMETER_DATA_DIR with shakespeare/input.txt",
)
def test_tiny_shakespeare_is_cut_as_in_the_tutorial():
    dataset = open_dataset(DataConfig(corpus="shakespeare"))
    assert dataset.vocab_size == 65
    assert dataset.split("train").n_tokens == 1_003_854
    assert dataset.split("val").n_tokens == dataset.split("val").n_bytes == 111_540
    assert dataset.tokenizer.decode(dataset.split("train").tokens[:14]) == "First Citizen:"
