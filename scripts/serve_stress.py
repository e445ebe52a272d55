"""A server under load, with clients that leave, signals, and an engine that dies.

    python scripts/serve_stress.py                          # 500 requests, 64 at once
    python scripts/serve_stress.py --requests 60 --concurrency 16 --num-blocks 250

The server runs as a child, with a pool so small that requests are preempted. Three acts:

1. Requests of mixed lengths, streamed or not, some with several answers, stop strings, seeds; a
   fifth of the clients hang up at random moments. Afterwards no block is used, and the memory of
   the server's processes has not grown.
2. SIGTERM under load: the server ends in time with status 0, its engine too.
3. SIGKILL to another server's engine under load: every open request ends with an error, /ready
   says 503 and then 200 again, and the next request is served.

Exit status 1 if anything fails.
"""

from __future__ import annotations

import argparse
from typing import Any

from measurements import report
from rich.table import Table
from serving.acts import Checks, kill_engine, mixed_load, terminate
from serving.requests import mixed_requests
from serving.small_server import Setup, SmallServer


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a hub id")
    parser.add_argument("--requests", type=int, default=500, help="of the first act (500)")
    parser.add_argument("--concurrency", type=int, default=64, help="clients at once (64)")
    parser.add_argument("--num-blocks", type=int, default=600, help="of 4 tokens (600)")
    parser.add_argument(
        "--leaving", type=float, default=0.2, metavar="SHARE", help="of clients (0.2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of requests and clients")
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="S", help="of a request (300)"
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=5,
        metavar="S",
        help="that the server gives open requests after SIGTERM (5)",
    )
    parser.add_argument(
        "--grace", type=float, default=10, metavar="S", help="for what should be immediate (10)"
    )
    report.add_arguments(parser, plot=False)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, checks: Checks) -> dict[str, Any]:
    setup = Setup(
        model=args.model,
        num_blocks=args.num_blocks,
        concurrency=args.concurrency,
        seed=args.seed,
        timeout=args.timeout,
        shutdown=args.shutdown_timeout,
        grace=args.grace,
    )
    jobs = mixed_requests(args.requests, args.leaving, args.seed)
    result: dict[str, Any] = {"model": args.model, "num_requests": len(jobs)}
    with SmallServer(setup) as server:
        with report.progress() as bar:
            task = bar.add_task("mixed load", total=len(jobs))
            act = mixed_load(server, jobs, checks, lambda reply: bar.advance(task))
        result["mixed_load"] = act
        result["sigterm"] = terminate(server, checks)
    with SmallServer(setup) as server:
        result["sigkill"] = kill_engine(server, checks)
    return result


def print_report(result: dict[str, Any], checks: Checks) -> None:
    act = result["mixed_load"]
    print(
        f"{result['num_requests']} requests in {act['seconds']:.0f} s: {act['num_whole']} whole "
        f"answers of {act['num_output_tokens']:,} tokens, {act['num_left']} clients left; the "
        f"slowest took {act['slowest_s']:.0f} s"
    )
    table = Table("what must hold", "", "seen")
    for row in checks.rows:
        table.add_row(row["check"], "ok" if row["ok"] else "FAILED", row["seen"])
    report.show(table)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    checks = Checks()
    result = run(args, checks)
    if args.json:
        report.print_json({**result, "ok": checks.all_ok, "checks": checks.rows})
    else:
        print_report(result, checks)
    return int(not checks.all_ok)


if __name__ == "__main__":
    report.run(main)
