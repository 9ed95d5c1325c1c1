"""Requests made from the OpenAPI document: no answer is a failure, and all are as documented."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counterfoil.app.routes import router

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
OPERATIONS = [(route.path, method) for route in router.routes for method in route.methods]


@pytest.fixture(scope="module")
def document(client):
    schemathesis = pytest.importorskip("schemathesis")
    return schemathesis.openapi.from_url(f"{client.base}/openapi.json")


@pytest.fixture(scope="module")
def checks():
    from schemathesis.checks import CHECKS as known

    return known.get_by_names(list(CHECKS))


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_makes_the_service_fail(document, checks, path, method) -> None:
    strategy = document[path][method].as_strategy()

    @settings(
        max_examples=settings.default.max_examples // 2,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def fuzz(data) -> None:
        data.draw(strategy).call_and_validate(checks=checks)

    fuzz()


@pytest.mark.parametrize("kind", ["explain", "correct", "search", "score"])
def test_any_text_about_a_known_image_has_an_answer(client, pairs, kind) -> None:
    image = pairs.test.ids[0]

    @given(st.text(max_size=60) | st.text("ab .,'\"-0Ii̇ß", max_size=30))
    def ask(text) -> None:
        command = {
            "search": {"text": text},
            "score": {"images": [image], "texts": [text, "a dog"]},
        }.get(kind, {"image": image, "text": text})
        answer = client.post(f"/api/{kind}", command)
        assert answer.status in (200, 422), answer.body

    ask()
