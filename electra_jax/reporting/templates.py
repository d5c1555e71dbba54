"""The pages that lie beside this file, filled in by Jinja2, which escapes whatever is put in."""

import functools
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

# Control characters, ends of lines, and what reverses the direction of what follows.
HIDDEN = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def visible(text: str) -> str:
    """`text` with codes such as `\\u001b` for control characters: it only ever is text."""
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def render(template: str, **values: Any) -> Markup:
    """The template with these values in their places; jinja2.TemplateError if one is missing."""
    return Markup(_environment().get_template(template).render(values))  # noqa: S704 - is escaped


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    environment.globals["css"] = Markup(css)  # noqa: S704 - is ours
    environment.filters["percent"] = "{:.0%}".format
    return environment
