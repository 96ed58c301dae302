"""Security with real processes: tokens, TLS, unauthenticated connections, and secrets that are never disclosed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from allhands.control.rendezvous import outbound_address
from ranks.certificates import made, tls
from ranks.harness import Result, free_port, launch

pytestmark = pytest.mark.usefixtures("fork_server")

SECRET, OTHER = "open-sesame-7391", "open-barley-1739"

# Time within which a certain cause must be reported: 0.2 s on an idle machine, longer on a loaded one.
AT_ONCE_S = 4.0
# The deadline of ranks that wait for one that will never come, by which all others have come; and what they may take
# more.
TIMEOUT_S, GRACE_S = 6.0, 3.0

INIT = """
import logging, os, socket, struct, time
import allhands as dist
import torch
from allhands.control import handshake
from allhands.control.messages import GREETING, HEADER, pack
from allhands.control.process_identity import port_owner
from allhands.control.messages import encode
logging.basicConfig(level=logging.DEBUG)
where = os.environ.get("WHERE") or None
port = int(where.rpartition(":")[2]) if where else 0

def form(timeout=20.0):
    return attempt(dist.init_process_group, "gloo", where, timeout, rank=rank, world_size=size)

def use():
    x = torch.ones(3)
    dist.all_reduce(x)
    return x.tolist() == [float(size)] * 3

def open_door():
    # Rank 0 is starting the coordinator.
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 5)
        except ConnectionRefusedError:
            time.sleep(0.02)
"""


def address(host: str = "127.0.0.1") -> dict[str, str]:
    """Return a TCP meeting place for all ranks."""
    return {"WHERE": f"tcp://{host}:{free_port(host)}"}


def silent_about_it(results: list[Result], *secrets: str) -> None:
    """Fail where any rank wrote a secret."""
    for result in results:
        for secret in secrets:
            assert secret not in result.stdout
            assert secret not in result.stderr


def formed(results: list[Result]) -> None:
    """Fail where a rank did not form and use the group."""
    for result in results:
        assert result["init"]["kind"] == "", result["init"]
        assert result["used"], result.stderr
        assert result.returncode == 0


# Tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [{}, address()], ids=["local", "tcp"])
def test_ranks_with_the_same_token_form_a_group(where: dict[str, str], tmp_path: Path) -> None:
    """The token works from the environment and from a file, and is written nowhere."""
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    results = launch(
        INIT + "say(init=form(), used=use())\ndist.destroy_process_group()",
        2,
        where,
        each={0: {"ALLHANDS_TOKEN": SECRET}, 1: {"ALLHANDS_TOKEN_FILE": str(file)}},
    )
    formed(results)
    silent_about_it(results, SECRET)


@pytest.mark.parametrize(
    ("tokens", "where", "why"),
    [
        ([SECRET, OTHER, SECRET], address(), "its proof was made with another token"),
        pytest.param([SECRET, OTHER, SECRET], {}, "its proof was made with another token", marks=pytest.mark.soak),
        ([SECRET, "", SECRET], address(), "the job has a token and this process has none"),
        pytest.param(
            ["", SECRET, ""], address(), "this process has a token and the coordinator has none", marks=pytest.mark.soak
        ),
    ],
    ids=["wrong", "wrong-local", "missing", "only-here"],
)
def test_a_rank_without_the_jobs_token_is_not_authorised(tokens: list[str], where: dict[str, str], why: str) -> None:
    """The rank that differs gets the error at once; the others wait for it and name it at their deadline."""
    results = launch(
        INIT + f"say(init=form({TIMEOUT_S}))",
        3,
        where,
        each={rank: {"ALLHANDS_TOKEN": token} for rank, token in enumerate(tokens)},
    )
    outcomes = [result["init"] for result in results]
    assert [(found["slug"], found["ranks"]) for found in outcomes] == [("not-authorised", [1])] * 3
    assert all("ConnectError" in found["bases"] for found in outcomes)
    assert outcomes[1]["seconds"] < AT_ONCE_S
    assert why in outcomes[1]["text"]
    for other in (0, 2):
        assert TIMEOUT_S - 0.5 < outcomes[other]["seconds"] < TIMEOUT_S + GRACE_S
        assert "rank 1 did not have the job's token" in outcomes[other]["text"]
    silent_about_it(results, SECRET, OTHER)


def test_a_token_on_rank_0_only() -> None:
    """If only rank 0 has the token, every other rank gets the error at once, and rank 0 names them all."""
    results = launch(INIT + f"say(init=form({TIMEOUT_S}))", 3, address(), each={0: {"ALLHANDS_TOKEN": SECRET}})
    outcomes = [result["init"] for result in results]
    assert [found["slug"] for found in outcomes] == ["not-authorised"] * 3
    assert [found["ranks"] for found in outcomes] == [[1, 2], [1], [2]]
    assert all(found["seconds"] < AT_ONCE_S for found in outcomes[1:])
    silent_about_it(results, SECRET)


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """A secret that is none is refused before anything is started."""
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o644)
    [result] = launch(INIT + "say(init=form(), children=children())", 1, {"ALLHANDS_TOKEN_FILE": str(file)})
    assert (result["init"]["slug"], result["children"]) == ("not-authorised", [])
    silent_about_it([result], SECRET)


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_token_is_not_in_what_others_can_read(source: str, tmp_path: Path) -> None:
    """The coordinator's command line never holds the token, and its environment only where rank 0's own does."""
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o600)
    env = {"ALLHANDS_TOKEN_FILE": str(file)} if source == "file" else {"ALLHANDS_TOKEN": SECRET}
    [result] = launch(
        INIT
        + f"""
