"""The API says what the models say, and errors are problems."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image

import counterfoil.app
from counterfoil.models.correct import correct

STATIC = Path(counterfoil.app.__file__).parent / "static"
TEXT = "A man on a red bicycle, next to a tree."


@pytest.fixture
def image(pairs) -> str:
    return pairs.test.ids[3]


def test_scores_are_those_of_the_model(client, content, pairs) -> None:
    texts = [TEXT, "two cows", *pairs.test.captions[0][:2]]
    result = client.post("/api/score", {"images": pairs.test.ids[:5], "texts": texts}).json
    fragments = [pairs.test.fragments.read(place) for place in range(5)]
    wanted = content.index.model.score(fragments, texts).tolist()
    for row, wanted_row in zip(result["scores"], wanted, strict=True):
        assert row == pytest.approx(wanted_row, abs=2e-3)  # the index keeps half precision


def test_a_text_finds_the_images_that_exhaustive_search_finds(client, content) -> None:
    result = client.post("/api/search", {"text": TEXT, "k": 7}).json
    wanted = content.index.search(TEXT, k=7, exhaustive=True)
    assert result["target"] == "images"
    assert [hit["id"] for hit in result["hits"]] == [hit.id for hit in wanted.hits]
    assert result["hits"][0]["score"] == pytest.approx(wanted.hits[0].score, abs=1e-5)
    assert [hit["rank"] for hit in result["hits"]] == list(range(1, 8))


def test_an_image_finds_captions_and_images_like_it(client, content, image) -> None:
    result = client.post("/api/search", {"image": image, "k": 5}).json
    wanted = content.index.search(image=image, k=5, exhaustive=True)
    assert [hit["text"] for hit in result["hits"]] == [hit.text for hit in wanted.hits]
    alike = client.post("/api/search", {"image": image, "k": 2, "target": "images"}).json
    assert alike["hits"][0]["id"] == image


def test_words_the_model_never_saw_are_named(client) -> None:
    result = client.post("/api/search", {"text": "a zyzzyva on a bicycle"}).json
    assert result["unknown"] == ["zyzzyva"]


def test_an_explanation_adds_up_and_says_where_words_looked(client, image, content) -> None:
    result = client.post("/api/explain", {"image": image, "text": TEXT}).json
    parts = [*result["words"], *result["specials"]]
    assert sum(word["effect"] for word in parts) == pytest.approx(result["score"], abs=1e-5)
    assert result["additive"]
    assert [TEXT[slice(*word["span"])] for word in result["words"]][:4] == ["A", "man", "on", "a"]
    assert all(len(word["region_weights"]) == len(result["boxes"]) for word in result["words"])
    assert all(-1 <= word["shade"] <= 1 for word in result["words"])
    assert result["scale"]["boundary"] == pytest.approx(result["boundary"])


def test_words_beyond_the_boundary_are_not_punished_by_themselves(client, image) -> None:
    """Similarities on the scale are the ones NAAF compares with its boundary (eq. 7)."""
    result = client.post("/api/explain", {"image": image, "text": "tree"}).json
    word, ends = result["words"][0], result["specials"]
    assert len(ends) == 2
    assert -1.001 <= word["similarity"] <= 1.001
    if word["similarity"] > result["boundary"]:
        assert word["positive"] > 0


def test_a_correction_is_that_of_the_corrector(client, content, pairs, image) -> None:
    command = {"image": image, "text": TEXT, "threshold": 0.3}
    result = client.post("/api/correct", command).json
    fragments = pairs.test.fragments.read(3)
    wanted = correct(content.models[0].corrector, fragments, TEXT, threshold=0.3)
    assert result["corrected"] == wanted.corrected
    assert [change["instead"] for change in result["changes"]] == [
        c.instead for c in wanted.changes
    ]
    assert result["corrected_score"] >= result["score"]


def test_the_matcher_agrees_only_with_what_raises_its_score(client, pairs) -> None:
    changed: list[bool] = []
    for image, (text, *_) in zip(pairs.test.ids, pairs.test.captions, strict=True):
        if len(changed) >= 4 and any(changed):
            break
        agreed = client.post("/api/correct", {"image": image, "text": text}).json["agreed"]
        both = {"images": [image], "texts": [text, agreed["text"]]}
        before, after = client.post("/api/score", both).json["scores"][0]
        climb = [before, *(change["score"] for change in agreed["changes"])]
        assert climb == sorted(climb)
        assert after == pytest.approx(agreed["score"], abs=1e-4)
        assert after == pytest.approx(climb[-1], abs=1e-4)
        assert (agreed["text"] == text) is (not agreed["changes"])
        changed.append(bool(agreed["changes"]))
    assert any(changed)


def test_an_upload_scores_as_the_same_image_in_the_index(client, image, photo) -> None:
    sent = client.upload(photo)
    assert sent.status == 201
    name = sent.json["id"]
    assert (sent.json["width"], sent.json["height"]) == Image.open(io.BytesIO(photo)).size
    scores = client.post("/api/score", {"images": [name, image], "texts": [TEXT]}).json["scores"]
    assert scores[0] == pytest.approx(scores[1], abs=5e-3)
    assert client.post("/api/explain", {"image": name, "text": TEXT}).json["boxes"]
    assert client.post("/api/correct", {"image": name, "text": TEXT}).status == 200
    shown = client.get(f"/api/picture?image={quote(name)}&side=160")
    assert shown.headers["content-type"] == "image/webp"
    assert max(Image.open(io.BytesIO(shown.body)).size) <= 160


def test_only_the_last_uploads_are_kept(client, photo) -> None:
    names = [client.upload(photo).json["id"] for _ in range(6)]
    kept = [client.get(f"/api/image?image={quote(name)}").status for name in names]
    assert kept == [404, 404, 200, 200, 200, 200]


def test_the_library_is_listed_page_by_page(client, pairs) -> None:
    first = client.get("/api/images?limit=20").json
    rest = client.get("/api/images?offset=20&limit=20").json
    assert first["total"] == 24
    names = [one["id"] for one in first["images"] + rest["images"]]
    assert sorted(names) == sorted(pairs.test.ids)
    assert names == [one["id"] for one in client.get("/api/images?limit=24").json["images"]]
    captions = dict(zip(pairs.test.ids, pairs.test.captions, strict=True))
    assert first["images"][0]["captions"] == list(captions[names[0]])


def test_findings_can_be_filtered_by_reason(client) -> None:
    every = client.get("/api/audit").json
    some = client.get("/api/audit?reason=wrong-words").json
    assert (every["total"], some["total"]) == (3, 2)
    assert {one["sign"]: one["count"] for one in every["reasons"]} == {
        "wrong-words": 2,
        "other-image": 1,
    }
    assert some["findings"][0]["correction"]["text"] == "a brown dog on a beach"


def test_a_run_has_its_results_and_curves(client, run) -> None:
    (listed,) = client.get("/api/runs").json["runs"]
    assert listed["name"] == "small-naaf"
    result = client.get("/api/run?name=small-naaf").json
    assert result["rsum"] == json.loads((run / "results.json").read_text())["rsum"]
    plots = {plot["name"]: plot for plot in result["plots"]}
    assert {"loss", "rsum", "boundary"} <= set(plots)
    assert [x for x, _ in plots["rsum"]["series"][0]["points"]] == [1, 2]


def test_errors_are_problems_with_a_reason(client, image) -> None:
    for answer, status in (
        (client.get("/nowhere"), 404),
        (client.ask("DELETE", "/api/score"), 405),
        (client.post("/api/explain", {"image": "no such", "text": "a dog"}), 404),
        (client.post("/api/explain", {"image": image, "text": "…"}), 422),
        (client.post("/api/search", {"text": "a", "image": image}), 422),
        (client.post("/api/search", {"text": "a", "kk": 3}), 422),
        (client.get("/api/run?name=..%2F.."), 404),
    ):
        assert answer.status == status, answer.body
        if status >= 400:
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json["status"] == status
            assert answer.json["detail"]


def test_a_reason_names_what_is_wrong(client, image) -> None:
    def detail(path: str, body: object) -> str:
        return client.post(path, body).json["detail"]

    assert detail("/api/search", {}) == "body: give either text or image"
    images = {"images": [image, "no such"], "texts": ["a dog"]}
    assert detail("/api/score", images) == "no such image: 'no such'"
    headers = {"Content-Type": "application/json"}
    broken = client.ask("POST", "/api/search", b'{"text": ', headers)
    assert broken.json["detail"] == "body: not JSON (at character 9)"


def test_health_and_numbers_for_prometheus(client) -> None:
    assert client.get("/healthz").json["status"] == "ok"
    text = client.get("/metrics").body.decode()
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) .+|\w+(\{(\w+="[^"]*",?)+\})? [-+.\de]+(inf)?', line), (
            line
        )
    assert 'counterfoil_requests_total{method="GET",route="/healthz",status="200"}' in text
    assert "counterfoil_batch_jobs_bucket" in text
    resident = re.search(r"^process_resident_memory_bytes (\S+)$", text, re.M)
    assert resident is not None
    assert float(resident[1]) > 1e7


def test_nothing_on_the_page_comes_from_elsewhere(client) -> None:
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert "http://" not in text, path
        assert "https://" not in text, path
        answer = client.get(f"/static/{path.name}")
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    for page in ("/", "/docs"):
        assert client.get(page).headers["content-type"].startswith("text/html")


def test_other_sites_cannot_reach_a_service_on_this_machine(client) -> None:
    answer = client.ask("GET", "/api/about", headers={"Host": "evil.example"})
    assert answer.status == 421
    assert client.ask("GET", "/api/about", headers={"Host": "localhost:1"}).status == 200


def test_the_document_describes_every_route(client) -> None:
    document = client.get("/openapi.json").json
    assert set(document["paths"]) == {
        "/api/about", "/api/images", "/api/image", "/api/picture", "/api/score", "/api/search",
        "/api/explain", "/api/correct", "/api/audit", "/api/audit/decisions", "/api/audit/export",
        "/api/audit/corrected", "/api/runs", "/api/run", "/api/session",
        "/healthz", "/metrics",
    }  # fmt: skip
