"""The page ``/docs``, which lists what the server can be asked, with a curl command for each request.

FastAPI's own page loads its scripts from a server of others, so it is empty without the Internet. This page is made
from the same OpenAPI document, and has no scripts.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A method of a path, as OpenAPI describes it.

    Attributes:
        commands: The name of each example -> the curl command that sends it.
        parameters: The name of each parameter of the query -> its description.
        responses: The status of each response -> its description.
    """

    method: str
    path: str
    summary: str
    description: str
    commands: Mapping[str, str]
    parameters: Mapping[str, str]
    responses: Mapping[str, str]


def operations(document: Mapping[str, Any], address: str) -> list[Operation]:
    """Returns the operations of an OpenAPI document.

    Args:
        document: The content of ``/openapi.json``.
        address: The address of the server, such as ``http://localhost:8000``.
    """
    found: list[Operation] = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            parameters: dict[str, str] = {}
            for parameter in described.get("parameters", []):
                parameters[parameter["name"]] = _parameter_text(parameter)
            responses = {status: response["description"] for status, response in described["responses"].items()}
            operation = Operation(
                method=method.upper(),
                path=path,
                summary=described.get("summary", ""),
                description=described.get("description", ""),
                commands=_commands(address + path, described),
                parameters=parameters,
                responses=responses,
            )
            found.append(operation)
    return found


def docs_page(document: Mapping[str, Any], address: str) -> str:
    """Returns the page about the operations. The arguments are those of ``operations``."""
    info = document["info"]
    return _template().render(title=info["title"], about=info["description"], operations=operations(document, address))


def _commands(url: str, described: Mapping[str, Any]) -> dict[str, str]:
    """Returns a curl command for each example of a body, or one for an operation without a body."""
    curl = f"curl {shlex.quote(url)}"
    if "requestBody" not in described:
        return {"": curl}
    examples = described["requestBody"]["content"]["application/json"]["examples"]
    commands: dict[str, str] = {}
    for name, example in examples.items():
        body = json.dumps(example["value"], ensure_ascii=False)
        commands[name] = f"{curl} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return commands


def _parameter_text(parameter: Mapping[str, Any]) -> str:
    """Returns the types and the default of a parameter, for example "boolean, false by default"."""
    schema = parameter["schema"]
    types = [choice["type"] for choice in schema.get("anyOf", [schema]) if choice["type"] != "null"]
    text = " or ".join(types)
    if "default" in schema:
        text = f"{text}, {json.dumps(schema['default'])} by default"
    return text


@cache
def _template() -> Template:
    templates = Environment(
        loader=PackageLoader("bert_tasks.serving", ""),
        autoescape=True,  # the address is from the request
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("docs.html")