say(init=form())
[pid] = children()
command = open(f"/proc/{{pid}}/cmdline").read()
given = dict(line.split("=", 1) for line in open(f"/proc/{{pid}}/environ").read().split("\\0") if "=" in line)
say(command=b"{SECRET}".decode() in command, where=[name for name, value in given.items() if "{SECRET}" in value])
say(new=sorted(set(given) - set(os.environ)))
dist.destroy_process_group()
""".replace("say(command", "say(named='allhands.control' in command, command"),
        1,
        {**address(), **env},
    )
    assert result["named"], "that was not the coordinator"
    assert not result["command"]
    assert result["where"] == ([] if source == "file" else ["ALLHANDS_TOKEN"])
    assert result["new"] == []
    silent_about_it([result], SECRET)


# Where it listens ------------------------------------------------------------------------------------------------


def test_a_coordinator_listens_only_on_its_address() -> None:
    """On 127.0.0.1 means on no other address of the machine, loopback ones included; on one host, on no port at all."""
    outward = outbound_address()
    ask = f"""
def answers(host):
    try:
        socket.create_connection((host, port), 2).close()
    except OSError as problem:
        return problem.strerror
    return "yes"
say(init=form(), found=[answers(host) for host in ("127.0.0.1", "127.0.0.2", "{outward}")])
dist.destroy_process_group()
"""
    [result] = launch(INIT + ask, 1, address())
    refused = "Connection refused"
    assert result["found"] == ["yes", refused, "yes" if outward == "127.0.0.1" else refused]
    [result] = launch(
        INIT
        + """
import psutil
form()
[coordinator] = children()
say(ports=[str(entry.laddr) for entry in psutil.Process(coordinator).net_connections("inet")])
dist.destroy_process_group()
""",
        1,
    )
    assert result["ports"] == []


WARNING = "without a token"


def test_an_open_coordinator_warns_once() -> None:
    """Without a token on an address that other hosts can reach, one rank prints a warning with the fix."""
    outward = outbound_address()
    if outward == "127.0.0.1":
        pytest.skip("this machine has no address but loopback")
    script = INIT.replace("logging.basicConfig(level=logging.DEBUG)", "") + "say(init=form(), used=use())"
    results = launch(script, 2, address(outward))
    formed(results)
    lines = [line for result in results for line in result.stderr.splitlines() if WARNING in line]
    assert len(lines) == 1
    assert WARNING in results[0].stderr
    assert "ALLHANDS_TOKEN" in lines[0]
    assert outward in lines[0]
    for quiet in ({**address(outward), "ALLHANDS_TOKEN": SECRET}, address()):
        results = launch(script, 2, quiet)
        formed(results)
        assert all(WARNING not in result.stderr for result in results)


# TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority, a certificate of it for 127.0.0.1, and another authority that signed nothing."""
    return made(tmp_path_factory.mktemp("tls"))


