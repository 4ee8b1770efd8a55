"""The command line: `antiphon init`, `serve`, `check`, `env`, `plan`, `bench` and those of `app.cli.cli_client`.

`serve` checks everything that can be checked in advance, sets the environment that Serve needs, starts `serve run`,
reports when the server is ready, and stops everything it has started.
"""

from __future__ import annotations

import errno
import os
import resource
import runpy
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.table import Table

from app.checkpoint_source import HubUnreachableError
from app.cli import cli_client, haproxy, preflight, serve_environment
from app.cli.config_file import read_config
from app.cli.new_config import DEVICES, new_config, write_new
from app.cli.readiness import watch
from app.cli.server_process import ServerProcess, end_without, tell
from engine.errors import CheckpointError
from kernels import compiling

DEFAULT_CONFIG = "serve_config.yaml"
EXIT_FAILED, EXIT_WRONG_INPUT = 1, 2


app = typer.Typer(help="Serve language models and their LoRA adapters.", no_args_is_help=False)
app.command()(cli_client.models)
app.command()(cli_client.chat)
app.add_typer(cli_client.adapters, name="adapters")

Config = Annotated[str, typer.Argument(help="Serve config file.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(version("antiphon"))
        raise typer.Exit


@app.callback()
def _antiphon(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 if it failed, 2 if the input is wrong and will fail again."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="antiphon")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else EXIT_FAILED
    except cli_client.AskError as error:
        is_ours = isinstance(error, cli_client.WrongInputError)
        return _refuse(str(error), status=EXIT_WRONG_INPUT if is_ours else EXIT_FAILED)
    return 0


@app.command("serve")
def serve_command(
    config: Config = DEFAULT_CONFIG,
    address: Annotated[
        str,
        typer.Option(
            help="Ray cluster: 'local' starts a new one, 'auto' joins the one on this machine, HOST:PORT the one there."
        ),
    ] = "local",
    ready_timeout_s: Annotated[float, typer.Option(min=0, help="Seconds to wait until the server is ready.")] = 900.0,
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds that running answers have to finish on shutdown.")
    ] = 20.0,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Also start Ray's dashboard, which `serve deploy` needs; uses 0.3 GB.")
    ] = False,
) -> None:
    """Check a configuration, download what it names by hub ids, start the server and report when it is ready."""
    # The server reads adapters when it starts, and reading thousands twice would take long.
    _check(config, reads_all=False, fetches=address == "local")
    raise typer.Exit(
        _serve(Path(config), address=address, timeout_s=ready_timeout_s, drain_s=drain_s, has_dashboard=dashboard)
    )


@app.command("init")
def init(
    model: Annotated[str, typer.Argument(help="Folder in Hugging Face layout, or a hub id (org/name).")],
    adapters: Annotated[str | None, typer.Option(help="Folder with a folder for each adapter.")] = None,
    device: Annotated[str, typer.Option(help=f"{' or '.join(DEVICES)}.")] = DEVICES[0],
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    output: Annotated[str | None, typer.Option(help="File to write; default: the model's name and .yaml.")] = None,
) -> None:
    """Write a configuration that serves a model, for `antiphon serve`, and check it."""
    if device not in DEVICES:
        raise typer.Exit(_refuse(f"--device: '{device}' is neither {' nor '.join(DEVICES)}"))
    try:
        name, text = new_config(model, adapters=adapters, device=device, port=port)
        path = output or f"{name}.yaml"
        write_new(path, text)
    except ValueError as error:
        raise typer.Exit(_refuse(str(error))) from None
    except FileExistsError:
        raise typer.Exit(_refuse(f"{path} exists; --output names another file")) from None
    except OSError as error:
        raise typer.Exit(_refuse(f"{path} cannot be written: {error.strerror}")) from None
    try:
        check(path)
    except BaseException:
        # Otherwise the next attempt, with a better model or folder, would be refused for the file of this one.
        Path(path).unlink(missing_ok=True)
        print(f"{path} was not kept.", file=sys.stderr)
        raise
    print(f"Wrote {path}. To start the server: antiphon serve {shlex.quote(path)}")


@app.command("check")
@app.command("validate", hidden=True)
def check(config: Config = DEFAULT_CONFIG) -> None:
    """Check a configuration without starting anything."""
    notes = _check(config, reads_all=True)
    from app.cli.config_lint import hub_ids, overlooked_adapters

    for line in (*notes, *overlooked_adapters(config)):
        print(f"note: {line}")
    for hub_id, place in hub_ids(config).items():
        print(f"note: {place}: '{hub_id}' was not checked, as it comes from the Hugging Face hub")
    print(f"{config} is valid.")


@app.command("env")
def env(
    drain_s: Annotated[int, typer.Option(min=0, help="Seconds that a stopping gateway still accepts requests.")] = 30,
) -> None:
    """Print the environment variables for `ray start` on the nodes of a cluster."""
    recommended = serve_environment.recommended(num_cores=os.cpu_count() or 1, drain_s=drain_s)
    for variable in (*recommended, serve_environment.CLUSTER_ONLY):
        print(f"export {variable.name}={shlex.quote(variable.value)}  # {variable.purpose}")


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="Folder with a config.json; weights are not needed.")],
    device: Annotated[str, typer.Option(help="GPU: l4, l40s, a100-80, h100, h200, b200 or mi300x.")] = "h200",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or int8.")] = "bfloat16",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    answer_tokens: Annotated[int, typer.Option(min=1)] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent answers.")] = 64,
    adapters: Annotated[int, typer.Option(min=0, help="Adapters that those answers use.")] = 0,
    rank: Annotated[int, typer.Option(min=1, help="LoRA rank of those adapters, on all linear layers.")] = 16,
    memory_fraction: Annotated[float, typer.Option(min=0.01, max=1.0)] = 0.9,
    price_per_hour: Annotated[
        float, typer.Option(min=0.0, help="Price of one device per hour, in any currency.")
    ] = 0.0,
) -> None:
    """Estimate a model's memory on a device and its roofline: latencies that no engine can beat."""
    # Imported here: they import torch, which takes longer than any other command.
    from app.cli import capacity
    from engine.loading.spec import read_model_spec

    known = f"{', '.join(capacity.DEVICES)}, and {', '.join(capacity.BYTES_BY_DTYPE)}"
    if device not in capacity.DEVICES or dtype not in capacity.BYTES_BY_DTYPE:
        raise typer.Exit(_refuse(f"unknown device {device!r} or dtype {dtype!r}; known are {known}"))
    try:
        spec = capacity.as_kept(read_model_spec(model), dtype, capacity.DEVICES[device])
    except CheckpointError as error:
        raise typer.Exit(_refuse(str(error))) from None
    traffic = capacity.Traffic(
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        concurrency=concurrency,
        num_adapters=adapters,
        rank=rank,
        price_per_hour=price_per_hour,
    )
    found = capacity.plan(spec, dtype, capacity.DEVICES[device], memory_fraction, traffic)
    stored = "" if spec.stored is None else f" with {spec.stored.title} weights"
    table = Table(title=f"{spec.architecture} in {dtype}{stored} on one {device}", show_header=False)
    rows = {
        "weights": f"{found.weight_bytes / 1e9:.2f} GB",
        "adapters": f"{found.adapter_bytes / 1e9:.2f} GB",
        "KV cache per token": f"{found.kv_bytes_per_token:,} bytes",
        "tokens in the KV cache": f"{found.cache_tokens:,}",
        "concurrent full-length answers": f"{found.max_concurrency:,}",
        "TTFT, at least": f"{found.ttft_s * 1000:.1f} ms",
        "TPOT, at least": f"{found.tpot_s * 1000:.2f} ms",
        "answer tokens/s, at most": f"{found.tokens_per_s:,.0f}",
    }
    if price_per_hour:
        rows["price of a million answer tokens, at least"] = f"{found.cost_per_million:.2f}"
    for name, value in rows.items():
        table.add_row(name, value)
    cli_client.console.print(table)
    if found.max_concurrency < concurrency:
        print(f"note: only {found.max_concurrency} of {concurrency} concurrent answers fit")


