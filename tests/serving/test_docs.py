"""``/docs``: all operations of the OpenAPI document, and curl commands that a server answers."""

import asyncio
import html
import json
import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from bert_tasks.model.task_model import TaskModel
from bert_tasks.serving.docs import operations
from support.servers import Application, application, listening, visit

if TYPE_CHECKING:
    from support.browser import Browser

ModelOf = Callable[[str], TaskModel]


def commands_of(page: str) -> list[list[str]]:
    """The words of each command on the page, as a shell reads them."""
    return [shlex.split(html.unescape(command)) for command in re.findall("<pre>(.*?)</pre>", page, flags=re.DOTALL)]


async def sent(served: Application, words: list[str]) -> httpx2.Response:
    """The response to a curl command."""
    assert words[0] == "curl"
    path = words[1].removeprefix("http://localhost")
    if "-d" not in words:
        return await served.client.get(path)
    assert words[2:5] == ["-H", "Content-Type: application/json", "-d"]
    return await served.post(json.loads(words[5]), path)


@pytest.mark.parametrize("case", ["pair", "token", "embedder"])
def test_every_command_is_answered(case: str, model_of: ModelOf, embedder: TaskModel) -> None:
    model = embedder if case == "embedder" else model_of(case)

    async def ask(served: Application) -> tuple[str, Any, list[httpx2.Response]]:
        page = (await served.client.get("/docs")).text
        document = (await served.client.get("/openapi.json")).json()
        return page, document, [await sent(served, words) for words in commands_of(page)]

    page, document, responses = visit(model, ask)
    assert {response.status_code for response in responses} == {200}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f'<span class="method">{method.upper()}</span>{path}</h2>' in page
            texts = [operation["summary"], *(response["description"] for response in operation["responses"].values())]
            assert [text for text in texts if text not in html.unescape(page)] == []
    shown = {words[1].removeprefix("http://localhost") for words in commands_of(page)}
    assert shown == document["paths"].keys()
    assert {"one row", "several rows"} <= set(re.findall("<p>Example: (.*?)</p>", page))


def test_parameters_and_responses_are_named(model_of: ModelOf) -> None:
    async def ask(served: Application) -> Any:
        return (await served.client.get("/openapi.json")).json()

    found = {operation.path: operation for operation in operations(visit(model_of("single"), ask), "http://any:1")}
    assert found["/predict"].parameters == {"explain": "boolean, false by default"}
    assert found["/model"].parameters == {"adapter": "string"}
    assert found["/predict"].responses["413"] == "The body is too large."
    assert found["/healthz"].commands == {"": "curl http://any:1/healthz"}


def test_the_page_loads_nothing_and_runs_nothing(model_of: ModelOf) -> None:
    async def ask() -> httpx2.Response:
        async with application(model_of("single")) as served:
            transport = httpx2.ASGITransport(app=served.gate)  # without the check of the Host header
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.get("/docs", headers={"host": "a'\"<b>.example"})

    response = asyncio.run(ask())
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script-src" not in policy
    assert "<script" not in response.text
    assert "<b>" not in response.text
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!/)|@import|url\(""", response.text) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read(browser: "Browser", model_of: ModelOf, scheme: Any) -> None:
    with listening([model_of("single")]) as (url,):
        browser.open(f"{url}/docs", scheme=scheme, width=400)
        assert browser.errors() == []
        assert not browser.is_blank()
        browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
        assert browser.low_contrast() == []
        assert browser.overflowing() == []
        assert browser.headings()[:2] == [1, 2]
        browser.find("pre").click()
        assert browser.run("return getSelection().toString()").startswith(f"curl {url}/")
        assert browser.errors() == []
