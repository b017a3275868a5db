from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PRELUDE = """
import sys
from agent.runtime.process import put_off_tls
put_off_tls()
import asyncio, ssl, threading
import anyio, grpclib.client
def loaded():
    return "_ssl" in sys.modules
"""

_USES = {
    "asyncio": """
async def main():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=theirs())
    port = server.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("localhost", port, ssl=ours())
    print(writer.get_extra_info("peercert")["subject"][0][0][1])
""",
    "anyio": """
from anyio.streams.tls import TLSAttribute
async def main():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=theirs())
    port = server.sockets[0].getsockname()[1]
    async with await anyio.connect_tcp("localhost", port, ssl_context=ours()) as stream:
        print(stream.extra(TLSAttribute.peer_certificate)["subject"][0][0][1])
""",
    "the API server's client": """
from agent.kubernetes.client import Connections
async def main():
    async def answer(reader, writer):
        await reader.readuntil(b"\\r\\n\\r\\n")
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 9\\r\\n\\r\\nlocalhost")
        await writer.drain()
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=theirs())
    connections = Connections(f"https://localhost:{server.sockets[0].getsockname()[1]}", ours)
    async with connections.ask(connections.request("GET", "/", {}, None)) as (_, answer):
        print((await answer.part()).decode())
    connections.close()
""",
}

_CONTEXTS = """
def theirs():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PATH + "/cert", PATH + "/key")
    return context
def ours():
    return ssl.create_default_context(cafile=PATH + "/cert")
"""


def _run(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    return found.stdout.strip()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key -out cert"
    more = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *more], cwd=path, check=True, capture_output=True)
    return path


@pytest.mark.needs("openssl 3")
@pytest.mark.parametrize("library", _USES)
def test_tls_works_once_something_uses_it_though_it_was_put_off(library: str, certificate: Path) -> None:
    code = f"{_PRELUDE}\nassert not loaded()\nPATH = {str(certificate)!r}\n{_CONTEXTS}\n{_USES[library]}\nasyncio.run(main())"
    assert _run(code) == "localhost"


def test_what_uses_no_tls_leaves_it_put_off() -> None:
    code = f"""{_PRELUDE}
async def main():
    grpclib.client.Channel(path="/nowhere").close()
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with await anyio.connect_tcp(*server.sockets[0].getsockname()):
        server.close()
anyio.run(main)
assert not loaded()
"""
    _run(code)


def test_a_class_that_was_taken_before_is_the_modules_own_wherever_it_is_used() -> None:
    code = f"""{_PRELUDE}
from ssl import SSLContext as Taken
assert not isinstance(1, Taken) and not issubclass(int, Taken) and not loaded()
class Own(Taken): pass
assert loaded() and issubclass(Own, ssl.SSLContext) and issubclass(ssl.SSLContext, Taken)
context = Taken(ssl.PROTOCOL_TLS_CLIENT)
assert type(context) is ssl.SSLContext and isinstance(context, Taken) and Taken.wrap_bio is ssl.SSLContext.wrap_bio
"""
    _run(code)


def test_threads_that_use_it_first_at_once_all_have_the_whole_module() -> None:
    code = f"""{_PRELUDE}
sys.setswitchinterval(1e-6)
found, start = [], threading.Barrier(8)
def use():
    start.wait()
    found.append(ssl.create_default_context)
threads = [threading.Thread(target=use) for _ in range(8)]
for it in threads: it.start()
for it in threads: it.join()
assert len(found) == 8 and len(set(found)) == 1
"""
    _run(code)


def test_a_module_that_was_imported_before_is_left_alone() -> None:
    assert _run(f"import ssl; before = ssl.SSLContext\n{_PRELUDE}\nprint(ssl.SSLContext is before)") == "True"
