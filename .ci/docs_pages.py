"""Pages of the documentation site that are generated while ``make docs`` builds it.

The command line comes from Typer, the fields and the JSON schema from pydantic, the API pages from
mkdocstrings. Markdown files outside of docs/ become pages, and so do source files that pages link.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from trishul_ray.cli.app import app
from trishul_ray.cli.fields import describe_fields
from trishul_ray.experiment.json_schema import experiment_schema
from trishul_ray.experiment.loading import load_experiment
from trishul_ray.methods.base import method_classes

ROOT = Path(__file__).resolve().parents[1]
#: Markdown files outside of docs/, and their pages.
OUTSIDE = {
    "README.md": "index.md",
    "cluster/README.md": "cluster.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
#: Modules that plug-ins import; docs/plugins.md lists them.
CONTRACT = {
    "Methods": ("methods.base", "methods.base.messages", "methods.base.adapters"),
    "Adapters": ("adapters.base", "adapters.layout", "adapters.linear"),
    "Stages": ("stages.base",),
    "Tasks": ("tasks.base", "tasks.sums"),
    "Datasets": ("data.public", "data.hub"),
    "Codecs": ("lab.codecs.base",),
    "Tools": ("config.section", "runtime.random_streams", "spectral"),
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".ipynb": "json",
    ".sh": "bash",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    sources: dict[str, Path] = {}
    for name, page in OUTSIDE.items():
        if name != "README.md":
            text = _relink((ROOT / name).read_text(encoding="utf-8"), name, page, sources)
            _add(files, config, page, text)
    for file in list(files.documentation_pages()):
        if file.generated_by is None:
            text = _relink(file.content_string, f"docs/{file.src_uri}", file.src_uri, sources)
            if text != file.content_string:
                file.content_string = text
    _add(files, config, "reference/cli.md", _command_line())
    _add(files, config, "reference/fields.md", _fields())
    _add(files, config, "reference/api.md", _api())
    _add(files, config, "reference/contract.md", _contract())
    schema = json.dumps(experiment_schema(), indent=1)
    files.append(File.generated(config, "reference/experiment.schema.json", content=schema))
    for page, path in sources.items():
        _add(files, config, page, _source(path))
        if path.suffix == ".md":
            for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
                copy = posixpath.join(posixpath.dirname(page), image)
                files.append(File.generated(config, copy, abs_src_path=str(path.parent / image)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles of Sphinx in front of names in docstrings."""
    return re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)", "", html)


def _add(files: Files, config: MkDocsConfig, page: str, text: str) -> None:
    file = File.generated(config, page, content=text)
    if page.startswith("source/"):
        file.inclusion = file.inclusion.NOT_IN_NAV
    files.append(file)


def _relink(text: str, name: str, page: str, sources: dict[str, Path]) -> str:
    """Let links to files outside of docs/ lead to their pages on the site.

    Args:
        text: The Markdown text.
        name: The path of its file in the repository.
        page: Its path on the site.
        sources: Source files that get a page; linked ones are added.
    """

    def replace(match: re.Match[str]) -> str:
        label, link, anchor = match[1], match[2], match[3] or ""
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        if path in OUTSIDE:
            target = OUTSIDE[path]
        elif path.startswith("docs/"):
            target = path.removeprefix("docs/")
        elif (ROOT / path).exists():
            target = f"source/{path}.md"
            sources[target] = ROOT / path
            anchor = ""
        else:
            return match[0]
        return f"[{label}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if n % 2 else LINK.sub(replace, part) for n, part in enumerate(parts))


def _source(path: Path) -> str:
    """Return a page with the text of a source file, or the names in a folder."""
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        names = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
        return head + "\n".join(f"- `{each}`" for each in names)
    if path.suffix == ".md":
        body = path.read_text(encoding="utf-8")
        return head + LINK.sub(r"\1", re.sub(r"^# .*", "", body, count=1))
    try:
        body = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return head + f"A binary file of {path.stat().st_size:,} bytes in the repository."
    return f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{body}\n````\n"


