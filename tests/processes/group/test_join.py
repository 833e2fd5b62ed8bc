"""Meeting over a store that may hold what a dead attempt has left."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from pentameter.errors import ConfigError
from pentameter.processes.failures.failure import LostProcessError, spelled
from pentameter.processes.group.join import Meeting, absent_ranks, loss_behind, open_store
from pentameter.processes.group.rank import LaunchedRank
from pentameter.processes.group.world import World


def launched(path, rank, size):
    return LaunchedRank(rank, size, rank, size, f"file://{path}", "torchrun")


def meet(path, size):
    """What each of `size` processes reads of rank 0's word after they have met."""
    with ThreadPoolExecutor(size) as pool:
        stores = list(
            pool.map(lambda rank: open_store(launched(path, rank, size), 10), range(size))
        )
    stores[0].set("word", "of this attempt")
    return [store.get("word").decode() for store in stores]


def test_a_second_attempt_meets_below_a_name_of_its_own(tmp_path):
    path = tmp_path / "store"
    keeper = dist.FileStore(str(path))  # which outlives the attempts, as torchrun's agent does
    for size in (2, 3, 3, 2):  # an elastic run may grow and shrink
        assert meet(path, size) == ["of this attempt"] * size
    assert not keeper.check(["word"])  # it lies below the names


@pytest.mark.parametrize("dead", [(1,), (0, 2), (0, 1, 2)], ids=str)
def test_the_words_of_those_who_died_while_meeting_are_not_taken(tmp_path, dead):
    path = tmp_path / "store"
    keeper = dist.FileStore(str(path))
    for rank in dead:
        keeper.set(f"came/{rank}", "a dead one's")
        keeper.set(f"agreed/{rank}", "a dead one's")
    keeper.set("proposal", '["a dead one\'s", "a dead one\'s", "a dead one\'s"]')
    assert meet(path, 3) == ["of this attempt"] * 3


@pytest.mark.parametrize(
    ("others", "named"), [([], "ranks 1 and 2"), ([1], "rank 2"), ([2], "rank 1")], ids=str
)
def test_who_did_not_come_is_named(tmp_path, others, named):
    path = tmp_path / "store"
    with ThreadPoolExecutor() as pool:
        came = [pool.submit(open_store, launched(path, rank, 3), 0.5) for rank in others]
        with pytest.raises(LostProcessError, match=rf"not all of the 3 .* 0\.\d+ s \({named}\)"):
            open_store(launched(path, 0, 3), 0.5)
        for one in came:
            with pytest.raises(LostProcessError, match="not all of the 3 processes"):
                one.result()


def test_spares_wait_for_the_end(tmp_path):
    path = tmp_path / "store"
    met = [Meeting(launched(path, rank, 3), dist.FileStore(str(path))) for rank in range(3)]
    with ThreadPoolExecutor() as pool:
        spares = [pool.submit(each.wait_as_spare) for each in met[1:]]
        time.sleep(0.2)
        assert not any(spare.done() for spare in spares)
        met[0].release_spares(1)
        for spare in spares:
            spare.result(5)


def test_a_spare_ends_with_the_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=1))
    del server
    with pytest.raises(LostProcessError, match="is gone"):
        Meeting(launched("", 1, 2), client).wait_as_spare()


def test_what_rank_0_does_not_tell_is_waited_for_in_vain(tmp_path):
    with pytest.raises(LostProcessError, match=r"no layout within 0\.1 s"):
        Meeting(launched("", 1, 2), dist.FileStore(str(tmp_path / "store"))).read("layout", 0.1)


def test_those_that_miss_nobody_are_the_absent(tmp_path):
    stores = [dist.FileStore(str(tmp_path / "store")) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(lambda rank: absent_ranks(stores[rank], rank, 4, 1.0), range(3)))
    assert told == [([3], {})] * 3


def test_a_store_that_is_gone_names_nobody():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=1))
    del server
    assert absent_ranks(client, 1, 2, 5.0) == ([], {})


@pytest.fixture
def cut_store():
    """A client of a TCPStore whose link was cut: what it sends arrives nowhere, and nobody says."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    is_cut = threading.Event()

    def pass_on(source, target):
        with suppress(OSError):
            while data := source.recv(4096):
                if not is_cut.is_set():
                    target.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", server.port))
            ends.extend([near, far])
            for way in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=way, daemon=True).start()

        ends: list[socket.socket] = []
        threading.Thread(target=accept, daemon=True).start()
        port = listener.getsockname()[1]
        client = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
        client.set("word", "x")
        is_cut.set()
        yield client
    for end in ends:
        end.close()  # which lets go of the thread that asks


def test_who_misses_others_does_not_wait_for_a_store_that_is_cut_off(cut_store):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        absent_ranks(cut_store, 3, 4, 0.2)
    assert time.monotonic() < start + 5
    store = dist.PrefixStore("pentameter/name", cut_store)
    lost = loss_behind(RuntimeError("Timed out waiting"), World(3, 4, 1, 2, 15.0, store=store))
    assert isinstance(lost, LostProcessError)
    assert "at least one of ranks 0 and 1 did not answer within 15 s" in str(lost)
    assert f"neither does the store at 127.0.0.1:{cut_store.port}: the network to" in str(lost)


def test_ranks_in_words():
    assert spelled([3]) == "rank 3"
    assert spelled([1, 2, 5]) == "ranks 1, 2 and 5"
    assert spelled(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_a_port_that_was_taken_loses_one_attempt_of_nodes_and_not_the_run():
    """The launchers choose another for the next one; who sets MASTER_PORT is told."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        for source, error in (("--nodes", LostProcessError), ("environment", ConfigError)):
            with pytest.raises(error, match="is in use on this machine"):
                open_store(LaunchedRank(0, 2, 0, 1, where, source), 5)
