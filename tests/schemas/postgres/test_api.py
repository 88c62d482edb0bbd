"""Two services with one catalog in Postgres: what one push brings both show; a server that is away is named."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from api.__main__ import main
from tests.schemas.postgres.server import PASSWORD, PostgresServer
from tests.schemas.postgres.test_push import name_of
from tests.support.buckets import FaultProxy
from tests.support.store_helpers import SITE, until
from tests.vllm_tap.bucket.conftest import Sample, erase, grow
from tests.vllm_tap.bucket.serving.test_api import OFTEN, beside, bucket, code, generation
from vllm_tap.bucket.push import push
from vllm_tap.cli.main import app


def service(folder: Path, url: str, catalog: str) -> AbstractContextManager[httpx.Client]:
    return bucket(folder, url, "--catalog", catalog, *OFTEN)


def test_what_is_pushed_two_services_show(sample: Sample, store: Path, tmp_path: Path, catalog: str, s3: FaultProxy,
                                          postgres: PostgresServer) -> None:
    url = f"s3://bucket/{name_of(catalog)}"
    push(store, url, catalog=catalog)
    at = f"/v1/captures/{sample.captures['long']}"
    paths = ["/v1/captures?status=complete", f"/v1/captures?status=complete&limit=2&site={SITE}", at,
             f"{at}/activations?site={SITE}&layer=0,1,2", f"{at}/zarr/zarr.json", f"{at}/map?site={SITE}"]
    with (service(tmp_path / "a", url, catalog) as one, service(tmp_path / "b", url, catalog) as other,
          beside(tmp_path / "c", store) as local):
        for path in paths:
            found = [client.get(path) for client in (one, other, local)]
            assert [each.status_code for each in found] == [200] * 3, path
            assert found[0].content == found[1].content == found[2].content, path
        assert not list(tmp_path.rglob("catalogs/*.sqlite"))
        capture = grow(store)
        push(store, url, catalog=catalog)
        for client in (one, other):
            assert client.get(f"/v1/captures/{capture}").status_code == 200  # at once: every read is of the last push
            assert until(lambda client=client: generation(client) == 2)
        erase(store, sample.captures["few"])
        push(store, url, catalog=catalog)
        for client in (one, other):
            assert client.get(f"/v1/captures/{sample.captures['few']}").status_code == 404
        said = one.get("/v1/capabilities").json()["bucket"]
        assert said["catalog"] == f"postgresql://127.0.0.1:{postgres.port}/{name_of(catalog)}"
        postgres.stop()
        try:
            for client in (one, other):
                answer = client.get("/v1/captures")
                assert code(answer) == (503, "catalog_unavailable") and answer.headers["retry-after"] == "1"
                assert PASSWORD not in answer.text and f"postgresql://127.0.0.1:{postgres.port}" in answer.text
                assert until(lambda client=client: client.get("/readyz").status_code == 503)
                assert PASSWORD not in client.get("/readyz").text + client.get("/v1/capabilities").text
        finally:
            postgres.start()
        for client in (one, other):
            assert client.get("/v1/captures").status_code == 200
            assert until(lambda client=client: client.get("/readyz").status_code == 200)
        grow(store)
        push(store, url, without_catalog=True)  # told, and served as it was
        for client in (one, other):
            assert until(lambda client=client: "is generation 4" in client.get("/readyz").text)
        assert one.get(at).status_code == 200
    for name in "ab":
        said = (tmp_path / name / "api.log").read_text()
        assert PASSWORD not in said and "is generation 4" in said


def test_flags_that_do_not_belong_together(store: Path, catalog: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", str(store), "--endpoint", "ipc:///tmp/x", "--catalog", catalog]) == 2
    assert "catalog: taken with a bucket's URL as --store or --also alone" in capsys.readouterr().err
    assert main(["--store", "s3://b/p", "--catalog", f"mysql://u:{PASSWORD}@h/d"]) == 2
    said = capsys.readouterr().err
    assert "valid: postgresql://USER@HOST/DATABASE" in said and PASSWORD not in said


def test_commands_take_it(sample: Sample, store: Path, tmp_path: Path, catalog: str, postgres: PostgresServer,
                          capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    url, long = (tmp_path / "bucket").as_uri(), sample.captures["long"]
    shown = f"postgresql://127.0.0.1:{postgres.port}/{name_of(catalog)}"
    at = ["--store", url, "--catalog", catalog]

    def run(*arguments: str) -> str:
        app([*arguments], standalone_mode=False)
        return capfdbinary.readouterr().out.decode()

    assert f"{shown}: " in (said := run("push", str(store), url, "--catalog", catalog)) and "all there are" in said
    assert f"{shown}: has this catalog already" in run("push", str(store), url, "--catalog", catalog)
    assert long in run("ls", *at)
    assert run("show", long, "--json", *at) == run("show", long, "--json", "--store", url)
    out = tmp_path / "rows.npz"
    assert str(out) in run("export", long, "--out", str(out), *at) and out.stat().st_size > 1000
    assert not [path for path in (tmp_path / "caches").rglob("*.sqlite") if path.stat().st_mtime > out.stat().st_mtime]