def test_a_group_over_tls(certificates: Path) -> None:
    """With a certificate the group forms, its store transfers large values both ways, and failures reach peers."""
    results = launch(
        INIT
        + """
say(init=form(), used=use())
from allhands.groups import session
store = session.current().store
store.set(f"large {rank}", bytes([rank]) * 2**20)
other = store.get(f"large {1 - rank}")
say(same=other == bytes([1 - rank]) * 2**20, tls="SSL" in type(session.current().member._sock).__name__)
gate("done")
if rank:
    os._exit(3)
say(lost=attempt(store.get, "never"))
""",
        2,
        {**address(), **tls(certificates), "ALLHANDS_TOKEN": SECRET},
    )
    assert [result["init"]["kind"] for result in results] == ["", ""]
    assert all(result["used"] and result["same"] for result in results)
    assert results[1]["tls"], "rank 1 spoke in the clear"
    lost = results[0]["lost"]
    assert (lost["slug"], lost["ranks"]) == ("peer-lost", [1])
    assert lost["seconds"] < AT_ONCE_S


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "slug", "words"),
    [
        ({}, {"ca": "other"}, "not-authorised", "the coordinator's certificate is not accepted"),
        pytest.param(
            {"cert": "elsewhere"},
            {},
            "not-authorised",
            "the coordinator's certificate is not accepted",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            {},
            None,
            "wrong-service",
            "as a coordinator with TLS does where ALLHANDS_TLS_CA is not set",
            marks=pytest.mark.soak,
        ),
        pytest.param(None, {}, "wrong-service", "the TLS handshake failed", marks=pytest.mark.soak),
    ],
    ids=["wrong-authority", "wrong-host", "plain-member", "plain-coordinator"],
)
def test_tls_that_does_not_fit(
    certificates: Path, rank_0: dict[str, Any] | None, rank_1: dict[str, Any] | None, slug: str, words: str
) -> None:
    """A certificate that is not trusted, or TLS on one side only, is an error at once on the connecting rank."""
    settings = [{} if side is None else tls(certificates, **side) for side in (rank_0, rank_1)]
    results = launch(INIT + f"say(init=form({TIMEOUT_S}))", 2, address(), each=dict(enumerate(settings)))
    found = results[1]["init"]
    assert (found["slug"], found["kind"]) == (slug, "ConnectError")
    assert words in found["text"]
    # A wrong service may be an old coordinator that is closing, so the connection is retried for a second.
    assert found["seconds"] < AT_ONCE_S + 1
    # A rank that fails in the TLS handshake cannot send its rank.
    assert (results[0]["init"]["slug"], results[0]["init"]["ranks"]) == ("missing-ranks", [1])


# Strangers -------------------------------------------------------------------------------------------------------


def test_a_silent_connection_does_no_harm() -> None:
    """Connections that stay silent, speak another protocol, or claim a rank without its token harm no roll call."""
    results = launch(
        INIT
        + """
strangers = []
if rank:
    for said in (b"", b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\x16\\x03\\x01\\x02\\x00", GREETING, GREETING[:5],
                 GREETING + HEADER.pack(100) + b"half",
                 GREETING + pack(b"\\xff" * 20), GREETING + pack(b"\\x82\\xa4type\\xa5Hello\\xa1x" + b"\\x91" * 8000)):
        strangers.append(open_door())
        strangers[-1].sendall(said)
    for number in (0, 1, 7, -1):
        opening = handshake.hello(job="", attempt=0, rank=number, world_size=size, token=b"guess")
        strangers.append(open_door())
        strangers[-1].sendall(GREETING + pack(encode(opening)) + pack(b"\\x82\\xa4type\\xa5Proof\\xa5proof\\xc4\\x00"))
say(init=form(), used=use())
say(again=use())
dist.destroy_process_group()
""",
        2,
        {**address(), "ALLHANDS_TOKEN": SECRET},
    )
    formed(results)
    assert all(result["again"] for result in results)
    assert "the coordinator reports" not in results[0].stderr + results[1].stderr, "a stranger can fill the log"


