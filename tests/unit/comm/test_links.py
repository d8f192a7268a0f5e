"""Messages between two sockets: framing, the end of a peer, strangers."""

import json
import socket
import time

import pytest

from mpdp.comm import links
from mpdp.errors import CommunicationError


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    ends = links.Link(left), links.Link(right)
    yield ends
    for end in ends:
        end.close()


def test_messages_arrive_whole_and_in_order(pair):
    here, there = pair
    for step in range(100):
        here.send("beat", step=step)
    assert [message["step"] for message in there.receive()] == list(range(100))
    assert not there.closed


def test_half_a_message_waits_for_the_rest(pair):
    here, there = pair
    line = json.dumps({"kind": "left", "rank": 1}).encode() + b"\n"
    here.sock.send(line[:7])
    assert there.receive() == []
    here.sock.send(line[7:])
    assert there.receive() == [{"kind": "left", "rank": 1}]


def test_the_end_of_a_peer_comes_after_its_last_message(pair):
    here, there = pair
    here.send("bye")
    here.close()
    assert there.receive() == [{"kind": "bye"}] and there.closed


def test_a_peer_that_reads_nothing_costs_no_memory_and_loses_no_message(pair):
    here, there = pair
    for step in range(20_000):
        here.send("beat", step=step)
    here.send("fail", text="x")
    assert len(here._out) < 200
    kinds = []
    deadline = time.monotonic() + 5
    while "fail" not in kinds and time.monotonic() < deadline:
        kinds += [message["kind"] for message in there.receive()]
        here.send("beat")
    assert "fail" in kinds


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"step": 1}\n', b"\xff\n"])
def test_a_stranger_is_cut_off(pair, junk):
    here, there = pair
    here.sock.send(junk)
    assert there.receive() == [] and there.closed


def test_sending_to_a_peer_that_is_gone_raises_nothing(pair):
    here, there = pair
    there.close()
    for _ in range(3):
        here.send("beat")
    here.receive()
    assert here.closed


@pytest.mark.parametrize("across_nodes", [False, True])
def test_listen_and_connect(across_nodes):
    listener = links.Listener(across_nodes)
    assert len(listener.address) == links.ADDRESS_BYTES
    deadline = time.monotonic() + 5
    link = links.connect(listener.address, deadline, rank=3)
    accepted = listener.accept(deadline)
    assert accepted is not None and accepted[1]["rank"] == 3
    listener.close(), link.close(), accepted[0].close()


def test_another_node_is_reached_by_tcp():
    listener = links.Listener(across_nodes=True)
    address = json.loads(listener.address)
    address["node"] = "elsewhere"
    deadline = time.monotonic() + 5
    link = links.connect(json.dumps(address).encode(), deadline, rank=1)
    accepted = listener.accept(deadline)
    assert link.sock.family == socket.AF_INET and accepted is not None
    listener.close(), link.close(), accepted[0].close()


def test_a_connection_without_the_key_is_dropped():
    listener = links.Listener(across_nodes=False)
    address = json.loads(listener.address)
    address["key"] = "0" * 32
    link = links.connect(json.dumps(address).encode(), time.monotonic() + 5, rank=1)
    assert listener.accept(time.monotonic() + 0.2) is None
    link.receive()
    assert link.closed
    listener.close(), link.close()


def test_an_address_that_nobody_answers_is_an_error():
    listener = links.Listener(across_nodes=True)
    listener.close()
    with pytest.raises(CommunicationError, match=r"ring: expected to reach a rank on one of .*open TCP"):
        links.connect(listener.address, time.monotonic() + 5)
