"""Command line of meshserve, with the commands that its help lists.

The flags of `serve`, `generate` and `plan` are generated from `ServeConfig`. Flags override the TOML file, which
overrides the defaults. Heavy imports happen inside the commands, so that --help stays fast.
"""

import argparse
import ast
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError, EngineStoppedError, MeshserveError
from ..api.versions import installed_version
from ..model_files.quantization import NOT_QUANTIZED
from ..options.flags import Parser, add_options, serve_config
from ..options.serve_config import options, server_only_options
from ..telemetry.logs import complain, configure_logs, drop_output
from ..weights.registry import published_names

_log = logging.getLogger(__name__)

_EXIT_USAGE = 2
_MAX_TOKEN_DAYS = 36_500
_EXAMPLES = """\
examples:
  meshserve demo                                   try it: an embedded model on virtual CPU devices
  meshserve serve Qwen/Qwen3-8B                    download a model and serve it on the machine's GPUs or TPUs
  meshserve serve demo --cpu-devices 4 --tp 4      serve the embedded model on four virtual CPU devices
  meshserve chat                                   talk to the server on this machine
  meshserve top                                    watch the server on this machine
  meshserve compile Qwen/Qwen3-8B --cache-dir DIR  compile its programs ahead, for servers on machines like this one
  meshserve plan qwen3-32b --target h100:8         memory and speed of a model on a machine, before there is one
  meshserve generate Qwen/Qwen3-8B --input prompts.jsonl --output completions.jsonl
  meshserve bench serve --rate 4 8 16              put load on the server on this machine

`meshserve COMMAND --help` explains a command."""
_BENCHMARK_FOLDERS = ("load", "engine", "kernels", "checks", "mesh")  # folders of meshserve.benchmarks


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status. User-facing errors are printed without a traceback."""
    _open_missing_files()
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 0
    namespace = parser.parse_args(arguments)
    configure_logs("text")
    try:
        return namespace.run(namespace)
    except EngineStoppedError as error:
        complain(str(error))
        return 1
    except (MeshserveError, ValueError, MemoryError) as error:
        complain(str(error))
        return _EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        drop_output()
        return 141


def _open_missing_files() -> None:
    """Opens /dev/null for standard streams that the caller closed, so that no other file takes their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _parser() -> Parser:
    parser = Parser(
        prog="meshserve",
        description="Serve Qwen3 from a mesh of accelerators.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"meshserve {installed_version()}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands", dest="command")

    serve = commands.add_parser("serve", help="serve a model over gRPC")
    add_options(serve)
    serve.set_defaults(run=_serve)

    compile_ahead = commands.add_parser("compile", help="fill --cache-dir with a server's programs, without serving")
    add_options(compile_ahead)
    compile_ahead.set_defaults(run=_compile)

    generate = commands.add_parser("generate", help="complete a file of prompts, without a server")
    add_options(generate, left_out=server_only_options())
    generate.add_argument(
        "--input",
        type=Path,
        required=True,
        help="JSONL: prompt or prompt_token_ids, sampling fields; or OpenAI's batches: custom_id, method, url, body",
    )
    generate.add_argument(
        "--output",
        type=Path,
        required=True,
        help="JSONL: index, sample, token_ids, text, finish_reason; or OpenAI's: id, custom_id, response, error",
    )
    generate.add_argument(
        "--errors", type=Path, help="for OpenAI's format: JSONL of what failed (OUTPUT with .errors.jsonl)"
    )
    generate.set_defaults(run=_generate)

    _add_embed(commands)
    _add_chat(commands)
    _add_top(commands)
    _add_convert(commands)
    _add_plan(commands)

    bench = commands.add_parser(
        "bench", help="benchmark this machine", add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_argument("benchmark", help="benchmark to run")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark; its --help lists them")
    bench.add_argument("-h", "--help", action=_BenchHelp, nargs=0, help="list the benchmarks and exit")
    bench.set_defaults(run=_bench)

    token = commands.add_parser("token", help="create an access token for the file of --tokens")
    token.add_argument("tenant", help="tenant that the token belongs to")
    token.add_argument("--days", type=int, default=0, help="days until it expires; 0: never (%(default)s)")
    token.set_defaults(run=_token)

    protos = commands.add_parser("protos", help="write the gRPC contract, to generate clients in other languages")
    protos.add_argument("directory", type=Path, help="directory to write to; files of the same names are replaced")
    protos.set_defaults(run=_protos)

    demo = commands.add_parser("demo", help="serve the embedded model on a CPU mesh and stream from it")
    demo.add_argument("--tp", type=int, default=4, help="tensor-parallel size (%(default)s)")
    demo.add_argument(
        "--processes", type=int, default=1, help="number of processes that share the devices (%(default)s)"
    )
    demo.set_defaults(run=_demo)
    return parser


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk to a server")
    chat.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of the server (%(default)s)")
    chat.add_argument("--max-tokens", type=int, help="maximum tokens per answer (default: what fits the context)")
    chat.add_argument("--temperature", type=float, help="sampling temperature; 0 is greedy (default: the server's)")
    chat.add_argument("--system", default="", help="system message that starts the conversation")
    chat.add_argument("--adapter", default="", metavar="NAME", help="adapter that answers (default: the model itself)")
    add_credentials(chat)
    chat.set_defaults(run=_chat)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser("convert", help="convert a Hugging Face model to an Orbax checkpoint")
    convert.add_argument("--model", required=True, help="local, gs:// or s3:// directory, or a Hugging Face id")
    convert.add_argument("--revision", default="", help="branch, tag or commit, if --model is a Hugging Face id")
    convert.add_argument("--output", default="", help="directory to write; without it, --verify checks --model itself")
    convert.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="dtype of the weights; auto: the model's (%(default)s)",
    )
    convert.add_argument(
        "--quantize",
        choices=options()["quantize"].choices,
        default=NOT_QUANTIZED,
        help="quantize the weights of an unquantized model (%(default)s)",
    )
    convert.add_argument("--verify", action="store_true", help="read the checkpoint and compare all its checksums")
    convert.set_defaults(run=_convert)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="estimate a model's memory per device and its speed on a machine")
    without_machine = {"cpu_devices", "cache_dir", "compile_threads", "random_weights"}
    helps = {
        "model": f"a published size ({', '.join(published_names())}), or a model as for serve",
        "tp": "tensor-parallel size (default: all devices of the target); the report compares all sizes",
    }
    add_options(plan, left_out=server_only_options() | without_machine, helps=helps)
    plan.add_argument(
        "--target", required=True, help="machine: CHIP:NUMBER or CHIP:SHAPE, such as h100:8, a100:4, v6e:2x4 or cpu:4"
    )
    plan.add_argument("--length", type=int, default=1024, help="tokens per request to plan for (%(default)s)")
    plan.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="decode batch sizes (%(default)s)")
    plan.add_argument(
        "--jax-fraction",
        type=float,
        default=0.0,
        help="fraction of GPU memory that JAX preallocates; 0: that of memory_fraction",
    )
    plan.add_argument(
        "--compile", action="store_true", help="compile every program for the target (extra [tpu] or [cuda])"
    )
    plan.add_argument("--json", action="store_true", help="print one line of JSON")
    plan.set_defaults(run=_plan)


