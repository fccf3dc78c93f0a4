"""docs/server-api.md against the code: every route, code, field and event is there, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.serverkit import make_folder
from specdec_server.app import create_app
from specdec_server.errors import CODES
from specdec_server.settings import Settings
from starlette.testclient import TestClient

PAGE = (Path(__file__).parents[3] / "docs" / "server-api.md").read_text()
NAMES = set(re.findall(r"`([a-zA-Z_]+)`", PAGE))


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("docs") / "shards")
    return create_app(Settings(shards_dir=folder, server_url="http://127.0.0.1:9", show_text=True))


def test_routes(app):
    real = {
        f"{method} {route.path}"
        for route in app.routes
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD"
    }
    documented = set(re.findall(r"`((?:GET|POST) /[^`]*)`", PAGE))
    assert documented == real


def test_error_codes():
    assert (
        dict(re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", PAGE.partition("## In")[0], re.MULTILINE)).keys()
        == CODES.keys()
    )


@pytest.mark.parametrize(
    "path",
    [
        "/healthz",
        "/api/capture?history=true",
        "/api/streams/ended",
        "/api/shards",
        "/api/records",
        "/api/runs",
        "/api/evaluations",
    ],
)
def test_fields_of_answers(app, path):
    with TestClient(app, base_url="http://127.0.0.1") as client:
        data = client.get(path).json()
    assert sorted(set(data) - NAMES) == []


def test_fields_of_a_rank(tmp_path, put_status):
    from specdec_tap.capture.status import StatusReader, total

    put_status("a")
    (status,) = StatusReader(tmp_path / "shards").read()
    assert sorted((set(status.to_json()) | set(total([status]))) - NAMES) == []