@pytest.mark.parametrize("claims", [True, False], ids=["with-a-token", "without"])
def test_an_impostor_is_not_counted(*, claims: bool) -> None:
    """A client that sends a false proof and claims a missing rank is refused and does not count as that rank."""
    results = launch(
        INIT
        + f"""
from allhands.control.messages import Splitter
from allhands.control.process_identity import this_process
from allhands.control.messages import Claim, Proof, decode_from_coordinator, decode_challenge
if rank:
    opening = handshake.hello(job="", attempt=0, rank=1, world_size=size, token=b"guess" if {claims} else b"")
    with open_door() as stranger:
        stranger.settimeout(5)
        stranger.sendall(GREETING + pack(encode(opening)))
        splitter, frames = Splitter(), []
        while not frames:
            frames = splitter.feed(stranger.recv(65536))
        challenge = decode_challenge(frames[0])
        claim = Claim(this_process(), "gloo", "", "", str(torch.__version__), dist.__version__, "arguments", 20.0)
        # The coordinator's own proof, handed back to it, is no proof either.
        stranger.sendall(pack(encode(Proof(challenge.proof))) + pack(encode(claim)))
        answers = []
        while data := stranger.recv(65536):
            answers += [decode_from_coordinator(frame) for frame in splitter.feed(data)]
    say(answers=[(type(answer).__name__, answer.diagnosis.slug) for answer in answers])
say(init=form(), used=use())
dist.destroy_process_group()
""",
        2,
        {**address(), "ALLHANDS_TOKEN": SECRET},
    )
    assert results[1]["answers"] == [["Refused", "not-authorised"]]
    formed(results)


def test_a_frame_that_is_too_long_is_cut_off_before_it_is_read() -> None:
    """A connection that announces a frame of a gibibyte is closed at once, without allocating memory."""
    results = launch(
        INIT
        + """
def resident(pid):
    return int(open(f"/proc/{pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def cut_off(said):
    with open_door() as stranger:
        stranger.settimeout(5)
        stranger.sendall(GREETING + said)
        sent = 0
        try:
            while sent < 2**26:
                sent += stranger.send(bytes(2**16))
            return -1
        except OSError:
            return sent

if rank:
    open_door().close()
    pid = port_owner(port).pid
    cut_off(HEADER.pack(2**30))
    before = resident(pid)
    sent = [cut_off(HEADER.pack(length)) for length in [2**30, 2**32 - 1, 2**26, 8193] * 3]
    say(sent=sent, grown=resident(pid) - before)
say(init=form(), used=use())
dist.destroy_process_group()
""",
        2,
        {**address(), "ALLHANDS_TOKEN": SECRET},
    )
    formed(results)
    # The kernel's own buffers take some before the sender sees the end.
    assert all(0 <= sent < 2**24 for sent in results[1]["sent"])
    assert results[1]["grown"] < 8 * 2**20


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused_on_the_local_socket() -> None:
    """On the local socket the kernel identifies the peer: another user is disconnected before it sends anything."""
    [result] = launch(
        INIT
        + """
form()
[coordinator] = children()
held = {os.readlink(f"/proc/{coordinator}/fd/{fd}") for fd in os.listdir(f"/proc/{coordinator}/fd")}
sockets = [line.split() for line in open("/proc/net/unix") if "@allhands-" in line]
# The one that listens has this flag; those of connections have the same name.
[name] = [line[7][1:] for line in sockets if line[3] == "00010000" and f"socket:[{line[6]}]" in held]

def knock():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect("\\0" + name)
        try:
            opening = handshake.hello(job="", attempt=0, rank=0, world_size=1, token=b"")
            sock.sendall(GREETING + pack(encode(opening)))
            return "let in" if sock.recv(100) else "cut off"
        except (ConnectionResetError, BrokenPipeError):
            return "cut off"

say(own=knock())
os.setresuid(65534, 65534, 0)
say(other=knock())
os.setresuid(0, 0, 0)
dist.destroy_process_group()
""",
        1,
    )
    assert (result["own"], result["other"]) == ("let in", "cut off")