def _add_top(commands: Any) -> None:
    top = commands.add_parser("top", help="watch a server in the terminal")
    top.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of the server (%(default)s)")
    top.add_argument(
        "--metrics", default="", help="HOST:PORT or URL of its metrics (--http-port); default: port 9090 of its host"
    )
    top.add_argument("--interval", type=float, default=1.0, help="seconds between two readings (%(default)s)")
    top.add_argument(
        "--screens", type=int, help="read the server so many times and print the last screen; default: until Ctrl-C"
    )
    add_credentials(top)
    top.set_defaults(run=_top)


def _add_embed(commands: Any) -> None:
    """Adds the command `embed` to the subparsers."""
    embed = commands.add_parser("embed", help="embed a file of texts, without a server; continues after a kill")
    add_options(embed, left_out=server_only_options())
    embed.add_argument("--input", type=Path, required=True, help="JSONL: text or token_ids, id; or .txt, a text a line")
    embed.add_argument("--output", type=Path, required=True, help="embeddings as .jsonl, .npy or .parquet, by its name")
    embed.add_argument(
        "--instruction",
        help="embed the texts as queries with this instruction (default: as documents, or with the "
        "prompt that the model's files name as default; empty: without either)",
    )
    embed.add_argument(
        "--dimensions",
        type=int,
        default=0,
        help="numbers of each embedding; 0: as the model's files say, or all (%(default)s)",
    )
    embed.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale embeddings to length 1 (default: unless the model's modules.json has no Normalize)",
    )
    embed.add_argument("--truncate", action="store_true", help="shorten texts that do not fit in the context")
    embed.set_defaults(run=_embed)


