"""The files of the page: what they may load, who may have them."""

import re
from base64 import b64encode
from hashlib import sha256
from typing import Final

import pytest

from components.api_keys import parse_file
from services.frontend.gate import OPEN_PATHS
from services.frontend.keys import KeyRing
from services.frontend.ui.page import FILES, FOLDER, HEADERS, PATHS, ROOT
from tests.services.frontend.fake_mesh import FakeMesh
from tests.services.frontend.ui.parts import make_page, served

pytestmark = pytest.mark.anyio

KEY: Final = "sk-alice-0123456789"
VENDORED: Final = {  # as npm has them
    "preact.mjs": "bdcbd9abdf2c77c5c45326eab42191e949222d479d0d5f69467387a77040cb55",
    "hooks.mjs": "e862ab2973aa6455eaa0f77c5d832d2157d6be59a17c8ba546550a575b58c6b4",
    "htm.mjs": "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
EXTERNAL: Final = re.compile(rb"https?://[\w.]+")
# A namespace's name is no address to load from; Perfetto opens in a tab of its own, when its button is pressed.
NAMED_ONLY: Final = {b"http://www.w3.org", b"https://ui.perfetto.dev"}


async def test_the_page_loads_and_may_load_nothing_from_elsewhere(mesh: FakeMesh) -> None:
    async with served(mesh, make_page()) as http:
        page = await http.get("/ui")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.strip().partition(" ")[::2] for part in page.headers["content-security-policy"].split(";"))
        assert policy.pop("script-src").split()[0] == "'self'"
        assert {policy[name] for name in ("style-src", "img-src", "connect-src")} == {"'self'"}
        assert {policy[name] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")} == {"'none'"}
        for path in FILES:
            answer = await http.get(path)
            assert answer.status_code == 200, path
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        again = await http.get("/ui/app.js", headers={"if-none-match": (await http.get("/ui/app.js")).headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        moved = await http.get("/ui/")
        assert (moved.status_code, moved.headers["location"]) == (308, "../ui")


def test_the_only_inline_script_is_the_import_map_with_its_hash() -> None:
    index = (FOLDER / "index.html").read_bytes()
    inline = [body for attributes, body in re.findall(rb"<script([^>]*)>(.*?)</script>", index, re.DOTALL) if body]
    assert len(inline) == 1
    assert b" style=" not in index
    assert not re.search(rb"\son\w+=", index)
    digest = b64encode(sha256(inline[0]).digest()).decode()
    [scripts] = [part for part in HEADERS["content-security-policy"].split(";") if "script-src" in part]
    assert f"'sha256-{digest}'" in scripts


def test_no_file_of_ours_names_another_host() -> None:
    for path in FOLDER.rglob("*"):
        if path.is_file() and "vendor" not in path.parts:
            assert set(EXTERNAL.findall(path.read_bytes())) <= NAMED_ONLY, path


def test_vendored_files_are_those_of_their_packages_and_have_their_licences() -> None:
    for name, digest in VENDORED.items():
        assert sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest, name
    for package in ("preact", "htm", "uPlot"):
        assert "icense" in (FOLDER / "vendor" / f"{package}.LICENSE.txt").read_text()
        assert package in (FOLDER / "vendor" / "README.txt").read_text()


def test_every_module_that_the_page_imports_is_served() -> None:
    for path in FOLDER.glob("*.js"):
        for imported in re.findall(r'from "(\./[^"]+)"', path.read_text()):
            assert f"{ROOT}/{imported[2:]}" in FILES, f"{path.name} imports {imported}"


async def test_a_browser_at_the_printed_address_gets_to_the_page(mesh: FakeMesh) -> None:
    """It got a JSON 404 that did not mention the page."""
    async with served(mesh, make_page()) as http:
        moved = await http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert (moved.status_code, moved.headers["location"]) == (307, "ui")
        other = await http.get("/", headers={"accept": "*/*"})
        error = other.json()["error"]
        assert (other.status_code, error["code"]) == (404, "unknown_url")
        assert "/ui is a page" in error["message"]


async def test_without_the_setting_there_is_no_page(mesh: FakeMesh) -> None:
    async with served(mesh, None) as http:
        assert (await http.get("/ui")).status_code == 404
        assert (await http.get("/ui/api/about")).status_code == 404


async def test_with_api_keys_the_page_loads_and_its_api_wants_one(mesh: FakeMesh) -> None:
    keys = KeyRing(parse_file(f'[alice]\nkey = "{KEY}"\n'))
    assert PATHS <= OPEN_PATHS
    async with served(mesh, make_page(), keys) as http:
        for path in FILES:
            assert (await http.get(path)).status_code == 200
        for path in (
            "about",
            "feed",
            "requests",
            f"traces/{'a' * 32}",
            f"traces/{'a' * 32}/perfetto",
            f"serving/{'a' * 32}",
        ):
            assert (await http.get(f"/ui/api/{path}")).status_code == 401, path
            wrong = await http.get(f"/ui/api/{path}", headers={"authorization": "Bearer wrong"})
            assert wrong.status_code == 401
        assert (await http.post("/ui/api/kill", json={"instance": "d1"})).status_code == 401
        right = {"authorization": f"Bearer {KEY}"}
        assert (await http.get("/ui/api/about", headers=right)).json() == {"may_kill": False}
        assert (await http.get("/ui/api/requests", headers=right)).status_code == 200


async def test_without_api_keys_other_sites_pages_cannot_ask(mesh: FakeMesh) -> None:
    async with served(mesh, make_page()) as http:
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
            assert (await http.get("/ui/api/requests", headers=headers)).status_code == 403


async def test_the_page_is_not_in_the_description_of_the_api(mesh: FakeMesh) -> None:
    async with served(mesh, make_page()) as http:
        assert not [path for path in (await http.get("/openapi.json")).json()["paths"] if path.startswith("/ui")]