@app.command(
    "bench",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Benchmark the engine alone on this machine; all arguments are passed to `loadtest.bench_engine`."""
    # In this process: Ctrl-C reaches a child as well, which would print a traceback.
    sys.argv[1:] = context.args
    runpy.run_module("loadtest.bench_engine", run_name="__main__", alter_sys=True)


def _check(config: str, *, reads_all: bool, fetches: bool = False) -> list[str]:
    """Refuse a configuration with mistakes; return what else is to be told of it."""
    # In a child process: Serve's validation code takes 65 MB, which this process would hold while the server runs.
    fork = get_context("fork")
    received, sent = fork.Pipe(duplex=False)
    checking = fork.Process(target=_send_mistakes, args=(sent, os.getpid(), config, reads_all, fetches))
    checking.start()
    sent.close()
    mistakes: list[str] = []
    notes: list[str] = []
    try:
        mistakes, notes, failure = received.recv()
    except EOFError:
        failure = f"{config} could not be checked: the process for it has died"
    finally:
        # Nothing is waited for on Ctrl-C: it may be a download.
        checking.kill()
        checking.join()
    if failure is not None:
        raise typer.Exit(_refuse(failure, status=EXIT_FAILED))
    if mistakes:
        print(f"{config} has {len(mistakes)} error{'s' * (len(mistakes) > 1)}:", file=sys.stderr)
        print(*(f"  {line}" for line in mistakes), sep="\n", file=sys.stderr)
        raise typer.Exit(EXIT_WRONG_INPUT)
    return notes


def _send_mistakes(sent: Connection, parent: int, config: str, reads_all: bool, fetches: bool) -> None:
    # Ctrl-C reaches this process, too, which its parent ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_without(parent, partial(os._exit, EXIT_FAILED))
    try:
        sent.send((*_mistakes(config, reads_all, fetches), None))
    except HubUnreachableError as error:
        sent.send(([], [], str(error)))


def _mistakes(config: str, reads_all: bool, fetches: bool) -> tuple[list[str], list[str]]:
    from app.cli.config_lint import fetch, lint_config

    notes: list[str] = []
    return lint_config(config, reads_all=reads_all, notes=notes) or (fetch(config) if fetches else []), notes


def _serve(config: Path, *, address: str, timeout_s: float, drain_s: float, has_dashboard: bool) -> int:
    tree = read_config(config)
    host, port = preflight.listen_address(tree)
    own = serve_environment.of_this_process()
    if (error := preflight.listen_error(host, port)) is not None:
        reason = f"cannot listen on {host}, port {port}: {error.strerror}; see http_options in {config}"
        if error.errno == errno.EADDRINUSE:
            reason = (
                f"port {port} on {host} is in use: stop the process that uses it, or set http_options.port in {config}"
            )
        return _refuse(reason, status=EXIT_FAILED)
    cluster = preflight.find_cluster_file(own)
    if cluster is not None and not cluster.is_alive:
        if address == "auto":
            reason = f"no Ray cluster responds at {cluster.address}; {cluster.path} is stale: remove it"
            return _refuse(reason, status=EXIT_FAILED)
        print(f"note: {cluster.path} is left from a cluster that is gone; remove it, or plain `serve run` hangs on it")
    if ":" not in address and address not in ("local", "auto"):
        return _refuse(f"--address: '{address}' is neither 'local', 'auto' nor the HOST:PORT of a Ray cluster")
    if ":" in address and "://" not in address and not preflight.answers(address):
        reason = f"no Ray cluster responds at {address}; `ray start --head` starts one (docs/operations.md)"
        return _refuse(reason, status=EXIT_FAILED)
    # Only this user may enter it.
    place = preflight.folder_for_sockets(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="antiphon-", dir=place, ignore_cleanup_errors=True) as folder:
        environment = _child_environment(own, host, Path(folder), is_local=address == "local")
        if ":" in host and environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1":
            # On "::1" it finds no gateway, on "::" it listens on IPv4 only: the server would never be ready.
            return _refuse(
                f"HAProxy cannot listen on {host}: set http_options.host in {config} to an IPv4 address, or set "
                "RAY_SERVE_ENABLE_HA_PROXY=0 to use Serve's slower Python proxy"
            )
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGTERM, _interrupt)
        compiling.begin()
        server = ServerProcess(config, environment, address=address, drain_s=drain_s, has_dashboard=has_dashboard)
        failure = None
        try:
            failure = watch(server, tree, f"http://{_reachable(host)}:{port}", timeout_s)
        except KeyboardInterrupt:
            tell(f"\nStopping; answers have {drain_s:g} s to finish. Press Ctrl-C again to stop at once.\n")
        finally:
            server.stop()
    if failure is None:
        tell("Stopped.\n")
        return 0
    # Two that start together both find the port free, and Serve tells of it some lines before its last one.
    if (error := preflight.listen_error(host, port)) is not None and error.errno == errno.EADDRINUSE:
        failure = f"port {port} on {host} is in use by another process that started meanwhile; {failure}"
    return _refuse(failure, status=EXIT_FAILED)


def _child_environment(own: Mapping[str, str], host: str, folder: Path, *, is_local: bool) -> dict[str, str]:
    if not is_local:
        print("note: nodes of a running cluster have their own environment; see `antiphon env`")
    variables = {
        variable.name: variable.value
        for variable in serve_environment.recommended(
            num_cores=os.cpu_count() or 1, drain_s=serve_environment.ONE_MACHINE_DRAIN_S
        )
    }
    if is_local and preflight.is_loopback(host):
        variables[serve_environment.LOCAL_ONLY.name] = serve_environment.LOCAL_ONLY.value
    if is_local:
        variables |= preflight.token_of_its_own(own) | {"RAY_TMPDIR": preflight.folder_for_ray(own)}
    if preflight.has_haproxy():
        variables |= preflight.haproxy_places(folder, own) | _connections()
        if not haproxy.PROGRAM.exists():
            del variables["RAY_SERVE_HAPROXY_BINARY_PATH"]
            print(f"note: {haproxy.PROGRAM} is missing, so HAProxy may not notice disconnects: run `make install`")
    else:
        variables["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
        print("note: HAProxy is not available on this platform; using Serve's Python proxy")
    # Variables that the user has set take precedence.
    environment = {**variables, **own}
    for name, value in variables.items():
        if environment[name] != value:
            print(f"note: {name}={environment[name]} is kept; `antiphon serve` would set {value}", flush=True)
    return environment


def _connections() -> dict[str, str]:
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    num_connections = preflight.connections_within(max_files)
    if num_connections == preflight.HAPROXY_CONNECTIONS:
        return {}
    print(f"note: the limit of {max_files} open files (ulimit -Hn) limits HAProxy to {num_connections} connections")
    return {"RAY_SERVE_HAPROXY_MAXCONN": str(num_connections)}


def _reachable(host: str) -> str:
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{address}]" if ":" in address else address


def _refuse(message: str, *, status: int = EXIT_WRONG_INPUT) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