def _command_line() -> str:
    group: Any = typer.main.get_command(app)
    lines = ["# Command line", "", "Exit codes are in [recovery](../architecture.md#recovery).", ""]
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if command.hidden:
            continue
        lines += [f"## trishul {name}", "", _dedent(command.help), ""]
        lines += ["| argument | meaning |", "|---|---|"]
        for parameter in command.params:
            if text := getattr(parameter, "help", None):
                lines.append(f"| {_names(parameter)} | {_cell(text)}{_default(parameter)} |")
        lines.append("")
    return "\n".join(lines)


def _dedent(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = ", ".join(f"`{each}`" for each in (*parameter.opts, *parameter.secondary_opts))
    metavar = "" if parameter.is_flag else parameter.metavar or parameter.name.upper()
    variable = f"<br>`{parameter.envvar}`" if parameter.envvar else ""
    return f"{names} {_cell(metavar)}{variable}"


def _default(parameter: Any) -> str:
    shown = parameter.default not in (None, False, ()) and parameter.show_default is not False
    return f" Default: `{parameter.default}`." if shown else ""


def _cell(text: str) -> str:
    for plain, entity in (("|", "\\|"), ("<", "&lt;"), ("{", "&#123;")):
        text = text.replace(plain, entity)
    return " ".join(text.split())


def _fields() -> str:
    lines = [
        "# Fields",
        "",
        "Every field of an experiment with its default on `dataset=digits`, its allowed values and",
        "its meaning. Presets of datasets change defaults: `trishul run dataset=NAME --fields`",
        "prints the values of a dataset. Fields marked with ○ are not in the id of a run.",
        "[Configuration](../configuration.md) explains how to set them. For completion in an",
        "editor, write the [JSON schema](experiment.schema.json) to a file, and name it in the",
        "first line of a YAML file:",
        "",
        "```bash",
        "trishul run --schema > experiment.schema.json",
        "```",
        "",
        "```yaml",
        "# yaml-language-server: $schema=experiment.schema.json",
        "dataset: digits",
        "method: fedit",
        "```",
        "",
    ]
    section = None
    for field in describe_fields(load_experiment()):
        first, dot, _ = field.name.partition(".")
        if (head := first if dot else "Top level") != section:
            section = head
            if section == "method":
                lines += ["", "## method", "", "The fields of each method."]
                lines += list(_method_fields())
                continue
            lines += ["", f"## {head}", "", "| field | default | allowed | meaning |"]
            lines.append("|---|---|---|---|")
        if section != "method":
            lines.append(_field_row(field))
    return "\n".join(lines)


def _field_row(field: Any) -> str:
    mark = "" if field.in_id else " ○"
    value = f"`{field.value}`" if field.value else ""
    return f"| `{field.name}`{mark} | {value} | {_cell(field.allowed)} | {_cell(field.meaning)} |"


def _method_fields() -> Iterator[str]:
    for name, cls in method_classes().items():
        summary = " ".join((cls.summary or "").split())
        yield from ("", f"### method={name}", "", f"{summary}. {cls.reference}.", "")
        rows = [
            _field_row(each)
            for each in describe_fields(load_experiment(None, [f"method={name}"]))
            if each.name.startswith("method.") and each.name != "method.name"
        ]
        if rows:
            yield from ("| field | default | allowed | meaning |", "|---|---|---|---|", *rows)


def _api() -> str:
    modules = {"list_runs": "report.summary", "load_plugin": "plugins.loading", "Result": "result"}
    errors = ("InputError", "RunError", "CorruptFileError", "StorageError")
    lines = ["# Python API", "", "[From Python](../python.md) is the introduction.", ""]
    for name in ("run", "sweep", "load", "list_runs", "load_plugin", "Result"):
        lines += [f"::: trishul_ray.{modules.get(name, 'api')}.{name}", ""]
    return "\n".join([*lines, *(f"::: trishul_ray.errors.{name}\n" for name in errors)])


def _contract() -> str:
    lines = [
        "# Plug-in contract",
        "",
        "The classes and functions that [plug-ins](../plugins.md) use.",
        "",
    ]
    for title, modules in CONTRACT.items():
        lines += [f"## {title}", ""]
        for module in modules:
            lines += [f"::: trishul_ray.{module}", "    options: {show_root_full_path: true}", ""]
    return "\n".join(lines)
