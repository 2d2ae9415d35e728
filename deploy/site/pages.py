"""Hooks of mkdocs: generate the reference from the code, and resolve links that leave docs/.

The options come from `ServeConfig`, the gRPC API from the comments of inference.proto, the metrics from the registry
of a server. None of these pages is in the repository, so none can be out of date.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshserve.runtime.api.sampling_params import params_table
from meshserve.runtime.options.foreign.translation import vllm_names
from meshserve.runtime.options.serve_config import SECTIONS, ServeConfig, options
from meshserve.runtime.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[(?P<label>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_DECLARATION = re.compile(r"^(?P<indent>\s*)(?P<kind>service|message|enum|rpc|oneof)\s+(?P<name>\w+)")
_FIELD = re.compile(r"^\s*(?P<type>(?:optional |repeated )?(?:map<[^>]+>|[\w.]+)) (?P<name>\w+) = (?P<number>\d+);")
_VALUE = re.compile(r"^\s*(?P<name>[A-Z][A-Z0-9_]*) = (?P<number>\d+);")


def on_config(config: Any) -> Any:
    """Writes the pages of folders into the navigation."""
    config.nav = expanded(config.nav)
    return config


def expanded(nav: Any) -> Any:
    """Returns the navigation with each `folder/*` replaced by the pages of the folder, its README first."""
    if isinstance(nav, list):
        return [expanded(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: expanded(entry) for title, entry in nav.items()}
    if not nav.endswith("/*"):
        return nav
    pages = sorted((ROOT / "docs" / nav.removesuffix("/*")).glob("*.md"), key=lambda path: (path.stem != "README", path))
    return [str(path.relative_to(ROOT / "docs")) for path in pages]


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    pages = {
        "reference/options.md": options_page(),
        "reference/grpc.md": grpc_page((ROOT / "protos" / "inference.proto").read_text()),
        "reference/metrics.md": metrics_page(),
        "reference/changes.md": (ROOT / "CHANGELOG.md").read_text(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to files outside docs/, which the site does not have, into their paths."""
    source = page.file.abs_src_path
    if source is None:
        return markdown
    return without_outer_links(markdown, Path(source))


def without_outer_links(markdown: str, source: Path) -> str:
    """Returns the text of a page with the links that leave docs/ replaced.

    Raises:
      FileNotFoundError: A link leads to a file that does not exist.
    """

    def resolved(found: re.Match[str]) -> str:
        target = found["target"]
        if "://" in target:
            return found[0]
        path = (source.parent / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return found[0]  # mkdocs checks it
        if not path.exists():
            raise FileNotFoundError(f"{source}: the link {target} leads nowhere")
        name = str(path.relative_to(ROOT))
        label = found["label"].strip("`")
        return f"`{name}`" if label in name or name in label else f"{found['label']} (`{name}`)"

    return _LINK.sub(resolved, markdown)


def options_page() -> str:
    """Returns the page of every option of a server, by section."""
    lines = [
        "# Options",
        "",
        "Each option is a flag of `meshserve serve` (`--max-running`) and a key of its TOML file (`max_running`). "
        "Options marked *server* have no effect without one: `meshserve generate` and `meshserve.LLM` do not take them.",
    ]
    defaults = {field.name: field.default for field in dataclasses.fields(ServeConfig)}
    types = {field.name: getattr(field.type, "__name__", str(field.type)) for field in dataclasses.fields(ServeConfig)}
    for section in SECTIONS:
        lines += ["", f"## {section.capitalize()}", "", "| option | type | default | |", "|---|---|---|---|"]
        for name, option in options().items():
            if option.section == section:
                notes = [f"one of {', '.join(option.choices)}"] if option.choices else []
                notes += ["server"] if option.is_server_only else []
                theirs = [f"`{each}`" for each in vllm_names(name)]
                notes += [f"in vLLM {', '.join(theirs)}"] if theirs else []
                text = f"{option.help} (*{'; '.join(notes)}*)" if notes else option.help
                lines.append(f"| `{name}` | {types[name]} | `{option.shown(defaults[name])}` | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def grpc_page(proto: str) -> str:
    """Returns the page of the services and messages of a proto file, with its comments."""
    lines = [
        "# gRPC API",
        "",
        "From `protos/inference.proto`. Besides, `grpc.health.v1.Health` is served, and, on loopback, reflection.",
        "",
    ]
    ranges = "; ".join(f"`{name}` {param._range()}" for name, param in params_table().items() if param.least > -1e9)
    lines += [f"Ranges of the sampling parameters: {ranges}.", ""]
    for comment, line in _commented_lines(proto):
        if (found := _DECLARATION.match(line)) is not None:
            level = "##" if not found["indent"] else "###"
            name = line.strip().rstrip("{;").strip() if found["kind"] == "rpc" else f"{found['kind']} {found['name']}"
            lines += ["", f"{level} {name}", "", comment, ""]
        elif (found := _FIELD.match(line)) is not None:
            lines.append(f"* `{found['name']}` ({found['type']}, field {found['number']}): {comment}")
        elif (found := _VALUE.match(line)) is not None:
            lines.append(f"* `{found['name']}` ({found['number']}): {comment}")
    return "\n".join(lines) + "\n"


def _commented_lines(proto: str) -> Iterator[tuple[str, str]]:
    """Yields each line of code with the comment above it, as one paragraph."""
    comment: list[str] = []
    for line in proto.splitlines():
        if line.strip().startswith("//"):
            comment.append(line.strip().removeprefix("//").strip())
        elif line.strip():
            yield _escaped(" ".join(comment)), line
            comment = []
        else:
            comment = []


def metrics_page() -> str:
    """Returns the page of every metric that a server exports."""
    lines = ["# Metrics", "", "Served at `/metrics` of `--http-port`.", "", "| name | type | |", "|---|---|---|"]
    for family in _families():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"| `{name}` | {family.type} | {_cell(family.documentation)} |")
    return "\n".join(lines) + "\n"


def _families() -> Iterator[Any]:
    """Yields the families of a server with an engine, by name."""
    import numpy as np

    from meshserve.runtime.api.engine_api import ModelInfo
    from meshserve.runtime.api.request import Load
    from meshserve.runtime.program.expert_balance import ExpertBalance
    from meshserve.runtime.telemetry.metrics import ServerState

    info = ModelInfo(
        name="", architecture="", vocab_size=0, max_context_tokens=0, eos_token_ids=(), tp_size=1, dtype="",
        page_size_tokens=1, num_parameters=0, num_devices=1, device_kind="", server_version="",
    )  # fmt: skip
    metrics = Metrics()
    load = Load(num_running=0, num_waiting=0, num_pages=1, num_free_pages=1)
    metrics.read_state = lambda: ServerState(info=info, load=load)
    none = np.zeros(0, np.int64)
    balance = ExpertBalance(expert_tokens=none, device_tokens=none, expert_imbalance=0.0, device_imbalance=0.0)
    metrics.read_expert_balance = lambda: balance
    yield from sorted(metrics.registry.collect(), key=lambda family: family.name)


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("{", "&#123;")