def benchmarks() -> dict[str, tuple[str, str]]:
    """Finds the benchmarks: each module of the folders above that defines `main(arguments)`, and `baselines`.

    The source files are read, because the benchmarks are slow to import.

    Returns:
      By name: the module, and the first line of its docstring.
    """
    spec = importlib.util.find_spec("meshserve.benchmarks")
    roots = [Path(root) for root in spec.submodule_search_locations or ()] if spec is not None else []
    found = {}
    for root in roots:
        paths = [path for folder in _BENCHMARK_FOLDERS for path in root.glob(f"{folder}/*.py")]
        for path in [*paths, root / "baselines" / "__init__.py"]:
            text = path.read_text(encoding="utf-8")
            if "\ndef main(arguments" in text:
                parts = [part for part in path.relative_to(root).with_suffix("").parts if part != "__init__"]
                about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
                found[parts[-1]] = ".".join(("meshserve.benchmarks", *parts)), about
    return found


class _BenchHelp(argparse.Action):
    """Prints the help of `bench` with the first docstring line of each benchmark."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        lines = ["benchmarks:"]
        lines += [f"  {name:16} {about}" for name, (_, about) in sorted(benchmarks().items())]
        parser.epilog = "\n".join(lines)
        parser.print_help()
        parser.exit()


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """Adds the client options for authentication and TLS; see `client.credentials_from`."""
    parser.add_argument("--token-file", type=Path, help="file that contains the access token")
    parser.add_argument(
        "--tls-ca", type=Path, help="PEM certificate of the authority that signed the server's certificate"
    )


def _serve(namespace: argparse.Namespace) -> int:
    from ..startup.interpreter import collecting_rarely

    with collecting_rarely():
        return _serve_until_stopped(namespace)


def _serve_until_stopped(namespace: argparse.Namespace) -> int:
    from ..startup.serve import serve_config_until_stopped

    notes: list[str] = []
    config = serve_config(namespace, notes.append)
    configure_logs(config.log_format)
    for note in notes:
        _log.info("%s", note)
    read = (lambda: serve_config(namespace, lambda note: None)) if namespace.config else None
    return serve_config_until_stopped(config, read)


def _compile(namespace: argparse.Namespace) -> int:
    from ..startup.compile_ahead import compile_ahead

    print(compile_ahead(serve_config(namespace)))
    return 0


def _generate(namespace: argparse.Namespace) -> int:
    from ..openai.batches.batch_lines import is_batch_file
    from .generate import generate_file

    if is_batch_file(namespace.input):
        return _generate_batch(namespace)
    if namespace.errors is not None:
        raise ConfigError("--errors is for files in OpenAI's batch format only. Leave it out.")
    num_failed = generate_file(serve_config(namespace), namespace.input, namespace.output)
    if num_failed:
        print(f"meshserve: {num_failed} samples failed; see `error` in {namespace.output}", file=sys.stderr)
    return 1 if num_failed else 0


def _generate_batch(namespace: argparse.Namespace) -> int:
    from .generate_batch import answer_batch

    errors = namespace.errors or namespace.output.with_suffix(".errors.jsonl")
    counts = answer_batch(serve_config(namespace), namespace.input, namespace.output, errors)
    failed = f", {counts.failed:,} failed; see {errors}" if counts.failed else ""
    print(f"meshserve: of {counts.total:,} lines {counts.completed:,} are answered{failed}", file=sys.stderr)
    return 1 if counts.failed else 0


def _embed(namespace: argparse.Namespace) -> int:
    from .embed import EmbedOptions, embed_file

    asked = EmbedOptions(
        instruction=namespace.instruction,
        dimensions=namespace.dimensions,
        is_normalized=namespace.normalize,
        truncate=namespace.truncate,
    )
    summary = embed_file(serve_config(namespace), namespace.input, namespace.output, asked)
    failed = f"; {summary.num_failed} failed" if summary.num_failed else ""
    print(f"meshserve: {summary}{failed}", file=sys.stderr)
    return 1 if summary.num_failed else 0


def _chat(namespace: argparse.Namespace) -> int:
    from ..client.client import credentials_from
    from .chat import chat

    credentials, token = credentials_from(namespace.tls_ca, namespace.token_file)
    return chat(
        namespace.target,
        max_tokens=namespace.max_tokens,
        temperature=namespace.temperature,
        system=namespace.system,
        adapter=namespace.adapter,
        credentials=credentials,
        token=token,
    )


def _top(namespace: argparse.Namespace) -> int:
    from ..client.client import Client, credentials_from
    from ..client.dashboard.top import Reader, show_top

    if namespace.interval <= 0 or (namespace.screens is not None and namespace.screens < 1):
        raise ConfigError("--interval must be above 0, and --screens 1 or more.")
    credentials, token = credentials_from(namespace.tls_ca, namespace.token_file)
    with Client(namespace.target, credentials=credentials, token=token, ready_seconds=0) as client:
        reader = Reader(client, namespace.target, namespace.metrics)
        return show_top(reader, interval_seconds=namespace.interval, num_screens=namespace.screens)


def _convert(namespace: argparse.Namespace) -> int:
    from ..weights.convert import run_convert

    return run_convert(
        namespace.model,
        namespace.output,
        revision=namespace.revision,
        dtype=namespace.dtype,
        quantize=namespace.quantize,
        is_verified=namespace.verify,
    )


def _plan(namespace: argparse.Namespace) -> int:
    from ..plan.report import PlanRequest, run_plan

    config = serve_config(namespace)
    asked = PlanRequest(
        config=config,
        target=namespace.target,
        tensor_parallelism=config.tp,
        length=namespace.length,
        batches=tuple(namespace.batch),
        jax_fraction=namespace.jax_fraction,
        is_compiled=namespace.compile,
        is_json=namespace.json,
    )
    return run_plan(asked)


def _bench(namespace: argparse.Namespace) -> int:
    if (found := benchmarks().get(namespace.benchmark)) is None:
        raise ConfigError(f"there is no benchmark {namespace.benchmark!r}; `meshserve bench --help` lists them.")
    return importlib.import_module(found[0]).main(namespace.arguments)


def _token(namespace: argparse.Namespace) -> int:
    """Prints the token to stdout, so that it can be piped, and the entry for the tokens file to stderr."""
    from datetime import UTC, datetime, timedelta

    from ..api.tenants import new_token

    if not 0 <= namespace.days <= _MAX_TOKEN_DAYS:
        raise ConfigError(f"--days is {namespace.days}; allowed is 0 (never) to {_MAX_TOKEN_DAYS}.")
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=namespace.days) if namespace.days else None
    token, lines = new_token(namespace.tenant, expires=expires)
    print(
        f"Add this to the tokens file (for an existing tenant, add one more entry to its tokens):\n\n{lines}\n"
        "The token, which is not stored anywhere:",
        file=sys.stderr,
    )
    print(token)
    return 0


def _protos(namespace: argparse.Namespace) -> int:
    from .protos import write_protos

    for path in write_protos(namespace.directory):
        print(path)
    return 0


def _demo(namespace: argparse.Namespace) -> int:
    from .demo import run_demo

    return run_demo(tp=namespace.tp, num_processes=namespace.processes)


if __name__ == "__main__":
    sys.exit(main())
