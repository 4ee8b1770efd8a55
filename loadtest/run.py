"""Load a running server with increasing numbers of users, headless, and write a report.

    python -m loadtest.run --host http://127.0.0.1:8000 --users 1,8,32 --seconds 20 --slo-ttft-ms 1000 --slo-tpot-ms 100

writes to the folder of `--out`: `table.md`, `report.html`, `ttft.png`, `itl.png`, `throughput.png`, and for each number
of users Locust's page, its log and a file with one line of JSON for every request.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from loadtest.arguments import add_seed, add_slo, at_least_1, counts, http_url, make_folder, slo_of
from loadtest.measure import Slo
from loadtest.report import Settings, write_folder
from loadtest.stream_client import StreamClient, StreamError
from loadtest.users.options import model_names
from loadtest.workloads import ChatMix, chat_asks, read_entries

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
OUT = Path(__file__).with_name("out")
GRACE_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The runs to do.

    Attributes:
        users: numbers of users, one run each.
        seconds: length of each run; requests open at its end are waited for, and count only in latencies.
        models: names to request, most popular first; if empty, all that the server lists.
        passed_on: further options for Locust and the users (`loadtest.users.options`).
    """

    host: str
    users: tuple[int, ...]
    seconds: int
    out: Path
    slo: Slo
    seed: int
    models: tuple[str, ...] = ()
    passed_on: tuple[str, ...] = ()


def parse(arguments: list[str] | None = None) -> Plan:
    """Parse the command line; unknown options are passed on to Locust, which refuses those it does not know."""
    epilog = "Other options go to Locust and its users: --max-answer-tokens N and so on (loadtest/users/options.py)."
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.run", description=__doc__, epilog=epilog, allow_abbrev=False
    )
    parser.add_argument("--host", type=http_url, default="http://127.0.0.1:8000", help="base URL of the running server")
    parser.add_argument("--users", type=_numbers, default=(1, 8, 32), help="numbers of users, by commas")
    parser.add_argument("--seconds", type=at_least_1, default=20, help="length of each run")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    add_slo(parser)
    parser.add_argument(
        "--models", type=model_names, default=(), help="names to ask, most popular first; default: all served"
    )
    add_seed(parser)
    options, passed_on = parser.parse_known_args(arguments)
    return Plan(
        host=options.host,
        users=options.users,
        seconds=options.seconds,
        out=options.out,
        slo=slo_of(options),
        seed=options.seed,
        models=options.models,
        passed_on=tuple(passed_on),
    )


def _numbers(text: str) -> tuple[int, ...]:
    numbers = counts(text)
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError("numbers of users must be distinct")
    return numbers


def locust_command(plan: Plan, users: int) -> list[str]:
    """Return the command of one run."""
    bounds = [("--slo-ttft-ms", plan.slo.ttft_ms), ("--slo-tpot-ms", plan.slo.tpot_ms)]
    return [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", plan.host),
        *("--users", str(users), "--spawn-rate", str(users), "--run-time", f"{plan.seconds}s"),
        *("--stop-timeout", str(GRACE_S), "--only-summary", "--exit-code-on-error", "0"),
        *("--html", str(plan.out / f"locust-{users}.html"), "--records", str(plan.out / f"records-{users}.jsonl")),
        *(part for name, bound in bounds if bound is not None for part in (name, str(bound))),
        *("--seed", str(plan.seed), *(("--models", ",".join(plan.models)) if plan.models else ())),
        *plan.passed_on,
    ]


def warm_up(host: str, models: tuple[str, ...] = ()) -> list[str]:
    """Request each of the models once, so that no run includes first loads; return their names.

    Args:
        models: by default all that the server lists, except those that generate no text.

    Raises:
        SystemExit: there is no server, it lists no model, or one does not answer.
    """
    client = StreamClient(host)
    try:
        names = [*models] or [model.name for model in client.models() if model.generates]
        for name in names:
            exchange = client.ask(next(chat_asks(ChatMix(models=(name,)), read_entries(), seed=-1, user=0)))
            if not exchange.is_ok:
                raise SystemExit(f"loadtest: {name} at {host} does not answer: {exchange.error}")
    except StreamError as failure:
        raise SystemExit(f"loadtest: {host} refuses ({failure}); ANTIPHON_API_KEY may hold a key") from failure
    except OSError as failure:
        raise SystemExit(f"loadtest: no server answers at {host} ({failure}); start one with `make serve`") from failure
    finally:
        client.close()
    if not names:
        raise SystemExit(f"loadtest: {host} lists no model that generates text; name one with --models")
    return names


def run_users(plan: Plan, users: int) -> None:
    """Do one run.

    Raises:
        SystemExit: Locust failed.
    """
    log_path = plan.out / f"locust-{users}.log"
    hint = f"see {log_path}; `python -m loadtest.report {plan.out}` reports what was measured"
    command, limit_s = locust_command(plan, users), plan.seconds + 2 * GRACE_S
    with log_path.open("w", encoding="utf-8") as log:
        try:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s).returncode
        except subprocess.TimeoutExpired as failure:
            raise SystemExit(f"loadtest: locust did not end within {limit_s} s; {hint}") from failure
    if status != 0:
        raise SystemExit(f"loadtest: locust ended with status {status}; {hint}")


def main() -> None:
    """Run the plan and print the table."""
    plan = parse()
    make_folder(plan.out)
    for stale in [*plan.out.glob("records-*.jsonl"), *plan.out.glob("locust-*.html")]:
        stale.unlink()
    settings = Settings(slo=plan.slo, seconds=plan.seconds)
    settings.write(plan.out)
    print(f"{plan.host} serves {', '.join(warm_up(plan.host, plan.models))}; seed {plan.seed}", flush=True)
    for users in plan.users:
        print(f"{users} users for {plan.seconds} s", flush=True)
        run_users(plan, users)
    try:
        print(write_folder(plan.out, settings))
    except ValueError as failure:
        raise SystemExit(f"loadtest: {failure}; the logs in {plan.out} may say why") from failure
    print(f"\nreport: {plan.out / 'report.html'}")


if __name__ == "__main__":
    main()
